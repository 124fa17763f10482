"""What a model does with positions, as a report for people and as plain data.

Everything is read from the model's patch, or from its config where it is not patched; nothing is run, so a model on the
meta device can be described too. `hf_posenc.verify` proves the same things by running the model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.analysis.in_force import InForce, in_force
from hf_posenc.attention import stock_name
from hf_posenc.checkpoint import PREFIX
from hf_posenc.encodings.rope import inverse_powers
from hf_posenc.patch import position_parameters
from hf_posenc.positions import CALL

WIDTH = 100
"""Columns of the report."""
PAIRS_SHOWN = 12
"""Rows of the table of wavelengths; `to_dict` has them all."""
HEADS_SHOWN = 8
"""Columns of the tables of heads."""
ONE_PERCENT = math.log(100)
"""A score lower by this gives a weight of 1 %."""


@dataclass(frozen=True)
class Pair:
    """One pair of dimensions that turns together."""

    wavelength: float
    """Tokens in which it completes a turn; infinite where it stands still."""
    turns: float
    """Turns over the trained length."""
    divided_by: float
    """Its frequency without scaling, over the one in force: 1 where it is kept as it was."""


@dataclass(frozen=True)
class Rotary:
    """The rotation in force."""

    pairs: tuple[Pair, ...]
    amplitude: float
    """What cos and sin are multiplied with; scores grow by its square."""
    at_length: int | None
    """Tokens of the sequence that the numbers are for, where they depend on it."""

    @property
    def unfinished(self) -> int:
        """How many pairs never complete a turn over the trained length."""
        return sum(pair.turns < 1 for pair in self.pairs)

    @property
    def scaled(self) -> int:
        """How many pairs are not turned as they were without scaling."""
        return sum(abs(pair.divided_by - 1) > 1e-6 for pair in self.pairs)


@dataclass(frozen=True)
class Bias:
    """The score bias in force."""

    distances: tuple[int, ...]
    """Query minus key position, in tokens."""
    values: tuple[tuple[float, ...], ...] | None
    """Bias at each distance, for each head; None where the weights have no values yet (meta device)."""
    query_position: int
    """Where the query stands; only encodings that look at it depend on this."""
    slopes: tuple[float, ...] | None
    """Loss of score per token, for each head, where the bias is a straight line."""

    @property
    def one_percent_distances(self) -> tuple[float, ...] | None:
        """Tokens at which the weight of each head has fallen to 1 % of that at distance 0, where it has slopes."""
        return None if self.slopes is None else tuple(ONE_PERCENT / slope for slope in self.slopes)


@dataclass(frozen=True)
class NewWeight:
    """A weight that the patch brought."""

    name: str
    shape: tuple[int, ...]
    trains: bool


@dataclass(frozen=True)
class Description:
    """What `describe` says of a model. `str` is a report for people, `to_dict` plain data."""

    model_type: str
    encoding: str
    """In force, as it was asked for."""
    native: str
    """What the model came with."""
    patched: bool
    embedding: str
    """What happens at the embedding site."""
    rotary: str
    """What happens at the rotary site."""
    score: str
    """What happens at the score site."""
    causal: bool
    trained_length: int
    usable_length: int | None
    """Tokens; None where the encoding sets no limit."""
    theta: float | None
    factor: float | None
    keep_native: bool
    native_weight: float
    """How much of the native encoding acts: 1 where the model is not patched."""
    attention: str
    """Attention implementation, under its stock name."""
    saved_as: str
    """`model_type` of the saved model."""
    rotation: Rotary | None
    bias: Bias | None
    new_weights: tuple[NewWeight, ...]
    trainable: int
    """Parameters of the whole model that train."""
    parameters: int
    """Parameters of the whole model."""

    @property
    def opens_in_stock(self) -> bool:
        """True where transformers opens the saved model without this package."""
        return self.saved_as == self.model_type

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON; a wavelength without end is None."""
        values = asdict(self)
        values["opens_in_stock"] = self.opens_in_stock
        if self.rotation is not None:
            values["rotation"].update(unfinished=self.rotation.unfinished, scaled=self.rotation.scaled)
        if self.bias is not None:
            values["bias"]["one_percent_distances"] = self.bias.one_percent_distances
        return _plain(values)

    def __str__(self) -> str:
        lines = [self._title(), ""]
        rows = [
            ("embedding", self.embedding),
            ("rotary", self.rotary),
            ("score", self.score),
            ("trained length", f"{self.trained_length:,} tokens"),
            (
                "usable length",
                "no limit set by the encoding" if self.usable_length is None else f"{self.usable_length:,} tokens",
            ),
        ]
        if self.theta is not None:
            rows.append(("theta", f"{self.theta:,.10g}"))
        if self.factor is not None:
            rows.append(("factor", f"{self.factor:g}"))
        if self.patched:
            rows.append(("native", self._native_text()))
        rows.append(("attention", self.attention))
        rows.append(("saved model", self._saved_text()))
        rows.append(("new weights", self._weights_text()))
        rows.append(("trainable", f"{self.trainable:,} of {self.parameters:,} parameters"))
        for name, text in rows:
            lines += _wrapped(f"  {name:<15} ", text)
        if self.rotation is not None:
            lines += ["", *_rotation_table(self.rotation, self.trained_length)]
        if self.bias is not None:
            lines += ["", *_bias_table(self.bias)]
        return "\n".join(lines)

    def _title(self) -> str:
        kind = "decoder" if self.causal else "encoder"
        where = "patched" if self.patched else "as it came"
        return f"{_cut(self.encoding)} on {self.model_type} ({kind}, {where})"

    def _native_text(self) -> str:
        if not self.keep_native:
            return f"{_cut(self.native)}, replaced"
        return f"{_cut(self.native)}, kept beside it with weight {self.native_weight:g}"

    def _saved_text(self) -> str:
        if self.opens_in_stock:
            return "opens in stock transformers"
        return f"needs `import hf_posenc` before from_pretrained (model type {self.saved_as})"

    def _weights_text(self) -> str:
        if not self.new_weights:
            return "none"
        parts = []
        for weight in self.new_weights:
            size = "x".join(str(n) for n in weight.shape)
            parts.append(f"{weight.name} [{size}]{'' if weight.trains else ' (fixed)'}")
        count = sum(math.prod(weight.shape) for weight in self.new_weights)
        return f"{count:,} parameters: {', '.join(parts)}"


