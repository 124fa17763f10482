"""FIRE: a small learned function of the distance, measured in parts of the context so far.

Li et al. 2023, "Functional Interpolation for Relative Positions Improves Long Context Transformers" (arXiv 2310.04418),
section 3, b(i, j) = f(psi(i - j) / psi(max(L, i))); sizes and starting values from the code in its appendix. Because
distances are divided by the query's own position, a longer context stays within the range seen in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.encoding import ModelShape, ScoreFunction, Weights, check_number
from hf_posenc.encodings._memory import check_memory
from hf_posenc.encodings._score import ScoreBias, distances


@dataclass(frozen=True)
class Fire(ScoreBias):
    """f(psi(query - key) / psi(max(L, query))) with psi(x) = log(c x + 1) and f a network of one hidden layer.

    Encoders take the absolute distance, and the larger of the two positions for the query's. The network's output has
    no offset: one would be the same for all keys, which the softmax does not see.

    Weights:
        c: [1]. Its sign has no meaning.
        L_ratio: [1], L divided by `init_L`. Its sign has no meaning.
        inner, inner_bias: [width], from the scaled distance to the hidden layer.
        outer: [heads, width], from the hidden layer to the bias of each head.
    """

    name: ClassVar[str] = "fire"

    width: int = 32
    """Units of the hidden layer (default: the code in the appendix of the paper)."""
    init_c: float = 0.1
    """Start of c, in 1 / tokens: how soon the logarithm sets in (default: the same code)."""
    init_L: float = 512.0
    """Start of L, in tokens: queries before it measure distances in parts of L (default: the same code)."""

    def __post_init__(self) -> None:
        check_number(self, "width", low=1, integer=True)
        check_number(self, "init_c", low=0, strict=True)
        check_number(self, "init_L", low=1)

    def resolve(self, shape: ModelShape) -> Fire:
        check_memory(self, "width", 4 * self.width * max(CHUNK, shape.heads))
        return self

    def new_weights(self, shape: ModelShape, native_table: Tensor | None) -> Weights:
        def uniform(*size: int, bound: float) -> Tensor:
            return (torch.rand(*size, dtype=torch.float32, device="cpu") * 2 - 1) * bound

        return {
            "c": torch.full((1,), float(self.init_c), dtype=torch.float32, device="cpu"),
            "L_ratio": torch.ones(1, dtype=torch.float32, device="cpu"),
            "inner": uniform(self.width, bound=1.0),
            "inner_bias": uniform(self.width, bound=1.0),
            "outer": uniform(shape.heads, self.width, bound=self.width**-0.5),
        }

    def bias(self, query_positions: Tensor, key_positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        with torch.autocast(query_positions.device.type, enabled=False):
            distance = distances(query_positions, key_positions).squeeze(1).abs()  # [batch, queries, keys]
            reach = query_positions.unsqueeze(-1)
            if not shape.causal:
                reach = torch.maximum(reach, key_positions.unsqueeze(-2))
            c = weights["c"].float().abs()
            least = weights["L_ratio"].float().abs() * float(self.init_L)
            reach = torch.maximum(reach.float(), least)
            part = torch.log1p(c * distance.float()) / torch.log1p(c * reach).clamp(min=1e-6)
            inner, offset, outer = (weights[name].float() for name in ("inner", "inner_bias", "outer"))
            if torch.compiler.is_compiling():  # the compiler fuses it by itself
                hidden = _hidden(part.flatten(1).unsqueeze(1), inner, offset)  # [batch, width, queries * keys]
                return (outer @ hidden).unflatten(-1, part.shape[1:])
            return _Network.apply(part, inner, offset, outer)  # type: ignore[no-any-return]

    def score_function(self, weights: Weights, shape: ModelShape, device: torch.device) -> ScoreFunction | None:
        if self.width > WIDEST:
            return None
        c, inner, offset, outer = (weights[name].float() for name in ("c", "inner", "inner_bias", "outer"))
        c, least = c.abs(), weights["L_ratio"].float().abs() * float(self.init_L)

        def at(query: Tensor, key: Tensor, head: Tensor) -> Tensor:
            reach = query if shape.causal else torch.maximum(query, key)
            reach = torch.maximum(reach.float(), least[0])
            part = torch.log1p(c[0] * (query - key).abs().float()) / torch.log1p(c[0] * reach).clamp(min=1e-6)
            total = torch.zeros_like(part)
            for unit in range(self.width):
                total = total + outer[head, unit] * torch.relu(part * inner[unit] + offset[unit])
            return total

        return at


WIDEST = 64
"""Units of a hidden layer up to which it is written out for every score, in `score_function`."""


CHUNK = 1 << 13
"""Distances that go through the network at once on a CPU: few enough that its hidden layer, `width` times as large,
stays in the cache."""


class _Network(torch.autograd.Function):
    """`outer @ relu(inner * x + offset)` for every x, whose hidden layer is never whole.

    Whole, it would be [batch, width, queries, keys]: with 12 heads and a width of 32 three times the bias itself, and
    reading and writing it is what takes the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, offset: Tensor, outer: Tensor) -> Tensor:
        """x [batch, queries, keys] to [batch, heads, queries, keys]."""
        ctx.save_for_backward(x, inner, offset, outer)
        out = x.new_empty(x.shape[0], len(outer), x.shape[1] * x.shape[2])
        for sample, whole in zip(x.flatten(1), out, strict=True):
            for part in _parts(sample):
                whole[:, part] = outer @ _hidden(sample[part], inner, offset)
        return out.unflatten(-1, x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, inner, offset, outer = ctx.saved_tensors
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        of_inner, of_offset, of_outer = (torch.zeros_like(weight) for weight in (inner, offset, outer))
        for sample, of_sample, upper in zip(x.flatten(1), of_x.flatten(1), grad.flatten(2), strict=True):
            for part in _parts(sample):
                hidden = _hidden(sample[part], inner, offset)
                of_outer.addmm_(upper[:, part], hidden.t())
                change = (outer.t() @ upper[:, part]).mul_(hidden > 0)
                of_inner.addmv_(change, sample[part])
                of_offset += change.sum(1)
                of_sample[part] = inner @ change
        return of_x, of_inner, of_offset, of_outer


def _hidden(x: Tensor, inner: Tensor, offset: Tensor) -> Tensor:
    """[width, distances]."""
    return torch.addcmul(offset.unsqueeze(1), inner.unsqueeze(1), x).relu_()


def _parts(x: Tensor) -> Iterator[slice]:
    chunk = CHUNK if x.device.type == "cpu" else 1 << 20
    return (slice(begin, begin + chunk) for begin in range(0, len(x), chunk))
