"""Dynamic NTK: the base grows with the length of the sequence, and short sequences see the pretrained model unchanged.

emozilla 2023 (r/LocalLLaMA, "Dynamically Scaled RoPE"); section 3.3 of the YaRN paper (Peng et al. 2023, arXiv
2309.00071). Usable without fine-tuning. The table is chosen once for each sequence, because cached keys cannot be
turned again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hf_posenc.encoding import ModelShape
from hf_posenc.encodings._angles import angle_dtype
from hf_posenc.encodings.rope import Scaling, inverse_powers


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """RoPE with the base theta * (factor * L / L0 - (factor - 1))**(d / (d - 2)) at a length of L tokens.

    L0 is `original_context_length`, up to which the base is theta; d is the number of rotated dimensions.
    """

    name: ClassVar[str] = "dynamic_ntk"
    rope_type: ClassVar[str | None] = "dynamic"
    length_dependent: ClassVar[bool] = True
    smallest_rotary_dim: ClassVar[int] = 4  # a single pair has no slowest and fastest

    def scaled_theta(self, rotary_dim: int, length: Tensor) -> Tensor:
        """Base for each of the lengths [...], in tokens."""
        factor, original = self._known("factor"), self._known("original_context_length")
        lengths = length.to(angle_dtype(length.device))
        growth = (factor * lengths / original - (factor - 1)).clamp(min=1)  # 1 up to the original length
        return self._known("theta") * growth ** (rotary_dim / (rotary_dim - 2))

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        """[rotary_dim / 2] of the original length; [..., rotary_dim / 2] for `length` [...]."""
        if length is None:
            return super().frequencies(rotary_dim)
        return inverse_powers(self.scaled_theta(rotary_dim, length), rotary_dim)

    @classmethod
    def from_stock_form(cls, entries: dict[str, Any]) -> DynamicNTK:
        # Stock has no entry for the original length: it is the config's own.
        return super().from_stock_form(entries).replace(original_context_length=entries["max_position_embeddings"])

    def _stock_length(self, shape: ModelShape) -> int | None:
        return self.original_context_length
