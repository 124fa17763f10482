"""Attention on a CPU with a bias that is never whole: a block of queries at a time through the fused kernel.

A block's bias comes from one of two places:

- `Diagonals`. Where positions go up by one and the bias depends on the distance alone, it is the same along every
  diagonal: one row of numbers for each head says it all. With the queries read backwards, the bias of query i and key j
  is number i + j of that row, so the kernel can be given it as a view of the row, with a stride of one in both
  directions. Memory is that of the row, and there is nothing to compute.
- `Computed`. Any other is worked out for one block at a time, and again in the backward pass.

The kernel and its own backward do all the work where the bias is fixed. Where it is learned its gradient is that of the
scores, which the kernel does not give away: that backward is written out here.

Shapes: query, key, value [batch, heads, length, head_dim]. Blocks count queries from the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORES = 1 << 21
"""Most scores (heads x queries x keys) that are held as one tensor at once: 8 MiB, of which few are needed."""

Pull = Callable[[Tensor, Sequence[Tensor]], None]
"""Adds to each sum the gradient of a learned tensor, given that of a block's bias."""


class Diagonals:
    """A bias by distance, which is one tensor, learned or fixed: [heads, 2 * length - 1], its value from distance
    `length - 1` (keys of the past) down to `1 - length`; -inf where a key is not seen."""

    size = 256
    """Queries in a block: few enough that little is wasted above the diagonal."""

    def block(self, learned: Sequence[Tensor], begin: int, end: int, seen: int) -> tuple[Tensor, Pull]:
        (row,) = learned
        heads, count = row.shape
        strip = row.as_strided((1, heads, end - begin, seen), (0, count, 1, 1), row.storage_offset() + begin)

        def pull(change: Tensor, sums: Sequence[Tensor]) -> None:
            # Each query's gradients one place further than those of the query before: diagonals become columns.
            many, pitch = end - begin, end - begin + seen
            slanted = change.new_zeros(heads, many, pitch)
            slanted.as_strided((heads, many, seen), (many * pitch, pitch + 1, 1)).copy_(change.sum(0))
            sums[0][:, begin : begin + pitch - 1] += slanted[:, :, :-1].sum(1)

        return strip, pull


@dataclass(frozen=True)
class Computed:
    """A bias that is worked out for each block."""

    make: Callable[[Sequence[Tensor], int, int, int], Tensor]
    """`make(learned, begin, end, seen)`, [batch or 1, heads, end - begin, seen], for queries counted from the last."""
    causal: bool
    size: int

    def block(self, learned: Sequence[Tensor], begin: int, end: int, seen: int) -> tuple[Tensor, Pull]:
        leaves = [tensor.detach().requires_grad_() for tensor in learned]
        bias = self.make(leaves, begin, end, seen)

        def pull(change: Tensor, sums: Sequence[Tensor]) -> None:
            for total, gradient in zip(sums, torch.autograd.grad(bias, leaves, change, allow_unused=True), strict=True):
                if gradient is not None:
                    total += gradient

        strip = bias.detach().clone() if bias.requires_grad else bias
        if self.causal:
            many = end - begin
            future = torch.ones(many, many, dtype=torch.bool).triu(1).flip(0)  # the first row is the last query
            strip[..., seen - many :].masked_fill_(future, -torch.inf)
        return strip, pull


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Diagonals | Computed,
    learned: Sequence[Tensor],
    scaling: float,
    causal: bool,
) -> Tensor:
    """softmax(scaling * q k + bias) v.

    Args:
        learned: the tensors that `bias` is made of, float32, or float64 where the queries are.
        causal: keys of the future, which `bias` hides, need not be looked at.

    Returns:
        [batch, heads, length, head_dim], whose memory is laid out as [batch, length, heads, head_dim].
    """
    if torch.is_autocast_enabled("cpu"):  # as stock's attention does it
        query, key, value = (part.to(torch.get_autocast_dtype("cpu")) for part in (query, key, value))
    return _Blockwise.apply(query, key, value, bias, scaling, causal, *learned)  # type: ignore[no-any-return]


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Diagonals | Computed,
        scaling: float,
        causal: bool,
        *learned: Tensor,
    ) -> Tensor:
        batch, heads, length, width = query.shape
        precise = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(batch, length, heads, width).transpose(1, 2)
        total = torch.empty(batch, length, heads, dtype=precise).transpose(1, 2)
        for begin, end, seen in _blocks(length, causal, bias.size):
            strip, _ = bias.block(learned, begin, end, seen)
            here = slice(length - end, length - begin)
            part, log_sum = _KERNEL(
                query[:, :, here].flip(2),
                key[:, :, :seen],
                value[:, :, :seen],
                0.0,
                False,
                attn_mask=strip.to(precise),
                scale=scaling,
            )
            out[:, :, here] = part.flip(2)
            total[:, :, begin:end] = log_sum  # as the kernel lays it out, with heads innermost, read backwards
        ctx.save_for_backward(query, key, value, out, total, *learned)
        ctx.bias, ctx.scaling, ctx.causal = bias, scaling, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, total, *learned = ctx.saved_tensors
        # A query that sees hidden keys only has scores so low that two ways to add them up differ by tens, and exp of
        # that overflows. Nobody asks what it says: its weights are 0.
        total = total.masked_fill(total < -1e6, torch.inf)
        step = _learned_step if any(ctx.needs_input_grad[6:]) else _fixed_step
        with torch.autocast("cpu", enabled=False):
            of_query, of_key, of_value, *of_learned = step(
                query, out, grads[0], total, key, value, ctx.bias, learned, ctx.scaling, ctx.causal
            )
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None, *of_learned


