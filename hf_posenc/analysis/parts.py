"""What position contributes to a score, and by which way it comes in.

A query is split into what depends on its position alone and the rest: its mean over many texts at that position, less
the mean over all positions, is the position part; what remains is content. Keys likewise. A score is then the sum of

    content_content + content_position + position_content + position_position     (query part first, unrotated)
    + rotation     what turning the query and the key changes
    + bias         what is added to the score

so that absolute encodings show in the second to fourth part, rotary ones in the fifth, biases in the last. The split of
vectors into position and the rest is that of Song and Zhong 2023, "Uncovering hidden geometry in Transformers via
disentangling position and context" (arXiv 2310.04861); the four terms are those of Ke, He and Liu 2020, "Rethinking
Positional Encoding in Language Pre-training" (arXiv 2006.15595), here of what each layer really receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.analysis.curves import checked, mean_by_distance
from hf_posenc.analysis.in_force import InForce, in_force
from hf_posenc.analysis.watch import Layer, undisturbed, watch
from hf_posenc.sites import rotate

PARTS = ("content_content", "content_position", "position_content", "position_position", "rotation", "bias")


@dataclass(frozen=True)
class ScoreParts:
    """The parts of every score of one layer, [batch, heads, queries, keys] each, float64. They add up to the score,
    up to a constant for each query, which the softmax does not see."""

    content_content: Tensor
    content_position: Tensor
    position_content: Tensor
    position_position: Tensor
    rotation: Tensor
    bias: Tensor

    @property
    def total(self) -> Tensor:
        """Their sum."""
        return torch.stack([getattr(self, name) for name in PARTS]).sum(0)


@dataclass(frozen=True)
class Decomposition:
    """The parts of the scores of every layer and head, summed up."""

    parts: tuple[str, ...]
    spread: Tensor
    """[layers, heads, parts]: how far a part tells the keys of a query apart. Root mean square over the visible keys
    of its difference from their mean, in units of the score (nats)."""
    distances: tuple[int, ...]
    """Query minus key position, in tokens: from 0 in decoders, of both signs in encoders."""
    by_distance: Tensor
    """[layers, heads, parts, distances]: mean of a part over all content, at each distance."""


def decompose(model: nn.Module, input_ids: Tensor) -> Decomposition:
    """What content and position contribute to the scores of every layer and head.

    Means over rows stand for means over all texts, so position parts carry noise of one over the square root of the
    number of rows. Rows that are one text, rotated by 0, 1, 2, … tokens, put every token at every position: then the
    first layer has no such noise.

    Args:
        model: a transformers model of a registered architecture, patched or not.
        input_ids: [batch, length], at least 2 rows, better 16 or more, without padding.

    Raises:
        ValueError: `input_ids` of another shape, or longer than a table of positions.
    """
    now, layers, positions = _look(model, input_ids)
    causal = now.shape.causal
    length = positions.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool, device=positions.device)
    visible = visible.tril() if causal else visible
    spreads, curves = [], []
    for layer in layers:
        parts = _parts(now, layer, positions)
        spread, curve = [], []
        for name in PARTS:
            part = getattr(parts, name)
            spread.append(_spread(part, visible))
            curve.append(mean_by_distance(part, visible, causal))
        spreads.append(torch.stack(spread, dim=-1).cpu())
        curves.append(torch.stack(curve, dim=1).cpu())
    distances = tuple(range(0 if causal else 1 - length, length))
    return Decomposition(PARTS, torch.stack(spreads), distances, torch.stack(curves))


def score_parts(model: nn.Module, input_ids: Tensor, layer: int) -> ScoreParts:
    """The parts of every single score of one layer.

    Args:
        model, input_ids: as in `decompose`. Memory is 6 x batch x heads x length^2 numbers.
        layer: index of the layer, from 0; negative ones count from the last.

    Raises:
        ValueError: no such layer; otherwise as `decompose`.
    """
    count = in_force(model).shape.layers
    if not isinstance(layer, int) or isinstance(layer, bool) or not -count <= layer < count:
        raise ValueError(f"layer={layer!r} is not allowed; the model has layers 0 to {count - 1}.")
    now, layers, positions = _look(model, input_ids)
    return _parts(now, layers[layer], positions)


def _look(model: nn.Module, input_ids: Tensor) -> tuple[InForce, list[Layer], Tensor]:
    now = in_force(model)
    inputs = checked(now, input_ids, rows=2)
    with undisturbed(now), torch.no_grad():
        layers, _ = watch(now, input_ids=inputs, attention_mask=torch.ones_like(inputs), return_dict=True)
    return now, layers, torch.arange(inputs.shape[1], device=inputs.device).unsqueeze(0)


@torch.no_grad()
def _parts(now: InForce, layer: Layer, positions: Tensor) -> ScoreParts:
    assert layer.raw_query is not None and layer.raw_key is not None
    query, key = layer.raw_query.double(), layer.raw_key.double()
    query_position, key_position = _of_position(query), _of_position(key)
    query_content, key_content = query - query_position, key - key_position
    turned = torch.zeros((), dtype=torch.float64, device=query.device)
    rotation = now.rotation(positions.shape[1])
    if rotation is not None:
        tables = [table.to(query.device) for table in rotation.tables(positions)]
        after = [rotate(x, tables[0], tables[1], rotation.interleaved) for x in (query, key)]
        turned = _products(after[0], after[1], layer) - _products(query, key, layer)
    bias = torch.zeros((), dtype=torch.float64, device=query.device)
    if now.resolved.site == "score":
        bias = now.resolved.bias(positions, positions, now.weights(positions), now.shape).double()
    content = _products(query_content, key_content, layer)

    def whole(part: Tensor) -> Tensor:
        return part.expand_as(content)

    return ScoreParts(
        content_content=content,
        content_position=whole(_products(query_content, key_position, layer)),
        position_content=whole(_products(query_position, key_content, layer)),
        position_position=whole(_products(query_position, key_position, layer)),
        rotation=whole(turned),
        bias=whole(bias),
    )


def _of_position(x: Tensor) -> Tensor:
    """[1, length, heads, head_dim]: mean over rows, less the mean over rows and positions."""
    at_position = x.mean(dim=0, keepdim=True)
    return at_position - at_position.mean(dim=1, keepdim=True)


def _products(query: Tensor, key: Tensor, layer: Layer) -> Tensor:
    """Scaled scores [batch, heads, queries, keys] of queries and keys [batch, length, heads, head_dim]."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    product: Any = query @ key.transpose(-1, -2)
    return product * layer.scaling


def _spread(part: Tensor, visible: Tensor) -> Tensor:
    """[heads]: root mean square of a part less its mean over the visible keys of each query."""
    count = visible.sum(-1, keepdim=True)
    centred = part - (part * visible).sum(-1, keepdim=True) / count
    return ((centred * visible).square().sum(dim=(0, 2, 3)) / (part.shape[0] * visible.sum())).sqrt()
