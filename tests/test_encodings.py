"""An encoding is a frozen value: it compares, hashes, prints and reads back exactly, and refuses what cannot be."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_posenc.encoding import Encoding, EncodingError, ModelShape, as_encoding, encodings
from hf_posenc.encodings.alibi import ALiBi
from hf_posenc.encodings.dynamic_ntk import DynamicNTK
from hf_posenc.encodings.fire import Fire
from hf_posenc.encodings.kerple import Kerple
from hf_posenc.encodings.learned import Learned
from hf_posenc.encodings.linear import LinearScaling
from hf_posenc.encodings.llama3 import Llama3
from hf_posenc.encodings.longrope import LongRoPE
from hf_posenc.encodings.nope import NoPE
from hf_posenc.encodings.ntk import NTK
from hf_posenc.encodings.ntk_by_parts import NTKByParts
from hf_posenc.encodings.rope import RoPE, Scaling
from hf_posenc.encodings.sandwich import Sandwich
from hf_posenc.encodings.sinusoidal import Sinusoidal
from hf_posenc.encodings.t5 import T5Bias
from hf_posenc.encodings.yarn import YaRN

SHAPE = ModelShape(
    hidden=32, heads=4, key_heads=2, head_dim=8, layers=2, trained_length=32, causal=True, theta=500000.0
)

NAMES = {
    "alibi": ALiBi,
    "dynamic_ntk": DynamicNTK,
    "fire": Fire,
    "kerple": Kerple,
    "learned": Learned,
    "linear": LinearScaling,
    "llama3": Llama3,
    "longrope": LongRoPE,
    "nope": NoPE,
    "ntk": NTK,
    "ntk_by_parts": NTKByParts,
    "rope": RoPE,
    "sandwich": Sandwich,
    "sinusoidal": Sinusoidal,
    "t5": T5Bias,
    "yarn": YaRN,
}

ROPE = {"theta": None, "rotary_fraction": 1.0, "interleaved": False}
SCALING = {**ROPE, "factor": None, "original_context_length": None}
BETAS = {"beta_fast": 32, "beta_slow": 1}
FUSION = {"scale": 1.0, "learn_scale": False, "fusion": "add"}
FIELDS: dict[str, dict[str, Any]] = {
    "alibi": {"slopes": None},
    "dynamic_ntk": SCALING,
    "fire": {"width": 32, "init_c": 0.1, "init_L": 512.0},
    "kerple": {"variant": "log"},
    "learned": {"num_positions": None, "init": "interpolate", **FUSION},
    "linear": SCALING,
    "llama3": {**SCALING, "low_freq_factor": 1, "high_freq_factor": 4},
    "longrope": {**SCALING, "short_factor": None, "long_factor": None, "attention_factor": None},
    "nope": {},
    "ntk": SCALING,
    "ntk_by_parts": {**SCALING, **BETAS},
    "rope": ROPE,
    "sandwich": {"dim": 128, "base": 10000.0},
    "sinusoidal": {"base": 10000.0, **FUSION},
    "t5": {"num_buckets": 32, "max_distance": 128},
    "yarn": {
        **SCALING,
        **BETAS,
        "attention_factor": None,
        "truncate": True,
        "mscale": None,
        "mscale_all_dim": None,
    },
}

# ---------------------------------------------------------------------- the registry and its fields


def test_every_encoding_is_registered_under_its_name() -> None:
    assert encodings() == NAMES
    assert list(encodings()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_fields_and_defaults_are_the_published_ones(name: str) -> None:
    fields = dataclasses.fields(NAMES[name])  # type: ignore[arg-type]
    assert [(field.name, field.default) for field in fields] == list(FIELDS[name].items())
    assert [type(field.default) for field in fields] == [type(value) for value in FIELDS[name].values()]


@pytest.mark.parametrize("name", NAMES)
def test_every_field_has_a_docstring_that_says_where_its_default_comes_from(name: str) -> None:
    documented: set[str] = set()
    for owner in NAMES[name].__mro__:
        if dataclasses.is_dataclass(owner):
            body = inspect.getsource(owner)
            lines = [line.strip() for line in body.splitlines()]
            for field in dataclasses.fields(owner):
                for line, after in itertools.pairwise(lines):
                    if line.startswith(f"{field.name}:") and after.startswith('"""') and len(after) > 10:
                        documented.add(field.name)
    assert documented == set(FIELDS[name])
    assert inspect.getmodule(NAMES[name]).__doc__  # type: ignore[union-attr]


