"""Rotary positions: each pair of dimensions of q and k is turned by an angle proportional to its position.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv 2104.09864), equations 14-16. A
score then depends on the distance only. Also here: `Scaling`, what all ways of stretching it to a longer context share;
each of them is a file of its own that overrides only the frequencies and, in some, the amplitude.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hf_posenc.encoding import Encoding, EncodingError, ModelShape, Site, check_choice, check_number

R = TypeVar("R", bound="RoPE")
S = TypeVar("S", bound="Scaling")


@dataclass(frozen=True)
class RoPE(Encoding):
    """Pair i turns by theta**(-2i / rotary_dim) radians per token."""

    name: ClassVar[str] = "rope"
    site: ClassVar[Site] = "rotary"
    rope_type: ClassVar[str | None] = "default"
    smallest_rotary_dim: ClassVar[int] = 2

    theta: float | None = None
    """Base: ratio between the longest and the shortest wavelength, which are about 2 pi times `theta` and 2 pi tokens
    (default: the model's own, else 10000, section 3.3 of the paper)."""
    rotary_fraction: float = 1.0
    """Part of each head's dimensions that is rotated, from the first on (default: all, as in the paper)."""
    interleaved: bool = False
    """Pairs are neighbours (0, 1), (2, 3), … as in the paper, instead of (i, i + rotary_dim / 2) (default: the layout
    of LLaMA; weights trained with one do not work with the other)."""

    def __post_init__(self) -> None:
        check_number(self, "theta", low=1, strict=True, optional=True)
        check_number(self, "rotary_fraction", low=0, high=1, strict=True)
        check_choice(self, "interleaved", (True, False))

    def rotary_dim(self, shape: ModelShape) -> int:
        """How many of a head's dimensions are rotated.

        Raises:
            EncodingError: an odd number of them, or too few.
        """
        rotary_dim = int(shape.head_dim * self.rotary_fraction)
        if rotary_dim % 2 or rotary_dim < self.smallest_rotary_dim:
            raise EncodingError(
                f"{self.name}: rotary_fraction={self.rotary_fraction!r} of a head width of {shape.head_dim} rotates "
                f"{rotary_dim} dimensions; that must be an even number of at least {self.smallest_rotary_dim}. Change "
                "rotary_fraction, or use an encoding that does not rotate."
            )
        return rotary_dim

    def resolve(self: R, shape: ModelShape) -> R:
        self.rotary_dim(shape)
        if self.theta is not None:
            return self
        return self.replace(theta=10000.0 if shape.theta is None else shape.theta)

    def for_length(self: R, length: int, shape: ModelShape) -> R:
        """See `Encoding.for_length`. A rotation that is new to the model has yet to be trained, at whatever length."""
        native = self.theta in (None, shape.theta) and self.rotary_fraction == 1.0 and not self.interleaved
        if shape.theta is not None and native and length > shape.trained_length:
            raise EncodingError(
                f"{self.name}: context_length={length} is more than the {shape.trained_length} tokens that this model "
                "was pretrained with, and its own rotation has nothing that reaches further. Use a scaling (yarn, ntk, "
                "dynamic_ntk, linear), or a larger theta and fine-tune."
            )
        return self

    def usable_length(self, shape: ModelShape) -> int | None:
        return shape.trained_length

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        return inverse_powers(self._known("theta"), rotary_dim)

    def stock_form(self, shape: ModelShape) -> dict[str, Any] | None:
        if self.interleaved or self.rotary_fraction != 1.0:
            return None
        parameters = self._rope_parameters(shape)
        return {"rope_parameters": parameters, "max_position_embeddings": self._stock_length(shape)}

    @classmethod
    def from_stock_form(cls: type[R], entries: dict[str, Any]) -> R:
        parameters = entries["rope_parameters"]
        known = {field.name: field.name for field in dataclasses.fields(cls)}
        known["theta"], known["original_context_length"] = "rope_theta", "original_max_position_embeddings"
        return cls(**{field: parameters[key] for field, key in known.items() if parameters.get(key) is not None})

    def _rope_parameters(self, shape: ModelShape) -> dict[str, Any]:
        """`config.rope_parameters` as stock reads it."""
        return {"rope_type": self.rope_type or "default", "rope_theta": self._known("theta")}

    def _stock_length(self, shape: ModelShape) -> int | None:
        """`config.max_position_embeddings`: the usable length, which serving engines read too."""
        return self.usable_length(shape)

    def _known(self, field: str) -> float:
        """A field that `resolve` fills in."""
        value = getattr(self, field)
        if value is None:
            raise EncodingError(
                f"{self.name}: {field} is None, which needs a model. Give {field}=, or call resolve(shape)."
            )
        return value


@dataclass(frozen=True)
class Scaling(RoPE):
    """A RoPE stretched to `factor` times the length that the model was pretrained with."""

    factor: float | None = None
    """Length wanted divided by `original_context_length`, at least 1 (default: worked out from the context length asked
    for; one of the two must be given)."""
    original_context_length: int | None = None
    """Tokens that the model was pretrained with (default: the model's own)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "factor", low=1, optional=True)
        check_number(self, "original_context_length", low=2, optional=True, integer=True)

    def resolve(self: S, shape: ModelShape) -> S:
        if self.factor is None:
            raise EncodingError(
                f"{self.name}: factor=None is not allowed here; it must be a number of at least 1. Give factor= "
                "(length wanted / trained length), or context_length= in tokens, from which it is worked out."
            )
        original = self.original_context_length or shape.trained_length
        return super().resolve(shape).replace(original_context_length=original)

    def for_length(self: S, length: int, shape: ModelShape) -> S:
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise EncodingError(
                f"{self.name}: context_length={length!r} is not allowed; it must be an integer of at least 1."
            )
        original = self.original_context_length or shape.trained_length
        needed = max(1.0, length / original)
        if self.factor is None:
            return self.replace(factor=needed, original_context_length=original)
        if not math.isclose(self.factor, needed, rel_tol=1e-9):
            raise EncodingError(
                f"{self.name}: factor={self.factor!r} times {original} tokens is {self.factor * original:g}, which "
                f"conflicts with context_length={length}. Give one of them, or factor={needed:g}."
            )
        return self.replace(original_context_length=original)

    def _rope_parameters(self, shape: ModelShape) -> dict[str, Any]:
        return {**super()._rope_parameters(shape), "factor": float(self._known("factor"))}

    def usable_length(self, shape: ModelShape) -> int | None:
        original = self.original_context_length or shape.trained_length
        # A factor that came from a length must give that length back, whatever the division was rounded to.
        return math.floor((self.factor or 1.0) * original + 1e-6)


def inverse_powers(theta: float | Tensor, rotary_dim: int) -> Tensor:
    """theta**(-2i / rotary_dim) for each pair i: [rotary_dim / 2], or [..., rotary_dim / 2] for a tensor of bases."""
    if isinstance(theta, Tensor):
        exponents = torch.arange(0, rotary_dim, 2, dtype=theta.dtype, device=theta.device) / rotary_dim
        return theta.unsqueeze(-1) ** -exponents
    return theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)
