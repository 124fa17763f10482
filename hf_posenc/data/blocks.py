"""Tokenised documents to blocks of at most a given length. Pure functions on lists; no tensors, no tokenizer.

Two ways, and neither ever lets a token see another document:
`pack_blocks` fills each block with as many documents as fit, every one at positions from 0;
`cut_blocks` gives each block one document, or a window of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

IGNORED = -100
"""The label of a token that is no target, as everywhere in transformers."""


@dataclass(frozen=True)
class Document:
    """A tokenised document."""

    id: str
    input_ids: list[int]
    labels: list[int] | None = None
    """A label for each token (`IGNORED` where it is no target); None where every token is its own label."""


@dataclass
class Block:
    """Tokens that are trained on together."""

    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    """As long as `input_ids` and not shifted; the first token of a document is no target of the one before it."""
    starts: list[int] = field(default_factory=list)
    """Where in the block each document starts; positions count from there."""
    documents: list[str] = field(default_factory=list)
    """Ids of the documents, one for each start."""

    def append(self, document: str, input_ids: list[int], labels: list[int]) -> None:
        """Add a document or a piece of one."""
        self.starts.append(len(self.input_ids))
        self.documents.append(document)
        self.input_ids += input_ids
        self.labels += [IGNORED, *labels[1:]]


def pack_blocks(documents: Iterable[Document], block_length: int) -> Iterator[Block]:
    """Blocks of exactly `block_length` tokens (the last may be shorter) that hold every token once, in order.

    A document that crosses the end of a block goes on in the next one as if it started there. A single token that would
    be left over at the end of a block has nothing to predict and is kept all the same, so that counts add up.

    Raises:
        ValueError: `block_length` is below 2.
    """
    _check_length(block_length)
    block = Block()
    for document in documents:
        labels = document.labels if document.labels is not None else document.input_ids
        start = 0
        while start < len(document.input_ids):
            end = start + block_length - len(block.input_ids)
            block.append(document.id, document.input_ids[start:end], labels[start:end])
            start = end
            if len(block.input_ids) == block_length:
                yield block
                block = Block()
    if block.input_ids:
        yield block


def cut_blocks(
    documents: Iterable[Document],
    block_length: int,
    *,
    overlap: int = 0,
    min_length: int = 2,
    prefix: list[int] | None = None,
    suffix: list[int] | None = None,
) -> Iterator[Block]:
    """Windows of one document each. Every token after the first is a target exactly once.

    Args:
        block_length: most tokens in a block, `prefix` and `suffix` included.
        overlap: tokens that a window repeats from the one before, as context without a loss.
        min_length: a window with fewer new tokens than this (at the end of a document) is left out.
        prefix, suffix: special tokens put around each window, without a loss ([CLS] and [SEP] of an encoder).

    Raises:
        ValueError: `block_length` leaves no room for two tokens, or `overlap` is not below what is left.
    """
    prefix, suffix = prefix or [], suffix or []
    room = block_length - len(prefix) - len(suffix)
    _check_length(room)
    if not 0 <= overlap < room - 1:
        raise ValueError(f"overlap={overlap} is not allowed with blocks of {room} tokens; it must be 0 to {room - 2}.")
    for document in documents:
        labels = document.labels if document.labels is not None else document.input_ids
        end = 0
        while end < len(document.input_ids):
            # One token more than the overlap is repeated, because the first token of a window is no target in it.
            start = max(0, end - overlap - 1)
            new, end = end, min(start + room, len(document.input_ids))
            if end - new < min_length:
                break
            targets = [IGNORED] * (new - start) + labels[new:end]
            block = Block()
            block.append(
                document.id,
                [*prefix, *document.input_ids[start:end], *suffix],
                # `append` hides the first label; behind a prefix the first token of the document is a target.
                [*[IGNORED] * len(prefix), *targets, *[IGNORED] * len(suffix)],
            )
            yield block


def _check_length(block_length: int) -> None:
    if block_length < 2:
        raise ValueError(f"block_length leaves {block_length} tokens in a block; at least 2 are needed.")
