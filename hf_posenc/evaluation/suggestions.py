"""Which encoding, and with which factor? Candidates tried without any training, on your text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.sweep import evaluate

ROTARY = ("linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn")
"""Tried on a model that rotates."""
TABLE = ("learned:init=interpolate", "learned:init=repeat", "learned:init=hierarchical", "rope", "alibi")
"""Tried on a model with a table of positions."""


@dataclass(frozen=True)
class Suggestion:
    """One candidate and what it did."""

    encoding: str
    """As `--encoding` takes it."""
    perplexity: float
    """At the context length asked for, without training."""
    short_change: float | None
    """Change against the native encoding at the trained length, as a fraction: what it costs there."""
    cache_bytes: int | None
    """Keys and values of one sequence of that length, in the model's dtype."""


def suggest(
    model: str | Path | nn.Module,
    context_length: int,
    texts: str | Path | Sequence[str | Path] = (),
    *,
    candidates: Sequence[Any] | None = None,
    max_tokens: int | None = None,
    **options: Any,
) -> list[Suggestion]:
    """Try candidates at `context_length`, best first.

    The order is that of zero-shot perplexity. Training changes it (`yarn` gains most from a little); the short cost is
    what training has to win back.

    Args:
        model: as for `evaluate`.
        context_length: tokens that the model shall take.
        texts: as for `evaluate`; at least one document as long as that.
        candidates: encodings to try (default: those that fit how the model tells positions).
        max_tokens: tokens of text to use (default: four times `context_length`).
        options: of `evaluate` (`dtype`, `device`, `output`, `documents`, ...).

    Raises:
        ValueError: as for `evaluate`; a model that is not causal.
    """
    from hf_posenc.models import load_model

    if not isinstance(model, nn.Module):
        loaded, tokenizer = load_model(model, options.pop("dtype", None), options.pop("device", None))
        options.setdefault("tokenizer", tokenizer)
    else:
        loaded = model
    try:
        limits.check_causal(loaded)
    except ValueError as error:
        raise ValueError(
            "suggest compares perplexities, which only a causal language model has. Evaluate an encoder under encodings"
            " of your choice instead, with evaluate's definition pseudo."
        ) from error
    config: Any = limits.text_config(loaded)
    if candidates is None:
        candidates = ROTARY if getattr(config, "rope_parameters", None) else TABLE
    results = evaluate(
        loaded, list(candidates), texts, [context_length], max_tokens=max_tokens or 4 * context_length, **options
    )
    trained = results["model"]["trained_length"]
    found = []
    for entry in results["encodings"]:
        rows = {row["length"]: row for row in entry["rows"]}
        short = rows.get(trained, {}).get("change_against_native")
        value = float(rows[context_length]["perplexity"])
        found.append(Suggestion(entry["label"], value, short, _cache_bytes(loaded, config, context_length)))
    return sorted(found, key=lambda item: (item.perplexity != item.perplexity, item.perplexity))


def _cache_bytes(model: nn.Module, config: Any, length: int) -> int | None:
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = next((p.element_size() for p in model.parameters()), 4)
    return 2 * layers * heads * width * length * size
