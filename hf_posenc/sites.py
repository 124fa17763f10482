"""What a patch puts at each site of a model: modules that stand in for native ones, and hooks.

Hooks are plain functions and find everything from the module that they are called with, so copies, pickles and replicas
of a model use their own parts.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_posenc import positions as where
from hf_posenc.encoding import Weights
from hf_posenc.positions import CALL, RECORD, Call, Plan, Record

HERE = "hf_posenc_here"
"""Keyword argument under which a self-attention module hands its `Call` to the attention function. Cross-attention
never gets one."""

_HANDED = "_hf_posenc_handed"


def _slot() -> str:
    """Where a module finds what it was handed for this call: each thread has a place of its own."""
    return _HANDED if torch.compiler.is_compiling() else f"{_HANDED}_{threading.get_ident()}"


def hand(module: nn.Module, value: Any) -> None:
    """Leave something for the next call of `module` by this thread, whose arguments have no room for it."""
    module.__dict__[_slot()] = value


def take(module: nn.Module) -> Any:
    """What was handed to `module` for this call, once; None where there is nothing."""
    return module.__dict__.pop(_slot(), None)


class PositionWeights(nn.Module):
    """All new weights of a patched model, in one submodule with one name, beside the plan that they belong to.

    Calling it returns the weights: where they are kept (offloaded, sharded, replicated, an adapter's copy) is then the
    business of whoever wrapped this module.
    """

    def __init__(self, plan: Plan, weights: Weights, frozen: frozenset[str]) -> None:
        super().__init__()
        self.plan = plan
        self.native_weight = 1.0 if plan.keep_native else 0.0
        self.names = tuple(weights)
        self.frozen = frozen
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=name not in frozen))

    def train(self, mode: bool = True) -> PositionWeights:
        """Loading makes new parameters, all of them trainable, and sets the mode last: freeze again what is fixed."""
        for name in self.frozen & set(self._parameters):
            getattr(self, name).requires_grad_(False)
        return super().train(mode)

    def forward(self, anchor: Tensor) -> Weights:
        """`anchor` is any tensor of this call; wrappers want one."""
        return {name: getattr(self, name) for name in self.names}

    def extra_repr(self) -> str:
        return str(self.plan.encoding)


class SilentTable(nn.Module):
    """A native table of absolute positions that no longer speaks, or speaks with less weight.

    It keeps the table's parameter under the table's name, so state dicts stay the same and a reload can be unpatched.
    """

    def __init__(self, weight: nn.Parameter, amount: float) -> None:
        super().__init__()
        self.weight = weight
        self.amount = amount
        self.num_embeddings, self.embedding_dim = weight.shape  # a weight that is shared out has another shape

    def train(self, mode: bool = True) -> SilentTable:
        """Loading makes a new parameter, which trains, and sets the mode last: freeze a silent one again."""
        if self.amount == 0.0:
            self.weight.requires_grad_(False)
        return super().train(mode)

    def forward(self, positions: Tensor) -> Tensor:
        if self.amount == 0.0:  # positions may lie beyond the table
            return torch.zeros(1, 1, self.embedding_dim, dtype=self.weight.dtype, device=positions.device)
        return self.amount * nn.functional.embedding(positions, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, amount={self.amount}"


class RotaryTable(nn.Module):
    """Stands in for a model's rotary module: the same answer (cos, sin), [batch, length, head_dim] each.

    It has no buffers, so no cast, no `to_empty` and no loading on the meta device can spoil its numbers: frequencies
    are plain float64 (or stock's own float32) on the CPU, angles are computed in the same precision, and the cast to
    the model's dtype comes last.
    """

    def __init__(
        self,
        plan: Plan,
        native_frequencies: Tensor | None = None,
        native_amplitude: float = 1.0,
        stock: tuple[Tensor, float] | None = None,
        speaks: bool = True,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.amount = 0.0
        self._native = native_frequencies
        self._native_amplitude = native_amplitude
        self._stock = stock
        self._speaks = speaks

    @property
    def attention_scaling(self) -> float:
        """Factor on cos and sin, under stock's name."""
        scale = self._stock[1] if self._stock else self.plan.resolved.amplitude() if self._speaks else 1.0
        return float(scale) * (self._native_amplitude if self.amount else 1.0)

    @property
    def inv_freq(self) -> Tensor:
        """Radians per token of each pair [head_dim / 2], under stock's name; where it matters, of a short sequence."""
        return self._frequencies(None)

    def _frequencies(self, lengths: Tensor | None) -> Tensor:
        if self._stock is not None:
            return self._stock[0]
        if self._speaks:
            frequencies = self.plan.resolved.frequencies(self.plan.rotary_dim, lengths)
        else:
            frequencies = torch.zeros(self.plan.shape.head_dim // 2, dtype=torch.float64, device="cpu")
        if self.amount and self._native is not None:
            frequencies = frequencies + self.amount * self._native.to(frequencies.device)
        return frequencies

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        lengths = take(self)
        if self.plan.resolved.length_dependent and lengths is None:
            lengths = position_ids.amax(-1, keepdim=True) + 1
        angles = _angles(position_ids.to(x.device), self._frequencies(lengths))
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def _angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """[batch, length, pairs] in the precision of `frequencies`: [pairs], or [batch, 1 or length, pairs]."""
    frequencies = frequencies.to(positions.device)
    return positions.to(frequencies.dtype).unsqueeze(-1) * frequencies


def rotation(plan: Plan, positions: Tensor, lengths: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for projections that hooks rotate, [batch, length, rotary_dim], in the encoding's own pairing."""
    encoding: Any = plan.resolved
    if not encoding.length_dependent:
        lengths = None
    angles = _angles(positions, encoding.frequencies(plan.rotary_dim, lengths))
    cos, sin = angles.cos() * encoding.amplitude(), angles.sin() * encoding.amplitude()
    if encoding.interleaved:
        return cos.to(dtype).repeat_interleave(2, dim=-1), sin.to(dtype).repeat_interleave(2, dim=-1)
    cos, sin = cos.to(dtype), sin.to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first dimensions of every head.

    Args:
        x: [batch, length, heads, head_dim].
        cos, sin: [batch or 1, length, 1, rotary_dim].
        interleaved: pairs are (0, 1), (2, 3) … as in RoFormer and GPT-J; otherwise (i, i + half), as in LLaMA and NeoX.
    """
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        quarter = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        quarter = torch.cat([-second, first], dim=-1)
    turned = turned * cos + quarter * sin
    return turned if kept.shape[-1] == 0 else torch.cat([turned, kept], dim=-1)


# ---------------------------------------------------------------------- hooks


def announce(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the base model: work positions out, fuse them with the tokens, send them down the layers."""
    owner: Any = getattr(module, CALL)
    plan: Plan = owner.plan
    kwargs = {**dict(zip(plan.arguments, args, strict=False)), **kwargs}
    tokens, vectors = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    source = tokens if tokens is not None else vectors
    if source is None or (tokens is not None and vectors is not None):
        return (), kwargs  # the model's own message says what is wrong
    batch, length = source.shape[0], source.shape[1]
    device = source.device
    cache = kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")
    mask = kwargs.get("attention_mask")
    seen = 0 if cache is None else cache.get_seq_length()
    if isinstance(seen, Tensor) and kwargs.get("cache_position") is not None:
        # Early transformers 5 counts the keys of a static cache that are not zero, which a padding token's may be.
        seen = kwargs["cache_position"][0]
    numbered = where.numbered(mask, batch)

    given = kwargs.get("position_ids")
    documents = None
    if given is not None:
        queries = given.to(device)
        if mask is None and isinstance(seen, int) and seen == 0 and length > 1:
            kwargs["attention_mask"], documents = where.packed(module, plan, queries, source, cache)
    elif numbered is not None:
        queries = where.window(numbered, seen, length).to(device)
    else:
        queries = (torch.arange(length, device=device) + seen).unsqueeze(0)
    kwargs["position_ids"] = queries
    if plan.architecture.token_types and kwargs.get("token_type_ids") is None:
        # Looked up by position in a buffer as long as the native table: said here, positions may go beyond.
        kwargs["token_type_ids"] = torch.zeros(batch, length, dtype=torch.long, device=device)

    encoding, weights = plan.resolved, owner(queries)
    remembered: Record | None = getattr(cache, RECORD, None)
    lengths, planned = None, 0
    if encoding.length_dependent:
        lengths, planned = where.lengths(plan, remembered, queries, mask, documents, seen, batch, length)

    keys = hidden = None
    if encoding.site == "score":
        keys = where.keys(queries, numbered, cache, remembered, seen, batch, length)
        if str(module.config._attn_implementation).endswith("sdpa"):  # type: ignore[union-attr]
            hidden = where.hidden_keys(mask, keys)
            if hidden is not None:
                kwargs["attention_mask"] = torch.ones_like(cast(Tensor, mask))
    if encoding.site == "embedding" and not plan.expressed:
        if vectors is None:
            vectors = module.get_input_embeddings()(tokens)  # type: ignore[operator]
        kwargs["input_ids"] = None
        kwargs["inputs_embeds"] = encoding.embed(vectors, queries, weights, plan.shape)

    turning = None
    if plan.rotates == "projections":
        turning = rotation(plan, queries, lengths, module.get_input_embeddings().weight.dtype)  # type: ignore[operator,union-attr]
    elif plan.rotates == "table" and lengths is not None:
        hand(module.get_submodule(str(plan.architecture.rotary)), lengths)
    record = None
    if keys is not None or lengths is not None:
        record = Record(keys, lengths if documents is None else None, planned)
    kwargs[CALL] = Call(plan, weights, queries, keys, hidden, turning, record)
    return (), kwargs


def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of the base model: leave on the cache what the next call with it must know."""
    call = kwargs.get(CALL)
    if call is None or call.record is None:
        return
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        if isinstance(value, Cache):
            where.leave_record(value, call.record)


def receive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a self-attention module: take the positions of this call to where they act."""
    kwargs = dict(kwargs)
    call: Call | None = kwargs.pop(CALL, None)
    if call is None:
        raise RuntimeError(
            f"{type(module).__name__} of a patched model was called without positions. Call the model, not its layers: "
            "the encoding in force needs the position of every token."
        )
    if call.rotation is not None:
        for name, parts in call.plan.architecture.projections:
            # Looked up now: LoRA may have wrapped the projection since, and its output is what has to be rotated.
            projection = getattr(module, name)
            if turn not in projection._forward_hooks.values():
                projection.register_forward_hook(turn)
            hand(projection, (call, parts))
    if call.keys is not None:
        kwargs[HERE] = call
    return args, kwargs


def turn(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Forward hook of a projection: rotate its queries and keys, before they are cached."""
    now = take(module)
    if now is None:  # the inner layer of a wrapped projection
        return None
    call, parts = now
    shape = call.plan.shape
    cos, sin = (table.to(output.dtype).unsqueeze(2) for table in call.rotation)
    interleaved = call.plan.resolved.interleaved
    count = {"query": shape.heads, "key": shape.key_heads, "value": shape.key_heads}
    pieces = output.split([count[part] * shape.head_dim for part in parts], dim=-1)
    turned = [
        piece
        if part == "value"
        else rotate(piece.unflatten(-1, (count[part], shape.head_dim)), cos, sin, interleaved).flatten(-2)
        for part, piece in zip(parts, pieces, strict=True)
    ]
    return turned[0] if len(turned) == 1 else torch.cat(turned, dim=-1)
