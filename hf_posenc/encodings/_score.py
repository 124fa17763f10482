"""What score biases share: distances between queries and keys."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.encoding import Encoding, Site


class ScoreBias(Encoding):
    """An encoding that adds a bias to the scores."""

    site: ClassVar[Site] = "score"
    by_distance: ClassVar[bool] = False
    """True where the bias depends on query minus key position alone: one row of numbers for each head then says it."""


def distances(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Query minus key position, so positive for keys in the past: [batch, 1, queries, keys], tokens, integer."""
    return (query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)).unsqueeze(1)


def per_head(weight: Tensor) -> Tensor:
    """[heads] as float32 [heads, 1, 1], to go with [batch, heads, queries, keys]."""
    return weight.float().reshape(-1, 1, 1)


def padded(columns: Tensor) -> Tensor:
    """Zero columns appended up to a multiple of 8, which fused kernels want of a head's width."""
    return functional.pad(columns, (0, -columns.shape[-1] % 8))


def constants(values: list[float], like: Tensor) -> Tensor:
    """[len(values)], float32, on the device of `like`."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)
