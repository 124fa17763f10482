"""Sandwich: the bias is the inner product of two sinusoidal vectors, squeezed by a ratio of its own for each head.

Chi, Fan, Rudnicky and Ramadge 2022, "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field
Analysis" (arXiv 2212.10356), where it is called Sandwich. Nothing to learn; it falls about as the logarithm of the
distance, and sees beyond the trained length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_posenc.encoding import EncodingError, ModelShape, Weights, check_number
from hf_posenc.encodings._angles import wave_angles
from hf_posenc.encodings._memory import check_memory
from hf_posenc.encodings._score import ScoreBias, padded


@dataclass(frozen=True)
class Sandwich(ScoreBias):
    """(sum over i < dim / 2 of cos((query - key) / base**(2i / dim)) - dim / 2) / ratio, the same in both directions.

    The ratio of head h = 1, 2, … is 8 h / heads. The subtracted constant, which no softmax sees, makes 0 the largest.
    """

    name: ClassVar[str] = "sandwich"
    by_distance: ClassVar[bool] = True
    columns_hold: ClassVar[Literal["past", "everywhere"]] = "everywhere"

    dim: int = 128
    """Width of the sinusoidal vectors, two for each wave (default: the paper)."""
    base: float = 10000.0
    """Ratio between the longest and the shortest wavelength, which are about 2 pi times `base` and 2 pi tokens
    (default: that of the sinusoid)."""

    def __post_init__(self) -> None:
        check_number(self, "dim", low=2, integer=True)
        check_number(self, "base", low=1, strict=True)
        if self.dim % 2:
            raise EncodingError(f"sandwich: dim={self.dim} is not allowed; it must be even (a sin and a cos each).")

    def resolve(self, shape: ModelShape) -> Sandwich:
        check_memory(self, "dim", 2 * 8 * self.dim * shape.trained_length)
        return self

    def bias(self, query_positions: Tensor, key_positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        with torch.autocast(query_positions.device.type, enabled=False):
            # In float64 until the constant is gone: what is left of 64 - 64 would be rounding. There are no heads yet.
            score = self._waves(query_positions) @ self._waves(key_positions).transpose(-1, -2) - self.dim // 2
            score = score.float().unsqueeze(1)
            return score / self._ratios(shape.heads, score)

    def columns(
        self, query_positions: Tensor, key_positions: Tensor, shape: ModelShape, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """cos(a - b) = cos a cos b + sin a sin b, for each wave. Only in float32: shorter numbers round every wave."""
        if dtype != torch.float32:
            return None
        query, key = self._waves(query_positions).unsqueeze(1), self._waves(key_positions).unsqueeze(1)
        return padded((query / self._ratios(shape.heads, query)).float()), padded(key.float())

    def _waves(self, positions: Tensor) -> Tensor:
        """[batch, length, dim]: the cos of every angle, then the sin."""
        angles = wave_angles(positions, self.base, self.dim)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def _ratios(self, heads: int, like: Tensor) -> Tensor:
        return torch.arange(1, heads + 1, device=like.device, dtype=like.dtype).reshape(-1, 1, 1) * (8 / heads)