def test_sites() -> None:
    sites = {name: cls.site for name, cls in encodings().items()}
    assert {name for name, site in sites.items() if site == "embedding"} == {"sinusoidal", "learned"}
    assert {name for name, site in sites.items() if site == "score"} == {"alibi", "t5", "kerple", "fire", "sandwich"}
    assert {name for name, site in sites.items() if site == "none"} == {"nope"}
    assert {name for name, cls in encodings().items() if cls.length_dependent} == {"dynamic_ntk", "longrope"}


def test_a_name_is_taken_once() -> None:
    with pytest.raises(TypeError, match=r"'yarn' is taken by hf_posenc\.encodings\.yarn\.YaRN"):
        type("Other", (Encoding,), {"name": "yarn"})
    assert encodings()["yarn"] is YaRN


# ---------------------------------------------------------------------- values of every encoding

positive = st.floats(1e-3, 1e6, allow_nan=False) | st.integers(1, 10**6)
above_one = st.floats(1.001, 1e7) | st.integers(2, 10**7)
maybe_scale = st.just("match") | positive
rope = {
    "theta": st.none() | above_one,
    "rotary_fraction": st.floats(1e-3, 1.0) | st.just(1),
    "interleaved": st.booleans(),
}
scaling = {
    **rope,
    "factor": st.none() | st.floats(1.0, 1e4) | st.integers(1, 10**4),
    "original_context_length": st.none() | st.integers(2, 10**6),
}
betas = {"beta_fast": st.floats(8, 100), "beta_slow": st.floats(0.1, 8) | st.integers(1, 8)}
fusion = {"scale": maybe_scale, "learn_scale": st.booleans(), "fusion": st.sampled_from(["add", "concat"])}
numbers = st.lists(positive, min_size=1, max_size=6)
STRATEGIES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "alibi": {"slopes": st.none() | numbers},
    "dynamic_ntk": scaling,
    "fire": {"width": st.integers(1, 512), "init_c": positive, "init_L": st.floats(1, 1e5)},
    "kerple": {"variant": st.sampled_from(["log", "power"])},
    "learned": {
        "num_positions": st.none() | st.integers(1, 10**6),
        "init": st.sampled_from(["interpolate", "repeat", "hierarchical", "sinusoidal", "random"]),
        **fusion,
    },
    "linear": scaling,
    "llama3": {**scaling, "low_freq_factor": st.floats(0.1, 2), "high_freq_factor": st.floats(2.5, 16)},
    "longrope": {
        **scaling,
        "short_factor": st.none() | numbers,
        "long_factor": st.none() | numbers,
        "attention_factor": st.none() | positive,
    },
    "nope": {},
    "ntk": scaling,
    "ntk_by_parts": {**scaling, **betas},
    "rope": rope,
    "sandwich": {"dim": st.integers(1, 500).map(lambda n: 2 * n), "base": above_one},
    "sinusoidal": {"base": above_one, **fusion},
    "t5": {"num_buckets": st.integers(2, 64).map(lambda n: 2 * n), "max_distance": st.integers(65, 10**4)},
    "yarn": {
        **scaling,
        **betas,
        "attention_factor": st.none() | positive,
        "truncate": st.booleans(),
    },
}


@st.composite
def values(draw: st.DrawFn) -> Encoding:
    """Any encoding, with any part of its fields given."""
    name = draw(st.sampled_from(sorted(NAMES)))
    chosen = {field: draw(value) for field, value in STRATEGIES[name].items() if draw(st.booleans())}
    if name == "yarn" and draw(st.booleans()):
        chosen |= {"mscale": draw(positive), "mscale_all_dim": draw(positive)}
    return NAMES[name](**chosen)


