"""The folder that a fine-tuning writes: whose it is, how it is finished, and what its model card says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.training.files import write_whole
from hf_posenc.training.trainer import is_whole, last_checkpoint

RECORD = "finetune.json"
"""What was asked for and what came of it; its presence says that a folder is ours."""
_MAY_CHANGE = ("dry_run", "merge", "eval_text", "eval_lengths", "eval_tokens", "data_processes", "loss_slice")


def check_output(folder: str, settings: Mapping[str, Any], resume: str | bool | None) -> Path | None:
    """The checkpoint to go on from, or None to start anew.

    Args:
        resume: None goes on from the last whole checkpoint of an unfinished run of the same settings, if there is one;
            "true" or "last" insists on one; "false" starts anew; a path names one.

    Raises:
        ValueError: the folder holds something else, another or a finished run, or no such checkpoint.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output_dir {folder!r} is a file; name a folder.")
    word = str(resume).lower() if resume is not None else None
    if word not in (None, "true", "last", "false", "no"):
        chosen = Path(str(resume))
        if not is_whole(chosen):
            raise ValueError(
                f"--resume_from_checkpoint {str(resume)!r} is not a whole checkpoint: no trainer_state.json in it."
            )
    else:
        chosen = None
    record = _read(path / RECORD)
    if record is None:
        if path.is_dir() and any(item.name != "runs" for item in path.iterdir()):
            raise ValueError(
                f"--output_dir {folder!r} holds something that is not a fine-tuning. Choose an empty or new folder."
            )
        if word in ("true", "last"):
            raise ValueError(f"--resume_from_checkpoint {resume}: there is no checkpoint in {folder!r}.")
        return chosen
    if record.get("finished") and word is None:
        raise ValueError(
            f"--output_dir {folder!r} holds a finished fine-tuning. Choose another folder, or "
            "--resume_from_checkpoint last to train it further."
        )
    earlier = record.get("settings", {})
    changed = [
        name for name, value in settings.items() if name not in _MAY_CHANGE and earlier.get(name, value) != value
    ]
    if changed and word not in ("false", "no"):
        name = changed[0]
        raise ValueError(
            f"--output_dir {folder!r} holds a run with other settings "
            f"({name}: {earlier[name]!r}, now {settings[name]!r}). "
            "Choose another folder, or --resume_from_checkpoint false to start anew in this one."
        )
    if chosen is not None or word in ("false", "no"):
        return chosen
    last = last_checkpoint(path)
    if last is None and word in ("true", "last"):
        raise ValueError(f"--resume_from_checkpoint {resume}: there is no whole checkpoint in {folder!r}.")
    return last


def write_record(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write what is known of a run."""
    write_whole(Path(folder) / RECORD, json.dumps(record, indent=2, sort_keys=True, default=str) + "\n")


def model_card(
    *,
    base: str,
    encoding: str,
    trained_length: int | None,
    context_length: int | None,
    objective: str,
    data: Sequence[str],
    data_report: str,
    method: str,
    command: str,
    evaluations: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
    base_folder: Path | None,
    saved_in: Path,
    measured: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """README.md of the adapted model.

    Args:
        command: how to make it again; empty where it was made from Python.
        saved_in: the folder with what was saved, which decides how it is opened.
        measured: how the numbers of `evaluations` were made.
    """
    license_name = _license(base_folder)
    head = ["---", "library_name: transformers", f"base_model: {json.dumps(base)}"]
    if license_name:
        head.append(f"license: {license_name}")
    head += ["tags:", *[f"- {tag}" for tag in ("hf-posenc", "long-context", *tags)], "---", ""]
    name = Path(base).stem if base.endswith(".gguf") else Path(base).name
    body = [
        f"# {name}, {encoding}" + (f", {context_length:,} tokens" if context_length else ""),
        "",
        "| | |",
        "|---|---|",
        f"| base model | {base} |",
        f"| position encoding | `{encoding}` |",
        f"| context length | {context_length or 'unchanged'} tokens (pretrained with {trained_length or 'unknown'}) |",
        f"| objective | {objective} |",
        f"| method | {method} |",
        f"| text | {', '.join(data)} |",
        f"| data | {data_report} |",
        *[f"| {key} | {value} |" for key, value in training.items()],
        "| licence of the base model | "
        + (license_name or "not stated in its files; look it up before you publish")
        + " |",
        "",
    ]
    if evaluations:
        keys = sorted({key for row in evaluations for key in row if key != "step"}, key=_by_number)
        body += ["## Results", "", "| step | " + " | ".join(key.removeprefix("eval_") for key in keys) + " |"]
        body += ["|---" * (len(keys) + 1) + "|"]
        for row in evaluations:
            cells = [f"{row[key]:.4g}" if isinstance(row.get(key), float) else str(row.get(key, "")) for key in keys]
            body.append(f"| {row['step']} | " + " | ".join(cells) + " |")
        body.append("")
        if measured:
            body += [measured, ""]
    body += ["## Use", "", "```python", *_opening(saved_in, objective), "```", ""]
    if command:
        body += ["## Made with", "", "```", command, "```", ""]
    return "\n".join([*head, *body])


def _opening(folder: Path, objective: str) -> list[str]:
    """Lines of Python that open what was saved. hf_posenc is in them only where stock transformers needs it."""
    config = _read(folder / "config.json")
    if config is None:
        task = "" if objective == "causal" else ', task="masked"'
        return [
            "from hf_posenc.models import load_model",
            "",
            f'model, tokenizer = load_model("FOLDER/adapter"{task})',
        ]
    auto = "AutoModelForCausalLM" if objective == "causal" else "AutoModelForMaskedLM"
    patched = str(config.get("model_type")).startswith("hf_posenc_")
    taught = ["import hf_posenc  # noqa: F401  (teaches transformers the encoding)"] if patched else []
    return [*taught, f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("FOLDER")']


def _by_number(key: str) -> tuple[str, int]:
    stem, _, number = key.rpartition("_")
    return (stem, int(number)) if number.isdigit() else (key, 0)


def _license(base_folder: Path | None) -> str | None:
    """The licence that the base model's card names."""
    if base_folder is None:
        return None
    card = base_folder / "README.md"
    if not card.is_file():
        return None
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            break
        if line.startswith("license:"):
            return line.partition(":")[2].strip() or None
    return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
