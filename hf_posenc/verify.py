"""Proof on the live model that an encoding is in force.

Each check runs the model on random tokens and measures. At the three sites it compares what is really computed (the
vectors that enter the first layer, the queries and keys that attention receives, the scores that its softmax is taken
of) with the encoding's own numbers in float64; the others compare two runs whose outputs must be equal, or must differ.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from hf_posenc.analysis.in_force import InForce, Rotation, in_force
from hf_posenc.analysis.watch import Layer, NotSeenError, attention_as, undisturbed, watch
from hf_posenc.attention import BACKENDS, stock_name
from hf_posenc.patch import position_parameters
from hf_posenc.positions import sequence_length
from hf_posenc.sites import rotate

SHORT = 24
"""Tokens of the sequences that are run, unless told otherwise: enough to see every site, quick on a large model."""
FAR = 65536
"""Tokens over which positions are spread, at most, when a site is measured: slow wavelengths show only far out."""
BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.25}
"""Difference between two runs, relative to the size of a token's vector, up to which they count as equal: what rounding
makes of it in models of some tens of layers. Two runs that must differ do so by more than this part of what another
token would change, so that a model in which little depends on the other tokens is not taken for one without order."""
ROUNDING = 8
"""Units in the last place below which no difference between two runs means anything."""


class VerificationError(RuntimeError):
    """An encoding that is not in force as it should be."""


@dataclass(frozen=True)
class Check:
    """One measurement."""

    name: str
    passed: bool | None
    """None where it is inconclusive: it could not be made, or the model shows too little to tell."""
    measured: float
    bound: float
    relation: str
    """How `measured` must stand to `bound`: "<=" or ">"."""
    explanation: str
    """What it shows, or why it failed, in one sentence."""

    def to_dict(self) -> dict[str, Any]:
        """The check as plain data; numbers that JSON does not know are None."""
        numbers = {n: getattr(self, n) if math.isfinite(getattr(self, n)) else None for n in ("measured", "bound")}
        return {
            "name": self.name,
            "passed": self.passed,
            **numbers,
            "relation": self.relation,
            "explanation": self.explanation,
        }


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    encoding: str
    model_type: str
    length: int
    """Tokens of the sequences that were run."""
    dtype: str
    attention: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True where no check failed and some check passed. Inconclusive ones count for nothing: look at `checks`."""
        return self.inconclusive < len(self.checks) and all(check.passed is not False for check in self.checks)

    @property
    def inconclusive(self) -> int:
        """How many checks neither passed nor failed."""
        return sum(check.passed is None for check in self.checks)

    @property
    def ok(self) -> bool:
        """The same as `passed`."""
        return self.passed

    def raise_if_failed(self) -> None:
        """Do nothing where everything passed.

        Raises:
            VerificationError: with the report of what failed.
        """
        if not self.passed:
            raise VerificationError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        fields = {
            name: getattr(self, name) for name in ("encoding", "model_type", "length", "dtype", "attention", "passed")
        }
        return {**fields, "checks": [check.to_dict() for check in self.checks]}

    def __str__(self) -> str:
        failed, all_ = sum(check.passed is False for check in self.checks), len(self.checks)
        verdict = f"NOT in force as it should be: {failed} of {all_} checks failed" if failed else "in force"
        if self.inconclusive == all_:
            verdict = "nothing can be concluded"
        elif self.inconclusive:
            verdict += f" ({self.inconclusive} of {all_} checks inconclusive)"
        lines = [f"{self.encoding} on {self.model_type}: {verdict}"]
        lines.append(f"({self.length} random tokens, {self.dtype}, {self.attention} attention)")
        lines += ["", f"{'check':<14}  {'':<12}  {'measured':>8}     {'bound':>8}  what it shows"]
        words = {True: "ok", False: "FAIL", None: "inconclusive"}
        for check in self.checks:
            measured, bound = _number(check.measured), _number(check.bound)
            head = f"{check.name:<14}  {words[check.passed]:<12}  {measured:>8} {check.relation:>2}  {bound:>8}  "
            text = textwrap.wrap(check.explanation, 100 - len(head)) or [""]
            lines.append((head + text[0]).rstrip())
            lines += [" " * len(head) + more for more in text[1:]]
        return "\n".join(lines)