def describe(model: nn.Module) -> Description:
    """What a model does with positions: sites, wavelengths, slopes, trained and usable length, new weights.

    Args:
        model: a transformers model of a registered architecture, patched or not, or a wrapper of one; on any device,
            the meta device too.

    Returns:
        The description; print it, or take `to_dict()`.

    Raises:
        ArchitectureError: not a model of a registered architecture.
    """
    now = in_force(model)
    resolved: Any = now.resolved
    embedding, rotary, score = _sites(now)
    theta = getattr(resolved, "theta", None)
    if theta is None and now.native_beside:
        theta = getattr(now.native, "theta", None)
    expressed = now.plan is None or now.plan.expressed
    return Description(
        model_type=now.architecture.model_type,
        encoding=str(now.encoding),
        native=str(now.encoding if now.plan is None else now.plan.native),
        patched=now.plan is not None,
        embedding=embedding,
        rotary=rotary,
        score=score,
        causal=now.shape.causal,
        trained_length=now.shape.trained_length,
        usable_length=now.usable_length,
        theta=None if theta is None else float(theta),
        factor=None if getattr(resolved, "factor", None) is None else float(resolved.factor),
        keep_native=now.plan is not None and now.plan.keep_native,
        native_weight=now.native_weight,
        attention=str(stock_name(now.base.config._attn_implementation)),
        saved_as=now.architecture.model_type if expressed else PREFIX + now.architecture.model_type,
        rotation=_rotation(now),
        bias=_bias(now),
        new_weights=_new_weights(model, now),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        parameters=sum(p.numel() for p in model.parameters()),
    )


# ---------------------------------------------------------------------- reading the model


