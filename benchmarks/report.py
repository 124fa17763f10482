"""The table, the file and the picture; `python -m benchmarks.report FOLDER` puts them into docs/ and the README."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from benchmarks.rows import Row

COLUMNS = ("what", "ours", "stock", "otherwise", "limit", "ratio", "target", "command")


ESSENCE = {
    "alibi on gpt2, forward,": "ALiBi, forward",
    "alibi on gpt2, forward + backward,": "ALiBi, forward + backward",
    "alibi on bert, forward,": "ALiBi in an encoder, forward",
    "t5 on gpt2, forward + backward,": "T5 bias, forward + backward",
    "fire on gpt2, forward + backward,": "FIRE, forward + backward",
    "yarn on llama, forward + backward,": "YaRN on LLaMA, forward + backward",
    "rope on gpt2, forward + backward,": "RoPE on GPT-2, forward + backward",
    "alibi on gpt2, 8 tokens one by one": "ALiBi, decoding",
    "perplexity in the shape of SmolLM2-135M": "perplexity in sliding windows",
    "training step, 10 of SmolLM2's 30 layers, 4096 tokens, float32": "training step with the loss in slices",
    "output layer, loss and gradient alone, 4096 tokens, vocabulary 49152, float32:": "loss of 4,096 tokens, memory",
}
"""Rows that the README shows: how `what` begins, and what it is called there."""


LOOKS = {"alibi": ("#0072B2", "o"), "t5": ("#D55E00", "s"), "fire": ("#009E73", "^")}
"""Colour and marker of an encoding in the picture."""


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


def read(path: Path) -> tuple[dict[str, object], list[Row]]:
    """The machine and the rows of a `results.json`."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept["machine"], [Row(**{key: value for key, value in row.items() if key != "met"}) for row in kept["rows"]]


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
            colour, marker = LOOKS.get(name.partition(",")[0], ("black", ""))  # told apart in grey by their markers
            line = ":" if not marker else "--" if "tensor" in name else "-"
            axis.plot(list(points), list(points.values()), line, color=colour, marker=marker, markersize=5, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        lengths = sorted({length for points in drawn.values() for length in points})
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.set_xlabel("tokens")
        axis.set_ylabel("seconds" if unit == "s" else "peak memory beyond the inputs, MiB")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    temporary = path.with_name(path.name + ".part")
    figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)
    os.replace(temporary, path)


def publish(output: Path, root: Path) -> None:
    """Put a finished benchmark into docs/benchmarks.md, its picture beside it and its essence into the README."""
    from hf_posenc.reference import update_readme

    machine, found = read(output / "results.json")
    plot(found, root / "docs" / "growth.png")
    where = (
        f"{machine['threads']} CPU cores ({machine['processor']}), torch {machine['torch']}, transformers"
        f" {machine['transformers']}, medians of {machine['rounds']} interleaved rounds"
    )
    missed = [row for row in found if row.met is False]
    text = [
        "# What position encodings cost",
        f"Measured by `make bench` on {where}. It prints this; each row names the command that measures it again.",
        "- **ours**: this package. **stock**: the encoding that the model came with. **limit**: the same model with no"
        " position encoding.\n- **otherwise**: what a user would do without this package.\n- **ratio**: the median over"
        " rounds of ours in parts of what is named there.",
        f"{sum(row.met is True for row in found)} targets are met, {len(missed)} missed"
        + "".join(f"\n- missed: {row.what}: {row.ratio:.3g} of {row.against}{_bound(row)}" for row in missed),
        "Where another way was better than ours:"
        + "".join(
            f"\n- {row.what}: {_number(value, row.unit)} ({other}), ours {_number(row.ours, row.unit)}"
            for row in found
            for other, value in row.otherwise
            if value < row.ours
        ),
        table(found).strip(),
        "![Time and memory of one attention call against its length](growth.png)",
    ]
    write(root / "docs" / "benchmarks.md", "\n\n".join(text) + "\n")
    update_readme(root / "README.md", speed=f"{essence(found)}\n\nOn {where}.")


def _bound(row: Row) -> str:
    """The most that could be gained, where the same work without the part that is saved was measured too."""
    if row.target is None or row.target[0] != "at least" or row.limit is None:
        return ""
    return f" ({row.otherwise[0][1] / row.limit:.3g} if the part that can be saved cost nothing)"


def essence(rows: list[Row]) -> str:
    """The rows of the README, in Markdown."""
    lines = ["| | ours | without position encoding, or stock | otherwise |", "|---|---:|---:|---|"]
    for begins, name in ESSENCE.items():
        row = next(row for row in rows if row.what.startswith(begins))
        otherwise = "; ".join(f"{_number(value, row.unit)} ({other})" for other, value in row.otherwise) or "-"
        base = row.limit if row.limit is not None else row.stock
        lines.append(f"| {name} | {_number(row.ours, row.unit)} | {_number(base, row.unit)} | {otherwise} |")
    return "\n".join(lines)


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path("."))
