"""What an encoding is: a frozen value with one verb for each place where a position can enter a transformer.

The verbs do nothing by default; an encoding overrides those of its own site. Nothing in this file or in
`hf_posenc.encodings` knows transformers: an encoding sees only tensors and a `ModelShape`.

Shapes are written `[batch, heads, queries, keys]` with full words. Positions are integer tensors, in tokens.
Angles, distances and slopes are computed in float32 or better, whatever the dtype of the model.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import math
import numbers
import pkgutil
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

if typing.TYPE_CHECKING:
    from torch import Tensor

Site = Literal["embedding", "rotary", "score", "none"]
Weights = dict[str, "Tensor"]
ScoreFunction = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""The bias at (query position, key position, head): what `Encoding.score_function` gives."""
E = TypeVar("E", bound="Encoding")


@dataclass(frozen=True)
class ModelShape:
    """All that an encoding may know about the model that it is put into."""

    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads in a layer."""
    key_heads: int
    """Key and value heads in a layer (fewer than `heads` under grouped-query attention)."""
    head_dim: int
    """Width of one head."""
    layers: int
    """Number of attention layers."""
    trained_length: int
    """Tokens that the model was pretrained with (before any scaling that its config already declares)."""
    causal: bool
    """True where a token sees only its past."""
    theta: float | None = None
    """The model's own rotary base; None where it has no rotation."""


class EncodingError(ValueError):
    """An encoding that cannot be: an unknown name, a wrong field, or a value that this model cannot take."""


