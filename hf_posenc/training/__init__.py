"""Adapting a model to a longer context or another encoding: the Trainer, its arguments, its callbacks.

Names load when they are used: transformers' Trainer takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.training.arguments import Arguments, FinetuneArguments, parse_arguments
    from hf_posenc.training.callbacks import FadeNative, Fading, StopOnSignal
    from hf_posenc.training.loss import sliced_cross_entropy
    from hf_posenc.training.run import FinetuneResult, finetune, main
    from hf_posenc.training.trainer import LongContextTrainer, NonFiniteLossError, last_checkpoint

_HOME = {
    "Arguments": "arguments",
    "FadeNative": "callbacks",
    "Fading": "callbacks",
    "FinetuneArguments": "arguments",
    "FinetuneResult": "run",
    "LongContextTrainer": "trainer",
    "NonFiniteLossError": "trainer",
    "StopOnSignal": "callbacks",
    "finetune": "run",
    "last_checkpoint": "trainer",
    "main": "run",
    "parse_arguments": "arguments",
    "sliced_cross_entropy": "loss",
}

__all__ = [
    "Arguments",
    "FadeNative",
    "Fading",
    "FinetuneArguments",
    "FinetuneResult",
    "LongContextTrainer",
    "NonFiniteLossError",
    "StopOnSignal",
    "finetune",
    "last_checkpoint",
    "main",
    "parse_arguments",
    "sliced_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
