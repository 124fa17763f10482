"""The benchmarks run, at a size at which their figures mean nothing."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measuring, memory, report
from benchmarks.__main__ import TINY, main
from benchmarks.measuring import ratio, times
from benchmarks.rows import ROWS, Row

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory cases here instead of in a process for each, which would take most of the time."""

    def run(case: str, ways: Any, *arguments: object) -> dict[str, float]:
        return dict(zip(ways, memory.CASES[case](",".join(ways), *map(str, arguments)), strict=True))

    monkeypatch.setattr(measuring, "in_own_process", run)


@linux
@pytest.mark.parametrize("name", ROWS)
def test_every_row_runs(name: str, in_this_process: None) -> None:
    found = list(ROWS[name](TINY))
    assert found
    for row in found:
        assert row.name == name  # or the command in the table would be another row's
        figures = [row.ours, row.stock, row.limit, row.ratio, *(value for _, value in row.otherwise)]
        assert all(math.isfinite(value) and value >= 0 for value in figures if value is not None)
        assert row.unit != "s" or row.ours > 0
        assert report.line(row).count(" | ") == len(report.COLUMNS) - 1


@linux
def test_the_command_writes_its_table_its_figures_and_a_picture(
    tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    done = main(["alibi_error", "growth", "--tiny", "--threads", "1", "--output", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["what"] for row in written["rows"]] == [row.what for row in done]
    assert written["machine"]["threads"] == 1
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    printed = capsys.readouterr().out
    assert len(lines) == 2 + len(done) and all(line in printed for line in lines)
    assert (tmp_path / "out" / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "out").glob("*.part"))


def test_rows_measured_again_replace_their_predecessors_alone(
    tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    tiny = ["--tiny", "--threads", "1", "--output", str(out)]
    main(["patching", *tiny])
    main(["alibi_error", *tiny])
    main(["patching", *tiny])
    _, found = report.read(out / "results.json")
    assert [row.name for row in found] == ["alibi_error", "patching", "patching", "patching"]
    before = (out / "results.json").read_bytes()
    with pytest.raises(SystemExit):
        main(["alibi_error", "--tiny", "--threads", "2", "--output", str(out)])
    assert "Name another --output" in capsys.readouterr().err
    assert (out / "results.json").read_bytes() == before


def test_results_are_published_with_what_was_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ESSENCE", {"walking": "walking, in short"})
    missed = Row(
        "a", "walking far", "s", 2.0, None, (("the bus", 1.5),), 1.0, 0.75, "the bus / ours", ("at least", 1.25)
    )
    met = Row("b", "walking home", "s", 1.0, limit=1.0, ratio=1.0, against="limit", target=("at most", 1.1))
    machine = {"threads": 2, "processor": "p", "torch": "t", "transformers": "v", "rounds": 5}
    rows = [{**vars(row), "met": row.met} for row in (missed, met)]
    (tmp_path / "results.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    report.publish(tmp_path, tmp_path)
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "1 targets are met, 1 missed" in page and "- missed: walking far" in page
    assert "1.5 if the part that can be saved cost nothing" in page
    assert "- walking far: 1.5 s (the bus), ours 2 s" in page
    readme = (tmp_path / "README.md").read_text()
    assert "walking, in short | 2 s | 1 s | 1.5 s (the bus)" in readme and "old" not in readme
    assert readme.startswith("before") and readme.endswith("after\n")


def test_an_unknown_row_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["alibi_backwards"])
    assert "alibi_backwards" in capsys.readouterr().err


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    order: list[str] = []
    taken = times({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 4
    assert {name: len(values) for name, values in taken.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_taken_round_by_round() -> None:
    """A round in which the machine was busy slows both, and says nothing."""
    assert ratio([1.0, 10.0, 2.0], [2.0, 20.0, 4.0]) == 0.5


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [(("at most", 1.2), 1.2, True), (("at most", 1.2), 1.3, False), (("at least", 1.2), 1.1, False), (None, 9.0, None)],
)
def test_targets(target: Any, value: float, met: bool | None) -> None:
    assert Row("x", "x", "s", 1.0, ratio=value, against="limit", target=target).met is met


@linux
def test_memory_is_what_a_run_adds() -> None:
    kept = bytearray(8 << 20)
    assert 60 < measuring.grows_by(lambda: bytearray(b"x" * (64 << 20))[0]) < 160
    assert len(kept) == 8 << 20


@linux
@pytest.mark.slow
def test_memory_in_a_process_of_its_own() -> None:
    """32 MiB of scores as a tensor; less than a quarter of it otherwise."""
    peaks = measuring.in_own_process("attention", ("ours", "dense"), "alibi", 1024, 8, "forward")
    assert peaks["dense"] > 32 > 4 * peaks["ours"]
