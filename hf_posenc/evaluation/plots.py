"""The pictures: one function each, from plain numbers to a matplotlib figure.

Every picture can be read in grey (lines differ in marker and dash, not only in colour), names its axes with their
units, and needs no display. `save` writes PNG and SVG.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people can tell apart, from dark to light.
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.2)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (8, 2, 1, 2, 1, 2)))
_EXPLODES = 12.0
"""Largest over smallest perplexity from which the axis is logarithmic."""


def perplexity_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    trained_length: int | None = None,
    title: str = "Perplexity against context length",
    intervals: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
) -> Figure:
    """Perplexity against context length, one line for each encoding.

    Args:
        curves: {label: [(context length in tokens, perplexity)]}.
        trained_length: marked where given, in tokens.
        title: what and on which text.
        intervals: {label: [(context length, low, high)]}, drawn as thin bars.
    """
    figure, axes = _figure()
    values = [y for points in curves.values() for _, y in points if math.isfinite(y)]
    if values and max(values) / max(min(values), 1e-9) > _EXPLODES:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_one_two_five())
        axes.yaxis.set_major_formatter(_plain_number())
        axes.minorticks_off()
    ends = []
    for index, (label, points) in enumerate(curves.items()):
        kept = [(x, y) for x, y in sorted(points) if math.isfinite(y)]
        if not kept:
            continue
        xs, ys = zip(*kept, strict=True)
        axes.plot(xs, ys, **_style(index), label=label, zorder=3)
        for x, low, high in (intervals or {}).get(label, ()):
            if math.isfinite(low) and math.isfinite(high):
                axes.plot([x, x], [low, high], color=_style(index)["color"], linewidth=0.8, alpha=0.6, zorder=2)
        ends.append((xs[-1], ys[-1], label, _style(index)["color"]))
    _lengths_axis(axes, [x for points in curves.values() for x, _ in points])
    axes.set_ylabel("perplexity (exp of nats per token)")
    _title(axes, title)
    _mark_length(axes, trained_length)
    _label_ends(figure, axes, ends)
    return figure


def loss_by_position(
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    trained_length: int | None = None,
    title: str = "Loss by position",
) -> Figure:
    """Loss against the number of tokens before the target, smoothed.

    Args:
        curves: {label: [(tokens before, nats, targets)]}, one point a bin.
    """
    figure, axes = _figure()
    ends = []
    for index, (label, points) in enumerate(curves.items()):
        kept = [p for p in sorted(points) if math.isfinite(p[1])]
        if not kept:
            continue
        xs = [p[0] for p in kept]
        style = _style(index) | {"marker": ""}
        axes.plot(xs, [p[1] for p in kept], color=style["color"], linewidth=0.6, alpha=0.25)
        smooth = _smooth([(p[1], p[2]) for p in kept])
        axes.plot(xs, smooth, **style, label=label)
        ends.append((xs[-1], smooth[-1], label, style["color"]))
    _lengths_axis(axes, [p[0] for points in curves.values() for p in points])
    axes.set_xlabel("tokens before the target (log scale)")
    axes.set_ylabel("loss (nats per token)")
    _title(axes, title)
    _mark_length(axes, trained_length)
    _label_ends(figure, axes, ends)
    return figure


def needle_heatmap(
    accuracy: Mapping[int, Mapping[float, float]],
    *,
    trained_length: int | None = None,
    title: str = "Needle in a haystack",
) -> Figure:
    """Fraction of needles found, by length of the prompt and by how deep they lie; every cell also says its number."""
    lengths = sorted(accuracy)
    depths = sorted({depth for row in accuracy.values() for depth in row})
    figure, axes = _figure(width=max(5.0, 1.6 + 0.85 * len(lengths)), height=max(3.2, 1.6 + 0.45 * len(depths)))
    grid = [[accuracy[length].get(depth, math.nan) for length in lengths] for depth in depths]
    image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            text, ink = (
                (f"{value:.0%}", "black" if value > 0.55 else "white") if math.isfinite(value) else ("-", "black")
            )
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(len(lengths)), [_tokens(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("length of the prompt (tokens)")
    axes.set_ylabel("depth of the needle\n(0% = start)")
    axes.spines[:].set_visible(False)
    axes.grid(False)
    inside = [i for i, length in enumerate(lengths) if trained_length is not None and length <= trained_length]
    _title(axes, title)
    if trained_length is not None and inside and inside[-1] + 1 < len(lengths):
        axes.axvline(inside[-1] + 0.5, color="white", linewidth=2.5)
        axes.axvline(inside[-1] + 0.5, color="black", linewidth=1.2, linestyle=(0, (4, 2)))
        _above(axes, inside[-1] + 0.5, f"trained length {_tokens(trained_length)}")
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.5, 1], fraction=0.05, pad=0.03)
    bar.ax.set_yticklabels(["0%", "50%", "100%"])
    bar.set_label("found (exact match)")
    return figure


def wavelengths(
    frequencies: Mapping[str, Sequence[float]],
    *,
    trained_length: int | None = None,
    context_length: int | None = None,
    title: str = "Rotary wavelengths",
) -> Figure:
    """Tokens in one full turn of each rotary pair. Pairs above the trained length never turned fully in training.

    Args:
        frequencies: {label: radians per token of each pair}; none draws no line.
    """
    figure, axes = _figure()
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(_token_number())
    every = max(1, max((len(f) for f in frequencies.values()), default=1) // 16)
    ends = []
    for index, (label, values) in enumerate(frequencies.items()):
        if not values:
            continue
        turns = [2 * math.pi / value if value > 0 else math.nan for value in values]
        axes.plot(range(len(turns)), turns, **_style(index), label=label, markevery=every)
        ends.append((len(turns) - 1, turns[-1], label, _style(index)["color"]))
    for length, text in ((trained_length, "trained length"), (context_length, "context length")):
        if length is not None:
            axes.axhline(length, color="#555555", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            axes.annotate(
                f"{text} {_tokens(length)}",
                (0, length),
                xytext=(2, 3),
                textcoords="offset points",
                fontsize=8,
                color="#444444",
            )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("rotary pair (0 turns fastest)")
    axes.set_ylabel("wavelength (tokens, log scale)")
    _title(axes, title)
    _label_ends(figure, axes, ends)
    return figure


def title_of(figure: Figure) -> str:
    """The title, in one line."""
    return figure.axes[0].get_title(loc="left").replace("\n", " ")


def cost_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str = "Cost against context length",
    unit: str = "seconds a pass",
) -> Figure:
    """Cost against context length on logarithmic scales, one line each.

    Args:
        curves: {label: [(tokens of a pass, cost in `unit`)]}.
    """
    figure, axes = _figure()
    ends = []
    for index, (label, points) in enumerate(curves.items()):
        if points:
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, **_style(index), label=label)
            ends.append((xs[-1], ys[-1], label, _style(index)["color"]))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(_one_two_five())
    axes.yaxis.set_major_formatter(_plain_number())
    axes.minorticks_off()
    _lengths_axis(axes, [x for points in curves.values() for x, _ in points])
    axes.set_xlabel("tokens of a pass (log scale)")
    axes.set_ylabel(f"{unit} (log scale)")
    _title(axes, title)
    _label_ends(figure, axes, ends)
    return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg, each whole."""
    return [write_whole(stem.with_name(f"{stem.name}.{kind}"), render(figure, kind)) for kind in ("png", "svg")]


