"""Clocks and memory."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Run = Callable[[], object]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def times(variants: Mapping[str, Run], rounds: int, clock: str = "wall") -> dict[str, list[float]]:
    """Seconds of each variant in each round, after one round that is not counted.

    Args:
        clock: `wall`, or `cpu`: processor time of all threads, which others on the machine disturb less.
    """
    now = CLOCKS[clock]
    for run in variants.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = now()
            run()
            taken[name].append(now() - start)
    return taken


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over rounds of one's time in parts of the other's in the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def grows_by(run: Run) -> float:
    """MiB by which this process's memory peaks above where it stands now, while `run` runs. Linux only."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    run()
    return max(0.0, _status("VmHWM") - before) / 1024


def in_own_process(case: str, ways: Sequence[str], *arguments: object) -> dict[str, float]:
    """MiB of each way of a case of `python -m benchmarks.memory`, in a process whose freed memory goes back at once."""
    # Small pieces stay with the process: to ask the system for each would take longer than the work.
    settings = {"MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-m", "benchmarks.memory", case, ",".join(ways), *(str(value) for value in arguments)]
    done = subprocess.run(
        command, env={**os.environ, **settings}, cwd=Path(__file__).parent.parent, text=True, capture_output=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return dict(zip(ways, map(float, done.stdout.splitlines()[-1].split()), strict=True))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])
