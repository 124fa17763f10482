"""Swap the position encoding of a pretrained Hugging Face model in one call.

Importing this package is light: it teaches transformers' Auto classes to open saved patched models, and loads the rest
when it is used.
"""

# ruff: noqa: F401  (the names are listed in __all__, some of which only the registry knows)

from __future__ import annotations

import importlib
import sys
import types
import typing
from typing import Any

import hf_posenc.architectures
import hf_posenc.encodings  # before the functions of the same names are bound below
from hf_posenc.architecture import Architecture, ArchitectureError, architectures
from hf_posenc.checkpoint import register as _register
from hf_posenc.encoding import Encoding, EncodingError, ModelShape, encodings

if typing.TYPE_CHECKING:
    from hf_posenc.adapters import load_adapter, lora_config
    from hf_posenc.describe import describe
    from hf_posenc.patch import PatchError, encoding_of, patch, position_parameters, set_native_weight, unpatch
    from hf_posenc.positions import sequence_length
    from hf_posenc.verify import verify

__version__ = "0.1.0"

_LATER = {
    "PatchError": "hf_posenc.patch",
    "describe": "hf_posenc.describe",
    "encoding_of": "hf_posenc.patch",
    "load_adapter": "hf_posenc.adapters",
    "lora_config": "hf_posenc.adapters",
    "patch": "hf_posenc.patch",
    "position_parameters": "hf_posenc.patch",
    "sequence_length": "hf_posenc.positions",
    "set_native_weight": "hf_posenc.patch",
    "unpatch": "hf_posenc.patch",
    "verify": "hf_posenc.verify",
}
_CLASSES = {encoding.__name__: encoding for encoding in encodings().values()}
globals().update(_CLASSES)

__all__ = sorted([
    "Architecture",
    "ArchitectureError",
    "Encoding",
    "EncodingError",
    "ModelShape",
    "architectures",
    "encodings",
    *_LATER,
    *_CLASSES,
])  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'hf_posenc' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """This module. `patch`, `describe` and `verify` are functions, and files of the same names: the function it is."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and value.__name__ == _LATER.get(name):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])


_register()