def render(figure: Figure, kind: str) -> bytes:
    """The figure as the bytes of a PNG or SVG file; the same figure gives the same bytes."""
    import matplotlib

    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "hf_posenc", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, dpi=160, bbox_inches="tight", metadata=metadata)
    return buffer.getvalue()


# ---------------------------------------------------------------------- parts of a picture


def _figure(width: float = 6.4, height: float = 4.2) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state of pyplot
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _title(axes: Any, text: str) -> None:
    """A title in as many lines as the width of the picture asks for."""
    letters = int(axes.figure.get_figwidth() * 10.5)
    lines = textwrap.wrap(text, letters, break_on_hyphens=False)
    axes.set_title("\n".join(lines), loc="left", fontsize=11)


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "linewidth": 1.8,
        "markersize": 5.5,
    }


def _lengths_axis(axes: Any, lengths: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("context length (tokens, log scale)")
    lengths = [x for x in lengths if x > 0]
    if not lengths:
        return
    low, high = math.floor(math.log2(min(lengths))), math.ceil(math.log2(max(lengths)))
    step = max(1, round((high - low) / 9))
    ticks = [2.0**power for power in range(high, low - 1, -step)]
    axes.set_xticks(ticks, [_tokens(tick) for tick in ticks])
    axes.minorticks_off()


def _mark_length(axes: Any, length: int | None) -> None:
    """Mark the trained length where it lies within the axis; the title makes room for its name."""
    if length is None or not axes.get_xlim()[0] <= length <= axes.get_xlim()[1]:
        return
    axes.axvline(length, color="#555555", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    _above(axes, length, f"trained length {_tokens(length)}")


def _above(axes: Any, x: float, text: str) -> None:
    """A small note between the axes and their title, at `x` of the data."""
    axes.annotate(
        text,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
        color="#444444",
        annotation_clip=False,
    )
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=11, pad=18)  # above it


def _label_ends(figure: Figure, axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name where it ends, moved apart where two would overlap, and a legend with markers and dashes
    (for readers in grey, and where lines lie on each other). Only the legend where names are many or long."""
    if not ends:
        return
    longest = max(len(end[2]) for end in ends)
    direct = longest <= 24 and len(ends) <= 8
    if len(ends) > 1 or not direct:
        handles, labels = axes.get_legend_handles_labels()
        labels = [textwrap.fill(label, 80, break_on_hyphens=False) for label in labels]
        columns = min(len(ends), max(1, int(figure.get_figwidth() * 15) // (longest + 9)))
        lines = sum(label.count("\n") + 1 for label in labels) / columns
        figure.set_figheight(figure.get_figheight() + 0.17 * (lines - 1))  # inches, so that the axes stay as high
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            fontsize=8,
            frameon=False,
            handlelength=3.2,
        )
    if not direct:
        return
    figure.canvas.draw()  # fixes the scales
    to_pixels = axes.transData.transform
    height = figure.dpi * 9 / 72 * 1.25  # of a line of text
    places = sorted((float(to_pixels((x, y))[1]), x, y, label, colour) for x, y, label, colour in ends)
    wanted = [place[0] for place in places]
    for _ in range(100):
        for i in range(len(wanted) - 1):
            overlap = height - (wanted[i + 1] - wanted[i])
            if overlap > 0:
                wanted[i] -= overlap / 2
                wanted[i + 1] += overlap / 2
    for target, (pixel, x, y, label, colour) in zip(wanted, places, strict=True):
        shift = (target - pixel) * 72 / figure.dpi
        axes.annotate(
            label,
            (x, y),
            xytext=(9, shift),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )


def _smooth(points: Sequence[tuple[float, float]]) -> list[float]:
    """Mean of each bin and its neighbours, weighted by how many targets they hold."""
    reach = max(1, len(points) // 24)
    result = []
    for i in range(len(points)):
        near = points[max(0, i - reach) : i + reach + 1]
        weight = sum(count for _, count in near)
        result.append(sum(value * count for value, count in near) / weight)
    return result


def _tokens(value: float) -> str:
    """1,024 as 1k: lengths are read in powers of two."""
    if value >= 1024 and value % 1024 == 0:
        return f"{int(value) // 1024}k"
    return f"{value:,.0f}"


def _plain_number() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")


def _one_two_five() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5), numticks=12)


def _token_number() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: _tokens(value))
