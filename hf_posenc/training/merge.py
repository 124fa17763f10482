"""An adapter and its base model to one folder that opens like any other model."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.training.files import written_whole

logger = logging.getLogger(__name__)


def merge(
    adapter: str | Path, output: str | Path, *, dtype: Any = None, device_map: Any = None, base: str | None = None
) -> Path:
    """Merge an adapter (LoRA, norms, embeddings and new position weights) into its base model and save the result.

    The tokenizer saved with it is the adapter's own, or else the base model's; where neither has one, a warning says so
    and the model is saved without.

    Args:
        adapter: the folder that a fine-tuning with --lora wrote (`adapter` in its output folder, or a checkpoint).
        output: an empty or new folder.
        dtype: of the saved weights; None keeps the base model's.
        device_map: where to merge, as in `from_pretrained`; None merges on the CPU.
        base: where the base model is now, if not where the adapter says.

    Returns:
        `output`.

    Raises:
        ValueError: `adapter` is no adapter, or `output` holds something.
    """
    source, target = Path(adapter), Path(output)
    if not (source / "adapter_config.json").is_file():
        raise ValueError(f"{str(source)!r} is not an adapter: it has no adapter_config.json.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"The output {str(target)!r} is not empty. Choose an empty or new folder.")
    model, tokenizer = merged(source, dtype=dtype, device_map=device_map, base=base)
    with written_whole(target) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if tokenizer is None:
        logger.warning("There is no tokenizer in %r, nor beside its base model: none was saved.", str(source))
    return target


def merged(adapter: Path, *, dtype: Any = None, device_map: Any = None, base: str | None = None) -> tuple[Any, Any]:
    """(model with the adapter merged in, tokenizer or None)."""
    from hf_posenc.adapters import load_adapter
    from hf_posenc.models import has_tokenizer, load_tokenizer, load_weights
    from hf_posenc.patch import drop_silent_native

    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    source = base or config.get("base_model_name_or_path")
    if not source:
        raise ValueError(f"The adapter {str(adapter)!r} does not name its base model; give base=.")
    masked = "MaskedLM" in str((config.get("auto_mapping") or {}).get("base_model_class", ""))
    tokenizer = load_tokenizer(adapter if has_tokenizer(adapter) else source, needed=False)
    with _whole_models():
        model = load_weights(source, dtype, device_map, task="masked" if masked else "causal")
        model = load_adapter(model, adapter).merge_and_unload()
    if not model.config.tie_word_embeddings:
        _untie(model)
    return drop_silent_native(model), tokenizer


@contextlib.contextmanager
def _whole_models() -> Iterator[None]:
    """Models that are loaded here are this process's alone, also while DeepSpeed's ZeRO-3 trains: transformers would
    share them out among all processes, of which only one merges.
    """
    from transformers.integrations import deepspeed

    config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config


def _untie(model: nn.Module) -> None:
    """Give every place that shares a weight its own copy, so that each is saved.

    peft unties the output layer where the embeddings were trained, but not what else hangs on that: BERT's output bias
    is one weight in two places, of which only one is saved, and loading would no longer tie them.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(weight) in seen:
                setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
            seen.add(id(weight))
