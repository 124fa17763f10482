"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
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


def output_folder(output: str | Path | None) -> Path | None:
    """The folder to write into.

    Raises:
        ValueError: it is a file, or holds something that is not an evaluation.
    """
    if output is None:
        return None
    if not isinstance(output, (str, Path)):
        raise ValueError(f"output={output!r} is not allowed; it is the path of a folder, or None.")
    folder = Path(output)
    if folder.exists():
        if not folder.is_dir():
            raise ValueError(f"output={str(output)!r} is a file; name a folder.")
        names = {item.name for item in folder.iterdir()}
        if names and not (_report_in(folder) or ("parts" in names and not names & _WRITTEN)):
            raise ValueError(
                f"output={str(output)!r} holds something else ({', '.join(sorted(names)[:3])}). Name a new folder, or"
                " one that an earlier evaluation wrote."
            )
    return folder


_WRITTEN = {"results.json", "report.md", "report.html", "perplexity.png", "perplexity.svg"}
"""What a report is made of; an interrupted evaluation has left none of it, only `parts`."""


def _report_in(folder: Path) -> dict[str, Any] | None:
    """The results that an evaluation wrote into `folder`; None where there are none, or somebody else's."""
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(results, dict) and {"encodings", "settings", "model", "text"} <= results.keys()
    return results if ours else None


def refuse_others_report(folder: Path | None, models: Sequence[tuple[str, str]]) -> None:
    """Raise a ValueError where the report in `folder` is on a model that is not among `models`: it would be lost.

    Args:
        models: (fingerprint, where it is loaded from) of each. The same place with other weights is a model trained
            again: its report may be replaced.
    """
    theirs = None if folder is None else _report_in(folder)
    if theirs is None:
        return
    reported = [(model["fingerprint"], model["source"]) for model in theirs.get("models", [theirs["model"]])]
    fingerprints, places = {f for f, _ in models}, {place for _, place in models}
    others = [place for f, place in reported if f not in fingerprints and place not in places]
    if others:
        raise ValueError(
            f"output={str(folder)!r} holds the report on another model ({', '.join(others)}). Name another folder, or"
            " remove that one first."
        )
