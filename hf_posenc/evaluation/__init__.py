"""How well a model uses a long context: perplexity by context length, retrieval, and reports one can show.

Names load when they are used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.evaluation.answers import AnswerScore as AnswerScore
    from hf_posenc.evaluation.answers import score_answer as score_answer
    from hf_posenc.evaluation.embedding_retrieval import EmbeddingRetrievalResult as EmbeddingRetrievalResult
    from hf_posenc.evaluation.embedding_retrieval import planted_sentence as planted_sentence
    from hf_posenc.evaluation.likelihood import PerplexityResult as PerplexityResult
    from hf_posenc.evaluation.likelihood import perplexity as perplexity
    from hf_posenc.evaluation.probes import RetrievalResult as RetrievalResult
    from hf_posenc.evaluation.pseudo import pseudo_perplexity as pseudo_perplexity
    from hf_posenc.evaluation.retrieval import needle as needle
    from hf_posenc.evaluation.retrieval import passkey as passkey
    from hf_posenc.evaluation.ruler_tasks import ruler as ruler
    from hf_posenc.evaluation.suggestions import Suggestion as Suggestion
    from hf_posenc.evaluation.suggestions import suggest as suggest
    from hf_posenc.evaluation.sweep import evaluate as evaluate

_HOME = {
    "AnswerScore": "answers",
    "EmbeddingRetrievalResult": "embedding_retrieval",
    "PerplexityResult": "likelihood",
    "RetrievalResult": "probes",
    "Suggestion": "suggestions",
    "evaluate": "sweep",
    "needle": "retrieval",
    "passkey": "retrieval",
    "perplexity": "likelihood",
    "planted_sentence": "embedding_retrieval",
    "pseudo_perplexity": "pseudo",
    "ruler": "ruler_tasks",
    "score_answer": "answers",
    "suggest": "suggestions",
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
