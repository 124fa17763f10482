"""T5's relative bias: a learned number for each bucket of distances, exact when near and logarithmic when far.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (arXiv
1910.10683), section 2.1. All distances from `max_distance` on share the last bucket. One table is shared by all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.encoding import EncodingError, ModelShape, ScoreFunction, Weights, check_number
from hf_posenc.encodings._memory import check_memory
from hf_posenc.encodings._score import ScoreBias, distances


@dataclass(frozen=True)
class T5Bias(ScoreBias):
    """A learned number for each bucket and head. All buckets are for the past in decoders, half of them in encoders.

    Weights:
        buckets: [num_buckets, heads], from a normal distribution of standard deviation hidden**-0.5 (T5's own).
    """

    name: ClassVar[str] = "t5"
    by_distance: ClassVar[bool] = True

    num_buckets: int = 32
    """Buckets, of both directions together in an encoder; even (default: section 2.1 of the paper)."""
    max_distance: int = 128
    """Distance in tokens from which on all share a bucket (default: section 2.1)."""

    def __post_init__(self) -> None:
        check_number(self, "num_buckets", low=4, integer=True)
        check_number(self, "max_distance", low=1, integer=True)
        if self.num_buckets % 2:
            raise EncodingError(f"t5: num_buckets={self.num_buckets} must be even, half for each side.")
        if self.max_distance <= self.num_buckets // 2:
            raise EncodingError(
                f"t5: max_distance={self.max_distance} is not allowed; it must be above num_buckets / 2 = "
                f"{self.num_buckets // 2}, up to where each distance has its own bucket."
            )

    def resolve(self, shape: ModelShape) -> T5Bias:
        check_memory(self, "num_buckets", 2 * 4 * self.num_buckets * shape.heads)
        return self

    def new_weights(self, shape: ModelShape, native_table: Tensor | None) -> Weights:
        table = torch.randn(self.num_buckets, shape.heads, dtype=torch.float32, device="cpu")
        return {"buckets": table * shape.hidden**-0.5}

    def bucket(self, distance: Tensor, causal: bool) -> Tensor:
        """The bucket of each distance (query minus key position, in tokens).

        Args:
            distance: [...], integer.
            causal: keys of the future all fall into bucket 0; otherwise they have the upper half of the buckets.
        """
        if causal:
            side, offset = self.num_buckets, torch.zeros_like(distance)
            distance = distance.clamp(min=0)
        else:
            side = self.num_buckets // 2
            offset = (distance < 0).to(distance.dtype) * side
            distance = distance.abs()
        exact = side // 2
        # The logarithm in float32, as in T5: where it falls on a whole number, rounding decides the bucket.
        ratio = torch.log(distance.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (side - exact)).to(distance.dtype)).clamp(max=side - 1)
        return offset + torch.where(distance < exact, distance, far)

    def bias(self, query_positions: Tensor, key_positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        bucket = self.bucket(distances(query_positions, key_positions).squeeze(1), shape.causal)
        table = weights["buckets"].float().t()
        return table[:, bucket.long()].transpose(0, 1)  # keys stay the innermost dimension, which kernels need

    def score_function(self, weights: Weights, shape: ModelShape, device: torch.device) -> ScoreFunction:
        table = weights["buckets"].float()
        return lambda query, key, head: table[self.bucket(query - key, shape.causal), head]
