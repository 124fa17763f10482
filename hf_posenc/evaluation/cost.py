"""What a pass costs by its length: seconds, and on a GPU the memory beyond the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.likelihood import perplexity
from hf_posenc.evaluation.scoring import device_of


def measure_cost(model: nn.Module, ids: Tensor, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """One scored pass over the first tokens of `ids` at each length, after a first one that does not count.

    Args:
        model: a causal model.
        ids: token ids [tokens], at least `max(lengths)`.
        lengths: tokens of a pass.

    Returns:
        For each length, ascending: {"length", "seconds", "peak_bytes"}, the last None but on CUDA: what the pass held
        at most beyond what was held before.
    """
    on_cuda = device_of(model).type == "cuda"
    rows: list[dict[str, Any]] = []
    for length in (min(lengths), *sorted(lengths)):
        before = torch.cuda.memory_allocated(device_of(model)) if on_cuda else 0
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device_of(model))
        start = time.perf_counter()
        perplexity(model, ids[:length], window=length, progress=False, distributed=False)  # its scores end on the CPU
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated(device_of(model)) - before if on_cuda else None
        rows.append({"length": length, "seconds": seconds, "peak_bytes": peak})
    return rows[1:]
