"""How a score is biased: the attention functions that a patched model runs instead of stock's.

They are registered beside stock's under names of their own, so no other model notices. A bias reaches them as positions
(`hf_posenc.positions.Call`), never as a tensor [heads, n, n]:

- a bias that is an inner product (`Encoding.columns`) rides in the fused kernel as a few extra columns of q and k;
- any other is made for one block of queries at a time;
- a few query tokens (decoding) get their few rows of bias, which is cheaper than widening the whole key cache.

Shapes: query [batch, heads, queries, head_dim]; key, value [batch, key_heads, keys, head_dim].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from hf_posenc.positions import Call
from hf_posenc.sites import HERE

PREFIX = "hf_posenc_"
BACKENDS = ("eager", "sdpa")
"""Stock attention implementations for which a bias can be applied."""

FEW_QUERIES = 8
"""Up to this many query tokens a dense bias costs less than widening every key."""

BLOCK = 256
"""Queries for which a dense bias is made at a time."""


def stock_name(implementation: str | None) -> str | None:
    """The stock implementation that a name stands for."""
    return implementation.removeprefix(PREFIX) if implementation else implementation


def check_backend(implementation: str | None, what: str) -> None:
    """Raise unless a score bias can be applied under this attention implementation.

    Raises:
        ValueError: naming the implementation and those that work.
    """
    if stock_name(implementation) not in BACKENDS:
        raise ValueError(
            f"attn_implementation={implementation!r} cannot apply the score bias of {what}: it would be dropped without a word. "
            f"Use {' or '.join(repr(name) for name in BACKENDS)}, for example model.set_attn_implementation('sdpa')."
        )


def biased_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with the bias of the encoding in force; [batch, queries, heads, head_dim]."""
    call: Call | None = kwargs.get(HERE)
    if call is None:  # cross-attention: positions of one side say nothing about the other
        stock = AttentionInterface()["sdpa"]
        return stock(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    decodes = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    queries = query.shape[2]
    causal = decodes and attention_mask is None and queries > 1
    key_positions, hidden = _keys_of(call, key), call.hidden
    if causal and key.shape[2] > queries:  # first tokens of an empty cache of fixed size
        key, value = key[:, :, :queries], value[:, :, :queries]
        key_positions, hidden = key_positions[:, :queries], None if hidden is None else hidden[:, :queries]
    encoding, shape = call.plan.resolved, call.plan.shape
    repeats = query.shape[1] // key.shape[1]
    columns = None
    if queries > FEW_QUERIES and (decodes or encoding.columns_hold == "everywhere" or attention_mask is None):
        columns = encoding.columns(call.queries, key_positions, shape, query.dtype)
    if columns is None:
        out = _in_blocks(call, key_positions, hidden, query, key, value, attention_mask, scaling, dropout, causal)
    elif decodes or encoding.columns_hold == "everywhere":
        query, key, value = _widened(query, key, value, columns, hidden, scaling)
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=1.0
        )
    elif dropout == 0.0 and query.device.type == "cpu" and repeats == 1:
        # A bias by distance in either direction: what holds for keys in the past holds for the others with the signs of
        # all positions changed.
        past = _widened(query, key, value, columns, hidden, scaling)
        columns = encoding.columns(-call.queries, -key_positions, shape, query.dtype)
        assert columns is not None
        out = _two_triangles(past, _widened(query, key, value, columns, hidden, scaling))
    else:
        out = _in_blocks(call, key_positions, hidden, query, key, value, attention_mask, scaling, dropout, causal)
    return out[..., : shape.head_dim].transpose(1, 2).contiguous(), None


def biased_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The same in plain steps, with the attention weights [batch, heads, queries, keys] as second result.

    Scores, bias and softmax are float32 whatever the model's dtype.
    """
    call: Call | None = kwargs.get(HERE)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scaling
    if call is not None:
        scores = scores + _bias(call, call.queries, _keys_of(call, key))
    if attention_mask is not None:
        scores = _masked(scores, attention_mask)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


# ---------------------------------------------------------------------- as columns of q and k


HIDE = 32768.0
"""Two columns of this size make a score of -2**30, which no key survives: a padded key is hidden without a mask."""


def _widened(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: tuple[Tensor, Tensor],
    hidden: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with the bias as extra columns, and v as wide, as the fused kernels want.

    The columns stand first, so that their partial sums cancel before the content is added. q is scaled beforehand,
    because the kernel's own scale would have to be divided out of columns that are exact.
    """
    batch = query.shape[0]
    left = columns[0].expand(batch, -1, -1, -1)
    right = columns[1].expand(batch, key.shape[1], -1, -1)
    parts_q, parts_k = [left, query * scaling], [right, key]
    if hidden is not None:
        mark = (hidden.to(key.dtype) * -HIDE)[:, None, :, None].expand(-1, key.shape[1], -1, -1)
        parts_q.append(pad(query.new_full((*query.shape[:3], 1), HIDE), (0, 7)))
        parts_k.append(pad(mark, (0, 7)))
    query, key = torch.cat(parts_q, dim=-1), torch.cat(parts_k, dim=-1)
    return query, key, pad(value, (0, query.shape[-1] - value.shape[-1]))


Triple = tuple[Tensor, Tensor, Tensor]