def same(left: Encoding, right: Encoding) -> bool:
    """Equal down to the type of every field, which 1 == 1.0 == True would hide."""
    pairs = [(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)]  # type: ignore[arg-type]
    return type(left) is type(right) and all(type(a) is type(b) and a == b for a, b in pairs)


@settings(max_examples=300, deadline=None)
@given(values())
def test_every_value_reads_back_exactly(value: Encoding) -> None:
    assert same(Encoding.from_dict(value.to_dict()), value)
    assert same(Encoding.from_dict(json.loads(json.dumps(value.to_dict()))), value)
    assert same(Encoding.parse(str(value)), value)
    assert same(as_encoding(value.to_dict()), value) and same(as_encoding(str(value)), value)
    assert same(pickle.loads(pickle.dumps(value)), value) and same(copy.deepcopy(value), value)
    assert same(type(value).from_dict(value.to_dict()), value)
    assert hash(Encoding.parse(str(value))) == hash(value)
    assert next(iter(value.to_dict())) == "name"
    assert as_encoding(value) is value


@pytest.mark.parametrize("name", NAMES)
def test_defaults_print_as_the_bare_name(name: str) -> None:
    assert str(NAMES[name]()) == name
    assert Encoding.parse(name) == NAMES[name]()
    assert Encoding.parse(f"  {name} ") == NAMES[name]()


def test_text_and_dict_forms() -> None:
    assert Encoding.parse("yarn:factor=4") == YaRN(factor=4) == Encoding.from_dict({"name": "yarn", "factor": 4})
    assert str(YaRN(factor=4, truncate=False)) == "yarn:factor=4,truncate=False"
    assert Encoding.parse("yarn: factor = 4 , truncate = false, attention_factor=none") == YaRN(
        factor=4, truncate=False
    )
    assert Encoding.parse("alibi:slopes=[0.5, 0.25]") == ALiBi(slopes=(0.5, 0.25))
    assert str(ALiBi(slopes=[0.5, 0.25])) == "alibi:slopes=[0.5,0.25]"  # type: ignore[arg-type]
    assert ALiBi(slopes=[0.5]).to_dict() == {"name": "alibi", "slopes": [0.5]}  # type: ignore[arg-type]
    assert Encoding.parse("sinusoidal:scale=match,fusion=concat") == Sinusoidal(scale="match", fusion="concat")
    assert Encoding.parse("rope:theta=1e6") == RoPE(theta=1e6)
    assert NoPE().to_dict() == {"name": "nope"}


def test_values_are_frozen_and_hashable() -> None:
    value = LongRoPE(short_factor=[1, 2], long_factor=[2, 4])  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.factor = 4.0  # type: ignore[misc]
    assert len({value, LongRoPE(short_factor=(1.0, 2.0), long_factor=(2.0, 4.0)), YaRN(factor=4), YaRN(factor=8)}) == 3
    assert YaRN(factor=4) != NTKByParts(factor=4) and NTK(factor=2) != DynamicNTK(factor=2)
    assert value.replace(factor=8) == LongRoPE(factor=8, short_factor=(1, 2), long_factor=(2, 4))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yarm", "Unknown encoding 'yarm'. Did you mean 'yarn'? Available: alibi, dynamic_ntk, "),
        ("YARN", "Unknown encoding 'YARN'. Did you mean 'yarn'?"),
        ("sinusoid", "Did you mean 'sinusoidal'?"),
        ("zzz", "Unknown encoding 'zzz'. Available: "),
        ("", "Unknown encoding ''. Available: "),
        ("yarn:factr=4", "yarn has no field 'factr'. Did you mean 'factor'? It has: theta, rotary_fraction, "),
        ("nope:factor=4", "nope has no field 'factor'. It has no fields."),
        ("yarn:factor", "Cannot read 'factor' in 'yarn:factor'. Write name:field=value,field=value."),
        ("yarn:factor=", "Cannot read 'factor=' in 'yarn:factor='."),
        ("yarn:", "'yarn:' ends after ':'."),
        ("yarn:factor=4,", "Cannot read '' in"),
        ("yarn:factor=4,factor=8", "Field 'factor' is given twice"),
        ("yarn:name=rope", "Field 'name' is given twice"),
        ("yarn:factor=four", "yarn: factor='four' is not allowed; it must be a number of at least 1."),
    ],
)
def test_text_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(EncodingError) as caught:
        Encoding.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [None, 4, 4.0, ["yarn"], b"yarn", object()])
