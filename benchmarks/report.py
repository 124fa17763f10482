"""The table, the file and the picture."""

from __future__ import annotations

import os
import re
from pathlib import Path

from benchmarks.rows import Row

COLUMNS = ("what", "ours", "stock", "otherwise", "limit", "ratio", "target", "command")


def head() -> str:
    return f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def line(row: Row) -> str:
    """One row in Markdown."""
    otherwise = "; ".join(f"{name} {_number(value, row.unit)}" for name, value in row.otherwise)
    ratio = "" if row.ratio is None else f"{row.ratio:.3g} of {row.against}"
    if "/ ours" in row.against:
        ratio = f"{row.against} = {row.ratio:.3g}"
    target = "" if row.target is None else f"{row.target[0]} {row.target[1]:g}: {'met' if row.met else '**missed**'}"
    cells = (
        row.what,
        _number(row.ours, row.unit),
        _number(row.stock, row.unit),
        otherwise or "-",
        _number(row.limit, row.unit),
        ratio,
        target or "-",
        f"`python -m benchmarks {row.name}`",
    )
    return f"| {' | '.join(cells)} |"


def table(rows: list[Row]) -> str:
    return "\n".join([head(), *(line(row) for row in rows)]) + "\n"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s" and value < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}".rstrip()


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def plot(rows: list[Row], path: Path) -> None:
    """Time and memory of one attention call against its length, on logarithmic scales."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    lines: dict[str, dict[str, dict[int, float]]] = {"s": {}, "MiB": {}}
    for row in rows:
        match = re.match(r"(\w+), one attention call, (\d+) tokens", row.what)
        if row.name != "growth" or match is None:
            continue
        name, length = match[1], int(match[2])
        drawn = lines[row.unit]
        drawn.setdefault(name, {})[length] = row.ours
        if row.limit is not None:
            drawn.setdefault("no position encoding", {})[length] = row.limit
        for other, value in row.otherwise:
            drawn.setdefault(f"{name}, {other}", {})[length] = value
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, (unit, drawn) in zip(axes, lines.items(), strict=True):
        for name, points in sorted(drawn.items()):
            style = "k:" if name.startswith("no ") else "--" if "tensor" in name else "-"
            axis.plot(list(points), list(points.values()), style, marker="o", markersize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
        axis.set_ylabel("seconds" if unit == "s" else "peak memory beyond the inputs, MiB")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    temporary = path.with_name(path.name + ".part")
    figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)
    os.replace(temporary, path)
