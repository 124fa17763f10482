"""Position interpolation: positions are squeezed into the trained range by dividing every frequency.

Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation" (arXiv 2306.15595),
section 2.3; found independently by kaiokendev. Needs fine-tuning: without it the distances between neighbours, which
the model has never seen so small, cost accuracy at short lengths too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_posenc.encodings.rope import Scaling


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Every frequency divided by `factor`."""

    name: ClassVar[str] = "linear"
    rope_type: ClassVar[str | None] = "linear"

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        return super().frequencies(rotary_dim) / self._known("factor")