class Encoding:
    """A position encoding: a frozen value, equal to any other with the same fields.

    Subclasses are frozen dataclasses in a file of their own under `hf_posenc/encodings/`; defining one registers it.
    """

    name: ClassVar[str]
    """Registered name, as written on the command line and in config.json."""
    site: ClassVar[Site] = "none"
    """Where it acts: "embedding", "rotary", "score" or "none"."""
    length_dependent: ClassVar[bool] = False
    """True where the numbers depend on how long the sequence is (chosen once per row, when its cache is empty)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("name")
        if name is None:  # a shared base, not an encoding of its own
            return
        known = _REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"Encoding name {name!r} is taken by {known.__module__}.{known.__qualname__}.")
        _REGISTRY[name] = cls

    columns_hold: ClassVar[Literal["past", "everywhere"]] = "past"
    """For which keys `columns` are the bias: those up to the query, or all."""

    # ------------------------------------------------------------------ the value

    def to_dict(self) -> dict[str, Any]:
        """The encoding as plain data, `name` first: what stands in config.json. `from_dict` is the exact inverse."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"name": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}}

    @classmethod
    def from_dict(cls: type[E], values: dict[str, Any]) -> E:
        """Build an encoding from `{"name": ..., field: value, ...}`.

        Raises:
            EncodingError: unknown name or field (with the nearest known one), or a value that is not allowed.
        """
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            raise EncodingError(
                f"An encoding as a dict needs a 'name', one of {', '.join(encodings())}; got {values!r}."
            )
        fields = dict(values)
        target = _lookup(fields.pop("name"))
        if not issubclass(target, cls):
            raise EncodingError(
                f"{cls.__name__}.from_dict got the name {values['name']!r}, which is {target.__name__}."
            )
        known = [field.name for field in dataclasses.fields(target)]  # type: ignore[arg-type]
        for key in fields:
            if key not in known:
                allowed = f"It has: {', '.join(known)}." if known else "It has no fields."
                raise EncodingError(f"{target.name} has no field {key!r}.{_nearest(key, known)} {allowed}")
        return target(**fields)

    @classmethod
    def parse(cls: type[E], text: str) -> E:
        """Build an encoding from text: `name` or `name:field=value,field=value`, as `str(encoding)` writes it.

        Values are Python literals (`4`, `1e6`, `[1.0, 2.0]`, `true`, `none`); anything else is taken as a string.

        Raises:
            EncodingError: unknown name or field, a field without `=`, one given twice, or a value not allowed.
        """
        if not isinstance(text, str):
            raise EncodingError(f"Expected the text of an encoding, such as 'yarn:factor=4'; got {text!r}.")
        name, colon, rest = text.strip().partition(":")
        values: dict[str, Any] = {"name": _lookup(name.strip()).name}
        if colon and not rest.strip():
            raise EncodingError(f"{text!r} ends after ':'. Write {name!r}, or name:field=value.")
        for part in _split(rest) if rest.strip() else []:
            key, equals, value = part.partition("=")
            key = key.strip()
            if not equals or not key or not value.strip():
                raise EncodingError(f"Cannot read {part.strip()!r} in {text!r}. Write name:field=value,field=value.")
            if key in values:
                raise EncodingError(f"Field {key!r} is given twice in {text!r}.")
            values[key] = _literal(value.strip())
        return cls.from_dict(values)

    def __str__(self) -> str:
        """The shortest text that `parse` turns back into this value."""
        parts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default or type(value) is not type(field.default):
                if isinstance(value, tuple):
                    parts.append(f"{field.name}=[{','.join(repr(v) for v in value)}]")
                else:
                    parts.append(f"{field.name}={value}")
        return self.name + (":" + ",".join(parts) if parts else "")

    def replace(self: E, **changes: Any) -> E:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    # ------------------------------------------------------------------ meeting a model

    def resolve(self: E, shape: ModelShape) -> E:
        """The same encoding with every None that stands for "the model's own" filled in from `shape`.

        Raises:
            EncodingError: naming the field, its value and what is allowed, where this model cannot take it.
        """
        return self

    def for_length(self: E, length: int, shape: ModelShape) -> E:
        """The same encoding made for a context of `length` tokens: a scaling works out its factor, others need nothing.

        Raises:
            EncodingError: where the encoding already says otherwise.
        """
        return self

    def usable_length(self, shape: ModelShape) -> int | None:
        """Tokens up to which a resolved encoding is meant to be used; None where it sets no limit."""
        return None

    def new_weights(self, shape: ModelShape, native_table: Tensor | None) -> Weights:
        """New weights by name, float32 on the CPU (on the meta device where `native_table` is there).

        Args:
            native_table: the [positions, hidden] table that is replaced; None where the model has none.

        Raises:
            EncodingError: where the weights cannot be made from this table.
        """
        return {}

    def frozen_weights(self) -> frozenset[str]:
        """Names of those weights that are saved with the model but do not train."""
        return frozenset()

    # ------------------------------------------------------------------ the same thing in stock transformers

    rope_type: ClassVar[str | None] = None
    """The `rope_type` of `config.rope_parameters` that stands for this encoding; None where there is none."""

    def stock_form(self, shape: ModelShape) -> dict[str, Any] | None:
        """Config entries with which transformers runs a resolved encoding at its native site; None if it cannot."""
        return None

    @classmethod
    def from_stock_form(cls: type[E], entries: dict[str, Any]) -> E:
        """The encoding that the config entries `rope_parameters` and `max_position_embeddings` stand for."""
        raise NotImplementedError(f"{cls.__name__} has no form in stock transformers.")

    # ------------------------------------------------------------------ the verbs, one for each site

    def embed(self, x: Tensor, positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        """Embedding site: token vectors `x` [batch, length, hidden] fused with those of `positions` [batch, length]."""
        return x

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        """Rotary site: radians per token of each pair, float64.

        Args:
            rotary_dim: how many of the head's dimensions are rotated (even).
            length: tokens of each row [batch], for a length-dependent encoding.

        Returns:
            [rotary_dim / 2], or [batch, rotary_dim / 2] where `length` is used.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rotate.")

    def amplitude(self) -> float:
        """Rotary site: what cos and sin are multiplied with (scores grow by its square). 1 unless a scaling says so."""
        return 1.0

    def bias(self, query_positions: Tensor, key_positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        """Score site: what is added to the scaled q·k before the softmax.

        Args:
            query_positions: [batch, queries], integer.
            key_positions: [batch, keys], integer. Keys that the mask hides may have any position.

        Returns:
            [batch, heads, queries, keys], float32, differentiable in `weights`.
        """
        raise NotImplementedError(f"{type(self).__name__} adds no bias.")

    def columns(
        self, query_positions: Tensor, key_positions: Tensor, shape: ModelShape, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Score site: the bias as an inner product of a few extra columns of q and k.

        Holds for keys in the query's past, and where `columns_hold` says so everywhere.

        Returns:
            ([batch, heads, queries, columns], [batch, 1, keys, columns]) in `dtype`, exact to the accuracy of a float32
            bias when accumulated in float32; None where the bias is not of that form.
        """
        return None

    def score_function(self, weights: Weights, shape: ModelShape, device: torch.device) -> ScoreFunction | None:
        """Score site: the bias of a single score, for kernels that work it out where the score is (flex attention).

        Returns:
            A function of (query position, key position, head), integers of shapes that broadcast, to float32. It may
            look numbers up in tensors that were made before, on `device`, and use operations that go element by
            element. None where the bias has no such form, or one that costs more than a tensor.
        """
        return None


if typing.TYPE_CHECKING:
    import torch

_REGISTRY: dict[str, type[Encoding]] = {}


def encodings() -> dict[str, type[Encoding]]:
    """Every registered encoding by name, sorted."""
    package = importlib.import_module("hf_posenc.encodings")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def as_encoding(value: Encoding | str | dict[str, Any]) -> Encoding:
    """An encoding from any of the ways in which one can be written: a value, text, or a dict."""
    if isinstance(value, Encoding):
        return value
    if isinstance(value, str):
        return Encoding.parse(value)
    if isinstance(value, dict):
        return Encoding.from_dict(value)
    raise EncodingError(
        "Expected an encoding: a value (YaRN(factor=4)), text ('yarn:factor=4') or dict ({'name': 'yarn', 'factor': 4})"
        f"; got {type(value).__name__}: {value!r}."
    )


# ---------------------------------------------------------------------- checks that the encodings share


def check_number(
    encoding: Encoding,
    field: str,
    *,
    low: float,
    high: float = math.inf,
    strict: bool = False,
    optional: bool = False,
    integer: bool = False,
) -> None:
    """Raise unless `encoding.field` is a finite number from `low` (above it where `strict`) to `high`."""
    value = getattr(encoding, field)
    if optional and value is None:
        return
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # numpy's numbers become Python's
        value = value.item()
        object.__setattr__(encoding, field, value)
    kind = (int,) if integer else (int, float)
    ok = _is_number(value, kind)
    if not ok or value > high or (value <= low if strict else value < low):
        allowed = f"{'an integer' if integer else 'a number'} {'above' if strict else 'of at least'} {low:g}"
        allowed += f" and at most {high:g}" if high < math.inf else ""
        raise EncodingError(f"{encoding.name}: {field}={value!r} is not allowed; it must be {allowed}.")


def check_choice(encoding: Encoding, field: str, choices: tuple[Any, ...]) -> None:
    """Raise unless `encoding.field` is one of `choices`."""
    value = getattr(encoding, field)
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        allowed = ", ".join(repr(choice) for choice in choices)
        raise EncodingError(f"{encoding.name}: {field}={value!r} is not allowed; it must be one of {allowed}.")


def check_factors(encoding: Encoding, field: str) -> None:
    """Turn a list of positive numbers into a tuple, so that the value stays hashable; raise if it is anything else."""
    value = getattr(encoding, field)
    if value is None:
        return
    ok = isinstance(value, (list, tuple)) and len(value) > 0
    ok = ok and all(_is_number(v, (int, float)) and v > 0 for v in value)
    if not ok:
        raise EncodingError(
            f"{encoding.name}: {field}={value!r} is not allowed; it must be a list of positive numbers."
        )
    object.__setattr__(encoding, field, tuple(float(v) for v in value))


def _is_number(value: Any, kind: tuple[type, ...]) -> bool:
    # The bound comes first: math.isfinite raises on an integer that no float can hold.
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    number: Any = value
    return bool(abs(number) < 1e300) and math.isfinite(number)


# ---------------------------------------------------------------------- reading text


def _lookup(name: str) -> type[Encoding]:
    known = encodings()
    if name in known:
        return known[name]
    raise EncodingError(f"Unknown encoding {name!r}.{_nearest(name, list(known))} Available: {', '.join(known)}.")


def _nearest(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word.lower(), known, n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


def _split(text: str) -> list[str]:
    """Split at commas that stand outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
