"""LongRoPE: every pair has its own divisor, found by search; one list for short sequences, one for long ones.

Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (arXiv 2402.13753), section 3; the
attention factor is the one of the code released with Phi-3. The lists come with a checkpoint, or from a search. The
list is chosen once for each sequence, because cached keys cannot be turned again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hf_posenc.encoding import EncodingError, ModelShape, check_factors, check_number
from hf_posenc.encodings._angles import angle_dtype
from hf_posenc.encodings.rope import Scaling, inverse_powers

LR = TypeVar("LR", bound="LongRoPE")


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """Frequencies divided by one list up to the original length, by another beyond; cos and sin amplified."""

    name: ClassVar[str] = "longrope"
    rope_type: ClassVar[str | None] = "longrope"
    length_dependent: ClassVar[bool] = True

    short_factor: tuple[float, ...] | None = None
    """Divisor of each pair in sequences of up to `original_context_length` tokens, rotary_dim / 2 numbers (no default:
    they belong to a checkpoint)."""
    long_factor: tuple[float, ...] | None = None
    """Divisor of each pair in longer sequences, rotary_dim / 2 numbers (no default: they belong to a checkpoint)."""
    attention_factor: float | None = None
    """Multiplies cos and sin, so scores grow by its square (default: sqrt(1 + ln(factor) /
    ln(original_context_length)), as Phi-3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factors(self, "short_factor")
        check_factors(self, "long_factor")
        check_number(self, "attention_factor", low=0, strict=True, optional=True)

    def resolve(self: LR, shape: ModelShape) -> LR:
        resolved = super().resolve(shape)
        pairs = resolved.rotary_dim(shape) // 2
        for field in ("short_factor", "long_factor"):
            values = getattr(self, field)
            if values is None or len(values) != pairs:
                raise EncodingError(
                    f"longrope: {field} is {'None' if values is None else f'a list of {len(values)}'}; it must be a "
                    f"list of {pairs} numbers, one for each rotated pair. They come with a checkpoint, or from search."
                )
        return resolved

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        """[rotary_dim / 2] of the short list; [..., rotary_dim / 2] for `length` [...]."""
        plain = inverse_powers(self._known("theta"), rotary_dim)
        short, long = (self._divisors(field, rotary_dim) for field in ("short_factor", "long_factor"))
        if length is None:
            return plain / short
        dtype = angle_dtype(length.device)
        is_long = (length > self._known("original_context_length")).unsqueeze(-1)
        return torch.where(is_long, (plain / long).to(length.device, dtype), (plain / short).to(length.device, dtype))

    def _rope_parameters(self, shape: ModelShape) -> dict[str, Any]:
        return {
            **super()._rope_parameters(shape),
            "original_max_position_embeddings": self._known("original_context_length"),
            "short_factor": list(self.short_factor or ()),
            "long_factor": list(self.long_factor or ()),
            "attention_factor": self.amplitude(),
        }

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return math.sqrt(1 + math.log(self._known("factor")) / math.log(self._known("original_context_length")))

    def _divisors(self, field: str, rotary_dim: int) -> Tensor:
        values = getattr(self, field)
        if values is None or len(values) != rotary_dim // 2:
            raise EncodingError(f"longrope: {field} must be a list of {rotary_dim // 2} numbers; got {values!r}.")
        return torch.tensor(values, dtype=torch.float64, device="cpu")
