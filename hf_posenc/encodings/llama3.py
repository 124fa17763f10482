"""Llama 3's scaling: long wavelengths are divided, short ones kept, with a smooth change in between.

Llama team 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), and the reference code released with Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hf_posenc.encoding import EncodingError, ModelShape, check_number
from hf_posenc.encodings.rope import Scaling, inverse_powers


@dataclass(frozen=True)
class Llama3(Scaling):
    """Fast pairs kept, slow ones divided by `factor`, and in between a blend that is linear in the number of turns."""

    name: ClassVar[str] = "llama3"
    rope_type: ClassVar[str | None] = "llama3"

    low_freq_factor: float = 1
    """Turns within `original_context_length` up to which a pair is divided by `factor` (default: Llama 3.1)."""
    high_freq_factor: float = 4
    """Turns within `original_context_length` from which on a pair is kept as it is (default: Llama 3.1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "low_freq_factor", low=0, strict=True)
        check_number(self, "high_freq_factor", low=0, strict=True)
        if self.high_freq_factor <= self.low_freq_factor:
            raise EncodingError(
                f"llama3: low_freq_factor={self.low_freq_factor!r} with high_freq_factor={self.high_freq_factor!r} is "
                "not allowed; high_freq_factor must be the larger."
            )

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        plain = inverse_powers(self._known("theta"), rotary_dim)
        turns = self._known("original_context_length") * plain / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain / self._known("factor") * (1 - kept) + plain * kept

    def _rope_parameters(self, shape: ModelShape) -> dict[str, Any]:
        return {
            **super()._rope_parameters(shape),
            "original_max_position_embeddings": self._known("original_context_length"),
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
        }
