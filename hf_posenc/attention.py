"""How a score is biased: the attention functions that a patched model runs instead of stock's.

They are registered beside stock's under names of their own, so no other model notices. A bias reaches them as positions
(`hf_posenc.positions.Call`), never as a tensor [heads, n, n]:

- on a CPU, a bias by distance alone is a view of one row of numbers for each head (`hf_posenc.blockwise`);
- a bias that is an inner product (`Encoding.columns`) rides in the fused kernel as a few extra columns of q and k;
- any other is worked out inside flex attention on a GPU (`hf_posenc.flex`), unless it is being trained;
- and else made for one block of queries at a time;
- a few query tokens (decoding) get their few rows of bias, which is cheaper than widening the whole key cache.

Shapes: query [batch, heads, queries, head_dim]; key, value [batch, key_heads, keys, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from hf_posenc import blockwise, flex
from hf_posenc.encoding import ScoreFunction
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
            f"attn_implementation={implementation!r} cannot apply the score bias of {what}: it would be dropped "
            f"without a word. Use {' or '.join(map(repr, BACKENDS))}, for example "
            "model.set_attn_implementation('sdpa')."
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
    causal = queries > 1 and attention_mask is None and decodes  # in this order: a traced length makes no bool
    key_positions, hidden = _keys_of(call, key), call.hidden
    if causal and key.shape[2] > queries:  # first tokens of an empty cache of fixed size
        key, value = key[:, :, :queries], value[:, :, :queries]
        key_positions, hidden = key_positions[:, :queries], None if hidden is None else hidden[:, :queries]
    encoding, shape = call.plan.resolved, call.plan.shape
    columns = function = None
    many = queries > FEW_QUERIES
    # On the CPU, and not where tensors are only traced: there the blocks are written out.
    plain = many and attention_mask is None and dropout == 0.0 and key.shape[2] == queries
    plain = plain and query.device.type == "cpu" and not torch.compiler.is_compiling()
    diagonal = plain and _runs_along_diagonals(call, key_positions, hidden)
    if many and not diagonal and (decodes or encoding.columns_hold == "everywhere"):
        columns = encoding.columns(call.queries, key_positions, shape, query.dtype)
    if queries > BLOCK and columns is None and attention_mask is None and dropout == 0.0:
        function = flex.function_of(call, query)
    if columns is not None:
        query, key, value = _widened(query, key, value, columns, hidden, scaling)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=1.0
        )
    elif function is not None:
        out = _in_flex(call, function, key_positions, hidden, query, key, value, scaling, decodes)
    elif plain:
        bias, *learned = (
            _diagonals(call, query, decodes) if diagonal else _computed(call, key_positions, query, decodes)
        )
        query, key, value = _marked(query, key, value, hidden)
        out = blockwise.attend(query, key, value, bias, learned, scaling, decodes)
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
"""Two columns of this size make a score of about -2**30: a padded key is hidden without a mask."""


def _widened(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: tuple[Tensor, Tensor],
    hidden: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with the bias as extra columns, and v as wide, as the fused kernels want; all with the heads of q.

    The columns stand first, so that their partial sums cancel before the content is added. q is scaled beforehand,
    because the kernel's own scale would have to be divided out of columns that are exact.
    """
    batch, heads = query.shape[:2]
    key, value = _repeated(key, heads), _repeated(value, heads)
    left = columns[0].expand(batch, -1, -1, -1)
    right = columns[1].expand(batch, heads, -1, -1)
    parts_q, parts_k = [left, query * scaling], [right, key]
    if hidden is not None:
        mark = _mark(query, hidden)
        parts_q, parts_k = [*parts_q, mark[0]], [*parts_k, mark[1]]
    query, key = torch.cat(parts_q, dim=-1), torch.cat(parts_k, dim=-1)
    return query, key, pad(value, (0, query.shape[-1] - value.shape[-1]))


