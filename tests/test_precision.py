"""Angles, distances and slopes do not depend on the dtype of the model: they are cast once, last."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encodings_under_test import CAUSAL, EVERY, LENGTH, assert_equal, cache_of, fresh, instance, logits, on
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc.sites import rotation
from models import ARCHITECTURES, tokens

IDS = tokens(LENGTH, batch=2)
LOW = [torch.bfloat16, torch.float16]
TURNING = [name for name, e in EVERY.items() if e.site == "rotary"]
SCORES = [name for name, e in EVERY.items() if e.site == "score"]
HEAD = 64
FACTORS = tuple(1 + pair / 8 for pair in range(HEAD // 2))
POSITIONS = torch.arange(4096)[None]


def wide(name: str) -> Any:
    """A LLaMA with heads of 64 dimensions, patched."""
    encoding = EVERY[name]
    if encoding.name == "longrope":
        encoding = encoding.replace(short_factor=FACTORS, long_factor=FACTORS[::-1])
    model = ARCHITECTURES["llama"](head_dim=HEAD, num_hidden_layers=1, vocab_size=11, intermediate_size=8)
    return hf_posenc.patch(model, encoding)


def turned_over(model: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Ways in which a model comes into a lower precision."""

    def through_a_file() -> Any:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return hf_posenc.patch(loaded, hf_posenc.encoding_of(loaded))

    def pickled() -> Any:
        saved = io.BytesIO()
        torch.save(copy.deepcopy(model).bfloat16(), saved)
        saved.seek(0)
        return torch.load(saved, weights_only=False)

    return {
        "float32": lambda: model,
        "to bfloat16": lambda: copy.deepcopy(model).to(torch.bfloat16),
        "half": lambda: copy.deepcopy(model).half(),
        "half and back": lambda: copy.deepcopy(model).half().float(),
        "copied after": lambda: copy.deepcopy(copy.deepcopy(model).bfloat16()),
        "pickled after": pickled,
        "loaded as bfloat16": through_a_file,
    }


