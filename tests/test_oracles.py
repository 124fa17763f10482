"""The numbers of every encoding against something that was not made from them.

Either stock transformers, or a float64 formula written here from the paper, in the plainest loops. Nothing here
is fed a table that this package made, except the function whose output is judged.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc.encoding import Encoding, ModelShape
from hf_posenc.encodings.alibi import ALiBi, paper_slopes
from hf_posenc.encodings.dynamic_ntk import DynamicNTK
from hf_posenc.encodings.fire import Fire
from hf_posenc.encodings.kerple import Kerple
from hf_posenc.encodings.learned import Learned
from hf_posenc.encodings.linear import LinearScaling
from hf_posenc.encodings.llama3 import Llama3
from hf_posenc.encodings.longrope import LongRoPE
from hf_posenc.encodings.ntk import NTK
from hf_posenc.encodings.ntk_by_parts import NTKByParts
from hf_posenc.encodings.rope import RoPE
from hf_posenc.encodings.sandwich import Sandwich
from hf_posenc.encodings.sinusoidal import Sinusoidal
from hf_posenc.encodings.t5 import T5Bias
from hf_posenc.encodings.yarn import YaRN


def shape(*, heads: int = 4, hidden: int = 32, causal: bool = True, trained_length: int = 32) -> ModelShape:
    return ModelShape(
        hidden=hidden,
        heads=heads,
        key_heads=heads,
        head_dim=hidden // heads,
        layers=2,
        trained_length=trained_length,
        causal=causal,
    )


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest relative difference."""
    return float(((ours.double() - theirs.double()) / theirs.double()).abs().max())


# ---------------------------------------------------------------------- rotary frequencies


def stock(
    rope_type: str, *, head_dim: int, theta: float, original: int, factor: float, length: int | None = None, **more: Any
) -> tuple[Tensor, float]:
    """Frequencies [head_dim / 2] and attention factor from stock transformers."""
    parameters = {"rope_type": rope_type, "rope_theta": theta, "factor": factor, **more}
    if rope_type in ("yarn", "llama3", "longrope"):
        parameters["original_max_position_embeddings"] = original
    usable = original if rope_type == "dynamic" else int(original * factor)
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=8,
        max_position_embeddings=usable,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), length)


GEOMETRY = [
    (64, 10000.0, 2048, 4.0),
    (128, 500000.0, 8192, 8.0),
    (8, 10000.0, 32, 4.0),
    (64, 1e6, 4096, 32.0),
    (64, 10000.0, 131_072, 4.0),  # even the slowest pair turns more than once
]
"""Rotated dimensions, theta, original length, factor."""


@pytest.mark.parametrize(("dim", "theta", "original", "factor"), GEOMETRY)
def test_plain_and_linear_equal_stock(dim: int, theta: float, original: int, factor: float) -> None:
    config = LlamaConfig(
        hidden_size=dim, num_attention_heads=1, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    plain, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    assert relative(RoPE(theta=theta).frequencies(dim), plain) < 1e-6
    theirs, _ = stock("linear", head_dim=dim, theta=theta, original=original, factor=factor)
    ours = LinearScaling(theta=theta, factor=factor, original_context_length=original)
    assert relative(ours.frequencies(dim), theirs) < 1e-6
    assert ours.amplitude() == RoPE().amplitude() == 1.0
    by_hand = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    assert relative(RoPE(theta=theta).frequencies(dim), by_hand) < 1e-14
    assert ours.frequencies(dim).dtype == torch.float64


@pytest.mark.parametrize(("dim", "theta", "original", "factor"), GEOMETRY)
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("betas", [{}, {"beta_fast": 16, "beta_slow": 2}])
def test_yarn_equals_stock(
    dim: int, theta: float, original: int, factor: float, truncate: bool, betas: dict[str, float]
) -> None:
    theirs, attention = stock(
        "yarn", head_dim=dim, theta=theta, original=original, factor=factor, truncate=truncate, **betas
    )
    ours = YaRN(theta=theta, factor=factor, original_context_length=original, truncate=truncate, **betas)  # type: ignore[arg-type]
    assert relative(ours.frequencies(dim), theirs) < 3e-6  # stock works its ramp out in float32
    assert ours.amplitude() == pytest.approx(attention, rel=1e-12)
    if truncate:  # NTK-by-parts is the same table without the temperature
        parts = NTKByParts(theta=theta, factor=factor, original_context_length=original, **betas)  # type: ignore[arg-type]
        assert relative(parts.frequencies(dim), theirs) < 1e-6 and parts.amplitude() == 1.0


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    """Dimensions 64, L0 2048, theta 1e4, factor 4: 9 of 32 pairs unchanged, 11 divided exactly."""
    plain = RoPE(theta=10000.0).frequencies(64)
    for cls in (YaRN, NTKByParts):
        ratio = plain / cls(theta=10000.0, factor=4, original_context_length=2048).frequencies(64)
        assert torch.equal(ratio[:9], torch.ones(9, dtype=torch.float64))
        assert torch.equal(ratio[-11:], torch.full((11,), 4.0, dtype=torch.float64))
        assert bool((ratio[9:-11] > 1).all()) and bool((ratio[9:-11] < 4).all()) and bool((ratio.diff() >= 0).all())
    fine = YaRN(theta=10000.0, factor=4, original_context_length=2048, truncate=False).frequencies(64)
    coarse = YaRN(theta=10000.0, factor=4, original_context_length=2048).frequencies(64)
    assert relative(fine, coarse) == pytest.approx(0.17, abs=0.01)


def test_yarn_ramp_by_hand() -> None:
    """Section 3.2: turns r = L0 / wavelength; here without rounding to whole pairs."""
    dim, theta, original, factor, fast, slow = 64, 10000.0, 2048, 4.0, 32.0, 1.0
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    # The published code makes the ramp linear in the index of the pair, between those turning `fast` and `slow` times.
    index = [dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)]
    expected = []
    for i, frequency in enumerate(frequencies):
        divided = min(max((i - index[0]) / (index[1] - index[0]), 0.0), 1.0)
        turns = original * frequency / (2 * math.pi)
        assert (divided == 0) == (turns >= fast) and (divided == 1) == (turns <= slow)
        expected.append((1 - divided) * frequency + divided * frequency / factor)
    ours = YaRN(theta=theta, factor=factor, original_context_length=original, truncate=False).frequencies(dim)
    assert relative(ours, torch.tensor(expected, dtype=torch.float64)) < 1e-12


