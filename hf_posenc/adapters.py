"""PEFT adapters that know about the new position weights, and about the encoding that they were trained under."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from peft import LoraConfig, PeftModel
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_posenc import checkpoint
from hf_posenc.architecture import architecture_of
from hf_posenc.encoding import Encoding
from hf_posenc.patch import encoding_of, patch, position_modules, set_native_weight, transformers_model

M = TypeVar("M", bound=nn.Module)


@dataclass
class PositionLoraConfig(LoraConfig):
    """A `peft.LoraConfig` that says in `adapter_config.json` which encoding the adapter was trained under.

    An adapter is nothing without it: read by PEFT alone, the unknown entry gives a warning that names it.
    """

    hf_posenc: dict[str, Any] | None = field(
        default=None, metadata={"help": "Record of the patch of the model that the adapter was trained on."}
    )


def lora_config(
    model: nn.Module, r: int = 16, *, train_norms: bool = False, train_embeddings: bool = False, **kwargs: Any
) -> LoraConfig:
    """A `peft.LoraConfig` that also trains and saves the weights that the patch of `model` brought.

    PEFT freezes every module that it does not know, and leaves it out of the adapter: without this, new position
    weights would be lost. Load it with `hf_posenc.load_adapter`: PEFT alone would put it on an unpatched model,
    with no more than a warning about an entry that it does not know.

    Args:
        model: a patched model (an unpatched one gives a plain config).
        r: rank of the adapter.
        train_norms: also train and save the normalisation layers, which long contexts gain most from together with the
            embeddings (Chen et al. 2023, "LongLoRA", arXiv 2309.12307, table 2).
        train_embeddings: also train and save the token embeddings. PEFT keeps an output layer tied to them only where
            it knows them by name (LLaMA); GPT-2's output layer keeps the pretrained ones.
        kwargs: anything else that `peft.LoraConfig` takes. `target_modules` defaults to the attention projections.

    Raises:
        ValueError: a rank below 1.
    """
    if not isinstance(r, int) or isinstance(r, bool) or r < 1:
        raise ValueError(f"r={r!r} is not allowed; the rank of an adapter is a whole number of at least 1.")
    top, base = transformers_model(model)
    modules = list(kwargs.pop("modules_to_save", None) or ())
    modules += position_modules(model)
    if train_norms:
        norms = {name for name, module in base.named_modules() if "norm" in type(module).__name__.lower()}
        modules += sorted({name.rpartition(".")[2] for name in norms})
    if train_embeddings:
        embeddings = base.get_input_embeddings()
        names = [name.rpartition(".")[2] for name, module in base.named_modules() if module is embeddings]
        modules += names
        tied = bool(getattr(top.config, "tie_word_embeddings", False))
        kwargs.setdefault("ensure_weight_tying", tied and any(name in EMBEDDING_LAYER_NAMES for name in names))
    kwargs.setdefault("target_modules", list(architecture_of(base.config).adapted))
    targets = kwargs["target_modules"]
    if isinstance(targets, (list, tuple, set)):  # GPT-2 keeps its weights transposed
        adapted = [module for name, module in base.named_modules() if name.rpartition(".")[2] in targets]
        kwargs.setdefault("fan_in_fan_out", any(isinstance(module, Conv1D) for module in adapted))
    if hasattr(top, "generate") and hasattr(top, "lm_head"):
        kwargs.setdefault("task_type", "CAUSAL_LM")
    record = getattr(base.config, checkpoint.RECORD, None)
    return PositionLoraConfig(r=r, modules_to_save=sorted(set(modules)) or None, hf_posenc=record, **kwargs)


def patch_as_trained(model: M, adapter: str | Path) -> M:
    """Patch a base model as that was on which an adapter was trained; leave it alone where the adapter says nothing.

    Args:
        adapter: the adapter's folder.

    Raises:
        ValueError: no adapter there, a record that this version cannot read, or an encoding that `model` cannot take.
    """
    path = Path(adapter) / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{str(adapter)!r} is not a PEFT adapter: it has no adapter_config.json.")
    record = json.loads(path.read_text(encoding="utf-8")).get(checkpoint.RECORD)
    if record is None:
        return model
    record = checkpoint.check_record(record)
    encoding = Encoding.from_dict(record["encoding"])
    if encoding_of(model) != encoding:
        patch(model, encoding, keep_native=record["keep_native"])
        if record["keep_native"]:
            set_native_weight(model, record["native_weight"])
    return model


def load_adapter(model: nn.Module, adapter: str | Path) -> PeftModel:
    """Patch a base model as an adapter was trained, and put the adapter on it.

    Raises:
        ValueError: see `patch_as_trained`.
    """
    patch_as_trained(model, adapter)
    with warnings.catch_warnings():
        # The entry that PEFT does not know has just been read.
        warnings.filterwarnings("ignore", message=r"Unexpected keyword arguments \['hf_posenc'\]")
        return PeftModel.from_pretrained(model, str(adapter))  # type: ignore[arg-type]
