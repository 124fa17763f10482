"""What is registered, as text for people: read from the encodings themselves, so that it is written once."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.encoding import Encoding, encodings


@dataclass(frozen=True)
class FieldReference:
    """One option of an encoding."""

    name: str
    default: Any
    text: str
    """What it is, its unit, and where its default comes from."""


def fields_of(encoding: type[Encoding]) -> list[FieldReference]:
    """The fields of an encoding in order, each with the docstring under it."""
    texts: dict[str, str] = {}
    for cls in reversed(encoding.__mro__):
        if issubclass(cls, Encoding):
            texts |= _docstrings(cls)
    return [FieldReference(f.name, f.default, texts.get(f.name, "")) for f in dataclasses.fields(encoding)]  # type: ignore[arg-type]


def describe_encoding(encoding: type[Encoding], width: int = 100) -> str:
    """All about one encoding: what it does, its source, and its fields."""
    module = inspect.getdoc(inspect.getmodule(encoding)) or ""
    lines = [
        f"{encoding.name} ({encoding.__name__}), {_site(encoding)}",
        "",
        inspect.getdoc(encoding) or "",
        "",
        module,
        "",
    ]
    fields = fields_of(encoding)
    if not fields:
        return "\n".join([*lines, "It has no fields."])
    for field in fields:
        lines.append(f"{field.name} = {field.default!r}")
        lines += textwrap.wrap(" ".join(field.text.split()), width - 4, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def encoding_rows() -> list[tuple[str, str, str, str]]:
    """(name, site, fields with defaults, one line of what it is) of each encoding, sorted by name."""
    rows: list[tuple[str, str, str, str]] = []
    for name, encoding in encodings().items():
        parent = _registered_parent(encoding)
        inherited = {f.name for f in fields_of(parent)} if parent else set()
        own = [f"{f.name}={f.default}" for f in fields_of(encoding) if f.name not in inherited]
        fields = ", ".join([f"those of {parent.name}", *own] if parent and inherited else own)
        rows.append((name, encoding.site, fields, _first_sentence(encoding)))
    return rows


def markdown_table() -> str:
    """The README's table of encodings."""
    lines = ["| name | site | what it is | fields (default) |", "|---|---|---|---|"]
    for name, site, fields, text in encoding_rows():
        parts = fields.split(", ") if fields else []
        listed = ", ".join(p if p.startswith("those of") else f"`{p}`" for p in parts) or "none"
        lines.append(f"| `{name}` | {site} | {text.replace('|', chr(92) + '|')} | {listed} |")
    return "\n".join(lines)


def _docstrings(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[node.target.id] = inspect.cleandoc(after.value.value)
    return found


def _first_sentence(encoding: type[Encoding]) -> str:
    module = inspect.getdoc(inspect.getmodule(encoding)) or ""
    return module.split("\n\n")[0].split("\n")[0].partition(": ")[2].rstrip(".") or module.split("\n")[0].rstrip(".")


def _site(encoding: type[Encoding]) -> str:
    return "no site: every native one is silent" if encoding.site == "none" else f"{encoding.site} site"


def _registered_parent(encoding: type[Encoding]) -> type[Encoding] | None:
    return next((c for c in encoding.__mro__[1:] if issubclass(c, Encoding) and "name" in vars(c)), None)


def versions() -> str:
    """The versions that this environment tests with, as the README tells them."""
    import importlib.metadata
    import platform

    names = ("torch", "transformers", "accelerate", "peft", "datasets")
    listed = [f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names]
    return f"Python {'.'.join(platform.python_version_tuple()[:2])}, " + ", ".join(listed)


def update_readme(path: Path, **sections: str) -> None:
    """Rewrite what stands between `<!-- name -->` and `<!-- /name -->` in a Markdown file, whole."""
    text = path.read_text(encoding="utf-8")
    for name, section in sections.items():
        head, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, tail = rest.partition(f"<!-- /{name} -->")
        if not opening or not closing:
            raise ValueError(f"{path} has no section between <!-- {name} --> and <!-- /{name} -->.")
        text = f"{head}{opening}{section}\n{closing}{tail}"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    update_readme(Path(sys.argv[1]), encodings=markdown_table(), versions=versions())
