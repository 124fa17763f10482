"""Memory figures in a process of their own: `python -m benchmarks.memory CASE ARGUMENTS` prints MiB."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.loss import Step
from benchmarks.measuring import grows_by
from benchmarks.parts import Attention, Size


def attention(ways: str, encoding: str, length: str, heads: str, backward: str) -> list[float]:
    """Of one attention call by each of `ways`, which are methods of `Attention`."""
    size = Size(length=int(length), heads=int(heads), hidden=64 * int(heads))
    peaks = []
    for way in ways.split(","):
        warm = Attention(encoding, replace(size, length=64), backward=backward == "backward")
        getattr(warm, way)()
        call = Attention(encoding, size, backward=backward == "backward")
        peaks.append(grows_by(getattr(call, way)))
    return peaks


def loss(ways: str, length: str, hidden: str, vocabulary: str, dtype: str) -> list[float]:
    """Of the loss of a long text and its gradient, by each of `ways`, which are methods of `Step`."""
    sizes = int(length), int(hidden), int(vocabulary)
    peaks = []
    for way in ways.split(","):
        getattr(Step(64, sizes[1], 97, getattr(torch, dtype)), way)()
        peaks.append(grows_by(getattr(Step(*sizes, getattr(torch, dtype)), way)))
    return peaks


CASES: dict[str, Callable[..., list[float]]] = {"attention": attention, "loss": loss}

if __name__ == "__main__":
    torch.set_num_threads(2)
    print(*CASES[sys.argv[1]](*sys.argv[2:]))
