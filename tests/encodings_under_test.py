"""What the contract tests run over: a working instance of every registered encoding, on the tiny model of every
registered architecture.

Both lists come from the registries, so a new encoding or architecture is tested without touching a test.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaModel, PreTrainedModel

import hf_posenc
from hf_posenc.encoding import Encoding, encodings
from models import ARCHITECTURES, HEADS, HIDDEN, tokens

SHORT = 16
"""Original length of the scalings below, so that sequences of 24 tokens cross it."""
LENGTH = 24
PAIRS = HIDDEN // HEADS // 2

FIELDS: dict[str, Any] = {"factor": 2.0, "original_context_length": SHORT, "num_positions": 64}
"""Values for fields of these names; all others keep their defaults."""


def instance(cls: type[Encoding], **fields: Any) -> Encoding:
    """An instance that works on every tiny model."""
    values: dict[str, Any] = {}
    for number, field in enumerate(dataclasses.fields(cls)):  # type: ignore[arg-type]
        if field.name in FIELDS:
            values[field.name] = FIELDS[field.name]
        elif field.name.endswith("_factor") and "tuple" in str(field.type):  # one divisor for each pair
            values[field.name] = tuple(1 + number * pair / 8 for pair in range(PAIRS))
    return cls(**{**values, **fields})


ENCODINGS: dict[str, Encoding] = {name: instance(cls) for name, cls in encodings().items()}
"""One of each, by name."""

BY_PATH: dict[str, Encoding] = {
    "rope_interleaved": hf_posenc.RoPE(interleaved=True),
    "rope_half": hf_posenc.RoPE(rotary_fraction=0.5),
    "dynamic_ntk_interleaved": instance(hf_posenc.DynamicNTK, interleaved=True),
    "sinusoidal_concat": hf_posenc.Sinusoidal(scale=2.0, learn_scale=True, fusion="concat"),
    "learned_concat": hf_posenc.Learned(num_positions=64, fusion="concat"),
    "kerple_power": hf_posenc.Kerple(variant="power"),
}
"""More of them, which take another way through the code."""

CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
"""What this release of transformers calls the argument."""

EVERY = {**ENCODINGS, **BY_PATH}
CAUSAL = ["gpt2", "llama"]
"""Architectures of the tiny models that see only the past."""


def backends(encoding: Encoding) -> list[str]:
    """Attention implementations whose code knows of the encoding; for the others one is as good as two."""
    return ["sdpa", "eager"] if encoding.site == "score" else ["sdpa"]


def cases(
    architectures: Sequence[str] = tuple(sorted(ARCHITECTURES)),
    names: Sequence[str] = tuple(EVERY),
    *,
    both: bool = True,
) -> list[Any]:
    """Parameters (architecture, name, backend) of a contract test.

    Where the backend cannot matter, or `both` is False, the second one is left to the full run.
    """
    made = []
    for architecture in architectures:
        for name in names:
            for backend in ("sdpa", "eager"):
                known = backend in (backends(EVERY[name]) if both else ["sdpa"])
                marks = [] if known else [pytest.mark.full]
                made.append(
                    pytest.param(architecture, name, backend, id=f"{architecture}-{name}-{backend}", marks=marks)
                )
    return made


def on(*architectures: str, both: bool = True, names: Sequence[str] = tuple(EVERY)) -> Any:
    """Decorator: run a test over `cases`."""
    return pytest.mark.parametrize(
        ("architecture", "name", "backend"), cases(architectures or tuple(sorted(ARCHITECTURES)), names, both=both)
    )


def fresh(architecture: str, encoding: Encoding | str, backend: str = "sdpa", **fields: Any) -> Any:
    """A patched tiny model of one's own, whose new weights have left their starting point."""
    model = ARCHITECTURES[architecture](attn_implementation=backend, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        hf_posenc.patch(model, EVERY[encoding] if isinstance(encoding, str) else encoding)
        stir(model)
    return model


def stir(model: Any) -> Any:
    """Move new weights: a matrix that starts as [I, I] would hide that its halves are swapped."""
    names = set(hf_posenc.position_parameters(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.add_(0.5 * parameter.abs().mean() * torch.randn_like(parameter))
    return model


@functools.cache
def shared(architecture: str, name: str, backend: str = "sdpa") -> Any:
    """A patched tiny model for tests that leave it as it is."""
    return fresh(architecture, name, backend).requires_grad_(False)


@functools.cache
def whole(architecture: str, name: str, backend: str, length: int = LENGTH, batch: int = 2) -> Tensor:
    """Logits of `tokens(length, batch=batch)` in one pass."""
    return logits(shared(architecture, name, backend), tokens(length, batch=batch))


def logits(model: Any, ids: Tensor | None = None, **arguments: Any) -> Tensor:
    """Logits without gradients."""
    with torch.no_grad():
        return model(ids, **arguments).logits if ids is not None else model(**arguments).logits


def cache_of(output: Any) -> Any:
    """The cache of an output, under whichever name this release gives it."""
    found = output.get("past_key_values")
    return output.get("cache") if found is None else found


def in_pieces(model: PreTrainedModel, ids: Tensor, sizes: Sequence[int], cache: Any = None, **arguments: Any) -> Tensor:
    """Logits of `ids` fed in pieces on a cache planned for all of them (or `planned` tokens); masks grow with them."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    planned = arguments.pop("planned", None)
    mask, positions = arguments.pop("attention_mask", None), arguments.pop("position_ids", None)
    made, start = [], int(cache.get_seq_length())
    assert start + sum(sizes) == (ids.shape[1] if mask is None else mask.shape[1])
    real = ids.shape[1] if mask is None else mask.sum(-1)
    with hf_posenc.sequence_length(real if planned is None else planned):
        for size in sizes:
            piece = dict(arguments)
            if mask is not None:
                piece["attention_mask"] = mask[:, : start + size]
            if positions is not None:
                piece["position_ids"] = positions[:, start : start + size]
            made.append(logits(model, ids[:, start : start + size], use_cache=True, **{CACHE: cache}, **piece))
            start += size
    return torch.cat(made, dim=1)


def distance(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference; NaN counts as infinitely far."""
    assert left.shape == right.shape, (left.shape, right.shape)
    return (left.float() - right.float()).abs().nan_to_num(nan=torch.inf).max().item()


def assert_equal(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4, what: str = "") -> None:
    """Equal within `tolerance` at every element."""
    found = distance(ours, theirs)
    assert found <= tolerance, f"{what} differs by {found:.3g}, allowed {tolerance:.3g}"


def assert_differs(ours: Tensor, theirs: Tensor, least: float = 1e-2, what: str = "") -> None:
    """Different by more than `least` somewhere."""
    found = distance(ours, theirs)
    assert found > least, f"{what} differs by only {found:.3g}, wanted more than {least:.3g}"
