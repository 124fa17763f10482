"""`python -m benchmarks`: see the package."""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from benchmarks import report
from benchmarks.parts import Size
from benchmarks.rows import ROWS, Row, Settings

TINY = Settings(size=Size(length=32, hidden=24, heads=3, layers=1), rounds=1, tiny=True)


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What position encodings cost.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="which rows to measure (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, on a busy machine"
    )
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="folder (default: bench-output)")
    parser.add_argument("--tiny", action="store_true", help="as small as can be: shows that it runs, and no more")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        print("\n".join(f"{name:20s} {(measure.__doc__ or '').strip()}" for name, measure in ROWS.items()))
        return []
    unknown = sorted(set(chosen.rows) - set(ROWS))
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are: {', '.join(ROWS)}")
    torch.set_num_threads(chosen.threads)
    machine = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": chosen.threads,
        "rounds": TINY.rounds if chosen.tiny else chosen.rounds,
        "clock": TINY.clock if chosen.tiny else chosen.clock,
    }
    before: list[Row] = []
    if chosen.rows and (chosen.output / "results.json").is_file():
        where, before = report.read(chosen.output / "results.json")
        if where != machine:
            parser.error(f"{chosen.output} holds rows measured otherwise ({where}). Name another --output.")
    settings = TINY if chosen.tiny else Settings(rounds=chosen.rounds, clock=chosen.clock)
    print(report.head(), flush=True)
    done: list[Row] = []
    for name in chosen.rows or ROWS:
        for row in ROWS[name](settings):
            done.append(row)
            print(report.line(row), flush=True)
    # Rows measured again replace their predecessors.
    again = {row.name for row in done}
    done = sorted(done + [row for row in before if row.name not in again], key=lambda row: list(ROWS).index(row.name))
    chosen.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "rows": [{**asdict(row), "met": row.met} for row in done]}, indent=1)
    report.write(chosen.output / "results.json", text)
    report.write(chosen.output / "table.md", report.table(done))
    if any(row.name == "growth" for row in done):
        report.plot(done, chosen.output / "growth.png")
    missed = [row.what for row in done if row.met is False]
    print(f"\n{len(done)} rows, {sum(row.met is True for row in done)} targets met, {len(missed)} missed.")
    for what in missed:
        print(f"  missed: {what}")
    print(f"Written to {chosen.output}/")
    return done


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