def _marked(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the heads of q, widened only where keys are hidden."""
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    if hidden is None:
        return query, key, value
    mark = _mark(query, hidden)
    return torch.cat([mark[0], query], dim=-1), torch.cat([mark[1], key], dim=-1), pad(value, (0, mark[0].shape[-1]))


def _mark(query: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of q and k that hide keys: [batch, heads, queries, 8], [batch, heads, keys, 8]."""
    mark = (hidden.to(query.dtype) * -HIDE)[:, None, :, None].expand(-1, query.shape[1], -1, -1)
    return pad(query.new_full((*query.shape[:3], 1), HIDE), (0, 7)), pad(mark, (0, 7))


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# ---------------------------------------------------------------------- inside flex attention


def _in_flex(
    call: Call,
    bias: ScoreFunction,
    key_positions: Tensor,
    hidden: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    causal: bool,
) -> Tensor:
    sizes = (query.shape[2], key.shape[2], causal)
    seen = _shared(call, ("seen", *sizes, query.device), lambda: flex.seen(*sizes, hidden, query.device))
    out = flex.attend(bias, query, key, value, call.queries, key_positions, seen, scaling)
    if out is None:
        return _in_blocks(call, key_positions, hidden, query, key, value, None, scaling, 0.0, causal)
    return out


# ---------------------------------------------------------------------- block by block on a CPU


def _runs_along_diagonals(call: Call, keys: Tensor, hidden: Tensor | None) -> bool:
    """Whether the bias is the same along every diagonal: it depends on the distance, and positions go up by one.

    Where a mask numbers them, they do so between the first and the last real token of a row, and what the others see
    does not matter. Looked at once for all layers; on the CPU looking costs nothing.
    """
    if not getattr(call.plan.resolved, "by_distance", False):
        return False

    def look() -> bool:
        if call.queries.shape[1] != keys.shape[1]:
            return False
        counted = torch.arange(keys.shape[1])
        starts, others = keys - counted, call.queries - counted
        if hidden is None:
            return bool(((starts == starts[:, :1]) & (others == starts[:, :1])).all())
        first = (~hidden).int().argmax(1, keepdim=True)
        start = starts.expand(hidden.shape).gather(1, first)
        return bool((((starts == start) & (others == start)) | hidden).all())

    return _shared(call, ("diagonal", keys.shape[1]), look)


def _diagonals(call: Call, query: Tensor, causal: bool) -> tuple[Any, ...]:
    """The bias by distance, and the row of numbers that says it."""
    length = query.shape[2]

    def make() -> Tensor:
        last, keys = torch.tensor([[length - 1]]), torch.arange(2 * length - 1)[None]
        row = _bias(call, last, keys)[0, :, 0]
        row = row.to(torch.promote_types(query.dtype, row.dtype)).contiguous()
        return row.masked_fill(keys[0] >= length, -torch.inf) if causal else row

    row = _shared(call, ("row", length, query.dtype, causal), make, fixed=not call.weights)
    return blockwise.Diagonals(), row


def _computed(call: Call, keys: Tensor, query: Tensor, causal: bool) -> tuple[Any, ...]:
    """The bias of a block, and the weights of the encoding that it is made of."""
    encoding, shape, names = call.plan.resolved, call.plan.shape, list(call.weights)
    backwards = call.queries.flip(1)

    def make(weights: Sequence[Tensor], begin: int, end: int, seen: int) -> Tensor:
        values = dict(zip(names, weights, strict=True))
        return encoding.bias(backwards[:, begin:end], keys[:, :seen], values, shape)

    size = blockwise.block_size(*query.shape[1:3])
    return blockwise.Computed(make, causal, size), *(weight.to(query.device) for weight in call.weights.values())


T = TypeVar("T")


def _shared(call: Call, name: Any, make: Callable[[], T], fixed: bool = True) -> T:
    """What all layers of a call have in common, made by the first that asks.

    Not where it has a gradient: layers that are recomputed in the backward pass must find nothing made before. A name
    with the id of a tensor is safe where the tensor is kept with what was made.
    """
    if torch.compiler.is_compiling() or not (fixed or not torch.is_grad_enabled()):
        return make()
    kept: dict[Any, Any] = call.__dict__.setdefault("_shared", {})
    if name not in kept:
        kept[name] = make()
    found: T = kept[name]
    return found


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
    """A dense bias for one block of queries at a time: memory [heads, block, keys], not [heads, queries, keys]."""
    batch, heads, queries, width = query.shape
    repeats = heads // key.shape[1]
    single = queries == 1 and repeats > 1  # heads of a group become the queries of their key head: no copy of the cache
    if not single and repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)

    def added(begin: int, end: int) -> Tensor:
        """All that is added to the scores of some queries, in the dtype that the kernel wants."""
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
        return bias.clamp(min=max(torch.finfo(query.dtype).min, LOWEST)).to(query.dtype)

    def attend(begin: int, end: int) -> Tensor:
        if queries > FEW_QUERIES:
            bias = added(begin, end)
        else:  # decoding: all layers add the same, and working it out anew would be a tenth of their time
            name = ("few", causal, query.dtype, query.device, None if mask is None else id(mask))
            bias, _ = _shared(call, name, lambda: (added(begin, end), mask), fixed=not call.weights)
        part = query[:, :, begin:end]
        if single:
            part = part.reshape(batch, -1, repeats, width)
            bias = bias.reshape(bias.shape[0], -1, repeats, bias.shape[-1])
        seen = bias.shape[-1]
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
            f"Attention sees {key.shape[2]} keys, but the positions of {have} are known. "
            "This cache does not tell its size."
        )
    return keys


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores with a stock mask on top: boolean (True: seen), or additive, whose lowest number hides any bias."""
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
