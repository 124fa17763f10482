"""What an architecture is: a row of names saying where, in one model family, a position can enter.

A row holds no code and knows no encoding. Paths are relative to the base model (`model.base_model`); `*` stands for
the index of a layer.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any


class ArchitectureError(ValueError):
    """A model whose architecture is not registered, or that is not built as its row says."""


@dataclass(frozen=True)
class Architecture:
    """Where the three sites of a model family are."""

    model_type: str
    """`config.model_type` of the family."""
    attention: str
    """Path of the self-attention modules, such as `h.*.attn`."""
    projections: tuple[tuple[str, tuple[str, ...]], ...]
    """Children of an attention module that make queries and keys, each with what its output holds, in order."""
    adapted: tuple[str, ...]
    """Children of an attention module that LoRA adapts unless told otherwise."""
    checked: str
    """Config entry of which stock takes only names that it knows (the activation function)."""
    table: str | None = None
    """Path of the trained table of absolute positions."""
    table_buffers: tuple[str, ...] = ()
    """Paths of buffers that are as long as that table."""
    rotary: str | None = None
    """Path of the module that answers (cos, sin) for all layers; its settings stand in `config.rope_parameters`."""
    causal: bool | str = True
    """Whether a token sees only its past, or the config attribute that says so."""
    token_types: bool = False
    """True where the model looks token types up by position unless it is given them."""


def architectures() -> dict[str, Architecture]:
    """Every registered architecture by `model_type`, sorted."""
    package = importlib.import_module("hf_posenc.architectures")
    rows = {}
    for module in pkgutil.iter_modules(package.__path__):
        row = importlib.import_module(f"{package.__name__}.{module.name}").ARCHITECTURE
        rows[row.model_type] = row
    return dict(sorted(rows.items()))


def architecture_of(config: Any) -> Architecture:
    """The row of a model's config.

    Raises:
        ArchitectureError: the model type is not registered.
    """
    known = architectures()
    model_type = getattr(config, "model_type", None)
    if model_type in known:
        return known[model_type]
    if str(model_type).startswith("hf_posenc_"):
        raise ArchitectureError(
            f"This model was saved patched (model type {model_type!r}) and opened by a class that knows nothing of "
            "it, so the patch is lost. Open it with an Auto class, such as AutoModelForCausalLM, after "
            "`import hf_posenc`."
        )
    match = difflib.get_close_matches(str(model_type), list(known), n=1)
    nearest = f" It is not the same as {match[0]!r}." if match else ""
    raise ArchitectureError(
        f"Unsupported model type {model_type!r}.{nearest} Supported: {', '.join(known)}. "
        "A new one is one file of names in hf_posenc/architectures."
    )