def _sites(now: InForce) -> tuple[str, str, str]:
    """What happens at the embedding, rotary and score site."""
    resolved: Any = now.resolved
    beside = f"native {now.native.name} with weight {now.native_weight:g}"
    embedding = rotary = score = "nothing"
    if now.resolved.site == "embedding":
        how = "fused by a trained matrix" if getattr(resolved, "fusion", "add") == "concat" else "added to the tokens"
        rows = getattr(resolved, "num_positions", None)
        embedding = f"{resolved.name}{'' if rows is None else f' table of {rows:,} positions'}, {how}"
        if now.native_beside and now.native.site == "embedding":
            embedding += f"; beside it {beside}"
    elif now.architecture.table is not None:
        embedding = beside if now.native_beside else "silent (the native table is not used)"
    if now.resolved.site == "rotary":
        rotary = _rotary_text(now)
    elif now.architecture.rotary is not None:
        rotary = beside if now.native_beside else "silent (the native rotation is not used)"
    if now.resolved.site == "score":
        score = f"{resolved.name} bias, {'of the past' if now.shape.causal else 'of both sides'}"
    return embedding, rotary, score


def _rotary_text(now: InForce) -> str:
    encoding: Any = now.resolved
    scaled = (
        "unscaled" if getattr(encoding, "factor", None) is None else f"scaled for {encoding.factor:g} times the length"
    )
    name = "default rope" if encoding.rope_type == "default" else encoding.name
    parts = [f"{name}, {scaled}"]
    if encoding.rotary_fraction != 1.0:
        parts.append(f"{now.plan.rotary_dim if now.plan else 0} of {now.shape.head_dim} dimensions of each head")
    if encoding.interleaved:
        parts.append("neighbouring dimensions paired")
    if encoding.length_dependent:
        parts.append("chosen by the length of each sequence")
    if now.native_beside and now.native.site == "rotary":
        parts.append(f"turned further by native {now.native.name} with weight {now.native_weight:g}")
    return ", ".join(parts)


def _rotation(now: InForce) -> Rotary | None:
    at_length = now.usable_length if now.resolved.length_dependent else None
    rotation = now.rotation(at_length)
    if rotation is None:
        return None
    theta = getattr(now.resolved if now.resolved.site == "rotary" else now.native, "theta", None) or 10000.0
    plain = inverse_powers(float(theta), rotation.rotary_dim)
    pairs = []
    for frequency, unscaled in zip(rotation.frequencies.tolist(), plain.tolist(), strict=True):
        wavelength = 2 * math.pi / frequency if frequency > 0 else math.inf
        pairs.append(
            Pair(wavelength, now.shape.trained_length / wavelength, unscaled / frequency if frequency > 0 else math.inf)
        )
    return Rotary(tuple(pairs), rotation.amplitude, at_length)


def _bias(now: InForce) -> Bias | None:
    encoding: Any = now.resolved
    if encoding.site != "score":
        return None
    farthest = max(now.shape.trained_length, 8)
    powers = [0, *(2**i for i in range(0, 40, 2) if 2**i < farthest), farthest]
    slopes = encoding.head_slopes(now.shape.heads) if hasattr(encoding, "head_slopes") else None
    weights = {} if now.plan is None else getattr(now.base, CALL)(torch.empty(0))
    weights = {name: weight.detach() for name, weight in weights.items()}
    if any(weight.is_meta for weight in weights.values()):
        return Bias(tuple(powers), None, farthest, None if slopes is None else tuple(slopes))
    weights = {name: weight.cpu() for name, weight in weights.items()}
    with torch.device("cpu"):
        past = _bias_at(now, powers, farthest, weights)
        if not now.shape.causal:
            both = [-d for d in reversed(powers[1:])] + powers
            full = _bias_at(now, both, farthest, weights)
            if not torch.allclose(full.flip(-1), full):
                past, powers = full, both
    values = tuple(tuple(row) for row in past.tolist())
    return Bias(tuple(powers), values, farthest, None if slopes is None else tuple(slopes))


def _bias_at(now: InForce, distances: list[int], position: int, weights: dict[str, Tensor]) -> Tensor:
    """[heads, distances], float32."""
    query = torch.tensor([[position]])
    return now.resolved.bias(query, query - torch.tensor([distances]), weights, now.shape)[0, :, 0]


