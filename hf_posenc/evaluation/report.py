"""The report of an evaluation: `results.json`, `report.md`, `report.html` and the pictures beside them."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_posenc.evaluation import plots
from hf_posenc.evaluation.files import write_json, write_whole


def write_report(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write all files of a report into `folder`, each whole; the ones that name others come last.

    Args:
        results: what `evaluate` returns.

    Returns:
        The files written: `results.json`, pictures, `report.md`, `report.html`.
    """
    pictures = _pictures(results)
    written = [write_json(folder / "results.json", results)]
    for name, (figure, _) in pictures.items():
        written += plots.save(figure, folder / name)
    images = [
        (name, plots.title_of(figure), caption, (folder / f"{name}.svg").read_bytes())
        for name, (figure, caption) in pictures.items()
    ]
    written.append(write_whole(folder / "report.md", _markdown(results, images)))
    written.append(write_whole(folder / "report.html", _html(results, images)))
    for pattern in ("loss_by_position.*", "wavelengths.*", "passkey_*.*"):
        for path in set(folder.glob(pattern)) - set(written):
            path.unlink()  # of an earlier report, which had more pictures than this one
    return written


def summary(results: dict[str, Any]) -> str:
    """The main tables as plain text, for a terminal."""
    return "\n\n".join(f"{title}\n{_text_table(head, rows)}" for title, _, head, rows in _tables(results))


# ---------------------------------------------------------------------- what is shown


