"""A patched model that is saved opens as the same model, or not at all."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encodings_under_test import EVERY, LENGTH, assert_equal, fresh, logits, on, stir
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline
from transformers.models.auto import auto_factory

import hf_posenc
from hf_posenc.checkpoint import CheckpointError
from models import ARCHITECTURES, tiny_tokenizer, tokens

IDS = tokens(LENGTH, batch=2)
AUTO = {"gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}

NATIVE = {
    "llama": ["rope", "linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope"],
    "gpt2": ["learned"],
    "bert": ["learned"],
}
"""What stock transformers can express, and must therefore open and run without this package."""


def keys_on_disk(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


# ---------------------------------------------------------------------- there and back


@on(both=False)
def test_saved_and_loaded_is_the_same_model(architecture: str, name: str, backend: str, tmp_path: Path) -> None:
    model = fresh(architecture, name, backend)
    out = logits(model, IDS)
    model.save_pretrained(tmp_path)
    loaded, info = AUTO[architecture].from_pretrained(tmp_path, attn_implementation=backend, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    # Stock runs what it can express; it takes the angles of a length-dependent encoding in float32.
    stock_angles = EVERY[name].length_dependent and name in NATIVE[architecture]
    assert_equal(logits(loaded, IDS), out, 2e-5 if stock_angles else 1e-6)
    assert type(loaded).__name__ == type(model).__name__
    assert hf_posenc.encoding_of(loaded) == EVERY[name]
    assert hf_posenc.position_parameters(loaded) == hf_posenc.position_parameters(model)
    assert [(n, p.requires_grad) for n, p in loaded.named_parameters()] == [
        (n, p.requires_grad) for n, p in model.named_parameters()
    ]
    if EVERY[name].site == "score":
        assert loaded.config._attn_implementation == f"hf_posenc_{backend}"
    if name in NATIVE[architecture]:  # no patch is in it; it can be patched with what it says it has
        hf_posenc.patch(loaded, hf_posenc.encoding_of(loaded))
        assert_equal(logits(loaded, IDS), out, 1e-6)
    else:
        plain = ARCHITECTURES[architecture](attn_implementation=backend)
        hf_posenc.unpatch(loaded)
        assert torch.equal(logits(loaded, IDS), logits(plain, IDS))
        assert list(loaded.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    "name", ["alibi", "t5", "yarn", "longrope", "rope_half", "sinusoidal_concat", "learned", "nope"]
)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_saving_what_was_loaded_writes_the_same_files(architecture: str, name: str, tmp_path: Path) -> None:
    fresh(architecture, name).save_pretrained(tmp_path / "one")
    AUTO[architecture].from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    one, two = (json.loads((tmp_path / x / "config.json").read_text(encoding="utf-8")) for x in ("one", "two"))
    assert one == two
    if any(key.endswith("LayerNorm.beta") for key in keys_on_disk(tmp_path / "two")):
        pytest.skip("transformers 5.0 saves a BERT that it loaded under older names, patched or not")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def auto_classes(architecture: str) -> list[Any]:
    """Auto classes of transformers that have a model of this family."""
    found = []
    for name in dir(transformers):
        if name.startswith("AutoModel"):
            mapping = getattr(getattr(transformers, name), "_model_mapping", None)
            if isinstance(mapping, auto_factory._LazyAutoMapping) and architecture in mapping._model_mapping:
                found.append(getattr(transformers, name))
    return found


@pytest.mark.parametrize(("architecture", "auto"), [(a, cls) for a in sorted(ARCHITECTURES) for cls in auto_classes(a)])
def test_every_auto_class_opens_a_patched_model(architecture: str, auto: Any, tmp_path: Path) -> None:
    config = ARCHITECTURES[architecture]().config
    model = auto.from_config(config).eval()
    for name in ("t5", "sinusoidal_concat", "longrope"):
        torch.manual_seed(1)
        stir(hf_posenc.patch(model, EVERY[name]))
        model.save_pretrained(tmp_path / name)
        loaded, info = auto.from_pretrained(tmp_path / name, output_loading_info=True)
        assert type(loaded).__name__ == type(model).__name__ and isinstance(loaded, type(auto.from_config(config)))
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        ids = IDS[:1] if "MultipleChoice" not in auto.__name__ else IDS[None, :1]
        with torch.no_grad():
            for ours, theirs in zip(loaded(ids).to_tuple(), model(ids).to_tuple(), strict=True):
                if isinstance(ours, torch.Tensor):
                    assert_equal(ours, theirs, 2e-5 if name == "longrope" else 1e-6)
        assert hf_posenc.encoding_of(loaded) == EVERY[name]


@pytest.mark.parametrize("name", ["alibi", "sinusoidal_concat", "yarn"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_model_with_a_head_opens_without_it_and_the_other_way_round(
    architecture: str, name: str, tmp_path: Path
) -> None:
    model = fresh(architecture, name)
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    with torch.no_grad():
        expected = model.base_model(IDS).last_hidden_state
        assert_equal(base(IDS).last_hidden_state, expected, 1e-6)
    base.save_pretrained(tmp_path / "base")
    again = AUTO[architecture].from_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert_equal(again.base_model(IDS).last_hidden_state, expected, 1e-6)
    assert hf_posenc.encoding_of(again) == EVERY[name]


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
@pytest.mark.parametrize("name", ["alibi", "sinusoidal_concat", "rope", "learned", "nope"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_faded_model_is_saved_as_it_is(architecture: str, name: str, weight: float, tmp_path: Path) -> None:
    model = ARCHITECTURES[architecture]()
    hf_posenc.set_native_weight(stir(hf_posenc.patch(model, EVERY[name], keep_native=True)), weight)
    model.save_pretrained(tmp_path)
    loaded = AUTO[architecture].from_pretrained(tmp_path)
    assert_equal(logits(loaded, IDS), logits(model, IDS), 1e-6)
    hf_posenc.set_native_weight(loaded, 0.5)
    hf_posenc.set_native_weight(model, 0.5)
    assert_equal(logits(loaded, IDS), logits(model, IDS), 1e-6)
    assert_equal(
        logits(hf_posenc.unpatch(loaded), IDS), logits(ARCHITECTURES[architecture](), IDS), 0.0, what="unpatched"
    )


@pytest.mark.parametrize("name", ["t5", "longrope", "rope_half", "sinusoidal_concat"])
def test_a_config_alone_builds_a_patched_model(name: str, tmp_path: Path) -> None:
    fresh("llama", name).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == "llama" and config.hf_posenc["encoding"] == EVERY[name].to_dict()
    for made in (AutoModelForCausalLM.from_config(config), AutoModel.from_config(config)):
        assert hf_posenc.encoding_of(made) == EVERY[name]
        made(IDS)
    clone = pickle.loads(pickle.dumps(config))
    assert clone.to_json_string() == config.to_json_string()
    assert hf_posenc.encoding_of(AutoModel.from_config(clone)) == EVERY[name]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_shared_bias_is_saved_once_and_still_shared_when_loaded(architecture: str, tmp_path: Path) -> None:
    fresh(architecture, "t5").save_pretrained(tmp_path)
    assert [key.rpartition(".")[2] for key in keys_on_disk(tmp_path) if "hf_posenc" in key] == ["buckets"]
    loaded = AUTO[architecture].from_pretrained(tmp_path)
    before = loaded(IDS, output_attentions=False).logits
    with torch.no_grad():
        loaded.base_model.hf_posenc.buckets.add_(torch.randn_like(loaded.base_model.hf_posenc.buckets))
    loaded(IDS, labels=IDS).loss.backward()
    assert loaded.base_model.hf_posenc.buckets.grad is not None
    assert not torch.equal(loaded(IDS).logits, before)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    for name in ("sinusoidal_concat", "learned_concat", "t5"):
        for architecture in sorted(ARCHITECTURES):
            model = fresh(architecture, name, tie_word_embeddings=True)
            model.save_pretrained(tmp_path / architecture / name)
            loaded = AUTO[architecture].from_pretrained(tmp_path / architecture / name)
            assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
            assert_equal(logits(loaded, IDS), logits(model, IDS), 1e-6)


def test_shards_dtypes_devices_and_resized_vocabularies(tmp_path: Path) -> None:
    model = fresh("llama", "sinusoidal_concat")
    model.resize_token_embeddings(101)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert_equal(logits(loaded, IDS), logits(model, IDS), 1e-6)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(half, IDS), logits(model.bfloat16(), IDS))


def test_the_tokenizer_beside_a_patched_model_opens(tmp_path: Path) -> None:
    fresh("gpt2", "alibi").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("abc").input_ids == tiny_tokenizer()("abc").input_ids


# ---------------------------------------------------------------------- in a process without this package

STOCK = """
import json, sys, torch, transformers, warnings
assert "hf_posenc" not in sys.modules
from pathlib import Path
folder, found = Path(sys.argv[1]), {}
ids = torch.load(folder / "ids.pt")
for path in sorted(p for p in folder.iterdir() if p.is_dir()):
    kind = transformers.AutoModelForMaskedLM if path.name.startswith("bert") else transformers.AutoModelForCausalLM
    try:
        model = kind.from_pretrained(path).eval()
        expected = torch.load(path / "expected.pt")
        with torch.no_grad():
            out = model(ids[:, :expected.shape[1]]).logits
        found[path.name] = (out - expected).abs().max().item()
    except Exception as error:
        found[path.name] = str(error)
