"""Positions for learning a long context from short blocks: the distances are long, the tokens are few.

A block whose positions are skipped is still one document. transformers reads positions that do not rise by one as
packed documents unless it is given an attention mask, so a mask of ones has to travel with them (the collator does it).
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


def skip_positions(
    length: int, target_length: int, chunks: int, rng: numpy.random.Generator, *, random_start: bool = False
) -> Tensor:
    """Positions [length] of a block cut into `chunks` pieces that are spread over `target_length` positions (PoSE).

    Inside a piece positions rise by one; between pieces they jump. Piece boundaries are uniform; each piece's offset is
    uniform between the previous piece's and `target_length - length`, so positions rise strictly and stay below
    `target_length`. Source: Zhu et al. 2023, "PoSE: Efficient Context Window Extension of LLMs via Positional
    Skip-wise Training", section 3.2 (offset 0 for the first piece, tokens contiguous).

    Args:
        length: tokens in the block.
        target_length: positions to be covered, in tokens.
        chunks: pieces; 1 gives 0 .. length - 1. The paper uses 2.
        random_start: give the first piece a random offset too (for absolute encodings, whose late rows would otherwise
            never be seen at the start of a block).

    Raises:
        ValueError: `length` is not between 1 and `target_length`, or `chunks` not between 1 and `length`.
    """
    _check(length, target_length)
    if not 1 <= chunks <= length:
        raise ValueError(f"chunks={chunks} is not allowed; a block of {length} tokens has 1 to {length} chunks.")
    room = target_length - length
    cuts = (
        numpy.sort(rng.choice(length - 1, size=chunks - 1, replace=False)) + 1 if chunks > 1 else numpy.array([], int)
    )
    positions = numpy.arange(length)
    offset = int(rng.integers(0, room, endpoint=True)) if random_start else 0
    positions += offset
    for cut in cuts.tolist():
        jump = int(rng.integers(offset, room, endpoint=True)) - offset
        positions[cut:] += jump
        offset += jump
    return torch.from_numpy(positions)


def random_positions(length: int, target_length: int, rng: numpy.random.Generator) -> Tensor:
    """Positions [length] drawn from 0 .. target_length - 1 without repetition and sorted.

    Source: Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of Transformers".

    Raises:
        ValueError: `length` is not between 1 and `target_length`.
    """
    _check(length, target_length)
    return torch.from_numpy(numpy.sort(rng.choice(target_length, size=length, replace=False)))


def _check(length: int, target_length: int) -> None:
    if not 1 <= length <= target_length:
        raise ValueError(
            f"A block of {length} tokens cannot be spread over target_length={target_length} positions; "
            f"the block must have 1 to {target_length} tokens."
        )
