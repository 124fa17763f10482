"""A score bias worked out inside torch's flex attention, on a GPU: where a score is, and never in memory.

For biases that are no inner product (`Encoding.score_function`). Not for those that are being trained: their gradient
would be added up number by number into a few addresses, at which a GPU's threads wait for each other.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_posenc.encoding import ScoreFunction
from hf_posenc.positions import Call

logger = logging.get_logger(__name__)

DEVICES = ("cuda",)
"""Types of devices on which flex attention is used."""

BLOCK = 128
"""Queries and keys of a block that is left out where all its scores are hidden: flex attention's own."""


def function_of(call: Call, query: Tensor) -> ScoreFunction | None:
    """The bias as a function of (query position, key position, head), where flex attention is the way for it."""
    if query.device.type not in DEVICES or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in call.weights.values()):
        return None
    weights = {name: weight.to(query.device) for name, weight in call.weights.items()}
    return call.plan.resolved.score_function(weights, call.plan.shape, query.device)


def attend(
    bias: ScoreFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    block_mask: Any,
    scaling: float,
) -> Tensor | None:
    """Attention with `bias` on the scores, [batch, heads, queries, head_dim]; None where that does not compile.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, key_heads, keys, head_dim].
        query_positions, key_positions: [batch or 1, queries], [batch or 1, keys].
        block_mask: of `seen`.
    """
    batch = query.shape[0]
    of_queries, of_keys = (x.expand(batch, -1).contiguous() for x in (query_positions, key_positions))

    def score(number: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return number + bias(of_queries[row, i], of_keys[row, j], head)

    grouped = key.shape[1] != query.shape[1]
    variant = (bias.__code__, block_mask is None, grouped)  # type: ignore[attr-defined]
    if variant in _failed:
        return None
    try:
        out: Tensor = kernel(variant)(query, key, value, score, block_mask, scaling, grouped)
    except _compile_errors() as error:
        _failed.add(variant)
        logger.warning(
            f"hf_posenc: flex attention does not compile here ({type(error).__name__}: {str(error).splitlines()[0]})."
            " The score bias is made block by block instead: the same numbers, more slowly."
        )
        return None
    return out


def seen(queries: int, keys: int, causal: bool, hidden: Tensor | None, device: torch.device) -> Any:
    """Flex attention's mask: the past where `causal` (as many queries as keys), and no hidden key; None for all.

    Made of block numbers: a mask of all scores, from which torch would work them out, would be the largest tensor of
    the whole pass.

    Args:
        hidden: [batch, keys], True where a key is padding; or None.
    """
    if not causal and hidden is None:
        return None
    from torch.nn.attention.flex_attention import BlockMask

    rows, columns = (-(-size // BLOCK) for size in (queries, keys))
    batch = 1 if hidden is None else len(hidden)
    diagonal = torch.arange(rows, device=device)

    def blocks(counts: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks each row of them has, and which: the one numbered `first`, and so on."""
        numbers = (first[:, None] + torch.arange(columns, device=device)).clamp(max=columns - 1)
        return (
            counts.int().expand(batch, 1, rows).contiguous(),
            numbers.int().expand(batch, 1, rows, columns).contiguous(),
        )

    def visible(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        past = i >= j if causal else i >= 0
        return past if hidden is None else past & ~hidden[row, j]

    start = torch.zeros_like(diagonal)
    whole: tuple[Tensor | None, Tensor | None] = (None, None)
    if hidden is not None:  # in any block there may be hidden keys
        some = blocks(diagonal + 1 if causal else torch.full_like(diagonal, columns), start)
    else:  # only those on the diagonal are seen in part
        some, whole = blocks(torch.ones_like(diagonal), diagonal), blocks(diagonal, start)
    return BlockMask.from_kv_blocks(*some, *whole, BLOCK, visible, (queries, keys))


@functools.cache
def kernel(variant: Hashable) -> Any:
    """torch's flex attention, compiled: not in plain steps, which hold all scores.

    A function for each variant, because torch gives up on one that it has compiled eight times.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def run(*inputs: Any) -> Any:
        return flex_attention(*inputs)

    own = types.FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
    return torch.compile(own, fullgraph=True)


_failed: set[Hashable] = set()
"""Variants that did not compile."""


def _compile_errors() -> tuple[type[Exception], ...]:
    import torch._dynamo.exc as errors

    return (errors.TorchDynamoException, getattr(errors, "FailOnRecompileLimitHit", errors.TorchDynamoException))