@pytest.mark.parametrize("name", TURNING)
def test_rotary_tables_are_those_of_float64(name: str, tmp_path: Path) -> None:
    """Positions up to 4,095 at every precision. A stock LLaMA is off by 1.56 after `.to(bfloat16)`."""
    model = wide(name)
    plan = model.model.hf_posenc.plan
    encoding: Any = plan.resolved
    lengths = torch.tensor([[4096]]) if encoding.length_dependent else None
    angles = POSITIONS.double().unsqueeze(-1) * encoding.frequencies(plan.rotary_dim, lengths)
    for how, make in turned_over(model, tmp_path).items():
        made = make()
        dtype = next(made.parameters()).dtype
        if plan.rotates == "table":
            cos, sin = made.model.rotary_emb(torch.zeros(1, dtype=dtype), POSITIONS)
            cos, sin = cos[..., : HEAD // 2], sin[..., : HEAD // 2]
        else:
            cos, sin = rotation(made.model.hf_posenc.plan, POSITIONS, lengths, dtype)
            step = 2 if encoding.interleaved else 1
            cos, sin = (table[..., ::step][..., : plan.rotary_dim // 2] for table in (cos, sin))
        assert cos.dtype == sin.dtype == dtype
        for ours, theirs in ((cos, angles.cos()), (sin, angles.sin())):
            theirs = theirs * encoding.amplitude()
            if plan.expressed and not encoding.length_dependent:  # stock's own numbers: frequencies in float32
                assert_equal(ours, theirs.float(), 4e-3 if dtype in LOW else 5e-4, what=how)
            else:
                assert torch.equal(ours, theirs.to(dtype)), how
        assert not list(made.model.rotary_emb.buffers()), "a buffer would be cast with the model"


@pytest.mark.parametrize("name", TURNING)
def test_no_table_ends(name: str) -> None:
    """Four times the original length and far beyond: each row is the direct cos and sin."""
    model = fresh("llama", name)
    plan = model.model.hf_posenc.plan
    encoding: Any = plan.resolved
    assert bool(logits(model, tokens(4 * 32)).isfinite().all())
    for start in (0, 100_000):
        positions = torch.arange(start, start + 4 * 32)[None]
        lengths = torch.tensor([[start + 4 * 32]]) if encoding.length_dependent else None
        cos, sin = rotation(plan, positions, lengths, torch.float32)
        angles = positions.double().unsqueeze(-1) * encoding.frequencies(plan.rotary_dim, lengths)
        step, half = (2, None) if encoding.interleaved else (1, plan.rotary_dim // 2)
        assert_equal(cos[..., ::step][..., :half], angles.cos() * encoding.amplitude(), 1e-6)
        assert_equal(sin[..., ::step][..., :half], angles.sin() * encoding.amplitude(), 1e-6)
        if plan.rotates == "table":
            cos, _ = model.model.rotary_emb(torch.zeros(1), positions)
            stock_angles = plan.expressed and not encoding.length_dependent
            tolerance = 1e-6 if not stock_angles else 1e-5 if start == 0 else 2e-2
            assert_equal(cos[..., :half], angles.cos() * encoding.amplitude(), tolerance)


@on(both=False)
def test_casting_loses_nothing_but_the_bits_of_weights(architecture: str, name: str, backend: str) -> None:
    """A patched model cast down and up again is the patched model of weights that were cast down and up."""
    model = fresh(architecture, name, backend)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.copy_(parameter.bfloat16().float())
    assert torch.equal(logits(model.bfloat16().float(), IDS), logits(expected, IDS))


@on(names=[name for name in EVERY if name not in ("sinusoidal_concat", "learned_concat")], both=False)
def test_patching_before_or_after_the_cast_is_the_same(architecture: str, name: str, backend: str) -> None:
    made = []
    for early in (True, False):
        torch.manual_seed(2)
        model = ARCHITECTURES[architecture]()
        model = (
            hf_posenc.patch(model, EVERY[name]).bfloat16() if early else hf_posenc.patch(model.bfloat16(), EVERY[name])
        )
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        made.append(logits(model, IDS))
    assert torch.equal(made[0], made[1]) or name == "learned"  # there the rows were interpolated from rounded ones
    assert_equal(made[0], made[1], 0.5)


@on()
def test_every_part_of_a_low_precision_model_has_its_dtype(architecture: str, name: str, backend: str) -> None:
    """A table in float32 would promote q and k, and double the cache."""
    for dtype in LOW:
        model = fresh(architecture, name, backend).to(dtype)
        with torch.no_grad():
            out = model(IDS, output_hidden_states=True, **({"use_cache": True} if architecture in CAUSAL else {}))
        assert out.logits.dtype == dtype
        assert {state.dtype for state in out.hidden_states} == {dtype}
        if architecture in CAUSAL:
            held = {t.dtype for layer in cache_of(out).layers for t in (layer.keys, layer.values)}
            assert held == {dtype}


@on(both=False)
def test_under_autocast_dtypes_are_stocks(architecture: str, name: str, backend: str) -> None:
    def run(model: Any) -> list[torch.dtype]:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(IDS, output_hidden_states=True, **({"use_cache": True} if architecture in CAUSAL else {}))
        held = (
            [t.dtype for layer in cache_of(out).layers for t in (layer.keys, layer.values)]
            if architecture in CAUSAL
            else []
        )
        return [out.logits.dtype, *(state.dtype for state in out.hidden_states), *held]

    assert run(fresh(architecture, name, backend)) == run(ARCHITECTURES[architecture](attn_implementation=backend))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_autocast_does_not_reach_the_numbers_of_an_encoding(architecture: str, name: str) -> None:
    model = fresh(architecture, name)
    owner = model.base_model.hf_posenc
    encoding, shape = owner.plan.resolved, owner.plan.shape
    weights, positions = dict(owner.named_parameters()), torch.arange(3000, 3040)[None]
    made = []
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            if encoding.site == "score":
                made.append(encoding.bias(positions, positions, weights, shape))
                columns = encoding.columns(positions, positions, shape, torch.float32)
                made[-1] = torch.cat([made[-1].flatten(), *(c.flatten() for c in columns or ())])
            elif encoding.site == "rotary":
                lengths = torch.tensor([[3040]])
                made.append(torch.cat(rotation(owner.plan, positions, lengths, torch.float32)))
            elif encoding.site == "embedding" and not owner.plan.expressed:
                vectors = torch.linspace(-1, 1, 5 * 32).reshape(1, 5, 32)
                made.append(encoding.embed(vectors, positions[:, :5] - 3000, weights, shape))
    assert not made or (made[0].dtype == torch.float32 and torch.equal(made[0], made[1]))


@on(names=SCORES)
def test_the_bias_reaches_the_scores_in_full_under_low_precision(architecture: str, name: str, backend: str) -> None:
    """Against the same bfloat16 weights run in float32: what is lost is the rounding of the rest, as in stock."""
    low = fresh(architecture, name, backend).bfloat16()
    exact = copy.deepcopy(low).float()
    stock = ARCHITECTURES[architecture](attn_implementation=backend).bfloat16()
    stock_exact = copy.deepcopy(stock).float()
    ids = tokens(30, batch=2)
    ours = (logits(low, ids).float() - logits(exact, ids)).abs().mean()
    theirs = (logits(stock, ids).float() - logits(stock_exact, ids)).abs().mean()
    assert ours < 2 * theirs, (ours, theirs)


# ---------------------------------------------------------------------- no NaN


@on()
def test_padding_in_float16_makes_no_nan(architecture: str, name: str, backend: str) -> None:
    for dtype in LOW:
        model = fresh(architecture, name, backend).to(dtype)
        for left in (True, False):
            mask = torch.ones_like(IDS)
            mask[0, :9] = 0
            mask = mask if left else mask.flip(1)
            assert bool(logits(model, IDS, attention_mask=mask).isfinite().all()), (dtype, left)


@on()
def test_padded_rows_send_back_finite_gradients(architecture: str, name: str, backend: str) -> None:
    """A query row that sees no key: NaN there would spread to every weight."""
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    labels = IDS.masked_fill(mask == 0, -100)
    for dtype in (torch.float32, torch.bfloat16):
        model = fresh(architecture, name, backend).to(dtype).train()
        model(IDS, attention_mask=mask, labels=labels).loss.backward()
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad and "pooler" not in parameter_name:
                assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), (parameter_name, dtype)


def test_extreme_slopes_in_float16_make_no_nan() -> None:
    """A slope whose bias leaves the range of float16 hides a key; it must not poison the row."""
    for backend in ("sdpa", "eager"):
        for architecture in sorted(ARCHITECTURES):
            model = fresh(architecture, hf_posenc.ALiBi(slopes=(5e4, 1e3, 1.0, 1e-3)), backend).half()
            assert bool(logits(model, IDS).isfinite().all()), (architecture, backend)


def test_instances_cover_every_scaling() -> None:
    """The tests above are worth as much as their instances: each scaling changes some frequency of the tiny model."""
    plain = hf_posenc.RoPE(theta=10000.0).frequencies(8)
    for name, cls in hf_posenc.encodings().items():
        if cls.site == "rotary" and name != "rope":
            resolved = instance(cls, theta=10000.0)
            lengths = torch.tensor([LENGTH]) if cls.length_dependent else None
            assert not torch.allclose(resolved.frequencies(8, lengths), plain), name
