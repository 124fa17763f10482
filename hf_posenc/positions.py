"""What one forward pass knows of positions.

Where every token stands is worked out once per forward pass, in front of the base model, and goes down the layers as a
keyword argument: data of this call, not state of a module. So two forwards before one backward, recomputed
layers, replicas and threads each see their own. What must outlive a call because the sequence itself does (the
positions of cached keys, the length that a length-dependent encoding was made for) is kept on the sequence's cache.

Rules, in this order:

1. `position_ids` are taken as given.
2. Otherwise a 2-D `attention_mask` numbers the real tokens of each row from 0: padding on either side does not matter.
3. Otherwise tokens are numbered from the length of the cache.

Documents packed into one row are told apart where `position_ids` do not increase; a jump forward is one document with
tokens left out. An `attention_mask` that is given decides alone what is seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticCache
from transformers.utils import logging

from hf_posenc.architecture import Architecture
from hf_posenc.encoding import Encoding, ModelShape, Weights

logger = logging.get_logger(__name__)

CALL = "hf_posenc"
"""Keyword argument under which a `Call` goes from the base model to the attention modules, and the name of the
submodule of the base model that holds the new weights."""

RECORD = "_hf_posenc_record"
"""Attribute of a cache under which its `Record` is kept."""


@dataclass(frozen=True)
class Plan:
    """What a patched model was asked to be. Plain data: it is copied, pickled and compared freely."""

    encoding: Encoding
    """As it was asked for."""
    resolved: Encoding
    """With everything filled in that depends on the model."""
    shape: ModelShape
    architecture: Architecture
    keep_native: bool
    expressed: bool
    """True where stock transformers runs the saved model as it is."""
    native: Encoding
    """What the model came with."""
    arguments: tuple[str, ...]
    """Names of the base model's positional arguments, in order."""

    @property
    def rotates(self) -> str | None:
        """Where the encoding rotates: in the model's own "table" of (cos, sin), or behind the "projections"."""
        encoding: Any = self.resolved
        if encoding.site != "rotary":
            return None
        native_pairs = not encoding.interleaved and self.rotary_dim == self.shape.head_dim
        return "table" if self.architecture.rotary is not None and native_pairs else "projections"

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head the encoding rotates; 0 where it rotates none."""
        return int(self.shape.head_dim * getattr(self.resolved, "rotary_fraction", 0))


@dataclass
class Record:
    """What a cache remembers about its own sequence."""

    positions: Tensor | None
    """[batch or 1, slots] of the keys that it holds."""
    lengths: Tensor | None
    """[batch or 1, 1]: the length that a length-dependent encoding was made for."""
    planned: int
    """Longest of those, known to the host."""

    def with_rows(self, choose: Callable[[Tensor], Tensor]) -> Record:
        """The record of a cache whose rows were chosen, moved or repeated. A single row stands for all of them."""

        def move(rows: Tensor | None) -> Tensor | None:
            return rows if rows is None or rows.shape[0] == 1 else choose(rows)

        return Record(move(self.positions), move(self.lengths), self.planned)


@functools.cache
def recording_class(stock: Any) -> type:
    """`stock`, a class of caches, whose record moves with its rows: what a cache becomes that carries a record."""

    def moving(name: str, choose: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Any], None]:
        def move(self: Any, argument: Any) -> None:
            getattr(stock, name)(self, argument)
            record: Record | None = getattr(self, RECORD, None)
            if record is not None:
                setattr(self, RECORD, record.with_rows(lambda rows: choose(rows, argument)))

        return functools.wraps(getattr(stock, name))(move)

    def select(rows: Tensor, index: Tensor) -> Tensor:
        return rows[index.to(rows.device)]

    body: dict[str, Any] = {
        "reorder_cache": moving("reorder_cache", select),
        "batch_select_indices": moving("batch_select_indices", select),
        "batch_repeat_interleave": moving("batch_repeat_interleave", lambda rows, n: rows.repeat_interleave(n, dim=0)),
        "__reduce_ex__": lambda self, protocol: (_rebuild_cache, (stock,), self.__dict__),
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "_hf_posenc_recording": True,
    }
    return type(stock.__name__, (stock,), body)


def _rebuild_cache(stock: type) -> Any:
    return object.__new__(recording_class(stock))


def leave_record(cache: Cache, record: Record) -> None:
    """Keep `record` on a cache, where the next call finds it."""
    setattr(cache, RECORD, record)
    if not hasattr(cache, "_hf_posenc_recording") and not torch.compiler.is_compiling():
        cache.__class__ = recording_class(type(cache))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Call:
    """Positions of one forward pass, as the layers receive them."""

    plan: Plan
    weights: Weights
    queries: Tensor
    """[batch or 1, queries]: positions of the tokens of this call."""
    keys: Tensor | None
    """[batch or 1, keys]: positions of all that attention sees, cached ones first; None unless a score needs them."""
    hidden: Tensor | None
    """[batch, keys]: True where a key is padding, and the mask that said so was taken out of the way; else None."""
    rotation: tuple[Tensor, Tensor] | None
    """cos and sin, [batch or 1, queries, rotary_dim], where the projections are rotated by hooks."""
    record: Record | None
    """What the cache of this call is to remember."""

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Call:
        """A copy on another device: how accelerate moves arguments between the devices of a split model."""

        def move(x: Tensor | None) -> Any:
            return None if x is None else x.to(device, non_blocking=non_blocking)

        rotation = None if self.rotation is None else (move(self.rotation[0]), move(self.rotation[1]))
        return replace(
            self, queries=move(self.queries), keys=move(self.keys), hidden=move(self.hidden), rotation=rotation
        )


_planned: ContextVar[Tensor | None] = ContextVar("hf_posenc_planned", default=None)


@contextlib.contextmanager
def sequence_length(length: int | Tensor) -> Iterator[None]:
    """Tell length-dependent encodings how long the sequences started inside will become.

    `generate` does this by itself, unless it runs inside. By hand it makes chunks, token-by-token passes and one whole
    pass agree, and plans a conversation for all of its turns.

    Args:
        length: tokens, for all rows or [batch].

    Raises:
        ValueError: a length below 1.
    """
    try:
        tensor = torch.as_tensor(length)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.tensor(0)
    if tensor.dtype == torch.bool or tensor.ndim > 1 or tensor.is_floating_point() or bool((tensor < 1).any()):
        raise ValueError(
            f"length={length!r} is not allowed; it must be a whole number of tokens of at least 1, or [batch]."
        )
    token = _planned.set(tensor.reshape(-1, 1))
    try:
        yield
    finally:
        _planned.reset(token)


def is_planned() -> bool:
    """Whether this runs inside `sequence_length`."""
    return _planned.get() is not None


# ---------------------------------------------------------------------- where tokens stand


def numbered(mask: Any, batch: int) -> Tensor | None:
    """Position of every slot from a 2-D mask: real tokens of a row count from 0, whatever stands between them."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != batch:
        return None
    return (mask.to(torch.long).ne(0).cumsum(-1) - 1).clamp(min=0)