def _new_weights(model: nn.Module, now: InForce) -> tuple[NewWeight, ...]:
    """Weights in the patch's own submodule, and a table that was made longer in its place."""
    if now.plan is None:
        return ()
    inside = {id(p) for p in getattr(now.base, CALL).parameters()}
    trained = set(position_parameters(model))
    return tuple(
        NewWeight(name, tuple(p.shape), p.requires_grad)
        for name, p in model.named_parameters()
        if id(p) in inside or name in trained
    )


def _plain(value: Any) -> Any:
    """Lists for tuples, None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------- the report


def _cut(text: str) -> str:
    """The text of an encoding without the end of a long list, which `to_dict` has."""
    return text if len(text) <= 60 else text[:57] + "..."


def _wrapped(head: str, text: str) -> list[str]:
    """`text` behind `head`, broken at spaces to `WIDTH` columns."""
    lines = [head.rstrip() if not text else head]
    for word in text.split():
        if len(lines[-1]) + len(word) > WIDTH and lines[-1].strip():
            lines.append(" " * len(head))
        lines[-1] += word + " "
    return [line.rstrip() for line in lines]


def _rotation_table(rotary: Rotary, trained_length: int) -> list[str]:
    pairs = rotary.pairs
    head = f"Rotation of {len(pairs)} pairs of dimensions"
    if rotary.at_length is not None:
        head += f", in a sequence of {rotary.at_length:,} tokens"
    lines = [head]
    lines.append(
        f"  {rotary.unfinished} of {len(pairs)} never complete a turn over the {trained_length:,} tokens of training"
    )
    if rotary.scaled:
        kept = len(pairs) - rotary.scaled
        most = max(pair.divided_by for pair in pairs)
        divided = sum(math.isclose(pair.divided_by, most, rel_tol=1e-6) for pair in pairs)
        between = rotary.scaled - divided
        lines.append(f"  {kept} as unscaled, {divided} divided by {_short(most)} (the most), {between} in between")
    else:
        lines.append("  none is scaled")
    if rotary.amplitude != 1.0:
        lines.append(f"  cos and sin times {rotary.amplitude:.6g}, so scores times {rotary.amplitude**2:.6g}")
    lines.append(f"  {'pair':>6}  {'wavelength (tokens)':>20}  {'turns in training':>18}  {'divided by':>10}")
    shown = _some(len(pairs), PAIRS_SHOWN)
    for index in shown:
        pair = pairs[index]
        lines.append(
            f"  {index:>6}  {_short(pair.wavelength):>20}  {_short(pair.turns):>18}  {_short(pair.divided_by):>10}"
        )
    if len(shown) < len(pairs):
        lines.append(f"  ({len(shown)} of {len(pairs)} pairs shown)")
    return lines


def _bias_table(bias: Bias) -> list[str]:
    lines: list[str] = []
    if bias.slopes is not None and bias.one_percent_distances is not None:
        lines.append("Slopes (score lost per token), and tokens at which a head's weight has fallen to 1 %")
        heads = _some(len(bias.slopes), HEADS_SHOWN)
        lines.append(_heads("head", [str(h) for h in heads]))
        lines.append(_heads("slope", [_short(bias.slopes[h]) for h in heads]))
        lines.append(_heads("1 % at", [_short(bias.one_percent_distances[h]) for h in heads]))
        if len(heads) < len(bias.slopes):
            lines.append(f"  ({len(heads)} of {len(bias.slopes)} heads shown)")
        lines.append("")
    if bias.values is None:
        return [*lines, "Bias: its weights have no values yet (meta device)"]
    lines.append("Bias added to the scores, by distance (query minus key, tokens) and head")
    heads = _some(len(bias.values), HEADS_SHOWN)
    lines.append(_heads("distance", [str(h) for h in heads]))
    for column, distance in enumerate(bias.distances):
        lines.append(_heads(f"{distance:,}", [_short(bias.values[h][column]) for h in heads]))
    if len(heads) < len(bias.values):
        lines.append(f"  ({len(heads)} of {len(bias.values)} heads shown)")
    return lines


def _heads(name: str, cells: list[str]) -> str:
    return f"  {name:>9}" + "".join(f"  {cell:>9}" for cell in cells)


def _some(count: int, most: int) -> list[int]:
    """Up to `most` of `count` indices, evenly, first and last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _short(value: float) -> str:
    """Four significant digits, thousands grouped."""
    if math.isinf(value):
        return "no end"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