def test_things_that_are_no_encoding(value: Any) -> None:
    with pytest.raises(EncodingError, match="Expected an encoding"):
        as_encoding(value)
    with pytest.raises(EncodingError, match="Expected the text"):
        Encoding.parse(value)


@pytest.mark.parametrize("value", [{}, {"factor": 4}, {"name": 4}, {"name": None}, [("name", "yarn")]])
def test_dicts_without_a_name(value: Any) -> None:
    with pytest.raises(EncodingError, match="needs a 'name', one of alibi, "):
        Encoding.from_dict(value)


def test_from_dict_of_a_class_takes_only_that_class() -> None:
    assert RoPE.from_dict({"name": "yarn", "factor": 2}) == YaRN(factor=2)
    with pytest.raises(EncodingError, match=r"ALiBi.from_dict got the name 'yarn', which is YaRN\."):
        ALiBi.from_dict({"name": "yarn", "factor": 2})


NOT_NUMBERS = ["4", True, float("nan"), float("inf"), [4], {}, 10**400]
BAD: list[tuple[type[Encoding], str, list[Any]]] = [
    (RoPE, "theta", [*NOT_NUMBERS, 1, 1.0, 0, -5]),
    (RoPE, "rotary_fraction", [*NOT_NUMBERS, None, 0, -0.5, 1.5]),
    (RoPE, "interleaved", [0, 1, None, "yes"]),
    (Sinusoidal, "base", [*NOT_NUMBERS, None, 1, 0, -1]),
    (Sinusoidal, "scale", [*NOT_NUMBERS[1:], None, 0, -1.0, "macth"]),
    (Sinusoidal, "learn_scale", [0, 1, None, "no"]),
    (Sinusoidal, "fusion", [None, "sum", True]),
    (Learned, "num_positions", [*NOT_NUMBERS, 0, -1, 16.0]),
    (Learned, "init", [None, "zeros", 0]),
    (Learned, "scale", [0, "macth"]),
    (Learned, "fusion", ["mul"]),
    (ALiBi, "slopes", [0.5, [], [0.0], [-1.0], [float("nan")], ["a"], [True], "0.5"]),
    (T5Bias, "num_buckets", [*NOT_NUMBERS, None, 0, 2, 33, 32.0]),
    (T5Bias, "max_distance", [*NOT_NUMBERS, None, 0, 16, 128.0]),
    (Kerple, "variant", [None, "linear", 1]),
    (Fire, "width", [*NOT_NUMBERS, None, 0, 32.0]),
    (Fire, "init_c", [*NOT_NUMBERS, None, 0, -0.1]),
    (Fire, "init_L", [*NOT_NUMBERS, None, 0.5]),
    (Sandwich, "dim", [*NOT_NUMBERS, None, 0, 7, 128.0]),
    (Sandwich, "base", [*NOT_NUMBERS, None, 1]),
    (NTKByParts, "beta_fast", [*NOT_NUMBERS, None, 0, 0.5]),
    (NTKByParts, "beta_slow", [*NOT_NUMBERS, None, 0, 33]),
    (YaRN, "beta_fast", [0, 0.5]),
    (YaRN, "beta_slow", [0, 33]),
    (YaRN, "attention_factor", [*NOT_NUMBERS, 0, -1]),
    (YaRN, "truncate", [0, 1, None]),
    (YaRN, "mscale", [*NOT_NUMBERS, 0, 1.0]),  # 1.0 is refused because it comes alone
    (YaRN, "mscale_all_dim", [*NOT_NUMBERS, 0, 1.0]),
    (Llama3, "low_freq_factor", [*NOT_NUMBERS, None, 0, 4, 5]),
    (Llama3, "high_freq_factor", [*NOT_NUMBERS, None, 0, 1, 0.5]),
    (LongRoPE, "short_factor", [2.0, [], [0], ["a"], [float("inf")]]),
    (LongRoPE, "long_factor", [2.0, [], [0], ["a"], [float("inf")]]),
    (LongRoPE, "attention_factor", [*NOT_NUMBERS, 0]),
]
BAD += [(cls, "factor", [*NOT_NUMBERS, 0, 0.99, -2]) for cls in NAMES.values() if issubclass(cls, Scaling)]
BAD += [
    (cls, "original_context_length", [*NOT_NUMBERS, 0, 1, 2048.0]) for cls in NAMES.values() if issubclass(cls, Scaling)
]


