"""PEFT adapters that know about the new position weights."""

from __future__ import annotations

import typing
from typing import Any

from torch import nn

from hf_posenc.patch import position_modules, transformers_model

if typing.TYPE_CHECKING:
    from peft import LoraConfig


def lora_config(
    model: nn.Module, r: int = 16, *, train_norms: bool = False, train_embeddings: bool = False, **kwargs: Any
) -> LoraConfig:
    """A `peft.LoraConfig` that also trains and saves the weights that the patch of `model` brought.

    PEFT freezes every module that it does not know, and leaves it out of the adapter: without this, new position weights
    would be lost.

    Args:
        model: a patched model (an unpatched one gives a plain config).
        r: rank of the adapter.
        train_norms: also train and save the normalisation layers, which long contexts gain most from together with the
            embeddings (Chen et al. 2023, "LongLoRA", arXiv 2309.12307, table 2).
        train_embeddings: also train and save the token embeddings.
        kwargs: anything else that `peft.LoraConfig` takes. `target_modules` defaults to the attention projections.

    Raises:
        ImportError: PEFT is not installed.
    """
    from peft import LoraConfig

    top, base = transformers_model(model)
    modules = list(kwargs.pop("modules_to_save", None) or ())
    modules += position_modules(model)
    if train_norms:
        norms = {name for name, module in base.named_modules() if "norm" in type(module).__name__.lower()}
        modules += sorted({name.rpartition(".")[2] for name in norms})
    if train_embeddings:
        embeddings = base.get_input_embeddings()
        modules += [name.rpartition(".")[2] for name, module in base.named_modules() if module is embeddings]
        kwargs.setdefault("ensure_weight_tying", bool(getattr(top.config, "tie_word_embeddings", False)))
    if "target_modules" not in kwargs:
        from hf_posenc.architecture import architecture_of

        kwargs["target_modules"] = list(architecture_of(base.config).adapted)
    if "task_type" not in kwargs and hasattr(top, "generate") and hasattr(top, "lm_head"):
        kwargs["task_type"] = "CAUSAL_LM"
    return LoraConfig(r=r, modules_to_save=sorted(set(modules)) or None, **kwargs)