def window(slots: Tensor, seen: int | Tensor, length: int) -> Tensor:
    """Columns seen .. seen + length. Under a static cache `seen` lives on the device and is not read back."""
    if slots.shape[1] == length:
        return slots
    if isinstance(seen, int):
        return slots[:, seen : seen + length]
    index = (torch.arange(length, device=slots.device) + seen.to(slots.device)).clamp(max=slots.shape[1] - 1)
    return slots.index_select(1, index)


def keys(
    queries: Tensor,
    numbered: Tensor | None,
    cache: Any,
    record: Record | None,
    seen: int | Tensor,
    batch: int,
    length: int,
) -> Tensor:
    """Positions of all keys, cached ones first: as recorded, else as the mask numbers them, else counted back."""
    if cache is None:
        return queries
    if any(getattr(cache, "is_sliding", ()) or ()):
        raise ValueError(
            "A score bias needs the positions of all cached keys, but this cache drops old ones (sliding window). "
            "Use DynamicCache or StaticCache, or a rotary encoding."
        )
    fixed = fixed_size(cache)
    total: Any = seen + length if fixed is None else fixed
    if isinstance(seen, int) and total == seen + length:  # a cache that grows
        if seen == 0:
            return queries
        old = _recorded(record, batch, seen)
        if old is None:
            old = _counted(queries, numbered, torch.arange(seen, device=queries.device), seen + length - 1)
        rows = max(old.shape[0], queries.shape[0])
        return torch.cat([old.to(queries.device).expand(rows, -1), queries.expand(rows, -1)], dim=1)
    # A cache of fixed size: keep one column per slot and write this call's columns into it.
    last = seen + length - 1
    old = _recorded(record, batch, total)
    slots = torch.arange(total, device=queries.device)
    if old is None:
        old = _counted(queries, numbered, slots, last)
    index = slots[:length] + (seen if isinstance(seen, int) else seen.to(queries.device))
    rows = max(old.shape[0], queries.shape[0])
    return old.to(queries.device).expand(rows, -1).index_copy(1, index, queries.expand(rows, -1))


def fixed_size(cache: Any) -> int | None:
    """Slots of a cache that keeps them all from the start; None for one that grows."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return getattr(layers[0], "max_cache_len", None) if layers else None


def _recorded(record: Record | None, batch: int, slots: int) -> Tensor | None:
    if record is None or record.positions is None or record.positions.shape[1] < slots:
        return None
    return _for_batch(record.positions, batch)[:, :slots]


def _for_batch(rows: Tensor, batch: int) -> Tensor:
    """Rows of a record for a batch that may have been repeated since (beams, several returned sequences)."""
    if rows.shape[0] in (1, batch):
        return rows
    if batch % rows.shape[0]:
        raise ValueError(
            f"The cache was filled with {rows.shape[0]} rows and is now used with {batch}. "
            "Repeat whole rows, or start a new cache."
        )
    return rows.repeat_interleave(batch // rows.shape[0], dim=0)


def hidden_keys(mask: Any, keys: Tensor) -> Tensor | None:
    """Which keys a 2-D mask hides, [batch, keys], where it hides any.

    A mask that only says what is padding would cost the fused kernel a tensor [batch, queries, keys]; said key by key
    it costs one column.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or torch.compiler.is_compiling():
        return None
    hidden = mask.eq(0).to(keys.device)
    if not bool(hidden.any()):  # stock looks at the same thing
        return None
    return nn.functional.pad(hidden, (0, keys.shape[1] - hidden.shape[1]))