assert "hf_posenc" not in sys.modules
model = torch.load(folder / "pickled.pt", weights_only=False)
with torch.no_grad():
    found["pickled"] = (model(ids).logits - torch.load(folder / "expected.pt")).abs().max().item()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def opened_by_stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process that does not import this package makes of each saved model: the difference, or the error."""
    folder = tmp_path_factory.mktemp("saved")
    torch.save(IDS, folder / "ids.pt")
    for architecture in sorted(ARCHITECTURES):
        for name, encoding in EVERY.items():
            model = fresh(architecture, name)
            path = folder / f"{architecture}-{name}"
            model.save_pretrained(path)
            short = 16 if encoding.length_dependent else LENGTH
            torch.save(logits(model, IDS[:, :short]), path / "expected.pt")
    pickled = fresh("llama", "longrope")
    torch.save(pickled, folder / "pickled.pt")
    torch.save(logits(pickled, IDS), folder / "expected.pt")
    script = folder / "stock.py"
    script.write_text(STOCK, encoding="utf-8")
    root = Path(hf_posenc.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, script, folder],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@on(both=False)
def test_stock_opens_what_it_can_run_and_refuses_the_rest(
    architecture: str, name: str, backend: str, opened_by_stock: dict[str, Any]
) -> None:
    found = opened_by_stock[f"{architecture}-{name}"]
    if name in NATIVE[architecture]:
        assert isinstance(found, float), found
        assert found <= 1e-4
    else:
        assert isinstance(found, str), f"opened as a plain model, {found} away"
        assert f"hf_posenc_{architecture}" in found


def test_a_pickle_opens_in_a_process_that_has_not_imported_this_package(opened_by_stock: dict[str, Any]) -> None:
    assert opened_by_stock["pickled"] <= 1e-6


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_models_own_class_cannot_open_it(architecture: str, tmp_path: Path) -> None:
    """`GPT2LMHeadModel.from_pretrained` would build the plain model and only warn of the type."""
    model, plain = fresh(architecture, "t5"), ARCHITECTURES[architecture]()
    model.save_pretrained(tmp_path)
    with pytest.raises(KeyError, match=r"import hf_posenc.*Auto class"):
        type(plain).from_pretrained(tmp_path)
    entry = hf_posenc.architectures()[architecture].checked
    loaded = AUTO[architecture].from_pretrained(tmp_path)
    assert (
        getattr(loaded.config, entry)
        == getattr(model.config, entry)
        == getattr(ARCHITECTURES[architecture]().config, entry)
    )


def test_pipelines_of_patched_and_of_stock_models(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    for model in (fresh("llama", "alibi"), ARCHITECTURES["llama"](), ARCHITECTURES["gpt2"]()):
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
        prompt = tokenizer.decode([5, 6, 7])
        assert generate(prompt, max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith(prompt)


# ---------------------------------------------------------------------- what stands in the files


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 41829.37), (128, 40889.94)])
def test_ntk_is_saved_as_the_base_that_it_means(head_dim: int, theta: float, tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"](
        head_dim=head_dim, hidden_size=head_dim, num_attention_heads=2, num_key_value_heads=1
    )
    hf_posenc.patch(model, "ntk:factor=4").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert saved["rope_parameters"]["rope_type"] == "default"
    assert saved["rope_parameters"]["rope_theta"] == pytest.approx(theta, rel=1e-6)
    assert saved["model_type"] == "llama" and saved["max_position_embeddings"] == 128
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert hf_posenc.encoding_of(loaded) == hf_posenc.NTK(factor=4)
    hf_posenc.patch(loaded, "ntk:factor=2")  # from the pretrained base, not from the one that was saved
    assert loaded.config.rope_parameters["rope_theta"] == pytest.approx(10000 * 2 ** (head_dim / (head_dim - 2)))


def test_theta_survives_every_patch(tmp_path: Path) -> None:
    for name in ("alibi", "nope", "yarn", "ntk", "ntk_by_parts", "longrope", "rope_half", "learned"):
        stock = ARCHITECTURES["llama"](rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
        before = stock.config.to_dict()
        hf_posenc.patch(stock, EVERY[name]).save_pretrained(tmp_path / name)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        hf_posenc.patch(loaded, "rope")
        assert loaded.config.rope_parameters["rope_theta"] == 500000.0, name
        assert hf_posenc.encoding_of(hf_posenc.unpatch(loaded)).theta == 500000.0 or name in NATIVE["llama"], name
        assert hf_posenc.unpatch(stock).config.to_dict() == before


def test_yarn_is_saved_with_all_that_decides_its_numbers(tmp_path: Path) -> None:
    fields = {
        "yarn:factor=8,original_context_length=2048": 1.207944,
        "yarn:factor=4": 1.138629,
        "yarn:factor=4,attention_factor=1.0": 1.0,
        "yarn:factor=40": 1.368888,
        "yarn:factor=40,mscale=1.0,mscale_all_dim=1.0": 1.0,
    }
    for number, (text, amplitude) in enumerate(fields.items()):
        model = hf_posenc.patch(ARCHITECTURES["llama"](), text)
        model.save_pretrained(tmp_path / str(number))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        assert hf_posenc.encoding_of(loaded) == hf_posenc.Encoding.parse(text)
        for m in (model, loaded):
            cos, sin = m.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[0, 5]]))
            assert_equal(cos**2 + sin**2, torch.full_like(cos, amplitude**2), 2e-6 * amplitude**2, what=text)
            assert cos[0, 0, 0].item() == pytest.approx(amplitude, rel=1e-6)
        lowest = loaded.model.rotary_emb.inv_freq[-1].item()
        assert lowest == pytest.approx(10000 ** (-3 / 4) / loaded.config.rope_parameters["factor"], rel=1e-5), text
        if "mscale" in text:
            assert loaded.config.rope_parameters["mscale"] == loaded.config.rope_parameters["mscale_all_dim"] == 1.0


def test_a_longer_table_is_saved_with_its_length(tmp_path: Path) -> None:
    for architecture in ("gpt2", "bert"):
        model = fresh(architecture, "learned")
        model.save_pretrained(tmp_path / architecture)
        saved = json.loads((tmp_path / architecture / "config.json").read_text(encoding="utf-8"))
        assert saved.get("n_positions", saved.get("max_position_embeddings")) == 64
        loaded = AUTO[architecture].from_pretrained(tmp_path / architecture)
        assert loaded.config.max_position_embeddings == 64
        assert_equal(logits(loaded, tokens(64)), logits(model, tokens(64)), 1e-6)


def test_an_unpatched_model_is_saved_without_a_trace(tmp_path: Path) -> None:
    for architecture in sorted(ARCHITECTURES):
        plain = ARCHITECTURES[architecture]()
        plain.save_pretrained(tmp_path / f"{architecture}-plain")
        hf_posenc.unpatch(hf_posenc.patch(plain, "t5")).save_pretrained(tmp_path / f"{architecture}-back")
        for file in ("config.json", "model.safetensors"):
            one, two = (tmp_path / f"{architecture}-{x}" / file for x in ("plain", "back"))
            assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, r"version 99; this hf_posenc reads versions up to 1\. Install a newer hf_posenc"),
        ({"version": None}, "version None"),
        ({"encoding": None}, "damaged: it names no encoding"),
        ({"resolved": 3}, "damaged"),
        ({"encoding": {"name": "alibo"}}, "Unknown encoding 'alibo'"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    fresh("llama", "alibi").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["hf_posenc"].update(change)
    path.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert issubclass(CheckpointError, ValueError)


# ---------------------------------------------------------------------- without values: the meta device


@on(both=False)
def test_built_and_patched_without_values_then_loaded(architecture: str, name: str, backend: str) -> None:
    """Numbers of an encoding are never in memory that `to_empty` leaves undefined."""
    real = fresh(architecture, name, backend)
    plain = ARCHITECTURES[architecture](attn_implementation=backend)
    with torch.device("meta"):
        empty = hf_posenc.patch(type(plain)(plain.config).eval(), EVERY[name])
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    loaded = empty.to_empty(device="cpu")
    for buffer in loaded.buffers():  # undefined memory, at its worst
        buffer.fill_(-1 if not buffer.is_floating_point() else math.nan)
    loaded.load_state_dict(real.state_dict())
    assert [(n, b.dtype) for n, b in loaded.named_buffers()] == [(n, b.dtype) for n, b in real.named_buffers()]
    assert_equal(logits(loaded, IDS), logits(real, IDS), 1e-6)
    padded = torch.ones_like(IDS)
    padded[0, :4] = 0
    assert_equal(logits(loaded, IDS, attention_mask=padded), logits(real, IDS, attention_mask=padded), 1e-6)
