"""How well a model uses a long context: perplexity by context length, retrieval, and reports one can show.

Names load when they are used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.evaluation.likelihood import PerplexityResult as PerplexityResult
    from hf_posenc.evaluation.likelihood import perplexity as perplexity
    from hf_posenc.evaluation.pseudo import pseudo_perplexity as pseudo_perplexity
    from hf_posenc.evaluation.sweep import evaluate as evaluate

_HOME = {
    "evaluate": "sweep",
    "PerplexityResult": "likelihood",
    "perplexity": "likelihood",
    "pseudo_perplexity": "pseudo",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
