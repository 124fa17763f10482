"""Sinusoidal positions: waves of geometrically growing wavelength are added to the token vectors.

Vaswani et al. 2017, "Attention Is All You Need" (arXiv 1706.03762), section 3.5. Nothing to learn and no last position,
though models seldom extrapolate far beyond the lengths that they were trained with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.encoding import ModelShape, Weights, check_number
from hf_posenc.encodings._absolute import Absolute, sinusoid


@dataclass(frozen=True)
class Sinusoidal(Absolute):
    """Even columns sin(position / base**(2i / hidden)), odd columns the cos of the same angle."""

    name: ClassVar[str] = "sinusoidal"

    base: float = 10000.0
    """Ratio between the longest and the shortest wavelength, which are about 2 pi times `base` and 2 pi tokens
    (default: section 3.5 of the paper)."""
    scale: float | str = 1.0
    """Factor on every position vector; `match` gives them the mean row norm of the table that they replace, which a
    pretrained model is used to (default: the paper's plain sum)."""
    learn_scale: bool = False
    """Train the factor, as one weight that starts at `scale` (default: fixed, as in the paper)."""
    fusion: str = "add"
    """`add` to the token vector as in the paper, or `concat`: W [x; p] with a trained W that starts out equal to
    adding."""

    def __post_init__(self) -> None:
        check_number(self, "base", low=1, strict=True)
        self._check_fusion()

    def new_weights(self, shape: ModelShape, native_table: Tensor | None) -> Weights:
        rows = shape.trained_length if native_table is None else native_table.shape[0]
        table = sinusoid(torch.arange(rows, device="cpu"), self.base, shape.hidden)
        return self._fusion_weights(table, shape, native_table)

    def _vectors(self, positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        return sinusoid(positions, self.base, shape.hidden)
