"""The sweep and its report: the right numbers in the right rows, resumed part by part, in files that are whole."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_posenc import encoding_of
from hf_posenc.comparison import compare
from hf_posenc.evaluation import evaluate, perplexity, plots
from hf_posenc.evaluation.files import plain, write_whole
from hf_posenc.evaluation.report import _number, summary
from hf_posenc.evaluation.text import tokenize
from models import tiny_bert, tiny_gpt2, tiny_llama

WORDS = ["time", "road", "stone", "river", "light", "house", "cloud", "green", "under", "seven"]


def letters(bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single characters: 0 is the end of text, 1 the start."""
    vocabulary = {"<e>": 0, "<s>": 1, "\n": 2} | {chr(32 + i): 3 + i for i in range(94)}
    inner = Tokenizer(models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if bos:
        from tokenizers.processors import TemplateProcessing

        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>", bos_token="<s>")


def prose(words: int, seed: int = 0) -> str:
    draw = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[i] for i in draw)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tiny LLaMA with a tokenizer."""
    tiny_llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    letters().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(prose(400))
    return path


def test_rows_are_the_perplexities_of_their_targets(tmp_path: Path, folder: Path, text: Path) -> None:
    results = evaluate(folder, ["native", "linear:factor=2"], text, [256, 512], tmp_path / "out", progress=False)
    ids = torch.tensor(letters()(text.read_text()).input_ids)
    model = tiny_llama(max_position_embeddings=256)
    blocks = [ids[begin : begin + 512] for begin in range(0, len(ids) - 1, 511)]
    total = perplexity(model, blocks, 512)
    native = results["encodings"][0]
    assert native["label"] == "native"
    assert native["tokens"] == len(ids) - 1 == total.tokens
    assert native["perplexity"] == pytest.approx(total.perplexity, rel=1e-5)
    for row in native["rows"]:
        part = total.within(row["length"] // 2, row["length"])
        assert row["tokens"] == part.tokens > 0
        assert row["perplexity"] == pytest.approx(part.perplexity, rel=1e-5)
        assert row["change_against_native"] == pytest.approx(0.0)
    linear = results["encodings"][1]
    assert [row["length"] for row in linear["rows"]] == [128, 256, 512]  # the short side is always there
    for mine, theirs in zip(linear["rows"], native["rows"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["perplexity"] != theirs["perplexity"]
        assert mine["change_against_native"] == pytest.approx(mine["perplexity"] / theirs["perplexity"] - 1)


def test_a_length_dependent_encoding_has_a_pass_for_each_length(folder: Path, text: Path) -> None:
    results = evaluate(folder, ["dynamic_ntk:factor=4", "native"], text, [256, 512], progress=False)
    dynamic, native = results["encodings"]
    assert dynamic["length_dependent"] and dynamic["passes"] == 3
    assert native["passes"] == 1
    for mine, theirs in zip(dynamic["rows"], native["rows"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
    # Up to the trained length its table is the native one, although a longer pass over the same text would change it.
    for i in (0, 1):
        assert dynamic["rows"][i]["perplexity"] == pytest.approx(native["rows"][i]["perplexity"], rel=1e-4)
    assert dynamic["rows"][2]["perplexity"] != pytest.approx(native["rows"][2]["perplexity"], rel=1e-3)


def test_with_a_stride_every_row_is_its_own_sliding_window(folder: Path, text: Path) -> None:
    encodings = ["dynamic_ntk:factor=4", "yarn", "native"]
    results = evaluate(folder, encodings, text, [256, 512], stride=100, progress=False)
    ids = torch.tensor(letters()(text.read_text()).input_ids)
    model = tiny_llama(max_position_embeddings=256)
    dynamic, yarn, native = results["encodings"]
    for row in native["rows"]:
        length = row["length"]
        whole = perplexity(model, ids, length, min(100, length))
        assert row["perplexity"] == pytest.approx(whole.within(length // 2, length).perplexity, rel=1e-5)
        if length >= 2 * 100:
            assert row["tokens"] == len(ids) - length // 2  # all but the beginning of the document
    for entry in (dynamic, yarn):
        assert entry["passes"] == native["passes"] == 3
        assert [row["tokens"] for row in entry["rows"]] == [row["tokens"] for row in native["rows"]]
    # Asked for or not, the native rows up to the trained length are the same.
    for mine, theirs in zip(
        evaluate(folder, ["yarn"], text, [512], stride=100, progress=False)["native"]["rows"],
        native["rows"],
        strict=False,
    ):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-6)
    whole = evaluate(folder, ["native"], text, [256], stride=64, definition="full_windows", progress=False)
    assert whole["encodings"][0]["bits_per_byte"] is None  # its targets count several times


def test_native_is_measured_on_the_short_side_even_if_not_asked_for(folder: Path, text: Path) -> None:
    results = evaluate(folder, ["yarn"], text, [512], progress=False)
    assert [entry["label"] for entry in results["encodings"]] == ["yarn:factor=2"]
    rows = {row["length"]: row for row in results["encodings"][0]["rows"]}
    assert rows[256]["change_against_native"] is not None
    assert rows[512]["change_against_native"] is None
    whole = evaluate(folder, ["native"], text, [512], progress=False)["encodings"][0]
    # The same targets, although the native pass of the first call was shorter.
    for full, short in zip(whole["rows"], results["native"]["rows"], strict=False):
        assert full["tokens"] == short["tokens"]
        assert full["perplexity"] == pytest.approx(short["perplexity"], rel=1e-4)
    assert re.search(r"yarn:factor=2 +[+-]\d+\.\d%", summary(results))  # the table of changes


def test_files_of_a_report(tmp_path: Path, folder: Path, text: Path) -> None:
    out = tmp_path / "out"
    results = evaluate(folder, ["native", "ntk:factor=2"], text, [256, 512], out, progress=False, command=["a", "b c"])
    read = json.loads((out / "results.json").read_text())
    assert read["encodings"] == json.loads(json.dumps(results["encodings"]))
    for key in ("versions", "device", "command", "created", "settings", "text", "model", "seconds"):
        assert read[key], key
    assert read["command"] == "a 'b c'"
    assert read["model"]["config"]["max_position_embeddings"] == 256
    assert read["model"]["trained_length"] == 256
    for name in ("perplexity", "loss_by_position", "wavelengths"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (out / f"{name}.svg").read_bytes()[:1000]
    page = (out / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # one file, nothing beside it
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert base64.b64decode(images[0]) == (out / "perplexity.svg").read_bytes()
    report = (out / "report.md").read_text()
    for name in re.findall(r"\]\(([^)]+)\)", report):
        assert (out / name).is_file()
    for entry in results["encodings"]:
        for row in entry["rows"]:
            assert f"| {row['perplexity']:.2f} |" in report  # all below 1,000
            assert f"| {row['tokens']:,} |" in report
    assert not [item for item in out.rglob(".*")]  # no temporary file is left


def test_finished_parts_are_reused(tmp_path: Path, folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posenc.evaluation import report, sweep

    out, calls = tmp_path / "out", []
    real = sweep._measure

    def counting(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    def only_numbers(results: Any, where: Path) -> None:  # drawing is another test's
        write_whole(where / "results.json", json.dumps(results))

    monkeypatch.setattr(sweep, "_measure", counting)
    monkeypatch.setattr(report, "write_report", only_numbers)
    options: dict[str, Any] = {"progress": False}
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, ["native", "ntk:factor=2"], text, [512], out, **options)
    assert not (out / "results.json").exists()
    first = evaluate(folder, ["native", "ntk:factor=2"], text, [512], out, **options)
    assert len(calls) == 3  # native was finished, ntk was not
    second = evaluate(folder, ["native", "ntk:factor=2"], text, [512], out, **options)
    assert len(calls) == 3
    assert second["encodings"] == first["encodings"]
    for name in ("model", "device", "seconds"):  # where and how long it was measured, not where it was looked up
        assert second[name] == first[name]
    evaluate(folder, ["native"], text, [512], out, fresh=True, **options)
    assert len(calls) == 4
    text.write_text(prose(400, seed=1))
    evaluate(folder, ["native"], text, [512], out, **options)
    assert len(calls) == 5  # other text
    tiny_llama(max_position_embeddings=256, seed=3).save_pretrained(folder)
    evaluate(folder, ["native"], text, [512], out, **options)
    assert len(calls) == 6  # other weights


def test_passkeys_are_kept_length_by_length(
    tmp_path: Path, folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_posenc.evaluation import sweep

    out, calls = tmp_path / "out", []
    real = sweep.passkey

    def counting(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments[2])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    monkeypatch.setattr(sweep, "passkey", counting)
    options: dict[str, Any] = {"passkey_trials": 1, "passkey_lengths": [448, 512], "passkey_depths": [0.5, 1]}
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, ["linear:factor=2"], text, [256], out, progress=False, **options)
    results = evaluate(folder, ["linear:factor=2"], text, [256], out, progress=False, **options)
    assert calls == [[448], [512], [512]]
    found = results["encodings"][0]["passkey"]
    assert found["accuracy"] == {"448": {"0.5": 0.0, "1.0": 0.0}, "512": {"0.5": 0.0, "1.0": 0.0}}
    assert (out / "passkey_0.png").is_file()
    assert "five digits" in (out / "report.md").read_text()
    evaluate(folder, ["linear:factor=2"], text, [256], out, progress=False)
    assert not list(out.glob("passkey_*"))  # no picture of an earlier report is left


def test_a_table_has_no_room_for_the_reply_to_a_prompt_as_long_as_it(tmp_path: Path, text: Path) -> None:
    model = tiny_gpt2(n_positions=512)
    options: dict[str, Any] = {"tokenizer": letters(), "passkey_trials": 1, "passkey_depths": [0.5]}
    results = evaluate(model, ["native"], text, [448, 512], tmp_path / "out", progress=False, **options)
    found = results["encodings"][0]["passkey"]["accuracy"]
    assert found == {"448": {"0.5": 0.0}, "512": {"0.5": "nan"}}
    assert "| 0% / 0% | - |" in (tmp_path / "out" / "report.md").read_text()


def test_a_given_model_is_left_as_it_was(text: Path) -> None:
    import hf_posenc

    model = tiny_llama(max_position_embeddings=256)
    ids = torch.arange(3, 60)[None]
    before = model(ids).logits
    evaluate(model, ["native", "alibi"], text, [256], tokenizer=letters(), progress=False)
    assert torch.equal(model(ids).logits, before)
    hf_posenc.patch(model, "yarn:factor=2")
    before = model(ids).logits
    results = evaluate(model, ["saved", "native"], text, [256], tokenizer=letters(), progress=False)
    assert torch.equal(model(ids).logits, before)
    assert [entry["label"] for entry in results["encodings"]] == ["saved (yarn:factor=2)", "native"]
    other = evaluate(model, ["native", "saved"], text, [256], tokenizer=letters(), progress=False)
    assert [entry["perplexity"] for entry in other["encodings"]] == [
        entry["perplexity"] for entry in reversed(results["encodings"])
    ]


def test_start_token_and_joined_documents(tmp_path: Path, folder: Path) -> None:
    documents = [prose(30, 1), prose(60, 2), prose(90, 3)]
    tokenizer = letters(bos=True)
    options: dict[str, Any] = {"tokenizer": tokenizer, "documents": documents, "progress": False}
    results = evaluate(tiny_llama(max_position_embeddings=256), lengths=[256], **options)
    count = sum(len(document) for document in documents)
    assert results["settings"]["bos"] == 1
    assert results["encodings"][0]["tokens"] == count - 3
    joined = evaluate(tiny_llama(max_position_embeddings=256), lengths=[512], concatenate=True, bos=False, **options)
    assert joined["settings"]["bos"] is None
    assert joined["encodings"][0]["tokens"] == count + 2 - 1  # two ends of text between them
    cut = evaluate(tiny_llama(max_position_embeddings=256), lengths=[256], max_tokens=300, bos=False, **options)
    assert cut["text"]["tokens"] == 300


def test_encoders_are_measured_by_pseudo_perplexity(tmp_path: Path, text: Path) -> None:
    tokenizer = letters()
    tokenizer.mask_token, tokenizer.cls_token, tokenizer.sep_token = "}", "<s>", "<e>"
    model = tiny_bert(max_position_embeddings=128)
    options: dict[str, Any] = {"tokenizer": tokenizer, "progress": False, "definition": "pseudo", "max_tokens": 600}
    encodings = ["native", "learned:init=repeat"]
    with pytest.raises(ValueError, match="128 rows"):
        evaluate(model, encodings, text, [128, 256], **options)
    results = evaluate(model, encodings[1:], text, [128, 256], tmp_path / "out", **options)
    (entry,) = results["encodings"]
    assert [row["length"] for row in entry["rows"]] == [128, 256]
    assert [row["tokens"] for row in entry["rows"]] == [2 * 64, 2 * 64]
    # Repeating the table leaves its own rows as they are, so the native length is not changed.
    assert entry["rows"][0]["change_against_native"] == pytest.approx(0.0, abs=1e-4)
    assert "masked one at a time" in (tmp_path / "out" / "report.md").read_text()
    with pytest.raises(ValueError, match="mask token"):
        evaluate(model, ["native"], text, [128], **(options | {"tokenizer": letters()}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encodings": ["yarm"]}, "yarn"),
        ({"encodings": []}, "encodings is empty"),
        ({"encodings": ["yarn:factor=0.5"]}, "factor"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [0]}, "lengths=0"),
        ({"lengths": [4096]}, "longest document has"),
        ({"texts": "no/such/file.txt"}, "no/such/file.txt"),
        ({"texts": ()}, "texts is empty"),
        ({"documents": ["  "], "texts": ()}, "blank"),
        ({"documents": ["x"]}, "both given"),
        ({"definition": "windows"}, "definition='windows'"),
        ({"definition": "disjoint", "stride": 8}, "stride=8"),
        ({"passkey_depths": [1.5], "passkey_trials": 1}, "passkey_depths=[1.5]"),
        ({"max_tokens": 10}, "max_tokens=10"),
        ({"model": "no/such/model.gguf"}, "model.gguf"),
        ({"model": "./nowhere"}, "nowhere"),
        ({"lengths": 512}, "lengths=512"),
        ({"lengths": "512"}, "lengths='512'"),
        ({"encodings": None}, "Expected an encoding"),
        ({"texts": None}, "texts=None"),
        ({"texts": (), "documents": [1, 2]}, "documents"),
        ({"passkey_depths": 0.5, "passkey_trials": 1}, "passkey_depths=0.5"),
        ({"passkey_lengths": 256, "passkey_trials": 1}, "passkey_lengths=256"),
        ({"bos": "never"}, "bos='never'"),
        ({"device": "nowhere"}, "nowhere"),
    ],
)
def test_refused(tmp_path: Path, folder: Path, text: Path, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"model": folder, "encodings": ["native"], "texts": text, "lengths": [256]}
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate(**(arguments | changes), output=tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_folder_that_holds_something_else_is_not_touched(tmp_path: Path, folder: Path, text: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        evaluate(folder, ["native"], text, [256], tmp_path / "out")
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["results.json", "report.md", "perplexity.png"])
def test_files_of_others_are_not_overwritten(tmp_path: Path, folder: Path, text: Path, name: str) -> None:
    out = tmp_path / "out"
    (out / "parts").mkdir(parents=True)
    (out / name).write_text('{"results": {"mmlu": 0.43}}')
    with pytest.raises(ValueError, match="something else"):
        evaluate(folder, ["native"], text, [256], out)
    assert (out / name).read_text() == '{"results": {"mmlu": 0.43}}'


def test_one_number_that_changed_is_seen(tmp_path: Path, folder: Path, text: Path) -> None:
    """Not a sample of the weights: nothing measured before is taken for the model as it is now."""
    from safetensors.torch import load_file, save_file

    def measured(model: Any) -> float:
        options: dict[str, Any] = {"tokenizer": letters()} if isinstance(model, torch.nn.Module) else {}
        found = evaluate(model, ["native"], text, [256], tmp_path / "out", progress=False, **options)
        return float(found["encodings"][0]["nll"])

    model = tiny_llama(max_position_embeddings=256)
    before = measured(model)
    with torch.no_grad():
        model.lm_head.weight[5, 5] += 9.0
    assert measured(model) != before
    shutil.rmtree(tmp_path / "out")
    before = measured(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 3] += 9.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert measured(folder) != before


def test_an_adapter_that_is_switched_off_is_another_model(tmp_path: Path, text: Path) -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(max_position_embeddings=256), options)
    found = []
    for _ in range(2):
        results = evaluate(model, ["saved"], text, [256], tmp_path / "out", tokenizer=letters(), progress=False)
        found.append(results["encodings"][0]["nll"])
        model.base_model.disable_adapter_layers()
    assert found[0] != found[1]


def test_disjoint_windows_are_those_of_perplexity(tmp_path: Path) -> None:
    """With a start token too, before which every token is a target: once."""
    model, tokenizer = tiny_llama(max_position_embeddings=256), letters(bos=True)
    documents = [prose(30, 1), prose(60, 2)]
    options: dict[str, Any] = {"tokenizer": tokenizer, "progress": False, "definition": "disjoint"}
    (entry,) = evaluate(model, ["native"], documents=documents, lengths=[64], **options)["encodings"]
    ids = [torch.tensor(tokenizer(document, add_special_tokens=False)["input_ids"]) for document in documents]
    alone = perplexity(model, ids, 64, definition="disjoint", bos=tokenizer.bos_token_id)
    assert entry["tokens"] == alone.tokens <= sum(map(len, ids))
    assert entry["nll"] == pytest.approx(alone.nll, rel=1e-6)


def test_bytes_are_those_of_the_text_that_is_scored(tmp_path: Path) -> None:
    """Not of separators, nor of what a tokenizer makes of its own tokens; and they are not those of another text."""
    model, tokenizer = tiny_llama(max_position_embeddings=256), letters()
    documents = [prose(20, 1), prose(20, 2)]
    options: dict[str, Any] = {"tokenizer": tokenizer, "progress": False, "lengths": [64], "concatenate": True}
    whole = evaluate(model, ["native"], documents=documents, **options)
    assert whole["text"]["bytes"] == sum(len(document) for document in documents)
    cut = evaluate(model, ["native"], documents=documents, max_tokens=whole["text"]["tokens"] - 1, **options)
    assert cut["text"]["bytes"] == whole["text"]["bytes"] - 1
    assert cut["text"]["tokens"] == whole["text"]["tokens"] - 1


def test_a_model_that_was_given_is_left_as_it_was_where_measuring_fails(text: Path) -> None:
    model = tiny_llama(max_position_embeddings=256)
    options: dict[str, Any] = {"tokenizer": letters(), "progress": False, "passkey_trials": 1}
    with pytest.raises(ValueError, match="longer than this model"):  # the table of the second
        evaluate(model, ["alibi", "learned:num_positions=256"], text, [256], passkey_lengths=[300], **options)
    assert encoding_of(model).name == "rope"


def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path: Path, text: Path) -> None:
    model = tiny_gpt2(n_positions=128)
    options: dict[str, Any] = {"tokenizer": letters(), "progress": False}
    with pytest.raises(ValueError, match="lengths=256 is longer than this model can be fed"):
        evaluate(model, ["alibi", "native"], text, [256], tmp_path / "out", **options)
    with pytest.raises(ValueError, match="question"):
        evaluate(model, ["alibi"], text, [128], tmp_path / "out", passkey_trials=1, passkey_lengths=[20], **options)
    parts = [json.loads(part.read_text())["key"]["task"] for part in (tmp_path / "out").rglob("*.json")]
    assert "perplexity" not in parts


def test_models_are_compared_only_where_both_begin_alike(tmp_path: Path, text: Path) -> None:
    """A start token before the windows of one: refused before either is measured, with the way out."""
    folders = [tmp_path / "x" / "m", tmp_path / "x-m"]
    for place, bos in zip(folders, (False, True), strict=True):
        tiny_llama(max_position_embeddings=256).save_pretrained(place)
        letters(bos=bos).save_pretrained(place)
    names = [str(place) for place in folders]
    with pytest.raises(ValueError, match="bos=False"):
        compare(names, ["native"], [text], [256], tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").rglob("*.json"))
    both = compare(names, ["native"], [text], [256], tmp_path / "out", bos=False, progress=False)
    assert len(both["encodings"]) == 2


def test_an_adapter_that_transformers_opened_is_a_causal_model() -> None:
    """It is the model itself that then says `peft_config`, without PEFT's wrapper."""
    model = tiny_llama(max_position_embeddings=256)
    model.peft_config = {}
    assert perplexity(model, torch.arange(3, 60), window=16).tokens == 56


