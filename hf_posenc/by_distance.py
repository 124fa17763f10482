"""Attention on a CPU whose bias depends on the distance alone, without a tensor [heads, queries, keys].

Where positions go up by one, such a bias has equal numbers along its diagonals: one row of numbers for each head says
it all. With the queries read backwards, the bias of query i and key j is number i + j of that row, so the kernel can be
given the whole bias as a view of the row, with a stride of one in both directions. It adds each number in float32, just
as it would those of a dense bias, and memory is that of the row.

The kernel and its backward do all the work where the row is fixed. Where it is learned its gradient is the sum along
each diagonal of the gradient of the scores, which the kernel does not give away: that backward is written out here.

Shapes: query, key, value [batch, heads, length, head_dim]; row [heads, 2 * length - 1], float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGEST = 1 << 22
"""Most scores (heads x queries x keys) that the written-out backward holds at once: 16 MiB, of which it needs three."""


def attend(query: Tensor, key: Tensor, value: Tensor, row: Tensor, scaling: float, causal: bool) -> Tensor:
    """softmax(scaling * q k + bias) v.

    Args:
        row: the bias by distance, from `length - 1` (keys of the past) down to `1 - length`; float32, or float64 with
            float64 queries.
        causal: keys of the future are hidden. Those numbers of `row` are not used.

    Returns:
        [batch, heads, length, head_dim], whose memory is laid out as [batch, length, heads, head_dim].
    """
    if torch.is_autocast_enabled("cpu"):  # as stock's attention does it
        query, key, value = (part.to(torch.get_autocast_dtype("cpu")) for part in (query, key, value))
    if causal:
        future = torch.arange(row.shape[1], device=row.device) >= query.shape[2]
        row = row.masked_fill(future, -torch.inf)
    return _ByDistance.apply(query, key, value, row.contiguous(), scaling, causal)  # type: ignore[no-any-return]


class _ByDistance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: Tensor, scaling: float, causal: bool
    ) -> Tensor:
        batch, heads, length, width = query.shape
        out = query.new_empty(batch, length, heads, width).transpose(1, 2)
        total = row.new_empty(batch, length, heads).transpose(1, 2)
        backwards = query.flip(2)
        for begin, end, seen in _blocks(length, causal):
            part, log_sum = _KERNEL(
                backwards[:, :, begin:end],
                key[:, :, :seen],
                value[:, :, :seen],
                0.0,
                False,
                attn_mask=_strip(row, begin, end, seen),
                scale=scaling,
            )
            out[:, :, length - end : length - begin] = part.flip(2)
            total[:, :, begin:end] = log_sum
        ctx.save_for_backward(query, key, value, row, out, total)
        ctx.scaling, ctx.causal = scaling, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, row, out, total = ctx.saved_tensors
        query, out, grad = query.flip(2), out.flip(2), grads[0].flip(2)
        step = _learned_step if ctx.needs_input_grad[3] else _fixed_step
        with torch.autocast("cpu", enabled=False):
            return (*step(query, out, grad, key, value, row, total, ctx.scaling, ctx.causal), None, None)


def _fixed_step(
    query: Tensor,
    out: Tensor,
    grad: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    total: Tensor,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Gradients of query, key and value by the kernel's own backward. Query, out and grad are read backwards."""
    of_query = torch.empty_like(query)
    # Sums over blocks in float32: in bfloat16 each addition would round away what a late block brings.
    of_key, of_value = (
        torch.zeros(part.shape, dtype=torch.promote_types(part.dtype, torch.float32)) for part in (key, value)
    )
    for begin, end, seen in _blocks(query.shape[2], causal):
        # The kernel keeps the log-sum-exp with heads innermost, as it is laid out here.
        for_query, for_key, for_value = _KERNEL_BACKWARD(
            grad[:, :, begin:end],
            query[:, :, begin:end],
            key[:, :, :seen],
            value[:, :, :seen],
            out[:, :, begin:end],
            total[:, :, begin:end],
            0.0,
            False,
            attn_mask=_strip(row, begin, end, seen),
            scale=scaling,
        )
        of_query[:, :, begin:end] = for_query
        of_key[:, :, :seen] += for_key
        of_value[:, :, :seen] += for_value
    return of_query.flip(2), of_key.to(key.dtype), of_value.to(value.dtype), None


def _learned_step(
    query: Tensor,
    out: Tensor,
    grad: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    total: Tensor,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and row, in float32. Query, out and grad are read backwards."""
    batch, heads, length, width = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    share = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    of_query = torch.empty(batch, heads, length, width, dtype=dtype)
    of_key, of_value = torch.zeros(2, batch, heads, length, width, dtype=dtype)
    of_row = torch.zeros_like(row, dtype=dtype)
    most = max(1, min(256, LARGEST // (heads * length)))
    scores, other = torch.empty(2, heads * most * length, dtype=dtype)
    for sample in range(batch):
        q, k, v, g = (part[sample].to(dtype) for part in (query * scaling, key, value, grad))
        # A score's gradient goes where its diagonal is a column: row i starts i places later. Fewest keys first, so
        # that what lies outside stays zero.
        pitch = length + most
        slanted = torch.zeros(heads, most, pitch, dtype=dtype)
        for begin, end, seen in reversed(list(_blocks(length, causal, most))):
            size = (heads, end - begin, seen)
            weights = scores[: heads * size[1] * seen].view(size)
            change = other[: heads * size[1] * seen].view(size)
            torch.bmm(q[:, begin:end], k[:, :seen].transpose(1, 2), out=weights)
            weights.add_(_strip(row, begin, end, seen)[0]).sub_(total[sample, :, begin:end, None]).exp_()
            of_value[sample, :, :seen].baddbmm_(weights.transpose(1, 2), g[:, begin:end])
            torch.bmm(g[:, begin:end], v[:, :seen].transpose(1, 2), out=change)
            change.sub_(share[sample, :, begin:end]).mul_(weights)
            slanted.as_strided(size, (most * pitch, pitch + 1, 1)).copy_(change)
            diagonals = size[1] + seen - 1
            of_row[:, begin : begin + diagonals] += slanted[:, : size[1], :diagonals].sum(1)
            of_query[sample, :, begin:end] = torch.bmm(change, k[:, :seen])
            of_key[sample, :, :seen].baddbmm_(change.transpose(1, 2), q[:, begin:end])
    of_query = of_query.mul_(scaling).flip(2).to(query.dtype)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_row.to(row.dtype)


def _blocks(length: int, causal: bool, most: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(begin, end, seen): queries begin .. end, counted from the last, and how many keys they see at most."""
    size = length if not causal else max(64, min(256, length // 8))
    size = size if most is None else most
    for begin in range(0, length, size):
        yield begin, min(begin + size, length), length - begin if causal else length


def _strip(row: Tensor, begin: int, end: int, seen: int) -> Tensor:
    """[1, heads, queries, keys]: the bias of a block of queries read backwards, as a view."""
    size, strides = (1, row.shape[0], end - begin, seen), (0, row.shape[1], 1, 1)
    return row.as_strided(size, strides, row.storage_offset() + begin)


_KERNEL: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
