"""Imports point one way, `import hf_posenc` is light, and the public names are sorted and complete."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_posenc

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_posenc"

MIDDLE = {"attention", "checkpoint", "patch"}
"""The files that know both encodings and architectures."""
UPPER = {"analysis", "data", "evaluation", "training"}
"""What stands on them."""
TOP = {"__main__", "cli", "demo", "reference"}
"""The faces: they know everything and nobody knows them."""

MAY_NOT_IMPORT: dict[str, set[str]] = {
    "encoding": MIDDLE | UPPER | TOP | {"architecture", "architectures", "models"},
    "encodings": MIDDLE | UPPER | TOP | {"architecture", "architectures", "models"},
    "architecture": MIDDLE | UPPER | TOP | {"encodings", "models"},
    "architectures": MIDDLE | UPPER | TOP | {"encoding", "encodings", "models"},
    **{name: UPPER | TOP for name in MIDDLE},
    "data": TOP | {"evaluation", "training", "analysis"},
    "evaluation": TOP | {"training"},
    "analysis": TOP | {"training"},
    "training": TOP,
}
"""By part of the package (a file or a folder): the parts that it knows nothing of."""

HEAVY = ("accelerate", "datasets", "matplotlib", "pandas", "peft", "pyarrow", "tensorboard")
"""Load when used, not with the package."""


def imported_parts(source: str, module: str) -> set[str]:
    """Parts of hf_posenc that the source of `module` (dotted, with `.__init__` for a folder) imports, at any depth."""
    parts = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*module.split(".")[: -node.level], base]))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        parts |= {name.split(".")[1] for name in names if name.startswith("hf_posenc.")}
    return parts


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize(
    ("source", "module", "expected"),
    [
        ("import hf_posenc.patch", "hf_posenc.encoding", {"patch"}),
        ("from hf_posenc.patch import patch", "hf_posenc.encoding", {"patch"}),
        ("def f():\n    from hf_posenc import cli", "hf_posenc.encoding", {"cli"}),
        ("from . import patch", "hf_posenc.encoding", {"patch"}),
        ("from ..patch import journal", "hf_posenc.encodings.rope", {"patch"}),
        ("from .rope import RoPE", "hf_posenc.encodings.yarn", {"encodings"}),
        ("import torch\nfrom transformers import Trainer", "hf_posenc.encoding", set()),
    ],
)
def test_the_walk_sees_every_way_to_import(source: str, module: str, expected: set[str]) -> None:
    assert imported_parts(source, module) == expected


@pytest.mark.parametrize("path", package_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    part = module.split(".")[1]
    found = imported_parts(path.read_text(encoding="utf-8"), module)
    forbidden = MAY_NOT_IMPORT.get(part, set() if part in TOP | {"__init__"} else TOP)
    assert not found & forbidden, f"{module} imports {sorted(found & forbidden)}"


@pytest.mark.parametrize("folder", ["encodings", "architectures"])
def test_encodings_and_architectures_know_no_transformers(folder: str) -> None:
    for path in sorted((PACKAGE / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "transformers"], (
                f"{path.name} knows transformers"
            )


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_is_light() -> None:
    loaded = modules_after("import hf_posenc")
    assert "hf_posenc" in loaded
    # The Auto classes of older transformers load some of them; that is not ours to change.
    theirs = modules_after("import transformers.models.auto.modeling_auto")
    assert not (loaded - theirs) & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["patch", "--help"], ["patsch"], ["patch", "MODEL"]])
def test_command_line_answers_without_loading_torch(arguments: list[str]) -> None:
    start = f"sys.argv = ['hf-posenc', *{arguments!r}]\nfrom hf_posenc_command import main"
    loaded = modules_after(f"import contextlib, sys\n{start}\nwith contextlib.suppress(SystemExit): main()")
    assert "click" in loaded
    assert not loaded & {"torch", "transformers", *HEAVY}


def test_no_class_of_transformers_is_replaced() -> None:
    """Nothing assigns an attribute of a `modeling_*` module, or `forward` on anything."""
    pattern = re.compile(r"modeling_\w+\.\w+(\.\w+)*\s*=[^=]|\.forward\s*=[^=]")
    for path in package_files():
        match = pattern.search(path.read_text(encoding="utf-8"))
        assert match is None, f"{path.name}: {match and match.group()}"


def test_public_names_are_sorted_and_complete() -> None:
    assert hf_posenc.__all__ == sorted(hf_posenc.__all__)
    assert len(set(hf_posenc.__all__)) == len(hf_posenc.__all__)
    for name in hf_posenc.__all__:
        assert getattr(hf_posenc, name) is not None, name
    verbs = {"architectures", "describe", "encoding_of", "encodings", "lora_config", "patch", "position_parameters"}
    verbs |= {"set_native_weight", "unpatch", "verify"}
    classes = {cls.__name__ for cls in hf_posenc.encodings().values()}
    assert (verbs | classes | {"Encoding"}) <= set(hf_posenc.__all__)
    assert set(hf_posenc.__all__) <= set(dir(hf_posenc))


def test_evaluation_names_what_the_documentation_promises() -> None:
    from hf_posenc import evaluation

    assert {"passkey", "perplexity"} <= set(evaluation.__all__)
    assert evaluation.__all__ == sorted(evaluation.__all__)
