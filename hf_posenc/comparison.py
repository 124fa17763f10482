"""Several evaluations as one: the same text and lengths, other models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def combined(evaluations: Sequence[tuple[str, dict[str, Any]]], title: str) -> dict[str, Any]:
    """One result from several, as `hf_posenc.evaluation.evaluate` returns them; `write_report` takes it.

    The first one's native encoding is what all are compared with at short lengths.

    Args:
        evaluations: each with what stands before its labels in tables and pictures ("" for nothing).
        title: of the report.

    Raises:
        ValueError: none, or evaluations of other text or other lengths, whose numbers cannot stand in one table.
    """
    if not evaluations:
        raise ValueError("There is nothing to combine.")
    first = evaluations[0][1]
    reported = sorted(set.intersection(*(set(results["settings"]["reported"]) for _, results in evaluations)))
    entries = []
    for prefix, results in evaluations:
        for name in ("text", "definition"):
            theirs = results["text"]["sha256"] if name == "text" else results["settings"][name]
            ours = first["text"]["sha256"] if name == "text" else first["settings"][name]
            if theirs != ours:
                raise ValueError(f"{prefix!r} was measured with another {name}; the numbers do not compare.")
        for entry in results["encodings"]:
            rows = [_against(row, first["native"]) for row in entry["rows"] if row["length"] in reported]
            label = f"{prefix}: {entry['label']}" if prefix else entry["label"]
            entries.append({**entry, "label": label, "rows": rows})
    return {
        **first,
        "title": title,
        "settings": {**first["settings"], "reported": reported},
        "seconds": sum(results["seconds"] for _, results in evaluations),
        "encodings": entries,
    }


def compare(
    models: Sequence[str],
    encodings: Sequence[Any],
    texts: Sequence[str],
    lengths: Sequence[int],
    output: Path,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate every encoding on every model, and write one report of all into `output` (and one of each below it).

    Args:
        options: of `hf_posenc.evaluation.evaluate`.

    Raises:
        ValueError: as for `evaluate`; models whose tokenizers cut the text differently.
    """
    from hf_posenc.evaluation import evaluate
    from hf_posenc.evaluation.report import write_report
    from hf_posenc.evaluation.sweep import _output_folder

    _output_folder(output)
    evaluations: dict[str, dict[str, Any]] = {}
    for model in models:
        name = Path(model).name
        name = name if name not in evaluations else f"{name} ({len(evaluations) + 1})"
        evaluations[name] = evaluate(model, encodings, texts, lengths, output / "parts" / name, **options)
    results = combined(list(evaluations.items()), "Comparison by context length")
    write_report(results, output)
    return results


def _against(row: dict[str, Any], native: dict[str, Any] | None) -> dict[str, Any]:
    twin = next((r for r in native["rows"] if r["length"] == row["length"]), None) if native else None
    change = float(row["perplexity"]) / float(twin["perplexity"]) - 1 if twin else None
    return {**row, "change_against_native": change}