def test_text_of_special_tokens_only_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="only special tokens"):
        evaluate(folder, documents=["<e><e><s><e>"], lengths=[4])


def test_a_tokenizer_that_truncates_is_named() -> None:
    class Cutting:
        is_fast = True
        model_max_length = 100

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": [1] * 100, "offset_mapping": [(i, i + 1) for i in range(100)]}

    with pytest.raises(ValueError, match="model_max_length=100"):
        tokenize(Cutting(), "a" * 300)


def test_a_table_too_short_is_named_and_a_longer_one_measured(text: Path) -> None:
    model = tiny_gpt2(n_positions=128)
    with pytest.raises(ValueError, match="128 rows"):
        evaluate(model, ["native"], text, [256], tokenizer=letters(), progress=False)
    results = evaluate(model, ["learned"], text, [256], tokenizer=letters(), progress=False)
    assert results["encodings"][0]["label"] == "learned:num_positions=256"
    assert math.isfinite(results["encodings"][0]["rows"][-1]["perplexity"])


# ---------------------------------------------------------------------- several models


def test_models_side_by_side(tmp_path: Path, text: Path) -> None:
    for number, name in enumerate(["a/same", "b/same", "other"]):
        tiny_llama(max_position_embeddings=256, seed=number).save_pretrained(tmp_path / name)
        letters().save_pretrained(tmp_path / name)
    models = [str(tmp_path / name) for name in ("a/same", "b/same", "other")]
    out = tmp_path / "out"
    results = compare(models, ["native", "yarn:factor=2"], [text], [256, 512], out, progress=False)
    labels = [entry["label"] for entry in results["encodings"]]
    assert labels == [f"{n}: {e}" for n in ("a/same", "b/same", "other") for e in ("native", "yarn:factor=2")]
    assert [model["source"] for model in results["models"]] == models
    first = json.loads((out / "parts" / "a-same" / "results.json").read_text())
    ours, theirs = results["encodings"][3]["rows"][0], first["encodings"][0]["rows"][0]
    assert ours["change_against_native"] == pytest.approx(ours["perplexity"] / theirs["perplexity"] - 1)
    report = (out / "report.md").read_text()
    assert "against `a/same: native`" in report
    assert not re.search(r"a/same: native \| [+-]", report)  # not compared with itself
    with pytest.raises(ValueError, match="another model"):  # a report on fewer models does not replace it
        evaluate(models[0], ["native"], [text], [256], out, progress=False)


