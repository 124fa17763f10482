"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file, or leave what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def written_whole(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder whose content moves into `folder` when the block ends well, and vanishes when it does not.

    `config.json` moves last: without it the folder does not open as a model.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    temporary = target / f".writing-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        move_whole(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def move_whole(source: Path, target: Path) -> None:
    """Move everything in `source` into `target`, replacing what has the same name. What makes it a model moves last."""
    for item in sorted(source.iterdir(), key=lambda item: item.name in ("config.json", "adapter_config.json")):
        place = target / item.name
        if place.is_dir():
            shutil.rmtree(place)
        os.replace(item, place)
    source.rmdir()
