"""Loading a model and its tokenizer from any of the places where one can lie: a hub id, a folder, a PEFT adapter, a
GGUF file."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

TASKS = ("causal", "masked", "features")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *(
        "spiece.model",
        "sentencepiece.bpe.model",
        "sentencepiece.model",
        "vocab.model",
        "tekken.json",
        "special_tokens_map.json",
    ),
)
"""A folder with none of these has no tokenizer; transformers would make up an empty one."""


def load_model(
    source: str | Path,
    dtype: Any = None,
    device_map: Any = None,
    *,
    task: str = "causal",
    tokenizer: bool = True,
    quantization_config: Any = None,
) -> tuple[Any, Any]:
    """Load a pretrained model with its tokenizer, ready to be patched, trained, evaluated and saved.

    Args:
        source: a hub id (`HuggingFaceTB/SmolLM2-135M`), a folder that `save_pretrained` wrote (of a model, or of a PEFT
            adapter), or a `.gguf` file, whose weights are expanded to `dtype`.
        dtype: a torch dtype or its name ("bfloat16", "auto"); None means float32 for GGUF and what transformers chooses
            (the checkpoint's own) elsewhere.
        device_map: as in transformers' `from_pretrained`; None loads to the CPU.
        task: "causal" (language model), "masked" (fill-in encoder) or "features" (encoder without a head).
        tokenizer: False takes a model without a tokenizer too, and gives None for one that is not there.
        quantization_config: as in transformers' `from_pretrained`; for a hub id or the folder of a model.

    Returns:
        (model in evaluation mode, tokenizer).

    Raises:
        ValueError: nothing at `source`, a folder without a model or (unless `tokenizer` is False) a tokenizer, weights
            that are damaged, missing, or of other sizes than the config says, or an unknown `dtype` or `task`.
    """
    _import_plugin()
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not known; choose one of {', '.join(TASKS)}.")
    dtype = _as_dtype(dtype)
    # The tokenizer first: it takes a moment, the weights may take minutes.
    found = load_tokenizer(source, needed=tokenizer)
    return load_weights(source, dtype, device_map, task=task, quantization_config=quantization_config), found


def load_weights(
    source: str | Path,
    dtype: Any = None,
    device_map: Any = None,
    *,
    task: str = "causal",
    quantization_config: Any = None,
) -> Any:
    """The model alone, as `load_model` loads it; whether there is a tokenizer does not matter.

    Raises:
        ValueError: see `load_model`.
    """
    import torch
    import transformers

    _import_plugin()
    auto = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "features": transformers.AutoModel,
    }[task]
    options: dict[str, Any] = {"device_map": device_map} if device_map is not None else {}
    dtype = _as_dtype(dtype)
    kind, path = _find(source)
    where = str(source) if path is None else str(path)
    if quantization_config is not None:
        if kind in ("adapter", "gguf"):
            what = "an adapter: merge it first" if kind == "adapter" else "a .gguf file: save it as a model first"
            raise ValueError(f"quantization_config is for a plain model, and {str(source)!r} is {what}.")
        options["quantization_config"] = quantization_config
    if kind == "adapter":
        assert path is not None
        return _load_adapter(path, dtype, device_map, task).eval()
    if kind == "gguf":
        assert path is not None
        where, options["gguf_file"] = str(path.parent), path.name
        options["dtype"] = torch.float32 if dtype in (None, "auto") else dtype
    elif dtype is not None:
        options["dtype"] = dtype
    try:
        model, loading = auto.from_pretrained(where, output_loading_info=True, **options)
    except torch.OutOfMemoryError:
        raise
    except _unreadable() as error:
        raise ValueError(f"Cannot load a model from {str(source)!r}: {_in_a_line(error)}") from error
    if kind == "gguf":
        _forget_quantization(model)
    _refuse_missing(source, loading, task)
    return model.eval()


def _unreadable() -> tuple[type[Exception], ...]:
    """What the libraries below raise on files that are missing, cut off, or not what their name says."""
    import pickle
    import struct

    from safetensors import SafetensorError

    mine = (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, EOFError, AssertionError)
    return (*mine, struct.error, SafetensorError, pickle.UnpicklingError)


def _in_a_line(error: Exception) -> str:
    """An error's message without its traceback or advice."""
    import re

    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if "ignore_mismatched_sizes" in str(error):
        return "weights in the checkpoint have other sizes than its config.json says."
    return (
        text
        if isinstance(error, (OSError, ValueError, RuntimeError, AssertionError))
        else f"{type(error).__name__}: {text}"
    )


def _refuse_missing(source: str | Path, loading: dict[str, Any], task: str) -> None:
    """Refuse weights that the checkpoint lacks: the model would run with random ones, and every number be noise."""
    missing = sorted(loading.get("missing_keys") or ())
    if missing and task != "features":  # a plain encoder may lack its pooler, which nothing here reads
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"Cannot load a model from {str(source)!r}: the checkpoint lacks weights of this model"
            f" ({', '.join(missing[:3])}{more}); they would be random. Is it complete, and a {task} language model?"
        )


