"""How attention falls with distance, measured on text: one curve for each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_posenc.analysis.in_force import InForce, in_force
from hf_posenc.analysis.watch import undisturbed, watch

QUANTITIES = ("weights", "scores")


@dataclass(frozen=True)
class DistanceCurve:
    """Means over rows and queries."""

    of: str
    """ "weights": attention weights; "scores": scores less that of the query's own token, which no softmax notices."""
    distances: tuple[int, ...]
    """Query minus key position, in tokens: from 0 in decoders, of both signs in encoders."""
    values: Tensor
    """[layers, heads, distances], float64."""
    counts: tuple[int, ...]
    """Pairs of a query and a key behind each distance, in each head."""


def distance_curve(model: nn.Module, input_ids: Tensor, *, of: str = "weights") -> DistanceCurve:
    """Mean attention weight, or score, at each distance, for every head.

    Args:
        model: a transformers model of a registered architecture, patched or not.
        input_ids: [batch, length], without padding. Memory is batch x heads x length^2 numbers for one layer at a time.
        of: "weights", or "scores": before the softmax, less the score of the query's own token.

    Raises:
        ValueError: an `of` that is not known, or `input_ids` of another shape or longer than a table of positions.
    """
    if of not in QUANTITIES:
        raise ValueError(f"of={of!r} is not known; choose one of {', '.join(map(repr, QUANTITIES))}.")
    now = in_force(model)
    inputs = checked(now, input_ids, rows=1)
    values = []
    with undisturbed(now), torch.no_grad():
        layers, _ = watch(now, input_ids=inputs, attention_mask=torch.ones_like(inputs), return_dict=True)
        for layer in layers:
            scores = layer.scores()
            visible = torch.isfinite(scores)
            if of == "weights":
                numbers = torch.softmax(scores, dim=-1)
            else:
                numbers = scores - scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            values.append(mean_by_distance(numbers, visible, now.shape.causal).cpu())
    length = inputs.shape[1]
    distances = _distances(length, now.shape.causal)
    counts = tuple(inputs.shape[0] * (length - abs(d)) for d in distances)
    return DistanceCurve(of, distances, torch.stack(values), counts)


def mean_by_distance(values: Tensor, visible: Tensor, causal: bool) -> Tensor:
    """Mean over rows, and over the pairs of a query and a visible key that lie equally far apart.

    Args:
        values: [batch, heads, length, length].
        visible: boolean, of a shape that fits.
        causal: leave out keys of the future.

    Returns:
        [heads, distances]: from 0 on, or in encoders from the farthest key of the future to the farthest of the past.
    """
    length = values.shape[-1]
    tokens = torch.arange(length, device=values.device)
    offset = 0 if causal else length - 1
    place = (tokens.unsqueeze(1) - tokens.unsqueeze(0) + offset).clamp(min=0).flatten()
    visible = visible.expand_as(values)
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool, device=values.device).tril()
    heads = values.shape[1]
    total = values.new_zeros(heads, length + offset)
    total.index_add_(1, place, values.masked_fill(~visible, 0.0).sum(0).flatten(1))
    count = values.new_zeros(heads, length + offset)
    count.index_add_(1, place, visible.to(values.dtype).sum(0).flatten(1))
    return total / count


def checked(now: InForce, input_ids: Tensor, rows: int) -> Tensor:
    """`input_ids` on the model's device.

    Raises:
        ValueError: not [batch, length] with at least `rows` rows and 2 tokens, or longer than a table of positions.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.shape[0] < rows or input_ids.shape[1] < 2:
        shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(
            f"input_ids={shape} is not allowed; it must be [batch, length] with at least {rows} rows of 2 tokens."
        )
    limit = now.position_limit
    if limit is not None and input_ids.shape[1] > limit:
        raise ValueError(
            f"input_ids has {input_ids.shape[1]} tokens, but the model's table has {limit} positions. Shorten it."
        )
    return input_ids.to(now.base.get_input_embeddings().weight.device)  # type: ignore[union-attr,arg-type]


def _distances(length: int, causal: bool) -> tuple[int, ...]:
    return tuple(range(0 if causal else 1 - length, length))