def test_models_that_do_not_compare_are_refused_before_they_run(tmp_path: Path, folder: Path, text: Path) -> None:
    other = tmp_path / "other"
    tiny_llama(max_position_embeddings=256).save_pretrained(other)
    tokenizer = letters()
    tokenizer.add_tokens(["time"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match="'other' cuts the text into other tokens"):
        compare([str(folder), str(other)], ["native"], [text], [256], tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="named twice"):
        compare([str(folder), f"{folder}/"], ["native"], [text], [256], tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- pictures


def test_the_axis_is_logarithmic_where_perplexity_explodes() -> None:
    calm = plots.perplexity_curve({"a": [(512, 20.0), (1024, 15.0)]})
    wild = plots.perplexity_curve({"a": [(512, 20.0), (1024, 1500.0)]}, trained_length=512)
    assert calm.axes[0].get_yscale() == "linear"
    assert wild.axes[0].get_yscale() == "log"
    assert wild.axes[0].get_xscale() == "log"


def test_lines_differ_without_colour() -> None:
    figure = plots.perplexity_curve({f"e{i}": [(512, 10.0 + i), (1024, 9.0 + i)] for i in range(6)})
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 2 and line.get_marker() != "None"]
    assert len({(line.get_marker(), line._unscaled_dash_pattern) for line in lines}) == 6
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        assert "tokens" in axis.get_label_text() or "nats" in axis.get_label_text()


def test_infinite_and_missing_values_are_left_out() -> None:
    figure = plots.perplexity_curve({"a": [(512, 20.0), (1024, math.inf), (2048, math.nan)], "b": []})
    assert plots.render(figure, "png").startswith(b"\x89PNG")


def test_long_names_are_whole_and_inside() -> None:
    labels = [f"SmolLM2-135M-Instruct.Q4_1.gguf: saved (ntk_by_parts:factor=2,beta_fast={n})" for n in (16, 32)]
    title = "Perplexity against context length: SmolLM2-135M-Instruct.Q4_1.gguf on a-text-with-a-long-name.txt"
    figure = plots.perplexity_curve({label: [(512, 20.0), (1024, 15.0)] for label in labels}, title=title)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == labels
    assert plots.title_of(figure) == title
    for part in (legend, figure.axes[0]):
        box = part.get_tightbbox(figure.canvas.get_renderer())
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_numbers_of_a_table_have_one_precision() -> None:
    assert [_number(value) for value in (9.234, 603.96, 603.7, 999.99, 1000.4, 1234567, 3e12, math.inf, "nan")] == [
        "9.23", "603.96", "603.70", "999.99", "1,000", "1,234,567", "3.00e+12", "inf", "-",
    ]  # fmt: skip


def test_pictures_are_the_same_bytes_again() -> None:
    def draw() -> bytes:
        return plots.render(plots.needle_heatmap({512: {0.0: 1.0, 1.0: 0.5}, 1024: {0.0: 0.2, 1.0: 0.0}}), "svg")

    assert draw() == draw()


# ---------------------------------------------------------------------- files


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    path = write_whole(tmp_path / "a.txt", "old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_no_numbers_that_readers_refuse() -> None:
    assert plain({"a": math.nan, 2: (math.inf, 1.5, None)}) == {"a": "nan", "2": ["inf", 1.5, None]}


def test_labels_leave_long_lists_out_and_stay_apart() -> None:
    from hf_posenc import LongRoPE
    from hf_posenc.evaluation.sweep import _label

    first, second = (LongRoPE(factor=2.0, short_factor=[1.0] * 32, long_factor=[x] * 32) for x in (1.5, 2.0))
    labels = {_label(encoding, encoding) for encoding in (first, second)}
    assert len(labels) == 2 and all(len(label) < 100 and "32 numbers" in label for label in labels)


def test_cost_is_measured_where_it_is_asked_for(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    encodings, lengths = ["native", "linear:factor=2"], [256, 512]
    assert evaluate(folder, encodings, text, lengths, out, progress=False)["encodings"][0]["cost"] is None
    assert not (out / "cost.png").exists()
    results = evaluate(folder, encodings, text, lengths, out, progress=False, cost=True)
    for entry in results["encodings"]:
        assert [row["length"] for row in entry["cost"]] == lengths
        assert all(row["seconds"] > 0 for row in entry["cost"])
    assert (out / "cost.png").is_file() and (out / "cost.svg").is_file()
    assert "Cost of one pass" in (out / "report.md").read_text(encoding="utf-8")
    again = evaluate(folder, encodings, text, lengths, out, progress=False, cost=True)
    assert [entry["cost"] for entry in again["encodings"]] == [entry["cost"] for entry in results["encodings"]]
    with pytest.raises(ValueError, match="cost"):
        evaluate(folder, encodings, text, lengths, definition="pseudo", cost=True)