@pytest.mark.parametrize(
    ("cls", "field", "bad"), BAD, ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else "")
)
def test_a_bad_value_is_refused_by_name(cls: type[Encoding], field: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(EncodingError) as caught:
            cls(**{field: value})
        message = str(caught.value)
        assert message.startswith(f"{cls.name}: "), message
        assert f"{field}={value!r}" in message, message
        assert isinstance(caught.value, ValueError)


# ---------------------------------------------------------------------- meeting a model

SCALINGS = sorted(name for name, cls in NAMES.items() if issubclass(cls, Scaling))


def scaled(name: str, **fields: Any) -> Any:
    """A scaling for a head of 8 dimensions."""
    lists = {"short_factor": (1, 1, 1, 1), "long_factor": (1, 2, 3, 4)} if name == "longrope" else {}
    return NAMES[name](**{**lists, **fields})


def test_the_models_own_theta_is_filled_in() -> None:
    assert RoPE().resolve(SHAPE) == RoPE(theta=500000.0)
    assert RoPE().resolve(dataclasses.replace(SHAPE, theta=None)) == RoPE(theta=10000.0)
    assert RoPE(theta=77).resolve(SHAPE) == RoPE(theta=77)
    with pytest.raises(EncodingError, match="rope: theta is None, which needs a model"):
        RoPE().frequencies(8)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_is_worked_out_from_a_length(name: str) -> None:
    asked = scaled(name).for_length(128, SHAPE)
    assert (asked.factor, asked.original_context_length) == (4.0, 32)
    resolved = asked.resolve(SHAPE)
    assert (resolved.theta, resolved.factor, resolved.original_context_length) == (500000.0, 4.0, 32)
    assert resolved.usable_length(SHAPE) == 128
    assert resolved.resolve(SHAPE) == resolved
    assert asked.for_length(128, SHAPE) == asked  # asking twice for the same is no conflict

    assert scaled(name).for_length(8, SHAPE).factor == 1.0  # shorter needs no scaling
    assert scaled(name, original_context_length=64).for_length(128, SHAPE).factor == 2.0
    assert scaled(name, factor=4).resolve(SHAPE).usable_length(SHAPE) == 128
    assert scaled(name, factor=4).for_length(128, SHAPE).original_context_length == 32


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_without_a_factor_or_with_two_is_refused(name: str) -> None:
    with pytest.raises(EncodingError, match=rf"{name}: factor=None .* Give factor= .* or context_length="):
        scaled(name).resolve(SHAPE)
    with pytest.raises(
        EncodingError, match=rf"{name}: factor=8 times 32 tokens is 256, which conflicts with context_length=128"
    ):
        scaled(name, factor=8).for_length(128, SHAPE)
    for length in (0, -1, 2.5, True, "128", None):
        with pytest.raises(EncodingError, match="context_length="):
            scaled(name).for_length(length, SHAPE)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 10**6), st.integers(2, 10**6))
def test_the_length_asked_for_is_the_usable_length(length: int, original: int) -> None:
    encoding = NTK(original_context_length=original).for_length(length, SHAPE)
    assert encoding.usable_length(SHAPE) == max(length, original)
    assert encoding.for_length(length, SHAPE) == encoding