def verify(model: nn.Module, *, length: int | None = None, seed: int = 0) -> Verification:
    """Prove on the live model that an encoding is in force, native or patched.

    The model is left as it was: weights, gradients, modes, hooks, configuration and random state.

    Args:
        model: a transformers model of a registered architecture, patched or not, or a wrapper of one.
        length: tokens of the sequences to run (default: 24, fewer where a table of positions is shorter).
        seed: of the random tokens.

    Returns:
        The report; `report.passed` says whether everything is as it should be.

    Raises:
        ValueError: a length that is too short or longer than a table of positions; a model on the meta device.
        ArchitectureError: not a model of a registered architecture.
    """
    now = in_force(model)
    embeddings = now.base.get_input_embeddings()
    weight: Tensor = embeddings.weight  # type: ignore[union-attr,assignment]
    if weight.is_meta:
        raise ValueError("model is on the meta device: there are no weights to run. Load it first.")
    limit = now.position_limit
    if length is None:
        length = SHORT if limit is None else min(SHORT, limit)
    if not isinstance(length, int) or isinstance(length, bool) or length < 4 or (limit is not None and length > limit):
        most = "" if limit is None else f" and at most {limit}, the positions that the model's table has"
        raise ValueError(f"length={length!r} is not allowed; it must be a whole number of tokens of at least 4{most}.")
    vocabulary = int(weight.shape[0])
    tokens = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(seed)).to(weight.device)
    pad = getattr(now.base.config, "pad_token_id", None)
    tokens[tokens == (-1 if pad is None else pad)] = 0 if pad else 1  # transformers warns of pads without a mask
    with undisturbed(now), torch.no_grad(), sequence_length(1):
        proof = _Proof(now, tokens, weight.dtype)
        checks = [check for make in proof.checks() if (check := _guarded(*make)) is not None]
    attention = str(stock_name(now.base.config._attn_implementation))
    dtype = str(weight.dtype).removeprefix("torch.")
    return Verification(str(now.encoding), now.architecture.model_type, length, dtype, attention, tuple(checks))


def _guarded(name: str, make: Callable[[], Check | None]) -> Check | None:
    """A check that cannot even be run has failed: a hook that is gone may show as an exception."""
    try:
        return make()
    except NotSeenError as reason:
        return Check(name, None, math.nan, math.nan, "", str(reason))
    except Exception as error:
        return Check(name, False, math.nan, math.nan, "", f"The model raised {type(error).__name__}: {error}")