def _pictures(results: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """{name of the file: (figure, caption)}, in the order in which they are shown."""
    trained, longest = _trained(results), max(results["settings"]["lengths"])
    text = ", ".join(Path(source).name or source for source in results["text"]["sources"])
    models = [model["name"] for model in _models(results)]
    subject = f"{models[0]} on {text}" if len(models) == 1 else text
    encodings = results["encodings"]
    bars = {
        entry["label"]: [(row["length"], *map(float, row["interval"])) for row in entry["rows"] if row["interval"]]
        for entry in encodings
        if any(row["interval"] for row in entry["rows"])
    }
    curve = plots.perplexity_curve(
        {entry["label"]: [(row["length"], float(row["perplexity"])) for row in entry["rows"]] for entry in encodings},
        trained_length=trained,
        title=f"Perplexity against context length: {subject}",
        intervals=bars,
    )
    found = {"perplexity": (curve, _column(results) + (" Thin bars: 95% bootstrap intervals." if bars else ""))}
    # An encoding keeps its place, and with it its colour, in every picture, also where it has no line.
    losses = {
        entry["label"]: [(float(x), float(y), n) for x, y, n in entry["positions"] if x >= 16]
        if not entry["length_dependent"] or len(encodings) == 1
        else []
        for entry in encodings
    }
    if any(losses.values()):
        found["loss_by_position"] = (
            plots.loss_by_position(losses, trained_length=trained, title=f"Loss by position: {subject}"),
            "Loss against the number of tokens before the target, in bins of equal width on the log scale: faint as"
            " measured, strong smoothed.",
        )
    turning = {entry["label"]: entry["frequencies"] or [] for entry in encodings}
    if any(turning.values()):
        dependent = [entry["label"] for entry in encodings if entry["length_dependent"] and entry["frequencies"]]
        found["wavelengths"] = (
            plots.wavelengths(turning, trained_length=trained, context_length=longest),
            "Tokens in one full turn of each rotary pair. Pairs above the trained length never made one in training."
            + (f" {_named(dependent)}: in sequences of {longest:,} tokens." if dependent else ""),
        )
    seconds = {
        entry["label"]: [(r["length"], float(r["seconds"])) for r in entry.get("cost") or []] for entry in encodings
    }
    if any(seconds.values()):
        found["cost"] = (
            plots.cost_curve(seconds, title=f"Cost against context length: {', '.join(models)}"),
            f"Seconds of one scored pass on {results['device']}. Four times as long for twice the length: attention"
            " alone; twice as long: everything else.",
        )
    for number, entry in enumerate(encodings):
        probed = entry["passkey"]["accuracy"] if entry.get("passkey") else {}
        table = {int(n): {float(d): float(v) for d, v in row.items()} for n, row in probed.items()}
        if any(math.isfinite(value) for row in table.values() for value in row.values()):
            found[f"passkey_{number}"] = (
                plots.needle_heatmap(table, trained_length=trained, title=f"Passkey retrieval: {entry['label']}"),
                f"Passkeys found under `{entry['label']}`: {_count(entry['passkey']['trials'], 'prompt')} a cell, exact"
                " match, greedy decoding.",
            )
    return found


def _models(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What is known of the model, or of each model of a comparison."""
    return results.get("models") or [results["model"]]


def _trained(results: dict[str, Any]) -> int | None:
    """The trained length, where the models have the same one."""
    lengths = {model["trained_length"] for model in _models(results)}
    return lengths.pop() if len(lengths) == 1 else None


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _named(labels: Sequence[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def _column(results: dict[str, Any]) -> str:
    if results["settings"]["definition"] == "pseudo":
        return "At length L: windows of L tokens, special ones included."
    return "At length L: the targets with L/2 .. L-1 tokens before them."


def _tables(results: dict[str, Any]) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """[(title, note, head, rows)]."""
    encodings, trained = results["encodings"], results["model"]["trained_length"]
    lengths = [row["length"] for row in encodings[0]["rows"]]
    rows = [[entry["label"], *(_number(row["perplexity"]) for row in entry["rows"])] for entry in encodings]
    rows.append(["targets", *(f"{row['tokens']:,}" for row in encodings[0]["rows"])])
    note = f"{_column(results)} Last line: how many targets each number is made of."
    if _trained(results):
        note += f" Trained length: {trained:,} tokens."
    tables = [("Perplexity by context length", note, ["encoding", *(f"{length:,}" for length in lengths)], rows)]
    short = [i for i, length in enumerate(lengths) if trained and length <= trained]
    changed = [entry for entry in encodings if entry["label"] != results["compared_with"] and _compared(entry)]
    if short and changed and results["native"]:
        rows = [
            [entry["label"], *(_change(entry["rows"][i]["change_against_native"]) for i in short)] for entry in changed
        ]
        note = (
            f"Change of perplexity against `{results['compared_with']}` at the same length, up to its trained length"
            f" ({trained:,} tokens)."
        )
        tables.append(("What it costs at short lengths", note, ["encoding", *(f"{lengths[i]:,}" for i in short)], rows))
    probed = [entry for entry in encodings if entry.get("passkey")]
    if probed:
        sizes = list(probed[0]["passkey"]["accuracy"])
        rows = []
        for entry in probed:
            kinds = [entry["passkey"][kind] for kind in ("accuracy", "lenient")]
            means = [" / ".join(_share(kind[size]) for kind in kinds).replace("- / -", "-") for size in sizes]
            rows.append([entry["label"], *means, f"{entry['passkey']['seconds']:,.1f}"])
        asked = len(probed[0]["passkey"]["depths"]) * probed[0]["passkey"]["trials"]
        note = f"Exact / lenient match, mean over depths: {asked} prompts each. Column: tokens of the prompt."
        if any("-" in row[1:] for row in rows):
            note += " -: the table of positions has no room for the reply."
        head = ["encoding", *(f"{int(size):,}" for size in sizes), "seconds"]
        tables.append(("Passkeys found", note, head, rows))
    priced = [entry for entry in encodings if entry.get("cost")]
    if priced:
        heavy = any(row["peak_bytes"] is not None for entry in priced for row in entry["cost"])
        tables.append(
            (
                "Cost of one pass",
                "Seconds" + (" and GiB beyond the weights." if heavy else "."),
                ["encoding", *(f"{row['length']:,}" for row in priced[0]["cost"])],
                [[entry["label"], *map(_cost, entry["cost"])] for entry in priced],
            )
        )
    tables.append(
        (
            "The runs",
            "Over all targets of the pass at the longest length, whatever their context. Seconds: of all passes,"
            " without loading the model.",
            ["encoding", "perplexity", "95% interval", "bits per byte", "targets", "passes", "seconds"],
            [
                [
                    entry["label"],
                    _number(entry["perplexity"]),
                    " .. ".join(map(_number, entry["interval"])) if entry["interval"] else "-",
                    "-" if entry["bits_per_byte"] is None else f"{float(entry['bits_per_byte']):.4f}",
                    f"{entry['tokens']:,}",
                    str(entry["passes"]),
                    f"{entry['seconds']:,.1f}",
                ]
                for entry in encodings
            ],
        )
    )
    return tables


def _cost(row: dict[str, Any]) -> str:
    seconds = f"{float(row['seconds']):.3g} s"
    return seconds if row["peak_bytes"] is None else f"{seconds}, {row['peak_bytes'] / 2**30:.2f} GiB"


def _notes(results: dict[str, Any]) -> list[str]:
    settings, text, encodings = results["settings"], results["text"], results["encodings"]
    window, stride = settings["window"], settings["stride"]
    notes = [
        "Perplexity is exp(nats / targets). A number is of one model on one text: it compares with numbers that were"
        " made the same way.",
        f"Definition `{settings['definition']}`: {settings['definition_means']}.",
    ]
    if settings["definition"] == "pseudo":
        notes.append("In each window up to 64 tokens, drawn with seed 0, were masked one at a time.")
    elif stride:
        notes.append(
            f"Each length L had a pass of its own, in windows of L tokens that begin {stride:,} tokens apart (L tokens"
            " where L is shorter). Targets with fewer than L/2 tokens before them are in no column."
        )
    else:
        notes.append(
            f"The text was cut into blocks of {window:,} tokens, each a fresh context. One pass over them gives every"
            " length: under a causal model the loss at position p is the loss at context length p."
        )
        dependent = [entry["label"] for entry in encodings if entry["length_dependent"]]
        if dependent:
            notes.append(
                f"Not so for {_named(dependent)}: its numbers depend on the length of the sequence, so each length had"
                " a pass of its own over the beginnings of the same blocks (same targets)."
            )
    alike = [entry["label"] for entry in encodings if entry.get("is_native") and not _compared(entry)]
    if alike:
        notes.append(
            f"`{alike[0]}` is what `native` means for this model, whose own config holds the encoding: there is no"
            " comparison between the two. To see what the encoding changed, evaluate the model it was made from."
        )
    notes += [
        "No document is context for another."
        if not text["concatenated"]
        else "Documents were joined into one stream, with the end-of-text token between them.",
        "No start token was added."
        if settings["bos"] is None
        else f"The start token {settings['bos']} stands before each window; it is context and no target.",
        "Logits are scored in float32; sums are float64. Intervals: bootstrap over"
        f" {'documents' if stride else 'blocks'}, 1,000 draws, seed 0; none from fewer than 5.",
    ]
    probes = next((entry["passkey"] for entry in encodings if entry.get("passkey")), None)
    if probes:
        notes.append(
            f"Passkeys: a number of five digits in repeated filler, {probes['trials']} for each length and depth, seed"
            f" {probes['seed']}, the same for every encoding; decoded greedily with a cache. Exact: the reply begins"
            " with the number. Lenient: it is anywhere in the reply."
        )
    for entry in encodings:
        older = {k: v for k, v in entry["versions"].items() if v != results["versions"].get(k)}
        if older:
            made = ", ".join(f"{name} {version}" for name, version in older.items())
            notes.append(f"`{entry['label']}` was measured by an earlier run, with {made}.")
    return notes


def _facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    text = results["text"]
    models = []
    for model in _models(results):
        length = f"{model['trained_length']:,} tokens" if model["trained_length"] else "unknown"
        size = f"{model['parameters'] / 1e6:,.1f} M parameters"
        dtype = str(model["dtype"]).removeprefix("torch.")
        models.append(("model", f"{model['name']} ({model['class']}, {size}, {dtype}; trained length {length})"))
    return [
        *models,
        ("text", f"{', '.join(text['sources'])}: {_count(text['documents'], 'document')}, {text['tokens']:,} tokens"),
        ("device", results["device"]),
        ("processes", str(results["processes"])),
        ("seconds", f"{results['seconds']:,.1f} in all, parts that an earlier run finished included"),
        ("versions", ", ".join(f"{name} {version}" for name, version in results["versions"].items())),
        ("made", results["created"]),
    ]


# ---------------------------------------------------------------------- as Markdown, as HTML


def _markdown(results: dict[str, Any], images: Sequence[tuple[str, str, str, bytes]]) -> str:
    parts = [f"# {results['title']}"]
    shown = {name: f"![{title}]({name}.png)\n\n{caption}" for name, title, caption, _ in images}
    parts.append(shown.pop("perplexity"))
    for title, note, head, rows in _tables(results):
        parts.append(f"## {title}\n\n{note}\n\n{_pipe_table(head, rows)}")
    parts += shown.values()
    parts.append("## How each number was made\n\n" + "\n".join(f"- {note}" for note in _notes(results)))
    parts.append("\n".join(f"- {name}: {value}" for name, value in _facts(results)))
    parts.append(f"Command:\n\n```\n{results['command']}\n```")
    return "\n\n".join(parts) + "\n"


_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; min-width: 9rem;
  overflow-wrap: anywhere; }
thead th { border-bottom: 2px solid #888; vertical-align: bottom; }
pre { background: #f5f5f5; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
code { font-size: .92em; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .92rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { margin: 0; } .wide { overflow: visible; } h2 { break-after: avoid; }
  figure, tr, pre { break-inside: avoid; } }
"""


def _html(results: dict[str, Any], images: Sequence[tuple[str, str, str, bytes]]) -> str:
    def escape(text: str) -> str:
        pieces = html.escape(text).split("`")
        return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))

    shown = {}
    for name, title, caption, svg in images:
        source = "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
        shown[name] = (
            f'<figure><img src="{source}" alt="{html.escape(title)}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    parts = [f"<h1>{escape(results['title'])}</h1>", shown.pop("perplexity")]
    for title, note, head, rows in _tables(results):
        cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(
            f'<h2>{escape(title)}</h2><p class="note">{escape(note)}</p>'
            f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
        )
    parts += shown.values()
    parts.append("<h2>How each number was made</h2><ul>")
    parts += [f"<li>{escape(note)}</li>" for note in _notes(results)]
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(results))
    parts.append(f"</ul><dl>{facts}</dl><h2>Command</h2><pre>{html.escape(results['command'])}</pre>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(results['title'])}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _pipe_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _text_table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *rows]
    )


def _number(value: Any) -> str:
    """A perplexity: two decimals, and none from 1,000 on."""
    value = float(value)
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e9 else f"{value:.2e}"


def _compared(entry: dict[str, Any]) -> bool:
    """True where some row was compared with the native encoding (of another model, in a combined report)."""
    return any(row["change_against_native"] is not None for row in entry["rows"])


def _change(value: Any) -> str:
    """A change as per cent with a sign, unless it rounds to none."""
    if value is None or math.isnan(float(value)):
        return "-"
    text = f"{float(value):+,.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def _share(by_depth: dict[str, Any]) -> str:
    """The mean of the fractions found."""
    mean = sum(map(float, by_depth.values())) / len(by_depth)
    return "-" if math.isnan(mean) else f"{mean:.0%}"
