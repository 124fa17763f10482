"""An adapter and its base model to one folder that opens like any other model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_posenc.training.files import written_whole


def merge(
    adapter: str | Path, output: str | Path, *, dtype: Any = None, device_map: Any = None, base: str | None = None
) -> Path:
    """Merge an adapter (LoRA, norms, embeddings and new position weights) into its base model and save the result.

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
        tokenizer.save_pretrained(folder)
    return target


def merged(adapter: Path, *, dtype: Any = None, device_map: Any = None, base: str | None = None) -> tuple[Any, Any]:
    """(model with the adapter merged in, tokenizer)."""
    from transformers import AutoTokenizer

    from hf_posenc.adapters import load_adapter
    from hf_posenc.models import load_model

    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    source = base or config.get("base_model_name_or_path")
    if not source:
        raise ValueError(f"The adapter {str(adapter)!r} does not name its base model; give base=.")
    masked = "MaskedLM" in str((config.get("auto_mapping") or {}).get("base_model_class", ""))
    model, tokenizer = load_model(source, dtype, device_map, task="masked" if masked else "causal")
    model = load_adapter(model, adapter).merge_and_unload()
    if (adapter / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(str(adapter))
    return model, tokenizer
