"""How likely a model finds an answer after a context, with the two tokenised as the one text that they are.

Encoding context and answer apart is a classic fault: " 4" may be one token that the boundary would cut, and a space at
the end of the context would change the score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.scoring import device_of, evaluating, logits_of, nats, unwrap


@dataclass(frozen=True)
class AnswerScore:
    """The likelihood of one answer."""

    nll: float
    """Nats over the answer's tokens."""
    tokens: int
    """Tokens of the answer, one that straddles the boundary included."""
    greedy: bool
    """True where each of them was the model's first choice: greedy decoding would have given the answer."""


def answer_span(tokenizer: Any, context: str, answer: str) -> tuple[Tensor, int]:
    """The text `context + answer` as token ids [length], and the index of the first token that holds any of the answer.

    White space at the end of the context counts as the answer's, wherever the caller put it.

    Raises:
        ValueError: a blank answer, nothing before it, or something else than a tokenizer and two texts.
    """
    prefix = start_tokens(tokenizer)
    for name, text in (("context", context), ("answer", answer)):
        if not isinstance(text, str):
            raise ValueError(f"{name}={text!r} is not allowed; it must be text.")
    if not answer.strip():
        raise ValueError(f"answer={answer!r} is blank; there is nothing to score.")
    stem = context.rstrip()
    text = context + answer
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        first = next(i for i, (_, end) in enumerate(offsets) if end > len(stem))
    else:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        alone = tokenizer(stem, add_special_tokens=False, verbose=False)["input_ids"]
        pairs = zip(alone, ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(alone), len(ids) - 1))
    if first + len(prefix) == 0:
        raise ValueError("context is empty and the tokenizer puts no token before a text: nothing to predict from.")
    return torch.tensor([*prefix, *ids], dtype=torch.int64), first + len(prefix)


def score_answer(model: nn.Module, tokenizer: Any, context: str, answer: str) -> AnswerScore:
    """Score `answer` as the continuation of `context` under a causal model.

    Raises:
        ValueError: a blank answer, nothing before it, or a text longer than the model can be fed.
        FloatingPointError: NaN or +inf among the logits.
    """
    model = unwrap(model)
    ids, first = answer_span(tokenizer, context, answer)
    limits.check_length(model, "tokens of context and answer", len(ids))
    with evaluating(model), torch.no_grad():
        logits = logits_of(model, ids[None].to(device_of(model)), first - 1)[0, :-1].float().cpu()
    scores = nats(logits, ids[first:])
    if torch.isnan(scores).any():
        raise FloatingPointError(f"The model's score of the answer {answer!r} is not a number.")
    greedy = bool((logits.argmax(-1) == ids[first:]).all())
    return AnswerScore(float(scores.double().sum()), len(ids) - first, greedy)


def start_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text (a BOS, or nothing). What it puts after one has no place in a prompt.

    Raises:
        ValueError: something that is no tokenizer.
    """
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise ValueError(f"tokenizer={tokenizer!r} is not allowed; it must be the model's tokenizer.")
    whole = tokenizer("a", verbose=False)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[:start])
    return []
