"""NTK-aware scaling: a larger base slows the slowest pair by `factor` and leaves the fastest alone.

bloc97 2023 (r/LocalLLaMA, "NTK-Aware Scaled RoPE"); section 3.1 of the YaRN paper (Peng et al. 2023, arXiv 2309.00071).
Usable without fine-tuning, up to somewhat less than `factor` times the trained length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hf_posenc.encoding import ModelShape
from hf_posenc.encodings.rope import Scaling, inverse_powers


@dataclass(frozen=True)
class NTK(Scaling):
    """RoPE with the base theta * factor**(d / (d - 2)), where d is the number of rotated dimensions."""

    name: ClassVar[str] = "ntk"
    rope_type: ClassVar[str | None] = None
    smallest_rotary_dim: ClassVar[int] = 4  # a single pair has no slowest and fastest

    def scaled_theta(self, rotary_dim: int) -> float:
        """The base that a plain RoPE needs to have the same frequencies."""
        return self._known("theta") * self._known("factor") ** (rotary_dim / (rotary_dim - 2))

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        return inverse_powers(self.scaled_theta(rotary_dim), rotary_dim)

    def _rope_parameters(self, shape: ModelShape) -> dict[str, Any]:
        # Stock has no name for it, and needs none: it is a plain RoPE of another base.
        return {"rope_type": "default", "rope_theta": self.scaled_theta(self.rotary_dim(shape))}