def _tokenizer_of(source: str | Path, kind: str, path: Path | None, needed: bool = True) -> Any:
    """The tokenizer, or None where it is not `needed` and there is none."""
    import transformers

    where = str(source) if path is None else str(path)
    options: dict[str, Any] = {}
    if kind == "gguf":
        assert path is not None
        where, options["gguf_file"] = str(path.parent), path.name
    elif kind == "folder" and path is not None and not has_tokenizer(path):
        if not needed:
            return None
        raise ValueError(
            f"Cannot load a tokenizer from {where!r}: the folder has no tokenizer files. Copy those of the model it was"
            " made from (tokenizer.json, tokenizer_config.json) into it."
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(where, **options)
    except Exception as error:  # the Rust tokenizers raise a bare one on a file they cannot read
        if kind == "hub" and not needed:
            return None
        raise ValueError(
            f"Cannot load a tokenizer from {str(source)!r}: {_in_a_line(error)}{_broken_json(path)}"
        ) from error


def _broken_json(path: Path | None) -> str:
    """Names the tokenizer file that is no JSON, which the error of the reader does not."""
    for file in sorted(path.glob("*token*.json")) if path is not None and path.is_dir() else ():
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return f" ({file} is damaged)"
    return ""


def _find(source: str | Path) -> tuple[str, Path | None]:
    """("gguf" | "adapter" | "folder" | "hub", where on disk)."""
    text = str(source)
    path = Path(text).expanduser()
    if text.lower().endswith(".gguf"):
        if not path.is_file():
            raise ValueError(f"There is no file {text!r}. A .gguf model is given as the path of its file.")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{text!r} is not a GGUF file: it is {_what(path)}.")
        return "gguf", path.resolve()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            return "adapter", path
        if (path / "config.json").is_file():
            return "folder", path
        found = sorted(item.name for item in path.glob("*.gguf"))
        hint = f" It holds {', '.join(found)}: give the path of the file." if found else ""
        if (path / "adapter" / "adapter_config.json").is_file():  # as a fine-tuning leaves one that was not merged
            hint = f" It holds an adapter: give {str(path / 'adapter')!r}."
        raise ValueError(f"The folder {text!r} holds no model: neither config.json nor adapter_config.json.{hint}")
    if path.is_file():
        raise ValueError(f"{text!r} is a file, but not a .gguf one. Give a folder, a .gguf file, or a hub id.")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ValueError(f"There is no folder {text!r}. A model is a folder, a .gguf file, or a hub id such as 'gpt2'.")
    return "hub", None


def _what(path: Path) -> str:
    return "empty" if path.stat().st_size == 0 else "cut off or something else (it does not begin with 'GGUF')"


def _load_adapter(path: Path, dtype: Any, device_map: Any, task: str) -> Any:
    try:
        from hf_posenc.adapters import load_adapter
    except ImportError as error:
        raise ValueError(f"{str(path)!r} is a PEFT adapter; install peft to load it.") from error
    model = load_weights(_base_of(path), dtype, device_map, task=task)
    try:
        return load_adapter(model, path)
    except _unreadable() as error:
        raise ValueError(f"Cannot load an adapter from {str(path)!r}: {_in_a_line(error)}") from error


def _base_of(adapter: Path) -> str:
    """Where an adapter says that its base model is.

    Raises:
        ValueError: it says nothing.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{adapter / 'adapter_config.json'} names no base model (base_model_name_or_path).")
    return str(base)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _forget_quantization(model: nn.Module) -> None:
    """Weights read from GGUF are plain floats; what transformers remembers of the file would make saving them fail."""
    for holder in (model, getattr(model, "config", None)):
        for name in (
            "quantization_config",
            "_pre_quantization_dtype",
            "hf_quantizer",
            "quantization_method",
            "is_quantized",
        ):
            if holder is not None and name in vars(holder):
                delattr(holder, name)


def _as_dtype(dtype: Any) -> Any:
    import torch

    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype), None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not allowed; use 'float32', 'bfloat16', 'float16' or 'auto'.")
    return found


def _import_plugin() -> None:
    """Register patched checkpoints with transformers' Auto classes."""
    import importlib

    importlib.import_module("hf_posenc")


def load_tokenizer(source: str | Path, *, needed: bool = True) -> Any:
    """Load only the tokenizer of what `load_model` takes: an adapter's own, or else that of its base model.

    Args:
        needed: False gives None where there is no tokenizer.

    Raises:
        ValueError: nothing at `source`, or (unless `needed` is False) no tokenizer in it.
    """
    kind, path = _find(source)
    if kind == "adapter" and path is not None and not has_tokenizer(path):
        return load_tokenizer(_base_of(path), needed=needed)
    return _tokenizer_of(source, kind, path, needed)


def fingerprint(source: str | Path) -> str:
    """A hash of what lies at `source`, read whole: equal for equal weights and config, wherever they are.

    Raises:
        ValueError: nothing at `source`.
    """
    kind, path = _find(source)
    if kind == "hub":
        from transformers.utils import cached_file

        try:
            config = cached_file(str(source), "config.json")
        except OSError as error:
            raise ValueError(f"Cannot find a model at {str(source)!r}: {str(error).splitlines()[0]}") from error
        assert config is not None
        path = Path(config).parent
    assert path is not None
    if path.is_file():
        return _hash_files([path])
    suffixes = {".json", ".safetensors", ".bin", ".gguf"}
    files = sorted(item for item in path.iterdir() if item.suffix in suffixes and item.is_file())
    digest = _hash_files(files)
    if kind == "adapter":
        digest = hashlib.sha256((digest + fingerprint(_base_of(path))).encode()).hexdigest()
    return digest


def _hash_files(files: list[Path]) -> str:
    def hashed(path: Path) -> bytes:
        digest = hashlib.sha256(path.name.encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
        return digest.digest()

    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing and reading let other threads run
        return hashlib.sha256(b"".join(pool.map(hashed, files))).hexdigest()