def _fixed_step(
    query: Tensor,
    out: Tensor,
    grad: Tensor,
    total: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Diagonals | Computed,
    learned: Sequence[Tensor],
    scaling: float,
    causal: bool,
) -> tuple[Any, ...]:
    """Gradients of query, key and value by the kernel's own backward."""
    length = query.shape[2]
    of_query = torch.empty_like(query)
    # Sums over blocks in float32: in bfloat16 each addition would round away what a late block brings.
    of_key, of_value = torch.zeros(2, *key.shape, dtype=total.dtype)
    for begin, end, seen in _blocks(length, causal, bias.size):
        strip, _ = bias.block(learned, begin, end, seen)
        here = slice(length - end, length - begin)
        for_query, for_key, for_value = _KERNEL_BACKWARD(
            grad[:, :, here].flip(2),
            query[:, :, here].flip(2),
            key[:, :, :seen],
            value[:, :, :seen],
            out[:, :, here].flip(2),
            total[:, :, begin:end],
            0.0,
            False,
            attn_mask=strip.to(total.dtype),
            scale=scaling,
        )
        of_query[:, :, here] = for_query.flip(2)
        of_key[:, :, :seen] += for_key
        of_value[:, :, :seen] += for_value
    return of_query, of_key, of_value, *(None for _ in learned)


def _learned_step(
    query: Tensor,
    out: Tensor,
    grad: Tensor,
    total: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Diagonals | Computed,
    learned: Sequence[Tensor],
    scaling: float,
    causal: bool,
) -> tuple[Any, ...]:
    """The same and the gradients of what is learned, in float32."""
    batch, heads, length, _ = query.shape
    k, v = key.to(total.dtype), value.to(total.dtype)
    of_query = torch.empty_like(query)
    of_key, of_value = torch.zeros(2, *query.shape, dtype=total.dtype)
    of_learned = [torch.zeros_like(tensor) for tensor in learned]
    for begin, end, seen in _blocks(length, causal, min(bias.size, block_size(heads, length))):
        with torch.enable_grad():
            strip, pull = bias.block(learned, begin, end, seen)
        here, there = slice(length - end, length - begin), slice(0, seen)
        q, g, o = (part[:, :, here].flip(2).to(total.dtype) for part in (query, grad, out))
        q = q * scaling
        share = (g * o).sum(-1, keepdim=True)
        changes = torch.zeros(strip.shape, dtype=total.dtype)
        for sample in range(batch):
            row = sample % len(strip)
            weights = torch.bmm(q[sample], k[sample, :, there].transpose(1, 2))
            weights.add_(strip[row]).sub_(total[sample, :, begin:end, None]).exp_()
            of_value[sample, :, there].baddbmm_(weights.transpose(1, 2), g[sample])
            change = torch.bmm(g[sample], v[sample, :, there].transpose(1, 2))
            change.sub_(share[sample]).mul_(weights)
            of_query[sample, :, here] = torch.bmm(change, k[sample, :, there]).mul_(scaling).flip(1)
            of_key[sample, :, there].baddbmm_(change.transpose(1, 2), q[sample])
            changes[row] += change
        pull(changes, of_learned)
    return of_query, of_key, of_value, *of_learned


def block_size(heads: int, length: int) -> int:
    """Queries for which `SCORES` scores are made at once, within reason."""
    return max(16, min(256, SCORES // (heads * length)))


def _blocks(length: int, causal: bool, size: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, seen): queries begin .. end, counted from the last, and how many keys they see at most."""
    size = min(size, max(64, length // 8)) if causal else size
    for begin in range(0, length, size):
        yield begin, min(begin + size, length), length - begin if causal else length


_KERNEL: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
