"""The command line: it teaches, it does what it says, and a bad argument is a usage error that changes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc.cli import main, whole_folder
from models import VOCABULARY, tiny_bert, tiny_gpt2, tiny_llama, tiny_tokenizer, tokens

COMMANDS = ["list", "inspect", "patch", "verify", "evaluate", "suggest", "compare", "finetune", "merge", "demo"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(result: Result, *words: str) -> None:
    """The run ended with a usage error that says each of `words`, and no traceback."""
    assert result.exit_code == 2, result.output
    assert "Error: " in result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output, result.output


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    tiny_gpt2().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------- help


def test_commands_are_those_promised() -> None:
    assert list(main.commands) == COMMANDS


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "finetune"])
def test_help_teaches(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "hf-posenc" in result.output or command == "demo"
    for option in main.commands[command].params:
        if option.param_type_name == "option":
            assert option.help, f"{command} {option.opts[0]} has no help"  # type: ignore[attr-defined]


def test_finetune_help_lists_its_own_and_the_trainers_options() -> None:
    result = run("finetune", "--help")
    assert result.exit_code == 0
    assert "--context_length" in result.output and "--gradient_checkpointing" in result.output


def test_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "hf_posenc", "--help"], capture_output=True, text=True, check=True)
    assert "MODEL is a hub id" in result.stdout


# ---------------------------------------------------------------------- list, inspect, verify


def test_list_names_everything_registered() -> None:
    output = run("list").output
    for name in [*hf_posenc.encodings(), *hf_posenc.architectures()]:
        assert f" {name}" in output
    known = json.loads(run("list", "--json").output)
    assert list(known["encodings"]) == list(hf_posenc.encodings())


@pytest.mark.parametrize("name", sorted(hf_posenc.encodings()))
def test_list_explains_every_field(name: str) -> None:
    result = run("list", name, "--json")
    assert result.exit_code == 0
    for field, about in json.loads(result.output)["fields"].items():
        assert about["text"], f"{name}.{field} has no docstring"
        assert field in run("list", name).output


def test_inspect_shows_what_is_in_force(llama: Path) -> None:
    result = run("inspect", llama)
    assert result.exit_code == 0, result.output
    assert "rope" in result.output and "32" in result.output
    patched = run("inspect", llama, "--encoding", "yarn", "--context-length", 128)
    assert patched.exit_code == 0, patched.output
    assert "yarn" in patched.output and "128" in patched.output


@pytest.mark.parametrize("encoding", ["yarn:factor=4", "alibi", "nope"])
def test_verify_passes_on_a_good_patch(llama: Path, encoding: str) -> None:
    result = run("verify", llama, "--encoding", encoding)
    assert result.exit_code == 0, result.output


# ---------------------------------------------------------------------- patch


@pytest.mark.parametrize("encoding", ["yarn:factor=4", "alibi", "learned"])
def test_patch_saves_what_loads_again_equal(llama: Path, tmp_path: Path, encoding: str) -> None:
    result = run("patch", llama, "--encoding", encoding, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    theirs = hf_posenc.patch(AutoModelForCausalLM.from_pretrained(llama), encoding).eval()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert hf_posenc.encoding_of(ours) == hf_posenc.encoding_of(theirs)
    ids = tokens(24)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-6)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert [item.name for item in tmp_path.iterdir()] == ["out"]  # no temporary folder is left


def test_patch_works_out_the_factor(llama: Path, tmp_path: Path) -> None:
    result = run("patch", llama, "--encoding", "linear", "--context-length", 128, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    stock = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stock["rope_parameters"]["factor"] == 4.0


def test_patch_keeps_native(gpt2: Path, tmp_path: Path) -> None:
    result = run("patch", gpt2, "--encoding", "alibi", "--keep-native", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    theirs = hf_posenc.patch(AutoModelForCausalLM.from_pretrained(gpt2), "alibi", keep_native=True).eval()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(ours(tokens(9)).logits, theirs(tokens(9)).logits, rtol=0, atol=1e-6)


def test_patch_refuses_a_folder_that_holds_something(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter 1")
    refused(run("patch", llama, "--encoding", "nope", "--output", tmp_path), "--output", "not empty")
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError])
def test_nothing_is_left_half_written(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(error if isinstance(error, type) else type(error)), whole_folder(tmp_path / "out") as folder:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_told(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tiny_llama()), "save_pretrained", full)
    result = run("patch", llama, "--encoding", "yarn:factor=2", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "disk is full" in result.output
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- bad arguments, each a usage error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["patsch"], ["Did you mean 'patch'?"]),
        (["patch", "MODEL", "--output", "OUT"], ["--encoding"]),
        (["patch", "MODEL", "--encoding", "yarm", "--output", "OUT"], ["Did you mean 'yarn'?"]),
        (["patch", "MODEL", "--encoding", "yarn:facter=4", "--output", "OUT"], ["facter", "factor"]),
        (["patch", "MODEL", "--encoding", "yarn:factor=0.5", "--output", "OUT"], ["factor=0.5"]),
        (["patch", "MODEL", "--encoding", "yarn:", "--output", "OUT"], ["ends after ':'"]),
        (["patch", "MODEL", "--encoding", "yarn", "--output", "OUT"], ["factor", "--context-length"]),
        (["patch", "MODEL", "--encoding", "yarn", "--context-length", "0", "--output", "OUT"], ["0"]),
        (["patch", "MODEL", "--encoding", "yarn", "--context-length", "x", "--output", "OUT"], ["'x'"]),
        (
            ["patch", "MODEL", "--encoding", "yarn:factor=2", "--context-length", "999", "--output", "OUT"],
            ["conflicts"],
        ),
        (["patch", "MODEL", "--encoding", "rope:rotary_fraction=0.4", "--output", "OUT"], ["rotary_fraction"]),
        (["patch", "MODEL", "--encoding", "native", "--output", "OUT"], ["Unknown encoding 'native'"]),
        (
            ["patch", "MODEL", "--encoding", "rope", "--context-length", "64", "--output", "OUT"],
            ["--context-length=64"],
        ),
        (["patch", "MODEL", "--encoding", "learned:num_positions=100000000000000", "--output", "OUT"], ["GiB"]),
        (["patch", "./nowhere", "--encoding", "nope", "--output", "OUT"], ["./nowhere"]),
        (["patch", "nowhere.gguf", "--encoding", "nope", "--output", "OUT"], ["nowhere.gguf"]),
        (["patch", "EMPTY", "--encoding", "nope", "--output", "OUT"], ["holds no model"]),
        (["patch", "MODEL", "--encoding", "nope", "--dtype", "float7", "--output", "OUT"], ["float7"]),
        (["patch", "MODEL", "--encoding", "nope", "--device", "toaster", "--output", "OUT"], ["toaster"]),
        (["inspect", "MODEL", "--context-length", "64"], ["--encoding"]),
        (["inspect", "T5"], ["t5"]),
        (["list", "yarm"], ["Did you mean 'yarn'?"]),
        (["verify", "./nowhere"], ["./nowhere"]),
        (["merge", "MODEL", "--output", "OUT"], ["adapter"]),
        (["evaluate", "MODEL", "--text", "./nowhere.txt", "--lengths", "16", "--output", "OUT"], ["./nowhere.txt"]),
        (["evaluate", "MODEL", "--text", "EMPTY_TEXT", "--lengths", "16", "--output", "OUT"], ["empty"]),
        (["evaluate", "MODEL", "--text", "SHORT", "--lengths", "16,4096", "--output", "OUT"], ["4096"]),
        (["evaluate", "MODEL", "--text", "SHORT", "--lengths", "0", "--output", "OUT"], ["0"]),
        (["evaluate", "MODEL", "--text", "SHORT", "--lengths", "3", "--output", "OUT"], ["at least 4"]),
        (["suggest", "MODEL", "--text", "SHORT", "--context-length", "4096"], ["--concatenate."]),
        (
            ["evaluate", "MODEL", "--text", "SHORT", "--lengths", "16", "--max-tokens", "5", "--output", "OUT"],
            ["--max-tokens=5"],
        ),
        (["evaluate", "MODEL", "--text", "SHORT", "--lengths", "-5", "--output", "OUT"], ["-5"]),
        (["evaluate", "MODEL", "--text", "SHORT", "--lengths", "many", "--output", "OUT"], ["many"]),
        (["evaluate", "MODEL", "--lengths", "16", "--output", "OUT"], ["--text"]),
        (
            ["evaluate", "MODEL", "--text", "SHORT", "--lengths", "16", "--encoding", "yarm", "--output", "OUT"],
            ["'yarn'"],
        ),
        (["finetune", "--model", "MODEL"], ["--output_dir"]),
        (["finetune", "--modle", "MODEL"], ["--model"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0] in {*COMMANDS, "patsch"} else "",
)
def test_bad_arguments_are_usage_errors(llama: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    from transformers import T5Config

    places = {name: tmp_path / name.lower() for name in ("OUT", "EMPTY", "EMPTY_TEXT", "SHORT", "T5")} | {
        "MODEL": llama
    }
    places["EMPTY"].mkdir()
    places["EMPTY_TEXT"].write_text("")
    places["SHORT"].write_text("A short text, of fewer tokens than the window of 4096.")
    T5Config(vocab_size=VOCABULARY).save_pretrained(places["T5"])
    result = run(*(places.get(argument, argument) for argument in arguments))
    if arguments[0] == "finetune":  # argparse: `finetune: error: ...`
        assert result.exit_code == 2
        assert "error: " in result.output
        assert all(word in result.output for word in words), result.output
    else:
        refused(result, *words)
    assert not places["OUT"].exists()


def test_traceback_is_shown_when_asked_for(llama: Path) -> None:
    result = run("--traceback", "inspect", llama, "--context-length", 64)
    assert isinstance(result.exception, ValueError)


# ---------------------------------------------------------------------- evaluate


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 12)
    return path


def test_evaluate_writes_results_picture_and_report(llama: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", llama, "--encoding", "native", "--encoding", "yarn:factor=4", "--text", text]
    result = run(*arguments, "--lengths", "16,32,128", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    written = {item.name for item in (tmp_path / "out").iterdir()}
    assert {"results.json", "perplexity.png", "report.md"} <= written
    assert "yarn:factor=4" in result.output
    report = (tmp_path / "out" / "report.md").read_text()
    assert "native" in report and "yarn" in report and "128" in report


# ---------------------------------------------------------------------- what a new user runs into


def test_encoders_empty_sources_and_long_strides_are_refused(llama: Path, text: Path, tmp_path: Path) -> None:
    from transformers import RobertaConfig, RobertaForMaskedLM

    encoder = tmp_path / "encoder"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    RobertaForMaskedLM(RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=34, **sizes)).save_pretrained(
        encoder
    )
    tiny_tokenizer().save_pretrained(encoder)
    out = ["--lengths", 32, "--output", tmp_path / "out"]
    refused(run("evaluate", encoder, "--text", text, *out), "sees both sides")
    refused(run("evaluate", llama, "--text", "", *out), "empty")
    refused(run("evaluate", llama, "--text", text, "--stride", 64, *out), "stride=64", "32")
    assert not (tmp_path / "out").exists()


def test_damaged_and_incomplete_models_are_told_in_a_line(llama: Path, tmp_path: Path) -> None:
    def copy(name: str, **config: object) -> Path:
        shutil.copytree(llama, tmp_path / name)
        settings = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(settings | config))
        return tmp_path / name

    cut = copy("cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:500])
    refused(run("inspect", cut), "Cannot load a model from", "header")
    refused(run("inspect", copy("sizes", intermediate_size=24)), "Cannot load a model from", "other sizes")
    refused(run("inspect", copy("layers", num_hidden_layers=7)), "lacks weights", "model.layers.")
    broken = copy("tokenizer")
    (broken / "tokenizer.json").write_text("{oops")
    refused(run("inspect", broken), str(broken / "tokenizer.json"))
    (tmp_path / "a.gguf").touch()
    refused(run("inspect", tmp_path / "a.gguf"), "empty")


def test_a_folder_without_a_tokenizer_will_do_where_none_is_needed(llama: Path, text: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    tiny_llama().save_pretrained(bare)
    assert run("inspect", bare).exit_code == 0
    assert run("verify", bare).exit_code == 0
    result = run("patch", bare, "--encoding", "alibi", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").is_file()
    refused(run("evaluate", bare, "--text", text, "--lengths", 16, "--output", tmp_path / "r"), "no tokenizer files")


def test_what_to_do_is_said_as_a_command(gpt2: Path, tmp_path: Path, text: Path) -> None:
    """Not as a call in Python."""
    result = run("evaluate", gpt2, "--text", text, "--lengths", "64", "--output", tmp_path / "out")
    refused(result, "hf-posenc patch MODEL --encoding learned --context-length 64 --output DIR")
    bert = tmp_path / "bert"
    tiny_bert().save_pretrained(bert)
    tiny_tokenizer().save_pretrained(bert)
    result = run("evaluate", bert, "--text", text, "--lengths", "16", "--output", tmp_path / "out")
    refused(result, "--definition='pseudo'")
    assert "hf_posenc." not in result.output


@pytest.mark.parametrize("command", ["patch", "merge"])
def test_full_disk_told_by_safetensors(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from safetensors import SafetensorError

    from hf_posenc.training import merge

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(type(tiny_llama()), "save_pretrained", full)
    monkeypatch.setattr(merge, "merged", lambda *_, **__: (tiny_llama(), tiny_tokenizer()))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    arguments = {"patch": [llama, "--encoding", "yarn:factor=2"], "merge": [adapter]}[command]
    result = run(command, *arguments, "--output", tmp_path / "new" / "out")
    assert result.exit_code == 1
    assert "disk is full" in result.output
    assert list(tmp_path.iterdir()) == [adapter]


def test_an_empty_folder_is_written_into_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # it may be a mount point, which cannot be renamed over
    before = (tmp_path / "out").stat().st_ino
    with whole_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
    assert (tmp_path / "out").stat().st_ino == before
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["config.json"]


def test_an_unforeseen_error_is_a_line(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(hf_posenc, "describe", fail)
    result = run("inspect", llama)
    assert result.exit_code == 1
    assert "Error: IndexError: index out of range in self" in result.output
    assert "--traceback" in result.output


def test_version_is_the_packages() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.strip().endswith(hf_posenc.__version__)


def test_saved_that_is_native_is_not_compared(llama: Path, text: Path, tmp_path: Path) -> None:
    yarn = tmp_path / "yarn"
    assert run("patch", llama, "--encoding", "yarn:factor=4", "--output", yarn).exit_code == 0
    out = ["--text", text, "--lengths", "16,32", "--output", tmp_path / "out"]
    result = run("evaluate", yarn, "--encoding", "saved", *out)
    assert result.exit_code == 0, result.output
    assert "What it costs" not in result.output
    assert "there is no comparison" in (tmp_path / "out" / "report.md").read_text()


def test_another_models_report_is_not_replaced(llama: Path, gpt2: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["--text", text, "--lengths", 16, "--output", tmp_path / "out"]
    assert run("evaluate", llama, *arguments).exit_code == 0
    before = (tmp_path / "out" / "results.json").read_bytes()
    refused(run("evaluate", gpt2, *arguments), "report on another model", str(llama))
    assert (tmp_path / "out" / "results.json").read_bytes() == before
    assert run("evaluate", llama, *arguments).exit_code == 0