def _counted(queries: Tensor, numbered: Tensor | None, slots: Tensor, last: int | Tensor) -> Tensor:
    """Positions of slots that were filled before anyone looked, counted from the newest token's."""
    if numbered is not None:
        index = slots.clamp(max=numbered.shape[1] - 1)
        newest = numbered[:, -1:]
        return queries[:, -1:] - newest + numbered.index_select(1, index)
    return queries[:, -1:] + (slots - last).unsqueeze(0)


def packed(
    module: nn.Module, plan: Plan, positions: Tensor, source: Tensor, cache: Any
) -> tuple[Tensor | None, Tensor | None]:
    """The mask that explicit positions without a mask stand for, and the document of each token if there are several.

    transformers reads every step other than +1 as a new document, and only without a cache and only in decoders. Here a
    document starts where positions do not increase, with or without a cache, in encoders too; a jump forward (skipped
    positions) hides nothing.
    """
    implementation = str(getattr(module.config, "_attn_implementation", "")).removeprefix("hf_posenc_")  # type: ignore[union-attr]
    if implementation not in ("eager", "sdpa"):
        return None, None
    batch, length = source.shape[:2]
    starts = positions[:, 1:] <= positions[:, :-1]
    if not torch.compiler.is_compiling() and not bool(starts.any()):
        return torch.ones(batch, length, dtype=torch.long, device=source.device), None
    if isinstance(cache, StaticCache):
        raise ValueError(
            "Packed documents cannot be put into a static cache. Pass use_cache=False, or an attention_mask."
        )
    documents = nn.functional.pad(starts.to(torch.long).cumsum(-1), (1, 0)).expand(batch, -1)
    seen = (documents[:, :, None] == documents[:, None, :]).unsqueeze(1)
    if plan.shape.causal:
        seen = seen & torch.ones(length, length, dtype=torch.bool, device=source.device).tril()
    if implementation == "sdpa":
        return seen, documents
    dtype = source.dtype if source.is_floating_point() else module.dtype  # type: ignore[union-attr]
    zero = torch.zeros((), dtype=dtype, device=source.device)  # type: ignore[arg-type]
    return torch.where(seen, zero, torch.finfo(zero.dtype).min), documents


# ---------------------------------------------------------------------- how long sequences are


def lengths(
    plan: Plan,
    record: Record | None,
    queries: Tensor,
    mask: Any,
    documents: Tensor | None,
    seen: int | Tensor,
    batch: int,
    length: int,
) -> tuple[Tensor, int]:
    """The length that each row's table is made for, [batch or 1, 1 or queries], and the longest known to the host."""
    # A static cache counts on the device; reading it back is why length-dependent encodings do not compile.
    held = int(seen)
    if held and record is not None and record.lengths is not None:
        if held + length > record.planned:
            _warn_crossing(plan, record.planned, held + length)
        return _for_batch(record.lengths.to(queries.device), batch), record.planned
    spans = _spans(queries, mask, documents, length) + held
    planned_rows = _planned.get()
    if planned_rows is not None:
        spans = torch.maximum(spans, _for_batch(planned_rows.to(spans.device), batch))
        return spans, max(held + length, int(planned_rows.max()))
    return spans, held + length


def _spans(queries: Tensor, mask: Any, documents: Tensor | None, length: int) -> Tensor:
    """Tokens from the first to the last real position of each row, or of each packed document."""
    if documents is not None:
        positions = queries.expand(documents.shape[0], -1)
        count = documents.shape[1]
        high = torch.full_like(documents, -1).scatter_reduce(1, documents, positions, "amax")
        low = torch.full_like(documents, torch.iinfo(torch.long).max).scatter_reduce(1, documents, positions, "amin")
        return (high - low + 1).gather(1, documents).reshape(-1, count)
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= length:
        real = mask[:, -length:].ne(0)
        rows = queries.expand(real.shape[0], -1)
        high = rows.masked_fill(~real, torch.iinfo(torch.long).min // 2).amax(1, keepdim=True)
        low = rows.masked_fill(~real, torch.iinfo(torch.long).max // 2).amin(1, keepdim=True)
        return (high - low + 1).clamp(min=1)
    return queries.amax(1, keepdim=True) - queries.amin(1, keepdim=True) + 1


def _warn_crossing(plan: Plan, planned: int, reached: int) -> None:
    encoding = plan.resolved
    made_for, now = (encoding.frequencies(plan.rotary_dim, torch.tensor([n])) for n in (planned, reached))
    if not torch.equal(made_for, now):
        logger.warning_once(
            f"{encoding.name}: the sequence has outgrown the {planned} tokens that its rotation was chosen for when "
            "its cache was empty; the choice is kept. Start it inside `with hf_posenc.sequence_length(n):`, or let "
            "`generate` do so."
        )
