"""`describe` says what is in force, for people and as plain data, on every model that can be patched."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from encodings_under_test import EVERY, fresh, on
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc
from hf_posenc import patch
from models import ARCHITECTURES, HEADS, HIDDEN, POSITIONS


def row(model: Any, name: str) -> str:
    """What the report says behind a name."""
    return next(line[18:] for line in str(hf_posenc.describe(model)).splitlines() if line.startswith(f"  {name:<15} "))


@on(both=False)
def test_report_fits_a_terminal_and_json(architecture: str, name: str, backend: str) -> None:
    model = fresh(architecture, name)
    said = hf_posenc.describe(model)
    lines = str(said).splitlines()
    assert max(len(line) for line in lines) <= 100
    assert EVERY[name].name in lines[0] and architecture in lines[0] and "patched" in lines[0]
    data = json.loads(json.dumps(said.to_dict(), allow_nan=False))
    assert data["encoding"] == str(EVERY[name]) and data["patched"] is True
    assert data["usable_length"] == said.usable_length
    site = {"embedding": "embedding", "rotary": "rotary", "score": "score"}.get(EVERY[name].site)
    for other in ("embedding", "rotary", "score"):
        active = not data[other].startswith(("nothing", "silent"))
        assert active == (other == site), f"{other}: {data[other]}"
    assert (data["rotation"] is not None) == (site == "rotary") and (data["bias"] is not None) == (site == "score")


# ---------------------------------------------------------------------- models as they come


def test_unpatched_llama_has_default_rope_unscaled() -> None:
    model = ARCHITECTURES["llama"]()
    said = hf_posenc.describe(model)
    assert not said.patched and said.factor is None and said.theta == 10000.0
    assert row(model, "rotary") == "default rope, unscaled"
    assert said.rotation is not None and said.rotation.scaled == 0
    assert "none is scaled" in str(said)
    assert said.embedding == said.score == "nothing" and said.new_weights == () and said.opens_in_stock


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_unpatched_table(architecture: str) -> None:
    said = hf_posenc.describe(ARCHITECTURES[architecture]())
    assert said.embedding == "learned table of 32 positions, added to the tokens"
    assert said.rotary == said.score == "nothing" and said.theta is None
    assert said.trained_length == said.usable_length == POSITIONS
    assert said.causal == (architecture == "gpt2")


def test_scaling_that_the_config_declares() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 32}
    said = hf_posenc.describe(ARCHITECTURES["llama"](rope_parameters=parameters, max_position_embeddings=128))
    assert not said.patched and said.rotary == "yarn, scaled for 4 times the length"
    assert (said.trained_length, said.usable_length, said.theta, said.factor) == (32, 128, 5e5, 4.0)


# ---------------------------------------------------------------------- rotation


def test_wavelengths_and_turns_of_a_real_head() -> None:
    """theta 10,000, head width 64, 2,048 tokens: pair i takes 2 pi 10000**(i / 32) tokens for a turn."""
    model = ARCHITECTURES["llama"](hidden_size=256, max_position_embeddings=2048)
    rotation = hf_posenc.describe(model).rotation
    assert rotation is not None and len(rotation.pairs) == 32
    for index, pair in enumerate(rotation.pairs):
        wavelength = 2 * math.pi * 10000 ** (index / 32)
        assert math.isclose(pair.wavelength, wavelength, rel_tol=1e-9)
        assert math.isclose(pair.turns, 2048 / wavelength, rel_tol=1e-9)
    # 2 pi 10000**(i / 32) > 2048 from i = 20.1 on
    assert rotation.unfinished == 11
    assert "11 of 32 never complete a turn over the 2,048 tokens of training" in str(hf_posenc.describe(model))


def test_yarn_says_what_it_keeps_and_divides() -> None:
    """Head width 64, 2,048 tokens, factor 4: 9 pairs kept, 11 divided by 4, 12 in between; amplitude 1.138629."""
    model = patch(ARCHITECTURES["llama"](hidden_size=256, max_position_embeddings=2048), "yarn:factor=4")
    said = hf_posenc.describe(model)
    rotation = said.rotation
    assert rotation is not None
    assert sum(pair.divided_by == 1.0 for pair in rotation.pairs) == 9
    assert sum(math.isclose(pair.divided_by, 4) for pair in rotation.pairs) == 11
    assert rotation.scaled == 23 and math.isclose(rotation.amplitude, 1.138629436, rel_tol=1e-9)
    assert "9 as unscaled, 11 divided by 4 (the most), 12 in between" in str(said)
    assert "cos and sin times 1.13863, so scores times 1.29648" in str(said)
    assert (said.trained_length, said.usable_length, said.factor) == (2048, 8192, 4.0)
    assert "(12 of 32 pairs shown)" in str(said)


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3", "dynamic_ntk", "longrope"])
def test_wavelengths_are_those_of_stock(name: str) -> None:
    model = fresh("llama", name)
    said = hf_posenc.describe(model)
    rotation = said.rotation
    assert rotation is not None
    length = said.usable_length if EVERY[name].length_dependent else None
    stock, amplitude = ROPE_INIT_FUNCTIONS[model.config.rope_parameters["rope_type"]](
        model.config, "cpu", seq_len=length
    )
    assert rotation.amplitude == pytest.approx(amplitude, rel=1e-6)
    if EVERY[name].length_dependent:
        assert rotation.at_length == length and f"in a sequence of {length} tokens" in str(said)
    for pair, frequency in zip(rotation.pairs, stock.tolist(), strict=True):
        assert 2 * math.pi / pair.wavelength == pytest.approx(frequency, rel=1e-5)


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_native_rotation_beside_a_bias(weight: float) -> None:
    model = hf_posenc.set_native_weight(patch(ARCHITECTURES["llama"](), "alibi", keep_native=True), weight)
    said = hf_posenc.describe(model)
    assert said.keep_native and said.native_weight == weight
    assert row(model, "native") == f"rope:theta=10000.0, kept beside it with weight {weight:g}"
    if weight:
        assert said.rotary == "native rope with weight 0.5" and said.rotation is not None
        assert said.rotation.pairs[0].wavelength == pytest.approx(4 * math.pi)  # half as fast
        assert said.usable_length == POSITIONS
    else:
        assert said.rotary.startswith("silent") and said.rotation is None and said.usable_length is None


# ---------------------------------------------------------------------- biases


def test_slopes_and_where_a_weight_falls_to_one_percent() -> None:
    model = patch(ARCHITECTURES["gpt2"](), "alibi")
    said = hf_posenc.describe(model)
    assert said.bias is not None and said.bias.slopes == (0.25, 0.0625, 0.015625, 0.00390625)
    reach = said.bias.one_percent_distances
    assert reach is not None
    for slope, distance in zip(said.bias.slopes, reach, strict=True):
        assert math.exp(-slope * distance) == pytest.approx(0.01)
    assert row(model, "usable length") == "no limit set by the encoding"
    assert said.usable_length is None and said.to_dict()["usable_length"] is None
    assert any(line.split() == ["1", "%", "at", "18.42", "73.68", "294.7", "1,179"] for line in str(said).splitlines())


@pytest.mark.parametrize("name", ["alibi", "kerple", "fire", "sandwich", "t5"])
def test_bias_table_is_the_bias(architecture: str, name: str) -> None:
    model = fresh(architecture, name)
    bias = hf_posenc.describe(model).bias
    assert bias is not None and bias.values is not None
    owner = model.base_model.hf_posenc
    weights = owner(torch.zeros(1))
    query = torch.tensor([[bias.query_position]])
    for column, distance in enumerate(bias.distances):
        true = owner.plan.resolved.bias(query, query - distance, weights, owner.plan.shape).flatten().tolist()
        assert [values[column] for values in bias.values] == pytest.approx(true, rel=1e-5, abs=1e-5)
    assert max(bias.distances) == POSITIONS
    assert (min(bias.distances) < 0) == (architecture == "bert" and name == "t5")  # the others are symmetric


# ---------------------------------------------------------------------- weights, saving, backends


def test_new_weights_are_named_and_counted() -> None:
    model = patch(ARCHITECTURES["bert"](), "sinusoidal:scale=match,fusion=concat")
    said = hf_posenc.describe(model)
    by_name = {weight.name: weight for weight in said.new_weights}
    assert by_name["bert.hf_posenc.fuse"].shape == (HIDDEN, 2 * HIDDEN) and by_name["bert.hf_posenc.fuse"].trains
    assert not by_name["bert.hf_posenc.scale"].trains
    assert row(model, "new weights").startswith("2,049 parameters: ")
    assert set(by_name) <= {name for name, _ in model.named_parameters()}
    assert said.parameters == sum(p.numel() for p in model.parameters())
    assert said.trainable == said.parameters - 1 - POSITIONS * HIDDEN  # without the fixed scale and the silent table


def test_a_grown_table_is_new() -> None:
    said = hf_posenc.describe(patch(ARCHITECTURES["gpt2"](), "learned:num_positions=64"))
    assert [(w.name, w.shape, w.trains) for w in said.new_weights] == [("transformer.wpe.weight", (64, HIDDEN), True)]
    assert said.opens_in_stock and said.usable_length == 64 and said.trained_length == 32


@on(both=False, names=["alibi", "yarn", "learned", "sinusoidal", "ntk", "nope"])
def test_it_opens_in_stock_where_the_config_says_so(architecture: str, name: str, backend: str, tmp_path: Any) -> None:
    model = fresh(architecture, name)
    model.config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    said = hf_posenc.describe(model)
    assert said.saved_as == saved["model_type"]
    assert said.opens_in_stock == (saved["model_type"] == architecture)
    assert ("needs `import hf_posenc`" in row(model, "saved model")) == (not said.opens_in_stock)


def test_attention_has_its_stock_name() -> None:
    assert hf_posenc.describe(fresh("gpt2", "alibi", "eager")).attention == "eager"
    assert hf_posenc.describe(fresh("gpt2", "alibi")).attention == "sdpa"


@pytest.mark.parametrize("name", ["t5", "yarn", "learned", "kerple"])
def test_a_saved_model_is_described_alike(name: str, tmp_path: Any) -> None:
    model = fresh("llama", name)
    model.save_pretrained(tmp_path)
    theirs, ours = hf_posenc.describe(model), hf_posenc.describe(AutoModelForCausalLM.from_pretrained(tmp_path))
    for field in ("encoding", "embedding", "rotary", "score", "trained_length", "usable_length", "theta", "saved_as"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.rotation == theirs.rotation and ours.bias == theirs.bias


@pytest.mark.parametrize("name", [None, "t5", "yarn", "alibi", "fire", "learned_concat"])
def test_on_the_meta_device(architecture: str, name: str | None) -> None:
    with torch.device("meta"):
        model = ARCHITECTURES[architecture]()
        if name is not None:
            patch(model, EVERY[name])
    said = hf_posenc.describe(model)
    text = str(said)
    assert said.parameters > 0
    if name in ("t5", "fire"):
        assert said.bias is not None and said.bias.values is None and "no values yet (meta device)" in text
    if name == "alibi":
        assert said.bias is not None and said.bias.values is not None and len(said.bias.values) == HEADS


@pytest.mark.parametrize("name", ["t5", "learned", "yarn"])
def test_under_a_peft_wrapper(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = patch(ARCHITECTURES["llama"](), EVERY[name])
    plain = hf_posenc.describe(model)
    wrapped = peft.get_peft_model(model, hf_posenc.lora_config(model, r=2))
    said = hf_posenc.describe(wrapped)
    assert (said.encoding, said.rotary, said.score, said.embedding) == (
        plain.encoding,
        plain.rotary,
        plain.score,
        plain.embedding,
    )
    assert said.rotation == plain.rotation and said.bias == plain.bias
    assert 0 < said.trainable < said.parameters
    assert {w.name for w in said.new_weights} <= {n for n, _ in wrapped.named_parameters()}


def test_changes_nothing() -> None:
    model = fresh("gpt2", "t5").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = dict(model.config.__dict__)
    hf_posenc.describe(model)
    assert model.training and config == model.config.__dict__
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_refuses_what_is_no_model() -> None:
    with pytest.raises(ValueError, match="Expected a transformers model"):
        hf_posenc.describe(torch.nn.Linear(2, 2))
