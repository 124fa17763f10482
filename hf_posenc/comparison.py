"""Several evaluations as one: the same text and lengths, other models."""

from __future__ import annotations

import os
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
        ValueError: none, or evaluations of other text or in other windows, whose numbers cannot stand in one table.
    """
    from hf_posenc.evaluation.sweep import against

    if not evaluations:
        raise ValueError("There is nothing to combine.")
    (first_prefix, first), *others = evaluations
    for prefix, results in others:
        _refuse_other_text(prefix, results["text"]["sha256"], first["text"]["sha256"])
        for name in ("definition", "window", "stride", "bos"):
            theirs, ours = results["settings"][name], first["settings"][name]
            if theirs != ours:
                raise ValueError(
                    f"{prefix!r} was measured with {name}={theirs!r}, {first_prefix!r} with {ours!r}; their numbers do"
                    " not compare. Evaluate them with the same."
                )
    reported = sorted(set.intersection(*(set(results["settings"]["reported"]) for _, results in evaluations)))
    entries = []
    for prefix, results in evaluations:
        for entry in results["encodings"]:
            rows = [against(row, first["native"]) for row in entry["rows"] if row["length"] in reported]
            entries.append({**entry, "label": _labelled(prefix, entry["label"]), "rows": rows})
    return {
        **first,
        "title": title,
        "device": "; ".join(dict.fromkeys(results["device"] for _, results in evaluations)),
        "models": [results["model"] for _, results in evaluations],
        "settings": {**first["settings"], "reported": reported},
        "seconds": sum(results["seconds"] for _, results in evaluations),
        "compared_with": _labelled(first_prefix, first["compared_with"]),
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
        ValueError: as for `evaluate`; a model named twice; models whose tokenizers cut the text differently. Raised
            before any model runs.
    """
    from hf_posenc.evaluation import evaluate
    from hf_posenc.evaluation.files import output_folder, refuse_others_report
    from hf_posenc.evaluation.processes import Processes
    from hf_posenc.evaluation.report import write_report
    from hf_posenc.evaluation.text import Text, read_text
    from hf_posenc.models import fingerprint, load_tokenizer

    names = _names(models)
    refuse_others_report(output_folder(output), [(fingerprint(model), str(model)) for model in models])
    read: list[Text] = []
    for model, name in zip(models, names, strict=True):
        chosen = {k: options.get(k) for k in ("documents", "max_tokens", "bos")}
        joined = options.get("concatenate", False)
        text = read_text(load_tokenizer(model), texts, concatenate=joined, longest=max(lengths, default=2), **chosen)
        read.append(text)
        _refuse_other_text(name, text.digest, read[0].digest)
        if text.bos != read[0].bos:
            raise ValueError(
                f"{name!r} puts the start token {text.bos} before each window and {names[0]!r} {read[0].bos}, so that"
                " their numbers do not compare. Evaluate both without one: bos=False (--bos never)."
            )
    evaluations = [
        (name, evaluate(model, encodings, texts, lengths, output / "parts" / _folder(name), **options))
        for model, name in zip(models, names, strict=True)
    ]
    results = combined(evaluations, "Comparison by context length")
    if Processes.find().is_first:
        write_report(results, output)
    return results


def _folder(name: str) -> str:
    """A folder name for each name: `x/m` and `x-m` have different ones."""
    return name.replace("-", "--").replace("/", "-")


def _labelled(prefix: str, label: str) -> str:
    return f"{prefix}: {label}" if prefix else label


def _refuse_other_text(prefix: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise ValueError(
            f"{prefix!r} cuts the text into other tokens than the first model does, so that their perplexities do not"
            " compare. Evaluate it by itself; bits per byte compare between tokenizers."
        )


def _names(models: Sequence[str]) -> list[str]:
    """The end of each model's place, as much of it as tells them apart.

    Raises:
        ValueError: one is named twice.
    """
    places = [Path(os.path.abspath(model) if os.path.exists(model) else model) for model in models]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise ValueError(f"{models[i]!r} is named twice; name each model once.")
    names = [place.name for place in places]
    for depth in range(2, max((len(place.parts) for place in places), default=0) + 1):
        names = [
            str(Path(*place.parts[-depth:])) if names.count(name) > 1 else name
            for place, name in zip(places, names, strict=True)
        ]
    return names
