"""Learned positions: one trained vector for each position, up to a fixed number of them.

The table of GPT-2 and BERT, longer: the native rows are stretched, repeated or composed to fill a table of any length,
which is then trained. The hierarchical composition, n * n rows from n, is Su Jianlin's (2020, kexue.fm/archives/7947).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.encoding import EncodingError, ModelShape, Weights, check_choice, check_number
from hf_posenc.encodings._absolute import Absolute, native_rows, sinusoid
from hf_posenc.encodings._memory import check_memory

L = TypeVar("L", bound="Learned")

ALPHA = 0.4
"""Weight of the coarse position in the hierarchical composition (Su Jianlin's; 0.5 would confuse (i, j) and (j, i))."""

STANDARD_DEVIATION = 0.02
"""Of random rows where there is no native table to measure: the initializer range of GPT-2 and BERT."""


@dataclass(frozen=True)
class Learned(Absolute):
    """A trained table of `num_positions` rows.

    Weights:
        table: [num_positions, hidden].
    """

    name: ClassVar[str] = "learned"

    num_positions: int | None = None
    """Rows of the table, in tokens; a position beyond is an error (default: the length asked for, else the length that
    the model was trained with)."""
    init: str = "interpolate"
    """How the rows start: `interpolate` stretches the native table, end rows kept; `repeat` tiles it; `hierarchical`
    composes up to the square of its length; `sinusoidal`; `random` with its standard deviation. A model without a table
    has nothing to stretch: there the first three start as the sinusoid, multiplied by `scale` like every start."""
    scale: float | str = 1.0
    """Factor on every position vector; `match` gives the starting rows the mean row norm of the table that they
    replace."""
    learn_scale: bool = False
    """Train the factor, as one weight that starts at `scale` (default: fixed)."""
    fusion: str = "add"
    """`add` to the token vector as the native table, or `concat`: W [x; p] with a trained W that starts out equal to
    adding."""

    def __post_init__(self) -> None:
        check_number(self, "num_positions", low=1, optional=True, integer=True)
        check_choice(self, "init", ("interpolate", "repeat", "hierarchical", "sinusoidal", "random"))
        self._check_fusion()

    def resolve(self: L, shape: ModelShape) -> L:
        rows = self.num_positions or shape.trained_length
        resolved = self.replace(num_positions=rows)
        check_memory(resolved, "num_positions", 16 * rows * shape.hidden)  # float32, four copies while it is made
        return resolved

    def for_length(self: L, length: int, shape: ModelShape) -> L:
        if self.num_positions not in (None, length):
            raise EncodingError(
                f"learned: num_positions={self.num_positions} conflicts with a context length of {length}. Give one."
            )
        return self.replace(num_positions=length)

    def usable_length(self, shape: ModelShape) -> int | None:
        return self.num_positions

    def stock_form(self, shape: ModelShape) -> dict[str, Any] | None:
        if self.fusion != "add" or self.scale != 1.0 or self.learn_scale:
            return None
        return {"max_position_embeddings": self.num_positions}

    @classmethod
    def from_stock_form(cls, entries: dict[str, Any]) -> Learned:
        return cls(num_positions=entries["max_position_embeddings"])

    def new_weights(self, shape: ModelShape, native_table: Tensor | None) -> Weights:
        rows = self.num_positions or shape.trained_length
        if native_table is not None and rows < native_table.shape[0]:
            raise EncodingError(
                f"learned: num_positions={rows} would lose positions of the model's own table, which has "
                f"{native_table.shape[0]}. Give at least as many."
            )
        table = self._start(rows, shape, None if native_table is None else native_rows(native_table))
        return {"table": table, **self._fusion_weights(table, shape, native_table)}

    def _start(self, rows: int, shape: ModelShape, native: Tensor | None) -> Tensor:
        if self.init == "random":
            spread = STANDARD_DEVIATION if native is None else native.std()
            device = "cpu" if native is None else native.device
            return torch.randn(rows, shape.hidden, dtype=torch.float32, device=device) * spread
        if native is None or self.init == "sinusoidal":
            return sinusoid(torch.arange(rows, device="cpu"), 10000.0, shape.hidden)
        return {"interpolate": interpolated, "repeat": repeated, "hierarchical": hierarchical}[self.init](native, rows)

    def _vectors(self, positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        table = weights["table"]
        # On a GPU this look would stop the stream, and embedding() itself stops the kernel; in a compiled graph it
        # cannot be. Nowhere is a position quietly moved into the table.
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            low, high = int(positions.min()), int(positions.max())
            if low < 0 or high >= table.shape[0]:
                raise EncodingError(
                    f"learned: position {low if low < 0 else high} is outside the table of {table.shape[0]} positions. "
                    f"Shorten the input, or patch with num_positions={max(high + 1, table.shape[0])} or more."
                )
        return functional.embedding(positions, table).float()


def interpolated(native: Tensor, rows: int) -> Tensor:
    """Linear interpolation of [n, hidden] to [rows, hidden]: first and last row kept, the same length unchanged."""
    count = native.shape[0]
    if rows == count:
        return native.clone()
    # Whole numbers until the last step, so that rows which fall on an old row equal it.
    place = torch.arange(rows, device="cpu") * (count - 1)
    below = place // (rows - 1)
    part = ((place % (rows - 1)).double() / (rows - 1)).float().unsqueeze(1).to(native.device)
    above = (below + 1).clamp(max=count - 1)
    return native[below] * (1 - part) + native[above] * part


def repeated(native: Tensor, rows: int) -> Tensor:
    """The native rows over and over: row i is old row i mod n (as in Longformer, Beltagy et al. 2020, section 5)."""
    return native[torch.arange(rows, device="cpu") % native.shape[0]]


def hierarchical(native: Tensor, rows: int) -> Tensor:
    """Row i n + j is a u_i + (1 - a) u_j with u_i = (p_i - a p_0) / (1 - a): the first n rows are the old ones."""
    count = native.shape[0]
    if rows > count**2:
        raise EncodingError(
            f"learned: num_positions={rows} is more than init='hierarchical' can compose from {count} rows, which is "
            f"{count**2}. Use fewer, or init='interpolate'."
        )
    basis = (native - ALPHA * native[:1]) / (1 - ALPHA)
    index = torch.arange(rows, device="cpu")
    table = ALPHA * basis[index // count] + (1 - ALPHA) * basis[index % count]
    table[:count] = native  # equal in exact arithmetic; this makes it so in float32
    return table
