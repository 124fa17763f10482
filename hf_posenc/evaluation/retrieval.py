"""Passkey and needle in a haystack: does the model find one fact in a long text, wherever it lies?

Perplexity alone misleads: a model can predict the next word well from the last thousand and know nothing of the rest.
"""

from __future__ import annotations

import numbers
import random
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hf_posenc.evaluation.probes import FILLER, Probe, RetrievalResult, ask, fit, place
from hf_posenc.evaluation.windows import check_int

CITIES = (
    "Amsterdam", "Bergen", "Cairo", "Dakar", "Edinburgh", "Florence", "Geneva", "Hanoi", "Istanbul", "Jakarta", "Kyoto",
    "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague", "Quito", "Rome", "Seoul", "Tallinn", "Utrecht", "Vienna", "Warsaw",
    "Zagreb",
)  # fmt: skip


def passkey(
    model: nn.Module,
    tokenizer: Any,
    lengths: Sequence[int] = (2048, 8192),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 5,
    seed: int = 0,
    *,
    digits: int = 5,
    haystack: str = FILLER,
    batch_size: int = 1,
    max_new_tokens: int | None = None,
    progress: bool | None = None,
    distributed: bool | None = None,
) -> RetrievalResult:
    """Hide a random number in repeated filler and ask for it (Mohtashami and Jaggi, 2023, arXiv 2305.16300).

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        lengths: tokens of the prompts; each prompt is within 1 % of it.
        depths: where the number lies, 0 at the start of the filler and 1 at its end.
        trials: numbers hidden for each length and depth.
        seed: of the numbers, which are the same for every model.
        digits: of each number.
        haystack: filler, repeated as often as needed (default: the paper's).
        batch_size, max_new_tokens: as for `hf_posenc.evaluation.probes.ask`.
        progress, distributed: as for `perplexity`.

    Returns:
        A result whose `accuracy` is {length: {depth: fraction}} by exact match, `lenient` the same by lenient match.

    Raises:
        ValueError: a depth outside 0 .. 1, a length shorter than the question or longer than the model can be fed, or
            an argument of another type.
        FloatingPointError: NaN or +inf among the logits, naming the first prompt.
    """
    probes = passkey_probes(tokenizer, lengths, depths, trials, seed, digits=digits, haystack=haystack)
    return ask(
        model, tokenizer, "passkey", probes,
        max_new_tokens=max_new_tokens, batch_size=batch_size, progress=progress, distributed=distributed,
    )  # fmt: skip


def passkey_probes(
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
    *,
    digits: int = 5,
    haystack: str = FILLER,
) -> list[Probe]:
    """The prompts of `passkey`, which takes the same arguments and raises the same errors."""
    lengths, depths, trials = _check(lengths, depths, trials)
    digits = check_int("digits", digits, low=1, why="it is the number of digits of a passkey")
    probes = []
    for length in lengths:
        for depth in depths:
            draw = random.Random(f"{seed} {length} {depth}")
            for _ in range(trials):
                key = str(draw.randrange(10 ** (digits - 1), 10**digits))
                fact = f"The pass key is {key}. Remember it. {key} is the pass key."

                def write(words: list[str], depth: float = depth, fact: str = fact) -> str:
                    return (
                        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it."
                        f" I will quiz you about the important information there. {place(words, [(depth, fact)])}"
                        " What is the pass key? The pass key is"
                    )

                probes.append(Probe(length, depth, fit(tokenizer, length, haystack, write), (key,)))
    return probes


def needle(
    model: nn.Module,
    tokenizer: Any,
    lengths: Sequence[int] = (2048, 8192),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 5,
    seed: int = 0,
    *,
    keys: int = 1,
    values: int = 1,
    haystack: str = FILLER,
    batch_size: int = 1,
    max_new_tokens: int | None = None,
    progress: bool | None = None,
    distributed: bool | None = None,
) -> RetrievalResult:
    """Hide the magic numbers of cities in a text and ask for one city's (as RULER's NIAH tasks: arXiv 2404.06654).

    Args:
        keys: cities with a number; all but the one asked for are distractors, spread over the text.
        values: numbers of the city that is asked for; the further ones are spread over the text. All are to be named.
        haystack: real text, or (default) repeated filler.
        model, tokenizer, lengths, depths, trials, seed, batch_size, max_new_tokens, progress, distributed: as for
        `passkey`.

    Raises:
        ValueError: as for `passkey`, or more keys than there are cities.
        FloatingPointError: as for `passkey`.
    """
    lengths, depths, trials = _check(lengths, depths, trials)
    keys = check_int("keys", keys, low=1, why="it is the number of cities with a number")
    values = check_int("values", values, low=1, why="it is the number of numbers of the city asked for")
    if keys > len(CITIES):
        raise ValueError(f"keys={keys} is not allowed; there are {len(CITIES)} cities.")
    probes = []
    for length in lengths:
        for depth in depths:
            draw = random.Random(f"{seed} {length} {depth}")
            for _ in range(trials):
                cities = draw.sample(CITIES, keys)
                numbers = [str(n) for n in draw.sample(range(10**6, 10**7), keys - 1 + values)]
                asked, answers = cities[0], numbers[:values]
                facts = [(depth, _fact(asked, answers[0]))]
                facts += [(draw.random(), _fact(asked, number)) for number in answers[1:]]
                facts += [(draw.random(), _fact(c, n)) for c, n in zip(cities[1:], numbers[values:], strict=True)]
                many = values > 1
                question = (
                    f"What {'are all' if many else 'is'} the special magic number{'s' * many} for {asked} mentioned"
                    " in the"
                    f" text? The special magic number{'s' * many} for {asked} mentioned in the text"
                    f" {'are' if many else 'is'}"
                )

                def write(words: list[str], facts: Any = facts, question: str = question) -> str:
                    return (
                        "Some special magic numbers are hidden within the following text. Memorize them. I will"
                        " quiz you about"
                        f" them afterwards.\n{place(words, facts)}\n{question}"
                    )

                ids = fit(tokenizer, length, haystack, write)
                probes.append(Probe(length, depth, ids, tuple(answers)))
    task = "needle" if keys == values == 1 else f"needle ({keys} keys, {values} values)"
    return ask(
        model, tokenizer, task, probes,
        max_new_tokens=max_new_tokens, batch_size=batch_size, progress=progress, distributed=distributed,
    )  # fmt: skip


def _fact(city: str, number: str) -> str:
    return f"One of the special magic numbers for {city} is: {number}."


def _check(lengths: Sequence[int], depths: Sequence[float], trials: int) -> tuple[Sequence[int], Sequence[float], int]:
    """The arguments as Python's numbers: a depth of 0 draws what one of 0.0 does."""
    lengths = [
        check_int("lengths", length, low=1, why="tokens of a prompt") for length in _listed("lengths", lengths, [2048])
    ]
    depths = _listed("depths", depths, [0.0, 0.5, 1.0])
    for depth in depths:
        if isinstance(depth, bool) or not isinstance(depth, numbers.Real) or not 0 <= float(depth) <= 1:
            raise ValueError(f"depths: {depth!r} is not allowed; 0 is the start of the text and 1 its end.")
    trials = check_int("trials", trials, low=1, why="it is the number of prompts for each length and depth")
    return lengths, [float(depth) for depth in depths], trials


def _listed(name: str, values: Any, example: list[Any]) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} is not allowed; give a list, such as {example}.")
    values = list(values)
    if not values:
        raise ValueError(f"{name} is empty; give a list, such as {example}.")
    return values