def test_a_users_yarn_factor_is_what_counts() -> None:
    ours = YaRN(theta=10000.0, factor=8, original_context_length=2048)
    assert float(ours.frequencies(64)[-1]) == pytest.approx(10000.0 ** (-62 / 64) / 8, rel=1e-12)
    assert ours.amplitude() == pytest.approx(1.207944, abs=1e-6)


def test_yarn_attention_factors() -> None:
    def amplitude(**fields: Any) -> float:
        return YaRN(theta=10000.0, original_context_length=2048, **fields).amplitude()

    assert amplitude(factor=4) == pytest.approx(1.138629, abs=1e-6)
    assert amplitude(factor=4) ** 2 == pytest.approx(1.296477, abs=1e-6)
    assert amplitude(factor=40) == pytest.approx(1.368888, abs=1e-6)
    assert amplitude(factor=4, attention_factor=1.0) == 1.0
    assert amplitude(factor=1) == 1.0
    assert amplitude(factor=40, mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert amplitude(factor=40, attention_factor=1.5, mscale=1.0, mscale_all_dim=1.0) == 1.5
    for mscale, every in ((1.0, 1.0), (0.707, 1.0), (1.0, 0.707)):
        _, theirs = stock(
            "yarn", head_dim=64, theta=1e4, original=2048, factor=40.0, mscale=mscale, mscale_all_dim=every
        )
        assert amplitude(factor=40, mscale=mscale, mscale_all_dim=every) == pytest.approx(theirs, rel=1e-12)
    with_both = YaRN(factor=40, mscale=0.707, mscale_all_dim=1.0)
    assert Encoding.parse(str(with_both)) == with_both


@pytest.mark.parametrize(("dim", "theta", "original", "factor"), GEOMETRY)
def test_llama3_equals_stock(dim: int, theta: float, original: int, factor: float) -> None:
    for low, high in ((1.0, 4.0), (2.0, 9.0)):
        theirs, attention = stock(
            "llama3",
            head_dim=dim,
            theta=theta,
            original=original,
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        ours = Llama3(
            theta=theta,
            factor=factor,
            original_context_length=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        assert relative(ours.frequencies(dim), theirs) < 1e-6
        assert ours.amplitude() == attention == 1.0


def test_llama3_counts() -> None:
    """Head width 128, theta 5e5, factor 8, 1/4, L0 8192: 29 pairs kept, 6 blended, 29 divided by 8."""
    ours = Llama3(theta=5e5, factor=8, original_context_length=8192).frequencies(128)
    ratio = RoPE(theta=5e5).frequencies(128) / ours
    assert int((ratio == 1).sum()) == 29 and int((ratio == 8).sum()) == 29
    assert bool(((ratio[29:35] > 1) & (ratio[29:35] < 8)).all())


def test_ntk_base() -> None:
    ours = NTK(theta=10000.0, factor=4, original_context_length=2048)
    assert ours.scaled_theta(64) == pytest.approx(41829.37, abs=0.01)
    assert ours.scaled_theta(128) == pytest.approx(40889.94, abs=0.01)
    for dim in (4, 64, 128):
        plain, scaled = RoPE(theta=10000.0).frequencies(dim), ours.frequencies(dim)
        assert float(scaled[0]) == 1.0  # the fastest pair is left alone
        assert float(plain[-1] / scaled[-1]) == pytest.approx(4.0, rel=1e-12)  # the slowest is interpolated
        assert (
            relative(scaled, torch.tensor([ours.scaled_theta(dim) ** (-2 * i / dim) for i in range(dim // 2)])) < 1e-6
        )
    assert ours.amplitude() == 1.0


def test_dynamic_ntk_base_follows_the_length() -> None:
    ours = DynamicNTK(theta=10000.0, factor=2, original_context_length=2048)
    lengths = torch.tensor([1, 2048, 2049, 4096, 8192])
    bases = ours.scaled_theta(64, lengths)
    assert bases[:2].tolist() == [10000.0, 10000.0]
    assert bases[3:].tolist() == pytest.approx([31082.24, 74534.83], rel=1e-6)
    assert 10000.0 < float(bases[2]) < 10020.0

    tables = ours.frequencies(64, lengths)
    assert tables.shape == (5, 32) and tables.dtype == torch.float64
    for row, length in zip(tables, lengths.tolist(), strict=True):
        theirs, _ = stock("dynamic", head_dim=64, theta=10000.0, original=2048, factor=2.0, length=length)
        assert relative(row, theirs) < 1e-6
    assert torch.equal(tables[0], tables[1]) and relative(tables[0], RoPE(theta=10000.0).frequencies(64)) < 1e-14
    assert relative(ours.frequencies(64), RoPE(theta=10000.0).frequencies(64)) < 1e-14
    assert torch.equal(ours.frequencies(64, lengths.reshape(5, 1)), tables.unsqueeze(1))  # any number of dimensions


def test_longrope_picks_a_list_for_each_row() -> None:
    short, long = [1.0, 1.5, 2.0, 4.0], [2.0, 3.0, 5.0, 64.0]
    ours = LongRoPE(theta=10000.0, factor=4, original_context_length=16, short_factor=short, long_factor=long)  # type: ignore[arg-type]
    lengths = torch.tensor([8, 16, 17, 24])
    tables = ours.frequencies(8, lengths)
    for row, length in zip(tables, lengths.tolist(), strict=True):
        theirs, attention = stock(
            "longrope",
            head_dim=8,
            theta=10000.0,
            original=16,
            factor=4.0,
            length=length,
            short_factor=short,
            long_factor=long,
        )
        assert relative(row, theirs) < 1e-6
        assert ours.amplitude() == pytest.approx(attention, rel=1e-12)
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[2], tables[3])
    assert not torch.equal(tables[1], tables[2])
    assert torch.equal(ours.frequencies(8), tables[0])
    assert torch.equal(ours.frequencies(8, lengths.reshape(4, 1)), tables.unsqueeze(1))

    def amplitude(**fields: Any) -> float:
        return LongRoPE(original_context_length=4096, **fields).amplitude()

    assert amplitude(factor=32) == pytest.approx(1.190238, abs=1e-6)
    assert amplitude(factor=1) == 1.0
    assert amplitude(factor=32, attention_factor=2.0) == 2.0


@pytest.mark.parametrize(
    "encoding",
    [
        RoPE(),
        LinearScaling(factor=4),
        NTK(factor=4),
        DynamicNTK(factor=4),
        NTKByParts(factor=4),
        YaRN(factor=4, truncate=False),
        YaRN(factor=4, mscale=0.7, mscale_all_dim=1.0, beta_fast=20),
        YaRN(factor=4, attention_factor=1.0),
        Llama3(factor=4),
        LongRoPE(factor=4, short_factor=(1.0, 1.5, 2.0, 4.0), long_factor=(2.0, 3.0, 5.0, 64.0)),
    ],
    ids=str,
)
def test_the_stock_form_means_the_same_to_stock(encoding: Encoding) -> None:
    made = shape(trained_length=512)
    resolved: Any = encoding.resolve(made)
    entries = resolved.stock_form(made)
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, **entries)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        theirs, attention = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs, attention = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    assert relative(resolved.frequencies(8), theirs) < 3e-6
    assert resolved.amplitude() == pytest.approx(attention, rel=1e-12)
    assert config.max_position_embeddings == (512 if isinstance(encoding, DynamicNTK) else resolved.usable_length(made))
    if encoding.length_dependent:
        theirs, _ = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), 2000)
        assert relative(resolved.frequencies(8, torch.tensor([2000]))[0], theirs) < 3e-6
    if encoding.rope_type is not None:
        read: Any = type(encoding).from_stock_form(entries).resolve(made)
        lengths = torch.tensor([100, 2000]) if encoding.length_dependent else None
        assert torch.equal(read.frequencies(8, lengths), resolved.frequencies(8, lengths))
        assert read.amplitude() == resolved.amplitude() and read.usable_length(made) == resolved.usable_length(made)
    assert resolved.replace(interleaved=True).stock_form(made) is None
    assert resolved.replace(rotary_fraction=0.5).stock_form(made) is None


def test_a_lone_mscale_in_a_config_counts_for_nothing() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    for lone in ({"mscale": 2.0}, {"mscale_all_dim": 2.0}, {"mscale": 2.0, "mscale_all_dim": 0}):
        ours = YaRN.from_stock_form({"rope_parameters": {**parameters, **lone}, "max_position_embeddings": 2048})
        assert ours == YaRN(theta=1e4, factor=4.0, original_context_length=512)
        _, theirs = stock("yarn", head_dim=8, theta=1e4, original=512, factor=4.0, **lone)
        assert ours.amplitude() == pytest.approx(theirs)


# ---------------------------------------------------------------------- absolute vectors


def sinusoid_by_hand(position: int, width: int, base: float = 10000.0) -> list[float]:
    """Section 3.5: sin(pos / base**(2i / d)) in column 2i, cos in column 2i + 1."""
    values = []
    for column in range(width):
        angle = position / base ** ((column - column % 2) / width)
        values.append(math.cos(angle) if column % 2 else math.sin(angle))
    return values


def added(
    encoding: Encoding, positions: Tensor, width: int, dtype: torch.dtype = torch.float32, **weights: Tensor
) -> Tensor:
    """What an embedding encoding adds to a zero vector, [batch, length, width]."""
    x = torch.zeros(*positions.shape, width, dtype=dtype)
    return encoding.embed(x, positions, weights, shape(hidden=width, heads=1))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 31, 32])
def test_sinusoid(width: int) -> None:
    positions = torch.tensor([[0, 1, 2, 31], [100, 4095, 100_000, 7]])
    ours = added(Sinusoidal(), positions, width)
    expected = torch.tensor([[sinusoid_by_hand(p, width) for p in row] for row in positions.tolist()])
    assert ours.shape == (2, 4, width) and ours.dtype == torch.float32
    assert float((ours - expected).abs().max()) < 1e-7
    other = torch.tensor([[sinusoid_by_hand(p, width, 77.0) for p in row] for row in positions.tolist()])
    assert float((added(Sinusoidal(base=77.0, scale=0.5), positions, width) - other / 2).abs().max()) < 1e-7


def test_sinusoid_columns() -> None:
    ours = added(Sinusoidal(), torch.tensor([[0, 1]]), 4)
    assert ours[0, 0].tolist() == [0, 1, 0, 1]
    assert ours[0, 1].tolist() == pytest.approx([0.841471, 0.540302, 0.0100, 0.99995], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_stay_exact_in_a_low_precision_model(dtype: torch.dtype) -> None:
    positions = torch.arange(4096)[None]
    ours = added(Sinusoidal(), positions, 64, dtype)
    expected = torch.tensor([sinusoid_by_hand(p, 64) for p in range(4096)])
    assert ours.dtype == dtype
    assert float((ours[0].float() - expected).abs().max()) < 4e-3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.zeros(1, 4096, 64)
        fused = Sinusoidal(fusion="concat").embed(x, positions, {"fuse": torch.eye(64).repeat(1, 2)}, shape(hidden=64))
    assert fused.dtype == torch.float32  # autocast would give bfloat16, and an error of 4e-3
    assert float((fused[0] - expected).abs().max()) < 1e-6


def test_matched_scale() -> None:
    torch.manual_seed(0)
    native = torch.randn(32, 31) * 0.3
    for encoding in (Sinusoidal(scale="match"), Learned(num_positions=48, init="sinusoidal", scale="match")):
        weights = encoding.new_weights(shape(hidden=31, heads=1), native)
        rows = added(encoding, torch.arange(32)[None], 31, **weights)[0]
        assert float(rows.norm(dim=-1).mean()) == pytest.approx(float(native.norm(dim=-1).mean()), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", [Sinusoidal(), Learned(num_positions=32)])
def test_concatenation_starts_out_as_addition(encoding: Encoding, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(2, 32, 32).to(dtype), torch.arange(32).repeat(2, 1)
    native = torch.randn(32, 32)
    both = encoding.replace(fusion="concat")
    weights = {name: w.to(dtype) for name, w in both.new_weights(shape(), native).items()}
    assert weights["fuse"].shape == (32, 64)
    plain = encoding.embed(x, positions, weights, shape())
    fused = both.embed(x, positions, weights, shape())
    assert fused.dtype == dtype and plain.dtype == dtype
    assert torch.equal(fused, plain)


def test_concatenation_is_the_weighted_sum_of_both_parts() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(32, 32), torch.randn(32, 32)
    x, positions = torch.randn(2, 8, 32), torch.arange(8).repeat(2, 1)
    ours = Sinusoidal(fusion="concat").embed(x, positions, {"fuse": torch.cat([a, b], dim=1)}, shape())
    p = torch.tensor([sinusoid_by_hand(i, 32) for i in range(8)])
    assert float((ours - (x @ a.T + p @ b.T)).abs().max()) < 1e-4


def test_a_learned_scale_has_the_gradient_of_a_factor() -> None:
    scale = torch.tensor([0.5], requires_grad=True)
    fields = {"scale": 0.5, "learn_scale": True}
    ours = Sinusoidal(**fields).embed(torch.zeros(1, 8, 32), torch.arange(8)[None], {"scale": scale}, shape())  # type: ignore[arg-type]
    p = torch.tensor([sinusoid_by_hand(i, 32) for i in range(8)])
    assert float((ours.detach()[0] - p / 2).abs().max()) < 1e-6
    weight = torch.randn(8, 32)
    (ours[0] * weight).sum().backward()
    assert scale.grad is not None and float(scale.grad) == pytest.approx(float((p * weight).sum()), rel=1e-4)


# ---------------------------------------------------------------------- how a learned table starts


def rows_of(init: str, native: Tensor | None, rows: int, **fields: Any) -> Tensor:
    hidden = 32 if native is None else native.shape[1]
    return Learned(num_positions=rows, init=init, **fields).new_weights(shape(hidden=hidden), native)["table"]


NATIVE = torch.randn(32, 32, generator=torch.Generator().manual_seed(3)) * 0.3


@pytest.mark.parametrize("init", ["interpolate", "repeat", "hierarchical"])
def test_the_same_length_is_bit_equal(init: str) -> None:
    table = rows_of(init, NATIVE, 32)
    assert torch.equal(table, NATIVE) and table.data_ptr() != NATIVE.data_ptr()


@pytest.mark.parametrize("rows", [33, 63, 64, 100])
def test_interpolated_rows(rows: int) -> None:
    table = rows_of("interpolate", NATIVE, rows)
    assert torch.equal(table[0], NATIVE[0]) and torch.equal(table[-1], NATIVE[-1])
    theirs = functional.interpolate(NATIVE.double().T[None], size=rows, mode="linear", align_corners=True)[0].T
    assert float((table - theirs).abs().max()) < 1e-6
    if rows == 63:  # every other row is an old one
        assert torch.equal(table[::2], NATIVE)


def test_one_row_becomes_many() -> None:
    for init in ("interpolate", "repeat"):
        assert torch.equal(rows_of(init, NATIVE[:1], 5), NATIVE[:1].repeat(5, 1))


def test_repeated_rows() -> None:
    table = rows_of("repeat", NATIVE, 75)
    for i in range(75):
        assert torch.equal(table[i], NATIVE[i % 32])


def test_hierarchical_rows() -> None:
    """p_(i n + j) = a u_i + (1 - a) u_j with u = (p - a p_0) / (1 - a), a = 0.4."""
    native, a = NATIVE[:6], 0.4
    table = rows_of("hierarchical", native, 36)
    assert torch.equal(table[:6], native)
    u = (native.double() - a * native[0].double()) / (1 - a)
    for i in range(6):
        for j in range(6):
            assert float((table[6 * i + j] - (a * u[i] + (1 - a) * u[j])).abs().max()) < 1e-6


def test_sinusoidal_and_random_rows() -> None:
    by_hand = torch.tensor([sinusoid_by_hand(i, 32) for i in range(64)])
    for init, native in (("sinusoidal", NATIVE), ("sinusoidal", None), ("interpolate", None), ("repeat", None)):
        assert float((rows_of(init, native, 64) - by_hand).abs().max()) < 1e-6
    torch.manual_seed(0)
    assert float(rows_of("random", NATIVE, 2000).std()) == pytest.approx(float(NATIVE.std()), rel=0.02)
    assert float(rows_of("random", None, 2000).std()) == pytest.approx(0.02, rel=0.02)


def test_a_learned_table_is_looked_up_and_trained() -> None:
    table = NATIVE.clone().requires_grad_()
    positions = torch.tensor([[0, 5, 31], [5, 5, 2]])
    ours = Learned(num_positions=32, scale=2.0).embed(torch.ones(2, 3, 32), positions, {"table": table}, shape())
    assert torch.equal(ours, 1 + 2 * NATIVE[positions])
    ours.sum().backward()
    count = torch.bincount(positions.flatten(), minlength=32).float()
    assert table.grad is not None and torch.equal(table.grad, (2 * count)[:, None].expand(32, 32))


# ---------------------------------------------------------------------- score biases


def bias_of(encoding: Encoding, queries: list[int], keys: list[int], made: ModelShape, **weights: Tensor) -> Tensor:
    """[heads, queries, keys] for one row."""
    bias = encoding.bias(torch.tensor([queries]), torch.tensor([keys]), weights, made)
    assert bias.dtype == torch.float32 and bias.shape == (1, made.heads, len(queries), len(keys))
    return bias[0]


SCORES: list[Encoding] = [ALiBi(), T5Bias(), Kerple(), Kerple(variant="power"), Fire(), Sandwich()]


@pytest.mark.parametrize("encoding", SCORES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_depends_only_on_its_own_row_and_is_finite(encoding: Encoding, causal: bool) -> None:
    torch.manual_seed(0)
    made = shape(causal=causal)
    weights = encoding.new_weights(made, None)
    queries = torch.tensor([[30, 31, 32], [0, 1, 2]])
    keys = torch.tensor([[0, 31, 32, 900], [0, 0, 1, 2]])
    both = encoding.bias(queries, keys, weights, made)
    assert both.shape == (2, 4, 3, 4) and both.dtype == torch.float32 and bool(both.isfinite().all())
    for row in range(2):
        alone = encoding.bias(queries[row : row + 1], keys[row : row + 1], weights, made)
        assert float((alone[0] - both[row]).abs().max()) < 1e-5
    broadcast = encoding.bias(queries[:1], keys, weights, made)
    assert float((broadcast[0] - both[0]).abs().max()) < 1e-5 and broadcast.shape[0] == 2


@pytest.mark.parametrize("encoding", SCORES, ids=str)
def test_a_bias_is_float32_and_the_same_under_autocast(encoding: Encoding) -> None:
    torch.manual_seed(0)
    made = shape()
    weights = encoding.new_weights(made, None)
    positions = torch.arange(300, 364)[None]
    plain = encoding.bias(positions, positions, weights, made)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoding.bias(positions, positions, weights, made), plain)
    low = {name: weight.bfloat16() for name, weight in weights.items()}
    rounded = encoding.bias(positions, positions, low, made)
    again = encoding.bias(positions, positions, {name: weight.float() for name, weight in low.items()}, made)
    assert rounded.dtype == torch.float32 and torch.equal(rounded, again)


@pytest.mark.parametrize("encoding", [e for e in SCORES if not isinstance(e, Fire)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_depends_only_on_distance(encoding: Encoding, causal: bool) -> None:
    made = shape(causal=causal)
    weights = encoding.new_weights(made, None)
    positions = torch.arange(40)[None]
    near, far = (encoding.bias(positions + shift, positions + shift, weights, made) for shift in (0, 70_007))
    assert float((near - far).abs().max()) < 1e-4


@pytest.mark.parametrize("encoding", [ALiBi(), Kerple(), Kerple(variant="power"), Fire(), Sandwich()], ids=str)
def test_an_encoder_sees_both_sides_alike(encoding: Encoding) -> None:
    made = shape(causal=False)
    weights = encoding.new_weights(made, None)
    positions = torch.arange(700)[None]
    bias = encoding.bias(positions, positions, weights, made)
    assert float((bias - bias.transpose(-1, -2)).abs().max()) < 1e-4
    assert float(bias.diff(dim=-1).abs().max()) > 1e-3


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 25, 32, 40, 71])
def test_alibi_slopes_are_blooms(heads: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1]
    assert torch.tensor(paper_slopes(heads)).tolist() == pytest.approx(theirs.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (
            12,
            [
                0.5,
                0.25,
                0.125,
                0.0625,
                0.03125,
                0.015625,
                0.0078125,
                0.00390625,
                0.707107,
                0.353553,
                0.176777,
                0.088388,
            ],
        ),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (3, [0.0625, 0.00390625, 0.25]),
        (1, [0.00390625]),
    ],
)
def test_alibi_slopes(heads: int, expected: list[float]) -> None:
    assert paper_slopes(heads) == pytest.approx(expected, abs=1e-6)
    assert paper_slopes(8)[0] == 0.5 and paper_slopes(8)[-1] == 0.00390625


def test_alibi_bias() -> None:
    queries, keys = [5, 6], [0, 3, 5, 6]
    decoder = bias_of(ALiBi(), queries, keys, shape())
    encoder = bias_of(ALiBi(), queries, keys, shape(causal=False))
    slopes = [0.25, 0.0625, 0.015625, 0.00390625]
    for h in range(4):
        for i, query in enumerate(queries):
            for j, key in enumerate(keys):
                assert float(encoder[h, i, j]) == -slopes[h] * abs(query - key)
                if key <= query:
                    assert float(decoder[h, i, j]) == -slopes[h] * (query - key)
    own = bias_of(ALiBi(slopes=(4.0, 3.0, 2.0, 1.0)), [2], [0], shape())
    assert own.flatten().tolist() == [-8, -6, -4, -2]


# ---------------------------------------------------------------------- a bias as columns of q and k


def spread(encoding: Encoding, positions: Tensor, made: ModelShape, dtype: torch.dtype) -> Tensor:
    """[heads, n, n]: the inner products of an encoding's columns in float64, each query's constant taken off."""
    columns = encoding.columns(positions, positions, made, dtype)
    assert columns is not None
    left, right = columns
    assert left.dtype == right.dtype == dtype and left.shape[-1] == right.shape[-1] and left.shape[-1] % 8 == 0
    assert left.shape[:3] == (1, made.heads, positions.shape[1]) and right.shape[:3] == (1, 1, positions.shape[1])
    assert bool(left.isfinite().all()) and bool(right.isfinite().all())
    scores = (left.double() @ right.double().transpose(-1, -2))[0]
    return scores - scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)


def alibi_by_hand(positions: Tensor, slopes: list[float]) -> Tensor:
    distance = (positions[0, :, None] - positions[0, None, :]).double()
    return -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [4, 12, 25])
def test_alibi_columns_are_the_bias(dtype: torch.dtype, heads: int) -> None:
    made = shape(heads=heads, hidden=heads * 8)
    skipped = torch.tensor([[0, 1, 2, 255, 256, 257, 2047, 2048, 2049, 65_535, 65_536, 65_537, 131_072, 200_001]])
    for positions in (skipped, skipped + 300_000):
        expected = alibi_by_hand(positions, paper_slopes(heads))
        ours = spread(ALiBi(), positions, made, dtype)
        # As exact as a float32 bias, whose slope has 24 bits; two parts of 11 bits are a little short of that.
        bound = 2**-23 if dtype == torch.float16 else 2**-24
        assert float(((ours - expected).abs() / expected.abs().clamp(min=1)).max()) < bound


def test_alibi_columns_take_any_slopes() -> None:
    positions = torch.tensor([[0, 1, 300, 5000, 70_000]])
    slopes = (3.7, 1e-3, 1e-5, 100.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = spread(ALiBi(slopes=slopes), positions, shape(), dtype)
        expected = alibi_by_hand(positions, list(slopes))
        # The second part of the smallest slope is below what float16 can hold.
        bound = 1e-5 if dtype == torch.float16 else 2**-24
        assert float(((ours - expected).abs() / expected.abs().clamp(min=1)).max()) < bound
    assert ALiBi(slopes=(1000.0, 1.0, 1.0, 1.0)).columns(positions, positions, shape(), torch.float16) is None


def test_columns_are_only_for_alibi_and_float32_sandwich() -> None:
    positions = torch.arange(8)[None]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for encoding in (T5Bias(), Kerple(), Fire()):
            assert encoding.columns(positions, positions, shape(), dtype) is None
    assert Sandwich().columns(positions, positions, shape(), torch.bfloat16) is None
    assert ALiBi().columns(positions, positions, shape(), torch.float64) is None


def attention(
    query: Tensor, key: Tensor, value: Tensor, columns: tuple[Tensor, Tensor] | None, bias: Tensor | None
) -> Tensor:
    """Fused causal attention in the inputs' dtype, scale 1, with the bias as columns put first or as a tensor."""
    if columns is None:
        assert bias is not None
        causal = torch.ones(bias.shape[-2:], dtype=torch.bool).tril()
        mask = bias.to(query.dtype).masked_fill(~causal, float("-inf"))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
    heads, width = query.shape[1], columns[0].shape[-1]
    wide_query = torch.cat([columns[0], query], dim=-1)
    wide_key = torch.cat([columns[1].expand(-1, heads, -1, -1), key], dim=-1)
    wide_value = functional.pad(value, (0, width))
    out = functional.scaled_dot_product_attention(wide_query, wide_key, wide_value, is_causal=True, scale=1.0)
    return out[..., : value.shape[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_columns_lose_nothing_in_the_fused_kernel(dtype: torch.dtype) -> None:
    """n = 4096 against float64: no worse than a bias tensor of the model's dtype."""
    torch.manual_seed(0)
    length, heads, width = 4096, 4, 32
    made = shape(heads=heads, hidden=heads * width)
    positions = torch.arange(length)[None]
    query, key, value = (torch.randn(1, heads, length, width).to(dtype) for _ in range(3))
    query = query / 4
    rows = slice(length - 256, length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()[rows]
    scores = query[:, :, rows].double() @ key.double().transpose(-1, -2)
    scores = scores + alibi_by_hand(positions, paper_slopes(heads))[:, rows]
    exact = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ value.double()

    columns = ALiBi().columns(positions, positions, made, dtype)
    ours = attention(query, key, value, columns, None)[:, :, rows].double()
    theirs = attention(query, key, value, None, ALiBi().bias(positions, positions, {}, made))[:, :, rows].double()
    ours_error, their_error = float((ours - exact).abs().max()), float((theirs - exact).abs().max())
    assert ours_error <= 2 * their_error, (ours_error, their_error)
    assert ours_error < (5e-6 if dtype == torch.float32 else 2e-2)


def test_sandwich_columns_are_the_bias() -> None:
    positions = torch.tensor([[0, 1, 7, 100, 4095, 70_000]])
    made = shape()
    ours = spread(Sandwich(), positions, made, torch.float32)
    expected = sandwich_by_hand(positions[0].tolist(), made.heads)
    assert float((ours - expected).abs().max()) < 2e-5
    assert spread(Sandwich(dim=12), positions, made, torch.float32).shape == (4, 6, 6)


# ---------------------------------------------------------------------- the other biases


def t5_bucket(key_minus_query: list[int], causal: bool, **fields: int) -> list[int]:
    return T5Bias(**fields).bucket(-torch.tensor(key_minus_query), causal).tolist()


def test_t5_buckets() -> None:
    assert t5_bucket([0, -7, -8, -11, -12, -15, -16, -128, -1000, 1, 8, 128], causal=False) == [
        0, 7, 8, 8, 9, 9, 10, 15, 15, 17, 24, 31,
    ]  # fmt: skip
    assert t5_bucket([-15, -16, -128, 1, 5, 1000], causal=True) == [15, 16, 31, 0, 0, 0]


@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (64, 200), (8, 20), (16, 1000), (4, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_are_t5s(buckets: int, far: int, causal: bool) -> None:
    relative_positions = torch.arange(-2100, 2100)
    theirs = T5Attention._relative_position_bucket(relative_positions, not causal, buckets, far)
    ours = T5Bias(num_buckets=buckets, max_distance=far).bucket(-relative_positions, causal)
    assert torch.equal(ours, theirs)
    assert torch.equal(T5Bias(num_buckets=buckets, max_distance=far).bucket(-relative_positions.int(), causal), theirs)
    assert int(ours.max()) < buckets


@pytest.mark.parametrize("causal", [True, False])
def test_t5_bias_looks_its_table_up(causal: bool) -> None:
    table = torch.randn(32, 4, requires_grad=True)
    queries, keys = [39, 40], list(range(41))
    ours = bias_of(T5Bias(), queries, keys, shape(causal=causal), buckets=table)
    assert ours.stride(-1) == 1
    used = torch.zeros(32)
    for i, query in enumerate(queries):
        bucket = T5Attention._relative_position_bucket(torch.tensor(keys) - query, not causal, 32, 128)
        assert torch.equal(ours[:, i], table[bucket].T)
        used += torch.bincount(bucket, minlength=32)
    ours.sum().backward()
    assert table.grad is not None and torch.equal(table.grad, used[:, None].expand(32, 4))
    start = T5Bias().new_weights(shape(hidden=400), None)["buckets"]
    assert start.shape == (32, 4) and float(start.std()) == pytest.approx(400**-0.5, rel=0.3)


def test_kerple_by_hand() -> None:
    """Power and logarithmic variant: -r1 |m - n|**r2 and -r1 log(1 + r2 |m - n|)."""
    r1, r2 = [0.3, 1.0, 2.0, 0.05], [0.7, 1.0, 1.9, 0.1]
    queries, keys = [0, 7, 31], [0, 1, 7, 31, 500]
    log = bias_of(Kerple(), queries, keys, shape(), raw_r1=torch.tensor(r1).log(), raw_r2=torch.tensor(r2).log())
    power = bias_of(
        Kerple(variant="power"),
        queries,
        keys,
        shape(),
        raw_r1=torch.tensor(r1).log(),
        raw_r2=(torch.tensor(r2) / 2).logit(),
    )
    for h in range(4):
        for i, query in enumerate(queries):
            for j, key in enumerate(keys):
                distance = abs(query - key)
                assert float(log[h, i, j]) == pytest.approx(-r1[h] * math.log(1 + r2[h] * distance), rel=1e-5, abs=1e-7)
                assert float(power[h, i, j]) == pytest.approx(-r1[h] * distance ** r2[h], rel=1e-5, abs=1e-7)


def test_kerple_starts_in_the_papers_ranges_and_never_leaves_what_is_allowed() -> None:
    torch.manual_seed(0)
    made = shape(heads=4000, hidden=4000)
    weights = Kerple().new_weights(made, None)
    r1, r2 = weights["raw_r1"].exp(), weights["raw_r2"].exp()
    assert float(r1.min()) >= 0.0099 and 1.9 < float(r1.max()) <= 2 and float(r2.min()) >= 0.0099
    assert 0.95 < float(r2.max()) <= 1
    power = Kerple(variant="power").new_weights(made, None)
    exponents = 2 * power["raw_r2"].sigmoid()
    assert 1.9 < float(exponents.max()) <= 2 and 0.95 < float(power["raw_r1"].exp().max()) <= 1
    for raw in (-50.0, 50.0):  # wherever an optimizer goes, nearer keys are never worse
        w = {"raw_r1": torch.zeros(4), "raw_r2": torch.full((4,), raw)}
        for encoding in (Kerple(), Kerple(variant="power")):
            bias = bias_of(encoding, [30], list(range(31)), shape(), **w)
            assert bool(bias.isfinite().all()) and bool((bias.diff(dim=-1) >= 0).all())


def fire_by_hand(query: int, key: int, causal: bool, weights: dict[str, Tensor], init_l: float) -> list[float]:
    """Section 3: f(psi(i - j) / psi(max(L, i))), psi(x) = log(c x + 1), f = linear, ReLU, linear."""
    c, least = abs(float(weights["c"])), abs(float(weights["L_ratio"])) * init_l
    reach = max(least, query if causal else max(query, key))
    x = math.log(c * abs(query - key) + 1) / math.log(c * reach + 1)
    inner, offset, outer = (weights[name].double().tolist() for name in ("inner", "inner_bias", "outer"))
    hidden = [max(0.0, w * x + b) for w, b in zip(inner, offset, strict=True)]
    return [sum(w * h for w, h in zip(head, hidden, strict=True)) for head in outer]


@pytest.mark.parametrize("causal", [True, False])
def test_fire_by_hand(causal: bool) -> None:
    torch.manual_seed(0)
    encoding = Fire(width=5, init_c=0.2, init_L=20.0)
    weights = encoding.new_weights(shape(), None)
    weights["c"], weights["L_ratio"] = torch.tensor([-0.3]), torch.tensor([1.5])
    queries, keys = [0, 10, 29, 31, 200], [0, 1, 10, 30, 31, 199]
    ours = bias_of(encoding, queries, keys, shape(causal=causal), **weights)
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            if causal and key > query:
                continue
            expected = fire_by_hand(query, key, causal, weights, 20.0)
            assert ours[:, i, j].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_fire_starts_at_the_papers_values() -> None:
    torch.manual_seed(0)
    weights = Fire().new_weights(shape(), None)
    assert float(weights["c"]) == pytest.approx(0.1) and float(weights["L_ratio"]) == 1.0
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        "c": (1,),
        "L_ratio": (1,),
        "inner": (32,),
        "inner_bias": (32,),
        "outer": (4, 32),
    }
    for name, bound in (("inner", 1.0), ("inner_bias", 1.0), ("outer", 32**-0.5)):
        assert 0.7 * bound < float(weights[name].abs().max()) <= bound


def sandwich_by_hand(positions: list[int], heads: int, dim: int = 128, base: float = 10000.0) -> Tensor:
    """The sum over waves of cos((m - n) / base**(2i / dim)) - dim / 2, over the ratio 8 h / heads."""
    rows = []
    for m in positions:
        waves = [[math.cos((m - n) / base ** (2 * i / dim)) for i in range(dim // 2)] for n in positions]
        rows.append([math.fsum(wave) - dim // 2 for wave in waves])
    ratios = torch.tensor([8 * h / heads for h in range(1, heads + 1)], dtype=torch.float64)
    return torch.tensor(rows, dtype=torch.float64) / ratios[:, None, None]


@pytest.mark.parametrize("heads", [4, 12])
def test_sandwich_by_hand(heads: int) -> None:
    positions = [0, 1, 2, 30, 31, 4095, 100_000]
    made = shape(heads=heads, hidden=8 * heads)
    ours = bias_of(Sandwich(), positions, positions, made)
    assert float((ours - sandwich_by_hand(positions, heads)).abs().max()) < 5e-5
    ours = bias_of(Sandwich(dim=10, base=50.0), positions, positions, made)
    assert float((ours - sandwich_by_hand(positions, heads, 10, 50.0)).abs().max()) < 5e-6


# ---------------------------------------------------------------------- gradients

LEARNED: list[Encoding] = [
    T5Bias(num_buckets=4, max_distance=3),
    Kerple(),
    Kerple(variant="power"),
    Fire(width=3, init_c=0.3, init_L=6.0),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("encoding", LEARNED, ids=str)
def test_gradients_of_learned_biases(encoding: Encoding, causal: bool) -> None:
    """Against central differences of the same bias, in float32 with a step where its curvature does not matter."""
    torch.manual_seed(1)
    made = shape(causal=causal)
    positions = torch.tensor([[0, 1, 2, 5, 9, 40]])
    weights = {name: w.clone().requires_grad_() for name, w in encoding.new_weights(made, None).items()}
    probe = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    (encoding.bias(positions, positions, weights, made) * probe).sum().backward()

    def total(changed: dict[str, Tensor]) -> float:
        return float((encoding.bias(positions, positions, changed, made).double() * probe).sum())

    step = 1e-3
    for name, weight in weights.items():
        assert weight.grad is not None and bool(weight.grad.isfinite().all()), name
        assert float(weight.grad.abs().max()) > 1e-4, name
        for index in range(min(weight.numel(), 6)):
            values = []
            for sign in (1, -1):
                moved = {n: w.detach().clone() for n, w in weights.items()}
                moved[name].view(-1)[index] += sign * step
                values.append(total(moved))
            slope = (values[0] - values[1]) / (2 * step)
            assert float(weight.grad.view(-1)[index]) == pytest.approx(slope, rel=0.01, abs=0.01), (name, index)


@pytest.mark.parametrize("encoding", [*SCORES, Sinusoidal(fusion="concat"), Learned(num_positions=64)], ids=str)
def test_an_encoding_compiles_without_a_graph_break(encoding: Encoding) -> None:
    made = shape()
    weights = encoding.new_weights(made, NATIVE)

    def run(positions: Tensor) -> Tensor:
        if encoding.site == "embedding":
            return encoding.embed(torch.zeros(1, positions.shape[1], 32), positions, weights, made)
        columns = encoding.columns(positions, positions, made, torch.float32)
        bias = encoding.bias(positions, positions, weights, made)
        return bias if columns is None else torch.cat([bias.flatten(), columns[0].flatten(), columns[1].flatten()])

    torch.compiler.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for length in (16, 32):
        positions = torch.arange(length)[None]
        assert torch.equal(compiled(positions), run(positions))
