"""The README and the examples are true: they run, their commands exist, their tables are those of the code."""

from __future__ import annotations

import itertools
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from hf_posenc import reference
from hf_posenc.cli import main
from models import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TESTED = ("torch", "transformers", "accelerate", "peft", "datasets")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def between(name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- /name -->`."""
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, flags=re.S)
    assert match is not None, f"README has no {name} section"
    return match.group(1).strip()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which the README's hub id is a tiny model with SmolLM2's trained length and base."""
    folder = tmp_path / "HuggingFaceTB" / "SmolLM2-135M"
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    tiny_llama(max_position_embeddings=8192, rope_parameters=rope).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_opening_diff_works(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (diff,) = blocks("diff")
    assert sum(line.startswith("+") for line in diff.splitlines()) == 3
    names: dict[str, object] = {}
    exec("\n".join(line[1:] for line in diff.splitlines()), names)
    assert names["model"].config.max_position_embeddings == 16384  # type: ignore[attr-defined]
    assert "yarn" in capsys.readouterr().out


def test_python_blocks_run_in_order(here: Path) -> None:
    python = blocks("python")
    assert len(python) >= 5
    names: dict[str, object] = {"__name__": "__main__"}
    for block in python:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize(
    "line", [b for block in blocks("bash") for b in block.splitlines() if b.startswith("hf-posenc ")]
)
def test_commands_and_their_options_exist(here: Path, line: str) -> None:
    (here / "book.txt").write_text("It was the best of times.")
    name, *arguments = shlex.split(line, comments=True)[1:]
    command = main.commands[name]
    with click.Context(main, info_name="hf-posenc") as parent:
        command.make_context(name, arguments, parent=parent)  # raises a usage error where an option is not known


def test_finetune_command_parses(here: Path) -> None:
    from hf_posenc.training.arguments import parse_arguments

    (line,) = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("accelerate launch")]
    words = shlex.split(line)
    assert (ROOT / words[2]).is_file()
    ours, _ = parse_arguments(words[3:])
    assert ours.context_length == 16384


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make ([a-z-]+)", README, flags=re.M)):
        assert re.search(rf"^{target}:", makefile, flags=re.M), f"make {target}"


def test_table_of_encodings_is_the_registry() -> None:
    assert between("encodings") == reference.markdown_table(), "run: python -m hf_posenc.reference README.md"


def test_versions_are_those_of_the_constraints() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in TESTED:
        assert f"{name} {pins[name]}" in between("versions")


def test_constraints_name_what_is_needed() -> None:
    """Every requirement of the package itself is pinned, so that two installations are the same."""
    tomllib = pytest.importorskip("tomllib")
    pins = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)
        assert name is not None
        if name.group() != "hf-posenc":
            assert name.group().lower().replace("_", "-") in pins, requirement


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_example_swaps_an_encoding_and_takes_it_back(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("swap_encoding")("HuggingFaceTB/SmolLM2-135M", "alibi")
    last = capsys.readouterr().out.splitlines()[-1]
    changed, restored = re.findall(r"by ([0-9.e+-]+)", last)
    assert float(changed) > 1e-2 and float(restored) == 0


def test_example_measures_by_length(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "book.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    example("perplexity_by_length")("HuggingFaceTB/SmolLM2-135M", "book.txt", "256")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["native", "yarn", "linear", "ntk"]
    assert all(float(value) > 1 for line in lines[1:] for value in line.split()[1:])


def test_example_gives_bert_another_encoding(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("bert_with_rope")(str(here / "bert"))
    out = capsys.readouterr().out
    assert "rope brings no new weights: []" in out
    assert "saved and loaded as: learned:" in out


def example(name: str) -> Callable[..., None]:
    """The `main` of a script in examples/."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


def test_example_prints_five_perplexities(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "book.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    example("five_perplexities")("HuggingFaceTB/SmolLM2-135M", "book.txt", "256", "64", "16")
    rows = capsys.readouterr().out.splitlines()[2:]
    values = [float(row.split("|")[-2]) for row in rows]
    assert len(values) == 5 and all(value > 1 for value in values) and len(set(values)) == 5


@pytest.mark.slow
def test_example_trains_short_and_fades(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps each, of models that learn nothing: every part runs, and nothing is done twice."""
    train = example("train_short_test_long/run")
    train.__globals__.update(ENCODINGS=("alibi",), SHAPE={"n_embd": 32, "n_layer": 1, "n_head": 2})
    train("trained", "2")
    assert "alibi" in capsys.readouterr().out
    made = (here / "trained" / "alibi" / "model.safetensors").stat().st_mtime_ns
    assert {"report.html", "perplexity.png", "native", "held-out.jsonl"} <= {
        p.name for p in (here / "trained").iterdir()
    }
    train("trained", "2")
    assert (here / "trained" / "alibi" / "model.safetensors").stat().st_mtime_ns == made
    fade = example("fade_native/run")
    fade.__globals__.update(EVERY=1)
    capsys.readouterr()
    fade("trained", "faded", "2")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == [f"| {name}" for name in fade.__globals__["RUNS"]]
    assert (here / "faded" / "losses.png").stat().st_size > 10_000


@pytest.mark.slow
def test_example_extends_a_context(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extend = example("extend_context/run")
    extend.__globals__.update(ENCODINGS=("yarn",), TRAINED=64, CONTEXT=128, SHORT=32, BLOCK=32)
    tiny_llama(max_position_embeddings=64).save_pretrained(here / "short")
    tiny_tokenizer().save_pretrained(here / "short")
    extend("extended", str(here / "short"), "2")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows] == [
        ("native", "no training"),
        ("yarn", "no training"),
        ("yarn", "position skipping"),
        ("native", "no skipping"),
        ("yarn", "no skipping"),
    ]