def test_plain_encodings_need_nothing_for_a_length() -> None:
    for encoding in (ALiBi(), NoPE(), Sinusoidal(), T5Bias(), Kerple(), Fire(), Sandwich()):
        assert encoding.for_length(10**6, SHAPE) == encoding
    assert RoPE().usable_length(SHAPE) == 32
    for encoding in (ALiBi(), NoPE(), Sinusoidal(), T5Bias(), Kerple(), Fire(), Sandwich()):
        assert encoding.usable_length(SHAPE) is None


def test_a_rotation_reaches_further_only_where_it_is_not_the_models_own() -> None:
    for own in (RoPE(), RoPE(theta=500000)):
        assert own.for_length(32, SHAPE) == own
        with pytest.raises(EncodingError, match=r"rope: context_length=33 is more than the 32 tokens .* \(yarn, ntk"):
            own.for_length(33, SHAPE)
    for new in (RoPE(theta=1e6), RoPE(rotary_fraction=0.5), RoPE(interleaved=True)):
        assert new.for_length(10**6, SHAPE) == new
    assert RoPE().for_length(10**6, dataclasses.replace(SHAPE, theta=None)) == RoPE()


@pytest.mark.parametrize(
    ("encoding", "field"),
    [
        (Learned(num_positions=10**14), "num_positions"),
        (Learned().for_length(10**14, SHAPE), "num_positions"),
        (T5Bias(num_buckets=10**14, max_distance=10**14), "num_buckets"),
        (Fire(width=10**14), "width"),
        (Sandwich(dim=10**14), "dim"),
    ],
    ids=str,
)
def test_more_than_there_is_memory_for_is_refused(encoding: Encoding, field: str) -> None:
    with pytest.raises(EncodingError, match=rf"{encoding.name}: {field}=10+ is not allowed; it would take about"):
        encoding.resolve(SHAPE)


@pytest.mark.parametrize("name", ["rope", *SCALINGS])
def test_head_widths_that_cannot_be_rotated(name: str) -> None:
    encoding = RoPE() if name == "rope" else scaled(name, factor=2)
    for head_dim, fraction in ((7, 1.0), (8, 0.4), (8, 0.1), (1, 1.0)):
        shape = dataclasses.replace(SHAPE, head_dim=head_dim)
        with pytest.raises(EncodingError) as caught:
            encoding.replace(rotary_fraction=fraction).resolve(shape)
        assert f"rotary_fraction={fraction} of a head width of {head_dim}" in str(caught.value)
    assert encoding.replace(rotary_fraction=1.0).rotary_dim(SHAPE) == 8
    assert RoPE(rotary_fraction=0.5).rotary_dim(SHAPE) == 4
    assert RoPE(rotary_fraction=0.25).rotary_dim(SHAPE) == 2


@pytest.mark.parametrize("name", ["ntk", "dynamic_ntk"])
def test_a_single_pair_has_no_base_to_change(name: str) -> None:
    with pytest.raises(EncodingError, match="an even number of at least 4"):
        scaled(name, factor=2, rotary_fraction=0.25).resolve(SHAPE)


def test_longrope_lists_must_fit_the_head() -> None:
    for field in ("short_factor", "long_factor"):
        for wrong in (None, (1.0, 2.0, 3.0), (1.0,) * 8):
            with pytest.raises(EncodingError, match=rf"longrope: {field} is .*; it must be a list of 4 numbers"):
                scaled("longrope", factor=2, **{field: wrong}).resolve(SHAPE)
    with pytest.raises(EncodingError, match="short_factor must be a list of 8 numbers"):
        scaled("longrope", factor=2, theta=10000.0, original_context_length=32).frequencies(16)


def test_alibi_slopes_must_fit_the_heads() -> None:
    assert ALiBi(slopes=(4, 3, 2, 1)).resolve(SHAPE).head_slopes(4) == [4, 3, 2, 1]
    with pytest.raises(EncodingError, match="alibi: slopes has 2 numbers; it must have 4, one for each head"):
        ALiBi(slopes=(0.5, 0.25)).resolve(SHAPE)


