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
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    queries = query.shape[2]
    causal = causal and attention_mask is None and queries > 1
    key_positions = _keys_of(call, key)
    if causal and key.shape[2] > queries:  # first tokens of an empty cache of fixed size
        key, value = key[:, :, :queries], value[:, :, :queries]
        key_positions = key_positions[:, :queries]
    encoding, shape = call.plan.resolved, call.plan.shape
    few = queries <= FEW_QUERIES
    columns = None if few else encoding.columns(call.queries, key_positions, shape, query.dtype)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        value = value.repeat_interleave(repeats, dim=1)
    if columns is not None:
        out = _with_columns(query, key, value, columns, attention_mask, scaling, dropout, causal)
    else:
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
        out = _in_blocks(call, key_positions, query, key, value, attention_mask, scaling, dropout, causal)
    return out.transpose(1, 2).contiguous(), None


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


# ---------------------------------------------------------------------- the two ways


def _with_columns(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: tuple[Tensor, Tensor],
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    causal: bool,
) -> Tensor:
    """One call of the fused kernel on q and k widened by the columns of the bias.

    The columns stand first, so that their partial sums cancel before the content is added. q is scaled beforehand,
    because the kernel's own scale would have to be divided out of columns that are exact.
    """
    batch, heads, _, width = query.shape
    extra = columns[0].shape[-1]
    left = columns[0].expand(batch, -1, -1, -1)
    right = columns[1].expand(batch, key.shape[1], -1, -1)
    query = torch.cat([left, query * scaling], dim=-1)
    key = torch.cat([right, key], dim=-1)
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
    # The fused kernels want q, k and v of one width.
    out = scaled_dot_product_attention(
        query, key, pad(value, (0, extra)), attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=1.0
    )
    return out[..., :width]


def _in_blocks(
    call: Call,
    key_positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    causal: bool,
) -> Tensor:
    """A dense bias for one block of queries at a time: memory [heads, block, keys] instead of [heads, queries, keys]."""
    queries = query.shape[2]

    def attend(begin: int, end: int) -> Tensor:
        seen = end if causal else key.shape[2]
        bias = _bias(call, call.queries[:, begin:end], key_positions[:, :seen])
        if causal:
            rows = torch.arange(begin, end, device=query.device)
            bias = bias.masked_fill(torch.arange(seen, device=query.device) > rows[:, None], -torch.inf)
        elif mask is not None:
            bias = _masked(bias, mask[:, :, begin:end] if mask.shape[2] > 1 else mask)
        bias = _cast(bias, query.dtype)
        return scaled_dot_product_attention(
            query[:, :, begin:end], key[:, :, :seen], value[:, :, :seen], attn_mask=bias, dropout_p=dropout, scale=scaling
        )

    if queries <= BLOCK:
        return attend(0, queries)
    blocks = [(begin, min(begin + BLOCK, queries)) for begin in range(0, queries, BLOCK)]
    if torch.is_grad_enabled() and query.requires_grad:
        # Otherwise every block's bias is kept until the backward pass, and together they are the dense tensor again.
        return torch.cat([checkpoint(attend, *block, use_reentrant=False) for block in blocks], dim=2)  # type: ignore[misc]
    return torch.cat([attend(*block) for block in blocks], dim=2)


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


def _cast(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """To the dtype of the scores, keeping hidden keys finite: a row that sees nothing must not become NaN."""
    return bias.clamp(min=torch.finfo(dtype).min).to(dtype)


def register() -> None:
    """Add the biased functions and their masks to transformers' registries, beside stock's."""
    for name, attend, mask in (("sdpa", biased_sdpa, sdpa_mask), ("eager", biased_eager, eager_mask)):
        AttentionInterface.register(PREFIX + name, attend)
        AttentionMaskInterface.register(PREFIX + name, mask)


register()
