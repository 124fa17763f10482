"""Pictures of the analysis. matplotlib (`pip install hf-posenc[eval]`) is loaded when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_posenc.analysis.curves import DistanceCurve
from hf_posenc.analysis.parts import Decomposition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = 4
"""Panels in a row."""


def plot_distance_curve(curve: DistanceCurve) -> Figure:
    """One panel for each layer, one line for each head: mean attention against distance."""
    layers, heads, _ = curve.values.shape
    figure, panels = _panels(layers)
    for layer in range(layers):
        axes = panels[layer]
        for head in range(heads):
            shade = str(0.75 * head / max(heads - 1, 1))  # greys, from the first head on
            axes.plot(
                curve.distances, curve.values[layer, head].tolist(), color=shade, linewidth=1, label=f"head {head}"
            )
        axes.set_title(f"layer {layer}", loc="left", fontsize=10)
        axes.set_xlabel("distance (tokens)")
    panels[0].set_ylabel("attention weight" if curve.of == "weights" else "score minus that of distance 0 (nats)")
    if curve.of == "weights":
        for axes in panels:
            axes.set_yscale("log")
    if heads <= 8:
        panels[0].legend(fontsize=7, frameon=False)
    return figure


def plot_decomposition(decomposition: Decomposition) -> Figure:
    """The spread of every part by layer, mean over the heads: what the keys of a query are told apart by."""
    figure, panels = _panels(1)
    axes = panels[0]
    means = decomposition.spread.mean(dim=1)  # [layers, parts]
    styles = ["o-", "s--", "^:", "D-.", "v-", "P--"]
    for index, name in enumerate(decomposition.parts):
        values = means[:, index].tolist()
        if any(values):
            axes.plot(
                range(len(values)), values, styles[index % len(styles)], label=name.replace("_", " and "), linewidth=1
            )
    axes.set_xlabel("layer")
    axes.set_ylabel("spread over the keys of a query (nats)")
    axes.set_xticks(range(len(means)))
    axes.legend(fontsize=8, frameon=False)
    return figure


def _panels(count: int) -> tuple[Figure, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install 'hf-posenc[eval]'.") from error
    columns = min(count, PANELS)
    rows = -(-count // columns)
    size = (7.0, 4.0) if count == 1 else (3.2 * columns, 2.6 * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]
