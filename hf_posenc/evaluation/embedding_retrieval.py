"""Planted-sentence retrieval for sentence encoders: can a pooled vector of a long text tell which fact is in it?

As the passkey test of LongEmbed (Zhu et al., 2024, arXiv 2404.12096): documents of one length that differ in one
planted sentence, and a query for each. A query counts as solved where its own document is the nearest one. The chance
level is 1 / documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.probes import FILLER, place, words_of
from hf_posenc.evaluation.retrieval import _check
from hf_posenc.evaluation.scoring import device_of, evaluating, unwrap
from hf_posenc.evaluation.windows import check_int

NAMES = (
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karen", "Liam", "Mona", "Noah",
    "Olga", "Peter", "Quinn", "Rosa", "Simon", "Tara", "Umar", "Vera", "Walter", "Xenia", "Yusuf", "Zoe",
)  # fmt: skip


@dataclass(frozen=True)
class EmbeddingRetrievalResult:
    """Fractions of queries whose own document came first."""

    accuracy: dict[int, float]
    """{length: fraction}."""
    ranks: dict[int, float]
    """{length: mean reciprocal rank}."""
    chance: float
    """What guessing gives."""


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean of the real tokens' vectors: [batch, length, hidden] and [batch, length] to [batch, hidden]."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def first_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The first token's vector ([CLS])."""
    return hidden[:, 0]


def planted_sentence(
    model: nn.Module,
    tokenizer: Any,
    lengths: Sequence[int] = (512, 1024, 2048),
    documents: int = 20,
    seed: int = 0,
    *,
    haystack: str = FILLER,
    pool: Callable[[Tensor, Tensor], Tensor] = mean_pool,
    batch_size: int = 4,
    progress: bool | None = None,
) -> EmbeddingRetrievalResult:
    """Measure retrieval by a pooled encoder at several document lengths.

    Args:
        model: an encoder whose first output is the hidden states [batch, length, hidden], such as `AutoModel` loads.
        tokenizer: its tokenizer.
        lengths: tokens of a document, special ones included.
        documents: documents, and queries, at each length (at most as many as there are names).
        seed: of names, numbers and depths, which are the same for every model.
        haystack: text around the planted sentences (default: repeated filler).
        pool: hidden states and mask to vectors (default: `mean_pool`).
        batch_size: documents encoded together. No effect on the result.
        progress: as for `perplexity`.

    Raises:
        ValueError: a length that the model cannot be fed, or too many documents.
    """
    from hf_posenc.evaluation.processes import Processes

    model = unwrap(model)
    _check(lengths, [0.5], 1)
    check_int("documents", documents, low=2, why="there must be something to confuse a document with")
    check_int("batch_size", batch_size, low=1, why="it is the number of documents encoded together")
    if documents > len(NAMES):
        raise ValueError(f"documents={documents} is not allowed; there are {len(NAMES)} names.")
    limits.check_length(model, "lengths", max(lengths))
    accuracy, ranks = {}, {}
    with (
        evaluating(model),
        torch.no_grad(),
        Processes().progress(documents * sum(lengths), "planted sentence", progress) as bar,
    ):
        for length in lengths:
            draw = random.Random(f"{seed} {length}")
            names = draw.sample(NAMES, documents)
            texts = []
            for name in names:
                fact = f"The pass key of {name} is {draw.randrange(10000, 100000)}."
                texts.append(_document(tokenizer, length, haystack, draw.random(), fact))
            queries = [tokenizer(f"What is the pass key of {name}?", truncation=False)["input_ids"] for name in names]
            vectors = _encode(model, tokenizer, texts, pool, batch_size, bar)
            asked = _encode(model, tokenizer, queries, pool, batch_size, None)
            similarity = torch.nn.functional.normalize(asked, dim=-1) @ torch.nn.functional.normalize(vectors, dim=-1).T
            own = similarity.diagonal().unsqueeze(1)
            # A tie is no success: documents that all look alike must not count as found.
            rank = (similarity >= own).sum(1)
            accuracy[length] = float((rank == 1).double().mean())
            ranks[length] = float((1 / rank.double()).mean())
    return EmbeddingRetrievalResult(accuracy, ranks, 1 / documents)


def _document(tokenizer: Any, length: int, haystack: str, depth: float, fact: str) -> list[int]:
    """Token ids, special ones included, of a text of at most `length` tokens with the fact at its depth, within 1 %."""

    def encode(words: list[str]) -> list[int]:
        return tokenizer(place(words, [(depth, fact)]), truncation=False, verbose=False)["input_ids"]

    if len(encode([])) > length:
        raise ValueError(
            f"lengths: {length} is not allowed; the planted sentence alone takes {len(encode([]))} tokens."
        )
    stream = words_of(haystack)
    words: list[str] = []
    while len(encode(words)) <= length:
        words += [next(stream) for _ in range(max(16, len(words)))]
    low, high = 0, len(words)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(encode(words[:middle])) <= length else (low, middle)
    return encode(words[:low])


def _encode(model: nn.Module, tokenizer: Any, rows: list[list[int]], pool: Any, batch_size: int, bar: Any) -> Tensor:
    device, vectors = device_of(model), []
    pad = tokenizer.pad_token_id or 0
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        longest = max(map(len, batch))
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in batch], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch], device=device)
        vectors.append(pool(model(input_ids=ids, attention_mask=mask)[0], mask).float().cpu())
        if bar is not None:
            bar.update(sum(map(len, batch)))
    return torch.cat(vectors)