def _two_triangles(past: Triple, future: Triple) -> Tensor:
    """Attention in both directions as two causal passes: keys up to the query, and keys after it, read backwards."""
    query, key, value = future
    after = (query[:, :, :-1].flip(2), key[:, :, 1:].flip(2), value[:, :, 1:].flip(2))
    return _Triangles.apply(*past, *after)  # type: ignore[no-any-return]


class _Triangles(torch.autograd.Function):
    """Two causal passes of the fused kernel, merged by their log-sum-exp.

    The kernel's backward needs only the merged result and the merged log-sum-exp, so each pass gets its exact share of the
    gradient (as in Liu et al. 2023, "Ring Attention", arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        past, after = tensors[:3], tensors[3:]
        out, total = _fused(*past)
        more, extra = _fused(*after)
        more, extra = more.flip(2), extra.flip(2)  # the last query has nothing after it
        both = torch.logaddexp(total[:, :, :-1], extra)
        share = (extra - both).exp().unsqueeze(-1)
        out[:, :, :-1] = (out[:, :, :-1] * (1 - share) + more * share).to(out.dtype)
        total = torch.cat([both, total[:, :, -1:]], dim=2)
        ctx.save_for_backward(*tensors, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        *tensors, out, total = ctx.saved_tensors
        grad = grads[0].contiguous()
        first = _fused_backward(grad, *tensors[:3], out, total)
        last = (part[:, :, :-1].flip(2) for part in (grad, out, total))
        grad, out, total = last
        return (*first, *_fused_backward(grad, *tensors[3:], out, total))


def _fused(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of the CPU kernel with its log-sum-exp [batch, heads, queries]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=1.0)


def _fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    # The kernel keeps the log-sum-exp with heads innermost.
    total = total.transpose(1, 2).contiguous().transpose(1, 2)
    return backward(grad, query, key, value, out, total, 0.0, True, scale=1.0)


# ---------------------------------------------------------------------- as a dense bias of a few queries


def _in_blocks(
    call: Call,
    key_positions: Tensor,
    hidden: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    causal: bool,
) -> Tensor:
    """A dense bias for one block of queries at a time: memory [heads, block, keys] instead of [heads, queries, keys]."""
    batch, heads, queries, width = query.shape
    repeats = heads // key.shape[1]
    single = queries == 1 and repeats > 1  # heads of a group become the queries of their key head: no copy of the cache
    if not single and repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)

    def attend(begin: int, end: int) -> Tensor:
        seen = end if causal else key.shape[2]
        bias = _bias(call, call.queries[:, begin:end], key_positions[:, :seen])
        if causal:
            rows = torch.arange(begin, end, device=query.device)
            bias = bias.masked_fill(torch.arange(seen, device=query.device) > rows[:, None], LOWEST)
        if mask is not None:
            bias = _masked(bias, mask[:, :, begin:end] if mask.shape[2] > 1 else mask)
        if hidden is not None:
            bias = bias.masked_fill(hidden[:, None, None, :seen], LOWEST)
        # Finite in any dtype: a row that sees nothing must not become NaN.
        bias = bias.clamp(min=max(torch.finfo(query.dtype).min, LOWEST)).to(query.dtype)
        part = query[:, :, begin:end]
        if single:
            part = part.reshape(batch, -1, repeats, width)
            bias = bias.reshape(bias.shape[0], -1, repeats, seen)
        out = scaled_dot_product_attention(
            part, key[:, :, :seen], value[:, :, :seen], attn_mask=bias, dropout_p=dropout, scale=scaling
        )
        return out.reshape(batch, heads, end - begin, -1)

    if queries <= BLOCK:
        return attend(0, queries)
    blocks = [(begin, min(begin + BLOCK, queries)) for begin in range(0, queries, BLOCK)]
    if torch.is_grad_enabled() and query.requires_grad:
        # Otherwise every block's bias is kept until the backward pass, and together they are the dense tensor again.
        return torch.cat([checkpoint(attend, *block, use_reentrant=False) for block in blocks], dim=2)  # type: ignore[misc]
    return torch.cat([attend(*block) for block in blocks], dim=2)


LOWEST = torch.finfo(torch.float32).min


def _bias(call: Call, queries: Tensor, keys: Tensor) -> Tensor:
    """[batch or 1, heads, queries, keys], float32."""
    weights = {name: weight.to(queries.device) for name, weight in call.weights.items()}
    return call.plan.resolved.bias(queries, keys, weights, call.plan.shape)


def _keys_of(call: Call, key: Tensor) -> Tensor:
    keys = call.keys
    if keys is None or keys.shape[1] != key.shape[2]:
        have = None if keys is None else keys.shape[1]
        raise RuntimeError(
            f"Attention sees {key.shape[2]} keys, but the positions of {have} are known. This cache does not tell its size."
        )
    return keys


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores with a stock mask on top: boolean (True: seen), or additive, whose lowest number hides whatever the bias is."""
    mask = mask[..., : scores.shape[-1]]
    lowest = torch.finfo(scores.dtype).min
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, lowest)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return (scores + mask.masked_fill(hidden, 0.0)).masked_fill(hidden, lowest)


def register() -> None:
    """Add the biased functions and their masks to transformers' registries, beside stock's."""
    for name, attend, mask in (("sdpa", biased_sdpa, sdpa_mask), ("eager", biased_eager, eager_mask)):
        AttentionInterface.register(PREFIX + name, attend)
        AttentionMaskInterface.register(PREFIX + name, mask)


register()
