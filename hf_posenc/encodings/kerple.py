"""KERPLE: scores fall with the logarithm, or a power, of the distance; how fast is learned for each head.

Chi, Fan, Ramadge and Rudnicky 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation" (arXiv
2205.09921), its power variant and its logarithmic one, which extrapolates best. ALiBi is the power of 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.encoding import ModelShape, ScoreFunction, Weights, check_choice
from hf_posenc.encodings._score import ScoreBias, distances, per_head

FLOOR = 0.01
"""Least starting value of a parameter: that at which the paper's code clamps."""


@dataclass(frozen=True)
class Kerple(ScoreBias):
    """-r1 * log(1 + r2 * abs(query - key)), or -r1 * abs(query - key)**r2; r1 and r2 are above 0, a power r2 below 2.

    Weights:
        raw_r1: [heads], logarithm of r1.
        raw_r2: [heads], logarithm of r2; for `power` its logit within (0, 2).
    """

    name: ClassVar[str] = "kerple"
    by_distance: ClassVar[bool] = True

    variant: str = "log"
    """`log` or `power` (default: log, the one that the paper recommends)."""

    def __post_init__(self) -> None:
        check_choice(self, "variant", ("log", "power"))

    def new_weights(self, shape: ModelShape, native_table: Tensor | None) -> Weights:
        # The ranges of the paper's code. Weights hold logarithms, so that no optimizer step leaves what is allowed.
        def uniform(high: float) -> Tensor:
            return (torch.rand(shape.heads, dtype=torch.float32, device="cpu") * high).clamp(FLOOR, high - FLOOR)

        if self.variant == "log":
            return {"raw_r1": uniform(2).log(), "raw_r2": uniform(1).log()}
        return {"raw_r1": uniform(1).log(), "raw_r2": (uniform(2) / 2).logit()}

    def bias(self, query_positions: Tensor, key_positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        with torch.autocast(query_positions.device.type, enabled=False):
            distance = distances(query_positions, key_positions)
            return self._at(distance, per_head(weights["raw_r1"]), per_head(weights["raw_r2"]))

    def score_function(self, weights: Weights, shape: ModelShape, device: torch.device) -> ScoreFunction:
        raw_r1, raw_r2 = weights["raw_r1"].float(), weights["raw_r2"].float()
        return lambda query, key, head: self._at(query - key, raw_r1[head], raw_r2[head])

    def _at(self, distance: Tensor, raw_r1: Tensor, raw_r2: Tensor) -> Tensor:
        distance = distance.abs().float()
        if self.variant == "log":
            return -raw_r1.exp() * torch.log1p(raw_r2.exp() * distance)
        return -raw_r1.exp() * distance.pow(2 * raw_r2.sigmoid())
