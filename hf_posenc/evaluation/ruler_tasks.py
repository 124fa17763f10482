"""Synthetic long-context tasks that need no outside data, in the manner of RULER (Hsieh et al., 2024, arXiv
2404.06654).

Written from the paper's descriptions, smaller and plainer than its own; numbers compare encodings of one model, not
with the paper's table.
"""

from __future__ import annotations

import itertools
import random
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hf_posenc.evaluation.probes import FILLER, Probe, RetrievalResult, ask, fit_shown, place
from hf_posenc.evaluation.retrieval import _check, _listed, needle

Answers = tuple[str, ...]
Made = tuple[Callable[[list[str]], str], Callable[[list[str]], Answers | None], str]
"""(the prompt from its filler words, the answers from them or None where ties leave them open, filler text)."""
DRAWS = 20
"""Prompts drawn in place of one without a clear answer, before its length is called too short."""


def ruler(
    model: nn.Module,
    tokenizer: Any,
    lengths: Sequence[int] = (2048, 8192),
    tasks: Sequence[str] | None = None,
    trials: int = 5,
    seed: int = 0,
    *,
    progress: bool | None = None,
    distributed: bool | None = None,
) -> dict[str, RetrievalResult]:
    """Run several tasks: {task: result}. `result.by_length()` gives the fraction solved at each length.

    Args:
        tasks: of `TASKS` (default: all).
        model, tokenizer, lengths, trials, seed, progress, distributed: as for `passkey`.

    Raises:
        ValueError: an unknown task, a length too short for a clear answer, or as for `passkey`.
        FloatingPointError: as for `passkey`.
    """
    chosen = _listed("tasks", tasks, list(TASKS)) if tasks is not None else list(TASKS)
    for task in chosen:
        if task not in TASKS:
            raise ValueError(f"tasks: {task!r} is not known; choose among {', '.join(TASKS)}.")
    lengths, _, trials = _check(lengths, [0.5], trials)
    results = {}
    for task in chosen:
        make = TASKS[task]
        if isinstance(make, dict):  # a needle task
            results[task] = needle(
                model,
                tokenizer,
                lengths,
                (0.1, 0.5, 0.9),
                trials,
                seed,
                progress=progress,
                distributed=distributed,
                **make,
            )
            continue
        probes = []
        for length in lengths:
            draw = random.Random(f"{seed} {task} {length}")
            for _ in range(trials):
                ids, answers = _clear(make, draw, tokenizer, task, length)
                probes.append(Probe(length, 0.5, ids, answers))
        results[task] = ask(model, tokenizer, task, probes, progress=progress, distributed=distributed)
    return results


def _clear(
    make: Callable[[random.Random], Made], draw: random.Random, tokenizer: Any, task: str, length: int
) -> tuple[Tensor, Answers]:
    """A prompt and its answers, which hold for the words that are in it and are the only ones to do so."""
    for _ in range(DRAWS):
        write, answers_of, filler = make(draw)
        ids, shown = fit_shown(tokenizer, length, filler, write)
        answers = answers_of(shown)
        if answers is not None:
            return ids, answers
    raise ValueError(f"lengths: {length} is too short for the task {task!r}: its words do not tell the answer clearly.")


def _most_frequent(words: list[str], count: int) -> Answers | None:
    """The `count` words that appear most often; None where another appears as often as one of them."""
    ranked = Counter(words).most_common(count + 1)
    if len(ranked) < count or (len(ranked) > count and ranked[count - 1][1] == ranked[count][1]):
        return None
    return tuple(word for word, _ in ranked[:count])


def variable_tracking(draw: random.Random, chain: int = 4) -> Made:
    """A number is handed from variable to variable; name all that hold it."""
    names: list[str] = []
    while len(names) < 2 * chain:
        name = "".join(draw.choices(string.ascii_uppercase, k=5))
        names += [name] if name not in names else []
    value, other = (str(n) for n in draw.sample(range(10000, 100000), 2))
    chains = [(names[:chain], value), (names[chain:], other)]
    facts = []
    for variables, number in chains:
        depths = sorted(draw.random() for _ in variables)
        lines = [f"VAR {variables[0]} = {number}."]
        lines += [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(variables)]
        facts += list(zip(depths, lines, strict=True))

    def write(words: list[str]) -> str:
        return (
            f"Memorize and track the chains of variable assignment hidden in the following"
            f" text.\n{place(words, facts)}\n"
            f"Question: Find all variables that are assigned the value {value} in the text above.\nAnswer: The"
            " variables"
            f" that are assigned the value {value} are"
        )

    return write, lambda shown: tuple(names[:chain]), FILLER


def common_words(draw: random.Random, common: int = 3) -> Made:
    """A list of words in which a few stand far more often than the rest; name those few."""
    words = _words(draw, 400)
    often, rare = words[:common], words[common:]
    stream = []
    for i, word in enumerate(rare):  # every fourth word is a common one
        stream.append(word)
        if i % 3 == 2:
            stream.append(often[(i // 3) % common])

    def write(filler: list[str]) -> str:
        numbered = " ".join(f"{i + 1}. {word}" for i, word in enumerate(filler))
        return (
            f"Below is a numbered list of words. Some of them appear more often than others. Memorize"
            f" those.\n{numbered}\n"
            f"Question: What are the {common} most common words in the list above?\nAnswer: The {common} most"
            " common words are:"
        )

    return write, lambda shown: _most_frequent(shown, common), " ".join(stream)


def frequent_words(draw: random.Random, frequent: int = 3, exponent: float = 2.0) -> Made:
    """Coded words drawn from a zeta distribution; name the most frequent."""
    words = _words(draw, 200)
    weights = [(rank + 1) ** -exponent for rank in range(len(words))]
    stream = draw.choices(words, weights, k=4000)

    def write(filler: list[str]) -> str:
        return (
            f"Read the following coded text and track how often each coded word appears. Find the {frequent} most"
            " frequent"
            f" coded words.\n{' '.join(filler)}\nQuestion: What are the {frequent} most frequent coded words in the"
            " text"
            f" above?\nAnswer: The {frequent} most frequent coded words are:"
        )

    return write, lambda shown: _most_frequent(shown, frequent), " ".join(stream)


def _words(draw: random.Random, count: int) -> list[str]:
    """Made-up words that can be said: no model has seen them, all tokenizers can write them."""
    words: dict[str, None] = {}
    while len(words) < count:
        word = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))
        words[word] = None
    return list(words)


TASKS: dict[str, Any] = {
    "single": {"keys": 1},
    "multi_key": {"keys": 8},
    "multi_value": {"values": 3},
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
}
"""What `ruler` can run: needle tasks by their settings, the others by what makes a prompt."""