def test_learned_positions() -> None:
    assert Learned().resolve(SHAPE) == Learned(num_positions=32)
    assert Learned().for_length(128, SHAPE).resolve(SHAPE) == Learned(num_positions=128)
    assert Learned(num_positions=128).for_length(128, SHAPE).usable_length(SHAPE) == 128
    with pytest.raises(EncodingError, match="num_positions=64 conflicts with a context length of 128"):
        Learned(num_positions=64).for_length(128, SHAPE)
    with pytest.raises(
        EncodingError, match=r"num_positions=16 would lose positions of the model's own table, which has 32"
    ):
        Learned(num_positions=16).new_weights(SHAPE, torch.zeros(32, 32))
    assert Learned(num_positions=16).new_weights(SHAPE, None)["table"].shape == (16, 32)
    with pytest.raises(EncodingError, match=r"num_positions=1025 is more than .* 1024"):
        Learned(num_positions=1025, init="hierarchical").new_weights(SHAPE, torch.zeros(32, 32))


def test_positions_outside_a_table_are_named() -> None:
    encoding = Learned(num_positions=4)
    weights, x = {"table": torch.zeros(4, 32)}, torch.zeros(1, 2, 32)
    assert encoding.embed(x, torch.tensor([[0, 3]]), weights, SHAPE).shape == x.shape
    for position in (4, -1):
        with pytest.raises(EncodingError, match=rf"position {position} is outside the table of 4 positions"):
            encoding.embed(x, torch.tensor([[0, position]]), weights, SHAPE)


@pytest.mark.parametrize("encoding", [Sinusoidal(scale="match"), Learned(scale="match")])
def test_matching_a_table_needs_one(encoding: Encoding) -> None:
    with pytest.raises(EncodingError, match=r"scale='match' .* this model has none. Give scale= a number"):
        encoding.new_weights(SHAPE, None)
    assert encoding.frozen_weights() == {"scale"}
    assert encoding.replace(learn_scale=True).frozen_weights() == frozenset()
    assert encoding.replace(scale=2.0).frozen_weights() == frozenset()
    assert "scale" not in encoding.replace(scale=2.0).new_weights(SHAPE, None)
    assert encoding.replace(scale=2.0, learn_scale=True).new_weights(SHAPE, None)["scale"].tolist() == [2.0]


WEIGHTED: list[Encoding] = [
    Sinusoidal(scale="match", fusion="concat"),
    *(
        Learned(num_positions=64, init=init)
        for init in ("interpolate", "repeat", "hierarchical", "sinusoidal", "random")
    ),
    Learned(num_positions=64, scale="match", learn_scale=True, fusion="concat"),
    T5Bias(),
    Kerple(),
    Kerple(variant="power"),
    Fire(),
]


@pytest.mark.parametrize("encoding", WEIGHTED, ids=str)
def test_new_weights_are_float32_on_the_cpu_whatever_the_defaults(encoding: Encoding) -> None:
    table = torch.randn(32, 32, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)  # as from_pretrained does while it builds a model
    try:
        with torch.device("meta"):
            weights = encoding.new_weights(SHAPE, table)
    finally:
        torch.set_default_dtype(torch.float32)
    assert weights
    for name, weight in weights.items():
        assert weight.dtype == torch.float32 and weight.device.type == "cpu", name
        assert bool(weight.isfinite().all()), name
    assert encoding.frozen_weights() <= set(weights)


@pytest.mark.parametrize("encoding", WEIGHTED, ids=str)
def test_new_weights_of_a_model_without_values_have_the_same_shapes(encoding: Encoding) -> None:
    real = encoding.new_weights(SHAPE, torch.ones(32, 32))
    empty = encoding.new_weights(SHAPE, torch.ones(32, 32, device="meta"))
    assert {name: w.shape for name, w in real.items()} == {name: w.shape for name, w in empty.items()}


def test_the_same_seed_gives_the_same_weights() -> None:
    for encoding in WEIGHTED:
        made = []
        for _ in range(2):
            torch.manual_seed(5)
            made.append(encoding.new_weights(SHAPE, torch.ones(32, 32)))
        assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
