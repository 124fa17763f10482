"""Sources of text to documents: {"id", "text", "messages"}, one row each.

A source is a text file (one document), a .jsonl or .parquet file (a document a row), a folder (every such file in it,
recursively), a data set saved with `datasets`, or the name of one on a hub: `name`, `name:split`, `name@config:split`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".html", ".tex", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".rs", ".go")
"""Files of a folder that are read as text, one document each."""
ROW_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
"""Files with a document a row."""
_VERSION = 1  # part of the cache key: raise it when rows come out differently


def load_documents(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    text_field: str = "text",
    messages_field: str = "messages",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """All documents of all `sources`, in order, as a data set with the columns `id`, `text` and `messages`.

    `messages` is a JSON list of {"role", "content"} where the row is a conversation (then `text` is empty), else "".
    Without `streaming` the rows are cached on disk, keyed by what the files hold.

    Raises:
        ValueError: a source is missing, empty, unreadable, or has no such field; nothing has been written then.
    """
    from datasets import concatenate_datasets

    names = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not names:
        raise ValueError("No source of text was given. Name a file, a folder or a data set.")
    plans = [_plan(os.fspath(name)) for name in names]  # all are checked before any is read
    parts = [_load(plan, text_field, messages_field, streaming) for plan in plans]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def hash_of_sources(sources: Sequence[str | os.PathLike[str]], *, streaming: bool = False) -> str:
    """A hash of all that the files of `sources` hold (of their sizes, where they are streamed because there is so much
    of it); of a data set of `datasets` or a hub, of its name.

    Raises:
        ValueError: as for `load_documents`.
    """
    digest = hashlib.sha256()
    for kind, name, files in [_plan(os.fspath(source)) for source in sources]:
        digest.update(f"{kind} {len(files)} {name if kind != 'files' else ''}\n".encode())
        for file in files:
            try:
                digest.update(f"{os.path.getsize(file)}\n".encode())
                if streaming:
                    continue
                with open(file, "rb") as content:
                    while piece := content.read(1 << 20):
                        digest.update(piece)
            except OSError as error:
                raise ValueError(f"{file!r} cannot be read: {error}.") from error
    return digest.hexdigest()


def _plan(name: str) -> tuple[str, str, list[str]]:
    """What a source is: (kind, name, files), kind one of "files", "saved", "hub"."""
    if not name.strip():
        raise ValueError("A source of text has an empty name. Name a file, a folder or a data set.")
    path = Path(name).expanduser()
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise ValueError(f"{name!r} cannot be read: permission denied.")
        if path.stat().st_size == 0:
            raise ValueError(f"{name!r} is empty.")
        return "files", name, [str(path)]
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return "saved", name, []
        files = sorted(
            str(f) for f in path.rglob("*") if f.suffix.lower() in TEXT_SUFFIXES + ROW_SUFFIXES and f.is_file()
        )
        files = [f for f in files if os.path.getsize(f) > 0]
        if not files:
            kinds = ", ".join(TEXT_SUFFIXES + ROW_SUFFIXES)
            raise ValueError(f"The folder {name!r} holds no text: no file that ends with {kinds} and is not empty.")
        return "files", name, files
    looks_like_path = (
        name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix.lower() in TEXT_SUFFIXES + ROW_SUFFIXES
    )
    if looks_like_path:
        raise ValueError(f"{name!r} does not exist. Name a text, .jsonl or .parquet file, a folder, or a data set.")
    return "hub", name, []


def _load(plan: tuple[str, str, list[str]], text_field: str, messages_field: str, streaming: bool) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    kind, name, files = plan
    if kind != "files":
        return _rows_of_dataset(kind, name, text_field, messages_field, streaming)
    features = datasets.Features({column: datasets.Value("string") for column in ("id", "text", "messages")})
    hashes = [""] * len(files)
    if not streaming:  # a time or a size may be another file's
        read = {file: found for file in files if (found := _hash(file, name)) is not None}
        files, hashes = list(read), list(read.values())
        if not files:
            raise ValueError(f"{name!r} holds no text: no file in it is UTF-8.")
    arguments = {
        "files": [os.path.abspath(file) for file in files],
        "root": os.path.abspath(Path(name).expanduser()),
        "hashes": hashes,
        "text_field": text_field,
        "messages_field": messages_field,
        "version": _VERSION,
    }
    if streaming:
        return datasets.IterableDataset.from_generator(_rows_of_files, features=features, gen_kwargs=arguments)
    try:
        rows = datasets.Dataset.from_generator(_rows_of_files, features=features, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        cause: BaseException | None = error
        while cause is not None and not (
            isinstance(cause, ValueError) and not isinstance(cause, DatasetGenerationError)
        ):
            cause = cause.__cause__ or cause.__context__
        raise ValueError(str(cause) if cause is not None else f"{name!r} could not be read: {error}") from error
    except ValueError as error:
        if "no data" not in str(error):
            raise
        raise ValueError(f"{name!r} holds no text: every document in it is blank.") from error
    return rows


def _hash(file: str, root: str) -> str | None:
    """A hash of what `file` holds; None where it is no UTF-8, which one file of a folder may be."""
    digest, is_text = hashlib.sha256(), Path(file).suffix.lower() != ".parquet"
    decoder = codecs.getincrementaldecoder("utf-8")()
    begins = 0  # where what the decoder looks at next begins: it keeps back the first bytes of a character
    try:
        with open(file, "rb") as content:
            while True:
                piece = content.read(1 << 20)
                digest.update(piece)
                if is_text:
                    begins = content.tell() - len(piece) - len(decoder.getstate()[0])
                    decoder.decode(piece, final=not piece)
                if not piece:
                    return digest.hexdigest()
    except UnicodeDecodeError as error:
        _refuse_code(file, Path(root).expanduser().is_dir(), begins + error.start)
        return None
    except OSError as error:
        raise ValueError(f"{file!r} cannot be read: {error}.") from error


def _refuse_code(file: str, in_folder: bool, byte: int) -> None:
    """A folder of sources may hold a few files in other codes; a file that was named must not be one."""
    if not in_folder:
        raise ValueError(f"{file!r} is not UTF-8 text: byte {byte} cannot be decoded.")
    logger.warning("%s is left out: it is not UTF-8 text (byte %d).", file, byte)


def _rows_of_files(
    files: list[str], root: str, hashes: list[str], text_field: str, messages_field: str, version: int
) -> Iterator[dict[str, str]]:
    base = Path(root)
    for file in files:
        label = os.path.relpath(file, base) if base.is_dir() else os.path.basename(file)
        suffix = Path(file).suffix.lower()
        try:
            if suffix == ".parquet":
                rows: Iterator[dict[str, str]] = _parquet_rows(file, label, text_field, messages_field)
            elif suffix in ROW_SUFFIXES:
                rows = _json_rows(file, label, text_field, messages_field)
            else:
                text = Path(file).read_text(encoding="utf-8")
                rows = iter([{"id": label, "text": text, "messages": ""}])
            yield from (row for row in rows if row["text"].strip() or row["messages"])
        except UnicodeDecodeError as error:
            _refuse_code(file, base.is_dir(), error.start)
        except OSError as error:
            raise ValueError(f"{file!r} cannot be read: {error}.") from error


def _json_rows(file: str, label: str, text_field: str, messages_field: str) -> Iterator[dict[str, str]]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file!r}, line {number}, is not JSON: {error}.") from error
            yield _row(row, f"{label}:{number}", f"{file!r}, line {number}", text_field, messages_field)


def _parquet_rows(file: str, label: str, text_field: str, messages_field: str) -> Iterator[dict[str, str]]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file!r} is not a readable parquet file: {error}.") from error
    number = 0
    for batch in table.iter_batches(batch_size=256):
        for row in batch.to_pylist():
            yield _row(row, f"{label}:{number}", f"{file!r}, row {number}", text_field, messages_field)
            number += 1


def _row(row: Any, number: str, where: str, text_field: str, messages_field: str) -> dict[str, str]:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object with a field {text_field!r}; it is {type(row).__name__}.")
    identity = str(row["id"]) if row.get("id") is not None else number
    if isinstance(row.get(text_field), str):
        return {"id": identity, "text": row[text_field], "messages": ""}
    if isinstance(row.get(messages_field), list):
        return {"id": identity, "text": "", "messages": json.dumps(row[messages_field])}
    raise ValueError(
        f"{where} has no text field {text_field!r} and no list of messages {messages_field!r}. "
        f"It has: {', '.join(row)}."
    )


def _rows_of_dataset(kind: str, name: str, text_field: str, messages_field: str, streaming: bool) -> Any:
    import datasets

    if kind == "saved":
        saved = datasets.load_from_disk(name)
        data = saved["train"] if isinstance(saved, dict) and "train" in saved else saved
        if isinstance(data, dict):
            raise ValueError(f"{name!r} has no split 'train'; it has {', '.join(map(str, data))}.")
        if streaming:
            data = data.to_iterable_dataset()
    else:
        rest, _, split = name.partition(":")
        repository, _, config = rest.partition("@")
        try:
            data = datasets.load_dataset(repository, config or None, split=split or "train", streaming=streaming)
        except Exception as error:  # whatever a hub, a network or a loader raises, the answer to the user is the same
            raise ValueError(
                f"{name!r} is neither a file nor a folder, and no data set of that name could be loaded: {error}"
            ) from error
    columns = data.column_names
    if columns and text_field not in columns and messages_field not in columns:
        raise ValueError(f"{name!r} has no column {text_field!r} or {messages_field!r}. It has: {', '.join(columns)}.")

    def convert(row: dict[str, Any], index: int) -> dict[str, str]:
        return _row(dict(row), f"{name}:{index}", f"{name!r}, row {index}", text_field, messages_field)

    rows = data.map(convert, with_indices=True, remove_columns=columns)
    rows = rows.filter(lambda row: bool(row["text"].strip() or row["messages"]))
    if not streaming and len(rows) == 0:
        raise ValueError(f"{name!r} holds no text: every document in it is blank.")
    return rows