class _Proof:
    """The checks, and what they share: two rows of random tokens and the outputs for them."""

    def __init__(self, now: InForce, tokens: Tensor, dtype: torch.dtype) -> None:
        self.now = now
        self.tokens = tokens
        self.length = tokens.shape[1]
        self.dtype = dtype
        self.bound = BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
        self.epsilon = torch.finfo(dtype).eps
        arguments = inspect.signature(now.base.forward).parameters
        self.cache_name = "cache" if "cache" in arguments else "past_key_values"
        unpatched_limit = now.shape.trained_length if now.plan is None and now.resolved.length_dependent else None
        self.limit = now.position_limit if unpatched_limit is None else unpatched_limit

    def checks(self) -> list[tuple[str, Callable[[], Check | None]]]:
        made: list[tuple[str, Callable[[], Check | None]]] = [
            ("embedding", self.embedding),
            ("rotation", self.rotation),
            ("score", self.score),
            ("shift", self.shift),
            ("swap", self.swap),
        ]
        if self.now.shape.causal:
            made += [("future", self.future), ("cache", self.cache)]
        made += [
            ("left padding", lambda: self.padding("left")),
            ("right padding", lambda: self.padding("right")),
            ("backend", self.backend),
            ("gradient", self.gradient),
        ]
        return made

    # ------------------------------------------------------------------ the three sites

    def embedding(self) -> Check | None:
        """The vectors that enter the first layer (before its normalisation) against tokens fused with positions."""
        now = self.now
        if not now.absolute and now.architecture.table is None and now.plan is None:
            return None
        positions = self._spread()
        tokens = self.tokens[:1]
        plain = now.base.get_input_embeddings()(tokens)  # type: ignore[operator]
        seen: dict[str, Tensor] = {}

        def entering(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if kwargs.get("inputs_embeds") is not None:
                seen["fused"] = kwargs["inputs_embeds"]

        def from_table(module: nn.Module, args: Any, output: Tensor) -> None:
            seen["table"] = output

        handles: list[Any] = [now.base.register_forward_pre_hook(entering, with_kwargs=True)]
        if now.architecture.table is not None:
            handles.append(now.base.get_submodule(now.architecture.table).register_forward_hook(from_table))
        try:
            self._run(tokens, positions=positions)
        finally:
            for handle in handles:
                handle.remove()
        measured = (seen.get("fused", plain).double() + seen.get("table", torch.zeros_like(plain)).double()).cpu()
        expected = plain
        if now.table_runs_natively:
            expected = plain.double() + functional.embedding(positions, self._table()).double()
        elif now.resolved.site == "embedding":
            expected = now.resolved.embed(plain, positions, now.weights(tokens), now.shape)
        if now.native_beside and now.native.site == "embedding":
            expected = expected.double() + now.native_weight * functional.embedding(positions, self._table()).double()
        error = (measured - expected.double().cpu()).abs()
        allowed = 4 * self.epsilon * (expected.double().abs() + plain.double().abs()).cpu().clamp(min=1e-3)
        what = "Tokens and positions enter the first layer as it says."
        if not now.absolute:
            what = "No position vector enters the first layer."
        return _small("embedding", *_worst(error, allowed), what)

    def rotation(self) -> Check:
        """Queries and keys as attention receives them, against those of the projections, turned by the encoding."""
        layers, positions, rotation = self._sites()
        base, found = 4 * self.epsilon, []
        for layer in layers:
            assert layer.raw_query is not None and layer.raw_key is not None
            for raw, live in ((layer.raw_query, layer.query()), (layer.raw_key, layer.key(self.now.shape.key_heads))):
                before, after = raw.double().cpu(), live.transpose(1, 2).cpu()
                expected = before if rotation is None else _turned(before, rotation, positions)
                slack = torch.zeros(1, dtype=torch.float64)
                if rotation is not None:  # stock's angles are float32: they are off by a rounding of the angle itself
                    angles = positions.cpu().double().unsqueeze(-1) * rotation.frequencies * 3e-7
                    pairs = _by_dimension(angles, rotation)
                    slack = (
                        functional.pad(pairs, (0, before.shape[-1] - rotation.rotary_dim)).unsqueeze(2)
                        * rotation.amplitude
                    )
                size = _pair_size(before, rotation)
                found.append(_worst((after - expected).abs(), (base + slack) * size + 1e-9))
        if rotation is None:
            what = "Queries and keys are not rotated."
        else:
            last = int(positions.max())
            what = f"q and k turn by its frequencies, to position {last}."
        return _small("rotation", *max(found, key=_proportion), what)

    def score(self) -> Check:
        """Scores as the softmax gets them, less q·k of the turned projections, against the bias of the encoding."""
        layers, positions, rotation = self._sites()
        now = self.now
        bias = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        if now.resolved.site == "score":
            bias = now.resolved.bias(positions, positions, now.weights(positions), now.shape).double().cpu()
        found = []
        for layer in layers:
            assert layer.raw_query is not None and layer.raw_key is not None
            query, key = (x.double().cpu() for x in (layer.raw_query, layer.raw_key))
            if rotation is not None:
                query, key = (_turned(x, rotation, positions) for x in (query, key))
            query, key = query.transpose(1, 2), key.transpose(1, 2)
            key = key.repeat_interleave(now.shape.heads // now.shape.key_heads, dim=1)
            content = query @ key.transpose(-1, -2) * layer.scaling
            size = query.norm(dim=-1).unsqueeze(-1) * key.norm(dim=-1).unsqueeze(-2) * layer.scaling
            scores = layer.scores().cpu()
            visible = torch.isfinite(scores)
            # A constant for each query cancels in the softmax, and the fused form of a bias leaves it out: compare with
            # what the query's own token gets.
            measured, expected = (_less_own(x, visible) for x in (scores - content, bias.expand_as(scores)))
            exact = layer.exact and rotation is None
            allowed = (1e-5 if exact else 8 * self.epsilon) * size
            if rotation is not None:
                allowed = allowed + _drift(rotation, positions) * size
            allowed = allowed + allowed.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            size_of_bias = bias.abs() + bias.abs().diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            allowed = allowed + 4 * self.epsilon * size_of_bias + 3e-5
            found.append(_worst((measured - expected).abs(), allowed.expand_as(scores)))
        what = "Nothing is added to the scores." if now.resolved.site != "score" else "Its bias is in the scores."
        return _small("score", *max(found, key=_proportion), what)

    # ------------------------------------------------------------------ pairs of runs

    def shift(self) -> Check:
        """All positions moved by the same amount."""
        by, length = self._shift()
        positions = torch.arange(length, device=self.tokens.device).unsqueeze(0)
        tokens = self.tokens[:1, :length]
        moved = _distance(self._run(tokens, positions=positions), self._run(tokens, positions=positions + by))
        if self.now.absolute or not self._bias_is_relative(positions, by):
            return self._large("shift", moved, f"Moving all positions by {by} changes the output.")
        return self._same("shift", moved, f"Moving all positions by {by} changes nothing.")

    def swap(self) -> Check:
        """Two tokens changed places; read where neither of them stands."""
        now, (first, second) = self.now, self._pair()
        tokens = self.tokens[:1].clone()
        if tokens[0, first] == tokens[0, second]:
            tokens[0, second] = self._another(tokens[0, first])
        swapped = tokens.clone()
        swapped[0, first], swapped[0, second] = tokens[0, second], tokens[0, first]
        moved = self._elsewhere(tokens, swapped)
        blind = now.resolved.site == "none" and not now.native_beside
        if blind and (not now.shape.causal or now.shape.layers == 1):
            return self._same("swap", moved, "Swapping two tokens changes nothing elsewhere.")
        return self._large("swap", moved, "Swapping two tokens changes the output elsewhere.")

    def future(self) -> Check:
        """Another last token must change nothing before it."""
        other = self.tokens[:1].clone()
        other[0, -1] = self._another(other[0, -1])
        moved = _distance(self._run(self.tokens[:1])[:, :-1], self._run(other)[:, :-1])
        return self._same("future", moved, "No token sees what comes after it.")

    def cache(self) -> Check:
        """One pass against a first half at once and the rest token by token."""
        with sequence_length(self.length):
            whole = self._run(self.tokens)
            cache, parts, half = DynamicCache(config=self.now.base.config), [], self.length // 2
            for begin, end in [(0, half), *((i, i + 1) for i in range(half, self.length))]:
                output = self.now.base(
                    input_ids=self.tokens[:, begin:end], use_cache=True, return_dict=True, **{self.cache_name: cache}
                )
                parts.append(output.last_hidden_state)
        moved = _distance(whole, torch.cat(parts, dim=1))
        return self._same("cache", moved, "Token by token with a cache equals one pass.")

    def padding(self, side: str) -> Check:
        """A shorter row in a padded batch, and the longer one beside it, against each row alone."""
        short = self.length // 2 + 1
        pads = self.length - short
        real = slice(pads, None) if side == "left" else slice(0, short)
        tokens = self.tokens.clone()
        tokens[1, real] = self.tokens[1, :short]
        mask = torch.ones_like(tokens)
        mask[1, :pads] = 0
        if side == "right":
            mask[1] = mask[1].flip(0)
        # Stock models number tokens from the padded start; `generate` tells them better, and so is done here.
        positions = (mask.cumsum(-1) - 1).clamp(min=0) if self.now.plan is None else None
        both = self._run(tokens, positions=positions, mask=mask)
        alone = [self._run(self.tokens[:1]), self._run(self.tokens[1:, :short])]
        moved = max(_distance(both[:1], alone[0]), _distance(both[1:, real], alone[1]))
        return self._same(f"{side} padding", moved, f"Padding on the {side} changes nothing for real tokens.")

    def backend(self) -> Check:
        """The model's attention implementation against another one."""
        used = stock_name(self.now.base.config._attn_implementation)
        other = "eager" if used == "sdpa" else "sdpa"
        here = self._run(self.tokens)
        with attention_as(self.now, other):
            there = self._run(self.tokens)
        if used not in BACKENDS and self.now.resolved.site == "score":
            return Check("backend", False, math.nan, math.nan, "", f"{used!r} attention cannot apply a score bias.")
        return self._same("backend", _distance(here, there), f"{used!r} and {other!r} attention agree.")

    def gradient(self) -> Check | None:
        """Every trainable position weight must get one, and no trainable native table may be left without."""
        named = dict(self.now.top.named_parameters())
        names = [name for name in position_parameters(self.now.top) if named[name].requires_grad]
        if self.now.architecture.table is not None:
            table = self.now.base.get_submodule(self.now.architecture.table)
            own = {id(p) for p in table.parameters() if p.requires_grad}
            names += [name for name, p in named.items() if id(p) in own and name not in names]
        if not names:
            return None
        with torch.enable_grad():
            output = self._run(self.tokens)
            direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
            loss = (output * direction).float().sum()
            grads = torch.autograd.grad(loss, [named[name] for name in names], allow_unused=True)
        sizes = {name: 0.0 if g is None else float(g.float().norm()) for name, g in zip(names, grads, strict=True)}
        worst = min(sizes, key=lambda name: sizes[name] if math.isfinite(sizes[name]) else -1.0)
        size = sizes[worst]
        good = math.isfinite(size) and size > 0
        noun = "weight gets" if len(names) == 1 else "weights get"
        what = f"{len(names)} position {noun} a gradient; least: {worst.rpartition('.')[2]}."
        return Check("gradient", good, size, 0.0, ">", what if good else f"{worst} trains, but gets no gradient.")

    # ------------------------------------------------------------------ shared steps

    def _pair(self) -> tuple[int, int]:
        """Places of two tokens near the end, before the last."""
        return self.length - 4, self.length - 2

    def _elsewhere(self, tokens: Tensor, others: Tensor) -> float:
        """Distance of two runs where neither of the `_pair` stands and, in decoders, both are seen."""
        pair, last = self._pair(), self.length - 1
        rest = [i for i in range(self.length) if i not in pair and (i == last or not self.now.shape.causal)]
        return _distance(self._run(tokens)[:, rest], self._run(others)[:, rest])

    @functools.cached_property
    def shown(self) -> float:
        """How much another token changes the output elsewhere: what order is a part of."""
        other, (first, _) = self.tokens[:1].clone(), self._pair()
        other[0, first] = self._another(other[0, first])
        return self._elsewhere(self.tokens[:1], other)

    def _another(self, token: Tensor) -> Tensor:
        """A token that is not this one: one of the others that are run, where there is any."""
        others = self.tokens[self.tokens != token]
        return others[0] if others.numel() else token

    def _run(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Vectors of the last layer, [batch, length, hidden]."""
        inputs = self._inputs(tokens, positions, mask)
        output = self.now.base(**inputs)
        return output.last_hidden_state

    def _inputs(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": tokens, "return_dict": True}
        if "use_cache" in inspect.signature(self.now.base.forward).parameters:
            inputs["use_cache"] = False
        if positions is not None:
            inputs["position_ids"] = positions.expand(tokens.shape[0], -1)
            # Without a mask, stock reads a jump in positions as a new document.
            inputs["attention_mask"] = torch.ones_like(tokens) if mask is None else mask
        elif mask is not None:
            inputs["attention_mask"] = mask
        return inputs

    def _spread(self) -> Tensor:
        """Positions [1, length] from 0 as far as the model goes, `FAR` at most."""
        usable = self.now.usable_length or 4 * self.now.shape.trained_length
        reach = max(self.length, min(FAR, usable if self.limit is None else min(usable, self.limit)))
        steps = torch.arange(self.length, dtype=torch.float64) / (self.length - 1)
        # Near and far: distances of one token at the start, growing ones later.
        near = torch.arange(self.length)
        return torch.maximum(near, (steps**3 * (reach - 1)).round().long()).unsqueeze(0).to(self.tokens.device)

    def _sites(self) -> tuple[list[Layer], Tensor, Rotation | None]:
        positions = self._spread()
        layers, _ = watch(self.now, **self._inputs(self.tokens[:1], positions, None))
        return layers, positions, self.now.rotation(int(positions.max()) + 1)

    def _shift(self) -> tuple[int, int]:
        """(by how much to move, tokens to run)."""
        if self.limit is None:
            return 64, self.length
        by = max(1, min(7, self.limit - self.length, self.length // 2))
        return by, min(self.length, self.limit - by)

    def _bias_is_relative(self, positions: Tensor, by: int) -> bool:
        """Whether the encoding itself says that its bias depends on distances only."""
        if self.now.resolved.site != "score":
            return True
        weights = self.now.weights(positions)
        here, there = (self.now.resolved.bias(p, p, weights, self.now.shape) for p in (positions, positions + by))
        return bool(torch.allclose(here, there, rtol=1e-4, atol=1e-4))

    def _table(self) -> Tensor:
        """The native table in its place, silent or not, [positions, hidden]."""
        module = self.now.base.get_submodule(str(self.now.architecture.table))
        return module.weight.to(self.tokens.device)  # type: ignore[union-attr,operator,return-value]

    def _same(self, name: str, measured: float, what: str) -> Check:
        return _small(name, measured, self.bound, what)

    def _large(self, name: str, measured: float, what: str) -> Check:
        rounding = ROUNDING * self.epsilon
        bound = max(rounding, self.bound * min(self.shown, 1.0))
        if measured > bound:
            return Check(name, True, measured, bound, ">", what)
        if bound <= rounding:
            why = f"Another token changes the output elsewhere by {_number(self.shown)} only: too little to tell."
            return Check(name, None, measured, bound, ">", why)
        if measured > 0 and self.epsilon > 1e-4:
            why = "Too close to what half precision rounds away to tell. Load the model in float32."
            return Check(name, None, measured, bound, ">", why)
        return Check(name, False, measured, bound, ">", f"Not so: {what}")


def _small(name: str, measured: float, bound: float, what: str) -> Check:
    good = measured <= bound
    return Check(name, good, measured, bound, "<=", what if good else f"Not so: {what}")


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of a token's vector relative to the mean size of one (root mean squares); NaN is infinite."""
    difference = (ours.double() - theirs.double()).square().mean(-1).sqrt().max()
    size = theirs.double().square().mean().sqrt()
    return float((difference / size).nan_to_num(math.inf))


def _worst(error: Tensor, allowed: Tensor) -> tuple[float, float]:
    """(error, allowed) where they are in the worst proportion."""
    error, allowed = error.nan_to_num(math.inf), allowed.expand_as(error)
    index = int((error / allowed).argmax())
    return float(error.flatten()[index]), float(allowed.flatten()[index])


def _proportion(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1]


def _turned(x: Tensor, rotation: Rotation, positions: Tensor) -> Tensor:
    """[batch, length, heads, head_dim] as the encoding turns it, float64."""
    return rotate(x, *rotation.tables(positions), rotation.interleaved)


def _by_dimension(pairs: Tensor, rotation: Rotation) -> Tensor:
    """[..., pairs] as [..., rotary_dim], one number for each dimension of a pair."""
    return pairs.repeat_interleave(2, dim=-1) if rotation.interleaved else torch.cat([pairs, pairs], dim=-1)


def _pair_size(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Length of the pair that each dimension belongs to, so that a slow pair is not lost in the size of the head."""
    if rotation is None:
        return x.abs()
    turned, kept = x[..., : rotation.rotary_dim], x[..., rotation.rotary_dim :]
    if rotation.interleaved:
        sizes = turned.unflatten(-1, (-1, 2)).norm(dim=-1)
    else:
        sizes = turned.unflatten(-1, (2, -1)).norm(dim=-2)
    return torch.cat([_by_dimension(sizes, rotation) * rotation.amplitude, kept.abs()], dim=-1)


def _drift(rotation: Rotation, positions: Tensor) -> Tensor:
    """What float32 angles may cost a score at most, in parts of its size: [1, 1, queries, keys]."""
    fastest = 3e-7 * float(rotation.frequencies.max()) * positions.double().cpu()
    return (fastest.unsqueeze(-1) + fastest.unsqueeze(-2)).unsqueeze(1) * rotation.amplitude**2


def _less_own(x: Tensor, visible: Tensor) -> Tensor:
    """[..., queries, keys] less the value of each query's own key; hidden keys are 0."""
    return (x - x.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).masked_fill(~visible, 0.0)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.1e}"
