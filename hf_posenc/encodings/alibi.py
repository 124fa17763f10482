"""ALiBi: scores fall linearly with distance, at a slope of its own for each head.

Press, Smith and Lewis 2021, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation"
(arXiv 2108.12409), section 3. Nothing to learn, no last position. In decoders it costs next to nothing: under a causal
softmax the bias is an inner product, and `columns` hands it to the fused kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from hf_posenc.encoding import EncodingError, ModelShape, ScoreFunction, Weights, check_factors
from hf_posenc.encodings._score import ScoreBias, constants, distances, padded

A = TypeVar("A", bound="ALiBi")


@dataclass(frozen=True)
class ALiBi(ScoreBias):
    """-slope * (query - key) in decoders, -slope * abs(query - key) in encoders."""

    name: ClassVar[str] = "alibi"
    by_distance: ClassVar[bool] = True

    slopes: tuple[float, ...] | None = None
    """Loss of score per token of distance, one positive number for each head (default: the paper's, 2**(-8 h / heads);
    for head counts that are no power of two as in its code, which BLOOM follows)."""

    def __post_init__(self) -> None:
        check_factors(self, "slopes")

    def resolve(self: A, shape: ModelShape) -> A:
        self.head_slopes(shape.heads)
        return self

    def head_slopes(self, heads: int) -> list[float]:
        """The slope of each head.

        Raises:
            EncodingError: `slopes` of another length.
        """
        if self.slopes is None:
            return paper_slopes(heads)
        if len(self.slopes) != heads:
            raise EncodingError(
                f"alibi: slopes has {len(self.slopes)} numbers; it must have {heads}, one for each head."
            )
        return list(self.slopes)

    def bias(self, query_positions: Tensor, key_positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        distance = distances(query_positions, key_positions)
        if not shape.causal:
            distance = distance.abs()
        slopes = constants(self.head_slopes(shape.heads), like=distance).reshape(-1, 1, 1)
        return distance.float() * -slopes

    def score_function(self, weights: Weights, shape: ModelShape, device: torch.device) -> ScoreFunction:
        slopes = torch.tensor(self.head_slopes(shape.heads), dtype=torch.float32, device=device)

        def at(query: Tensor, key: Tensor, head: Tensor) -> Tensor:
            distance = query - key if shape.causal else (query - key).abs()
            return distance.float() * -slopes[head]

        return at

    def columns(
        self, query_positions: Tensor, key_positions: Tensor, shape: ModelShape, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """slope * (key - query) as an inner product in which every product with a key is exact.

        A slope and a position are each cut into parts of as few bits as `dtype` holds (half of them in float32), so
        that part times part is exact in float32. Each product slope * key is followed by its row term -slope * query,
        so that partial sums stay as small as the distance. Row terms are rounded to float32 at worst, the same for all
        keys of a query.
        """
        slopes = self.head_slopes(shape.heads)
        if dtype not in _PARTS or not shape.causal:  # of an absolute value there is no such form
            return None
        bits, slope_parts, position_parts, unit = _PARTS[dtype]
        if dtype == torch.float16 and max(slopes) * unit >= 2.0**15:  # would overflow
            return None
        # Products are (slope * unit) * (position / unit), which keeps float16 within its range.
        parts = _cut_slopes(slopes, bits, slope_parts)
        slope = [constants([s * unit for s in part], like=query_positions).reshape(1, -1, 1) for part in parts]
        query = [part.unsqueeze(1) / unit for part in _cut_positions(query_positions, bits, position_parts)]
        key = [part.unsqueeze(1) / unit for part in _cut_positions(key_positions, bits, position_parts)]
        one = torch.ones_like(key[0])

        left: list[Tensor] = []
        right: list[Tensor] = []
        if dtype == torch.bfloat16:
            # A row term needs several bfloat16 columns. Two make that of the coarsest position part exact, so that what
            # is left is small before the finer parts are added; three hold the rest of the row for all other products.
            coarse = -slope[0] * query[0]
            whole = sum((s * q for s in slope[1:] for q in query), slope[0] * (query[1] + query[2]))
            terms = [(0, 0, _rounded(coarse, 2)), (0, 1, []), (0, 2, _rounded(-whole, 3))]
            terms += [(i, j, []) for i in (1, 2) for j in range(position_parts)]
        else:
            terms = [(i, j, [-s * q / unit]) for i, s in enumerate(slope) for j, q in enumerate(query)]
        for i, j, rows in terms:
            left += [slope[i].expand_as(query[0] * slope[0]), *rows]
            right += [key[j], *(one if dtype == torch.bfloat16 else one * unit for _ in rows)]
        return padded(torch.stack(left, dim=-1).to(dtype)), padded(torch.stack(right, dim=-1).to(dtype))


_PARTS: dict[torch.dtype, tuple[int, int, int, float]] = {
    # bits of a part, parts of a slope, parts of a position, unit
    torch.float32: (12, 2, 2, 1.0),
    torch.bfloat16: (8, 3, 3, 1.0),
    torch.float16: (11, 2, 2, 256.0),
}


def paper_slopes(heads: int) -> list[float]:
    """The slope of each head, as in the paper's code.

    2**(-8 h / n) for h = 1 … n where the number of heads n is a power of two; otherwise those of the next lower power
    of two, followed by every other one of its double (the first, the third, …) until there are enough.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]


def _cut_slopes(slopes: list[float], bits: int, parts: int) -> list[list[float]]:
    """Numbers of `bits` significant bits that add up to each slope, largest first: [parts][heads]."""
    cut = []
    rest = list(slopes)
    for _ in range(parts):
        part = []
        for value in rest:
            mantissa, exponent = math.frexp(value)
            part.append(math.ldexp(round(mantissa * 2**bits), exponent - bits))
        rest = [value - taken for value, taken in zip(rest, part, strict=True)]
        cut.append(part)
    return cut


def _cut_positions(positions: Tensor, bits: int, parts: int) -> list[Tensor]:
    """Parts of `bits` bits (11 in float32) that add up to each position, most significant first, float32."""
    bits = min(bits, 11)
    cut = []
    for part in range(parts - 1, 0, -1):
        high = (positions >> (bits * part)) << (bits * part)
        cut.append(high.float())
        positions = positions - high
    return [*cut, positions.float()]


def _rounded(values: Tensor, parts: int) -> list[Tensor]:
    """bfloat16 numbers that add up to `values`, to 8 bits for each part, as float32."""
    cut = []
    for _ in range(parts):
        part = values.bfloat16().float()
        values = values - part
        cut.append(part)
    return cut
