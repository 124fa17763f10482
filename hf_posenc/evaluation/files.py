"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file under another name beside `path`, then rename it: an interrupt or a full disk leaves no half of
    it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write `value` as JSON; infinities and NaN become strings, so that every reader can read it."""
    return write_whole(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """`value` with everything in it turned into what JSON has."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # "nan", "inf", "-inf": float() reads them back
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
