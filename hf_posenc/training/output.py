"""The folder that a fine-tuning writes: whose it is, how it is finished, and what its model card says."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.training.files import write_whole
from hf_posenc.training.trainer import is_whole, last_checkpoint

RECORD = "finetune.json"
"""What was asked for and what came of it; its presence says that a folder is ours."""
_MAY_CHANGE = ("dry_run", "merge", "eval_text", "eval_lengths", "eval_tokens", "data_processes", "loss_slice")
_MUST_STAY = (
    *("samples_per_step", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16", "seed", "data_seed"),
    *("dataloader_drop_last", "train_sampling_strategy", "group_by_length", "average_tokens_across_devices"),
)
"""Options of the Trainer that decide what comes out of a step; a checkpoint would silently go on with its own."""
_EARLIER = "_earlier-"
_NAMES = {
    "train_text_sha256": "SHA-256 of what --train_text holds",
    "samples_per_step": "per_device_train_batch_size x gradient_accumulation_steps x processes",
}


def check_output(
    folder: str, settings: Mapping[str, Any], training: Mapping[str, Any], resume: str | bool | None
) -> Path | None:
    """The checkpoint to go on from, or None to start anew.

    Args:
        settings, training: our arguments and the Trainer's, as they are recorded.
        resume: None goes on from the last whole checkpoint of an unfinished run of the same settings, if there is one;
            "true" or "last" insists on one; "false" starts anew; a path names one.

    Raises:
        ValueError: the folder holds something else, another or a finished run, or no such checkpoint.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output_dir {folder!r} is a file; name a folder.")
    word = str(resume).lower() if resume is not None else None
    chosen = None
    if word not in (None, "true", "last", "false", "no"):
        chosen = Path(str(resume))
        if not is_whole(chosen):
            raise ValueError(
                f"--resume_from_checkpoint {str(resume)!r} is not a whole checkpoint: no trainer_state.json in it."
            )
        changed = _changed(_read(chosen.resolve().parent / RECORD) or {}, settings, training)
        if changed:
            raise ValueError(
                f"--resume_from_checkpoint {str(resume)!r} is of a run with other settings ({changed}). "
                "Give the same, or start anew without it."
            )
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
    if word in ("false", "no"):
        return None
    changed = _changed(record, settings, training)
    if changed:
        raise ValueError(
            f"--output_dir {folder!r} holds a run with other settings ({changed}). "
            "Choose another folder, or --resume_from_checkpoint false to start anew in this one."
        )
    if chosen is not None:
        return chosen
    last = last_checkpoint(path)
    if last is None and word in ("true", "last"):
        raise ValueError(f"--resume_from_checkpoint {resume}: there is no whole checkpoint in {folder!r}.")
    return last


def _changed(record: Mapping[str, Any], settings: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    """The first setting that a run's record has otherwise, in words; empty where all are the same."""
    pairs = [(record.get("settings", {}), settings, [name for name in settings if name not in _MAY_CHANGE])]
    pairs += [(record.get("training", {}), training, [name for name in _MUST_STAY if name in training])]
    for earlier, now, names in pairs:
        for name in names:
            if earlier.get(name, now[name]) != now[name]:
                return f"{_NAMES.get(name, name)}: {earlier[name]!r}, now {now[name]!r}"
    return ""


def set_aside(folder: str | os.PathLike[str]) -> Path | None:
    """Move what an earlier run left in a folder out of the way of a new run in it: checkpoints, model, adapter, card.

    Left where they are, checkpoints would be gone on from and counted by `save_total_limit`, and an old model would be
    opened as the new one.

    Returns:
        Where they are now; None where there was nothing but a record and logs.
    """
    path = Path(folder)
    stays = (".", _EARLIER)  # hidden files are no run's: .git, and what is being written
    found = [x for x in path.glob("*") if x.name not in (RECORD, "runs") and not x.name.startswith(stays)]
    if not found:
        return None
    # Nothing that begins with an underscore is pushed to a hub.
    aside = next(place for n in itertools.count(1) if not (place := path / f"{_EARLIER}{n}").exists())
    aside.mkdir()
    if (path / RECORD).is_file():
        shutil.copyfile(path / RECORD, aside / RECORD)
    # The newest checkpoint first: if this is interrupted, none is left that would be gone on from.
    for item in sorted(found, key=lambda item: (not is_whole(item), -item.stat().st_mtime)):
        os.replace(item, aside / item.name)
    return aside


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
    adapter = _read(saved_in / "adapter_config.json")
    library = "transformers" if adapter is None else "peft"
    head = ["---", f"library_name: {library}", f"base_model: {json.dumps(base)}"]
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
    if adapter is not None and adapter.get("hf_posenc") is not None:
        body += [
            "This is an adapter, and nothing without its position encoding: PEFT or transformers alone would put it on "
            "the plain base model. On a model that is loaded already: `hf_posenc.load_adapter(model, FOLDER)`.",
            "",
        ]
    if command:
        body += ["## Made with", "", "```", command, "```", ""]
    return "\n".join([*head, *body])


def _opening(folder: Path, objective: str) -> list[str]:
    """Lines of Python that open what was saved. hf_posenc is in them only where stock transformers needs it."""
    config = _read(folder / "config.json")
    if config is None:
        task = "" if objective == "causal" else ', task="masked"'
        inside = "" if (folder / "adapter_config.json").is_file() else "/adapter"
        return [
            "from hf_posenc.models import load_model",
            "",
            f'model, tokenizer = load_model("FOLDER{inside}"{task})',
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
