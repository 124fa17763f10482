"""Questions with a known answer in a long text: making them exactly as long as asked, putting them, and marking the
answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.answers import start_tokens
from hf_posenc.evaluation.processes import Processes
from hf_posenc.evaluation.scoring import device_of, evaluating, logits_of, unwrap
from hf_posenc.evaluation.windows import check_int

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Repeated filler of the passkey task (Mohtashami and Jaggi, 2023, arXiv 2305.16300)."""


@dataclass(frozen=True)
class Probe:
    """One question."""

    length: int
    """Tokens asked for, a start token included."""
    depth: float
    """Where the fact lies: 0 at the start of the text, 1 at its end."""
    input_ids: Tensor = field(repr=False)
    """The prompt [tokens]; within 1 % of `length`."""
    answers: tuple[str, ...]
    """What has to be in the reply."""


@dataclass(frozen=True)
class Reply:
    """What a model said to a probe."""

    length: int
    depth: float
    tokens: int
    """Tokens of the prompt."""
    answers: tuple[str, ...]
    text: str
    """The model's reply, decoded greedily."""

    @property
    def exact(self) -> bool:
        """One answer: the reply begins with it, and goes on with something else. Several: all are there as whole
        words."""
        if len(self.answers) == 1:
            return re.match(rf"\W*{re.escape(self.answers[0])}(?!\w)", self.text) is not None
        return all(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", self.text) for answer in self.answers)

    @property
    def lenient(self) -> float:
        """Share of the answers that are anywhere in the reply, in whatever case."""
        return sum(answer.lower() in self.text.lower() for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class RetrievalResult:
    """Fractions found, by length of the prompt and depth of the fact."""

    task: str
    replies: tuple[Reply, ...] = field(repr=False)
    """Every reply, for a closer look."""

    @property
    def accuracy(self) -> dict[int, dict[float, float]]:
        """{length: {depth: fraction}} by exact match."""
        return self._table(lambda reply: float(reply.exact))

    @property
    def lenient(self) -> dict[int, dict[float, float]]:
        """{length: {depth: fraction}} by lenient match."""
        return self._table(lambda reply: reply.lenient)

    def by_length(self) -> dict[int, float]:
        """{length: fraction} by exact match, over all depths."""
        return {length: sum(row.values()) / len(row) for length, row in self.accuracy.items()}

    def _table(self, mark: Callable[[Reply], float]) -> dict[int, dict[float, float]]:
        marks: dict[int, dict[float, list[float]]] = {}
        for reply in self.replies:
            marks.setdefault(reply.length, {}).setdefault(reply.depth, []).append(mark(reply))
        return {n: {d: sum(found) / len(found) for d, found in row.items()} for n, row in marks.items()}


def words_of(text: str) -> Iterator[str]:
    """The words of `text`, over and over."""
    words = text.split() if isinstance(text, str) else []
    if not words:
        raise ValueError("haystack holds no words; give some text, or leave it out for repeated filler.")
    while True:
        yield from words


def place(words: Sequence[str], facts: Sequence[tuple[float, str]]) -> str:
    """The words with each fact put in at its depth, at the end of the nearest sentence."""
    ends = [0, *(i + 1 for i, word in enumerate(words) if word.endswith((".", "!", "?"))), len(words)]
    spots = []
    for depth, fact in facts:
        spots.append((min(ends, key=lambda end, depth=depth: abs(end - depth * len(words))), fact))  # type: ignore[misc]
    pieces, done = [], 0
    for spot, fact in sorted(spots, key=lambda item: item[0]):
        pieces += [*words[done:spot], fact]
        done = spot
    return " ".join([*pieces, *words[done:]])


def fit(tokenizer: Any, length: int, haystack: str, write: Callable[[list[str]], str]) -> Tensor:
    """The prompt `write(filler words)` with as much filler as makes it `length` tokens long, start token included.

    Raises:
        ValueError: the prompt without any filler is already longer, or no filler makes it fit within 1 %.
    """
    return fit_shown(tokenizer, length, haystack, write)[0]


def fit_shown(
    tokenizer: Any, length: int, haystack: str, write: Callable[[list[str]], str]
) -> tuple[Tensor, list[str]]:
    """The same, with the filler words in it."""
    prefix = start_tokens(tokenizer)

    def encode(words: list[str]) -> list[int]:
        return prefix + list(tokenizer(write(words), add_special_tokens=False, verbose=False)["input_ids"])

    shortest = len(encode([]))
    if shortest > length:
        raise ValueError(f"lengths: {length} is not allowed; the question alone takes {shortest} tokens.")
    best, words = _filled(encode, haystack, length)
    if length - len(best) > max(1, length // 100):
        raise ValueError(f"lengths: no prompt of {length} tokens can be made of this text (nearest: {len(best)}).")
    return torch.tensor(best, dtype=torch.int64), words


def fill(encode: Callable[[list[str]], list[int]], haystack: str, length: int) -> list[int]:
    """`encode(filler words)` with as much filler as makes it at most `length` tokens long. Without any it must fit."""
    return _filled(encode, haystack, length)[0]


def _filled(encode: Callable[[list[str]], list[int]], haystack: str, length: int) -> tuple[list[int], list[str]]:
    """What `fill` says, and the words."""
    stream = words_of(haystack)
    words: list[str] = []
    while len(encode(words)) <= length:
        words += [next(stream) for _ in range(max(16, len(words)))]
    low, high = 0, len(words)  # the most words that still fit lie in low .. high - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(encode(words[:middle])) <= length else (low, middle)
    shown = words[:low]
    best = encode(shown)
    for cut in range(1, len(words[low])):  # a word is several tokens: fill up with a part of one
        if len(best) == length:
            break
        more = [*words[:low], words[low][:cut]]
        longer = encode(more)
        if len(best) < len(longer) <= length:
            best, shown = longer, more
    return best, shown


def ask(
    model: nn.Module,
    tokenizer: Any,
    task: str,
    probes: Sequence[Probe],
    *,
    max_new_tokens: int | None = None,
    batch_size: int = 1,
    progress: bool | None = None,
    distributed: bool | None = None,
) -> RetrievalResult:
    """Put every probe to the model, greedily decoded with a cache, and keep its replies.

    Args:
        max_new_tokens: tokens of a reply (default: as many as the answers take, and eight).
        batch_size: prompts decoded together, left-padded. No effect on the result.
        progress, distributed: as for `perplexity`.

    Raises:
        ValueError: an argument that is not allowed, or prompts longer than the model can be fed.
        FloatingPointError: NaN or +inf among the logits, naming the first prompt.
    """
    model = unwrap(model)
    batch_size = check_int("batch_size", batch_size, low=1, why="it is the number of prompts decoded together")
    if max_new_tokens is not None:
        max_new_tokens = check_int("max_new_tokens", max_new_tokens, low=1, why="it is the number of tokens of a reply")
    if not probes:
        raise ValueError("There is nothing to ask: lengths, depths and trials must each name something.")
    answer_length = max(
        len(tokenizer(" " + ", ".join(p.answers), add_special_tokens=False)["input_ids"]) for p in probes
    )
    new = answer_length + 8 if max_new_tokens is None else max_new_tokens
    limits.check_length(model, "tokens of prompt and reply", max(len(p.input_ids) for p in probes) + new)
    processes = Processes.find(distributed)
    batches = [range(i, min(i + batch_size, len(probes))) for i in range(0, len(probes), batch_size)]
    texts: dict[int, str | None] = {}
    tokens = sum(len(probe.input_ids) for probe in probes)
    with evaluating(model), torch.no_grad(), processes.progress(tokens, task, progress) as bar:
        for number, batch in enumerate(batches):
            if processes.mine(number):
                replies = _greedy(model, [probes[i].input_ids for i in batch], new, tokenizer)
                for i, reply in zip(batch, replies, strict=True):
                    texts[i] = None if reply is None else tokenizer.decode(reply, skip_special_tokens=True)
                    if processes.count == 1:  # several stop together, below
                        _said(probes[i], texts[i])
            bar.update(sum(len(probes[i].input_ids) for i in batch))
    texts = processes.gather(texts)
    return RetrievalResult(
        task,
        tuple(Reply(p.length, p.depth, len(p.input_ids), p.answers, _said(p, texts[i])) for i, p in enumerate(probes)),
    )


def _said(probe: Probe, text: str | None) -> str:
    """Raise where the model had no reply, because its logits were no numbers."""
    if text is None:
        raise FloatingPointError(
            f"The model's logits are NaN or infinite after a prompt of {probe.length} tokens (depth {probe.depth:g})."
            " In float16 this is usually an overflow: load the model in bfloat16 or float32."
        )
    return text


def _greedy(model: nn.Module, prompts: list[Tensor], new: int, tokenizer: Any) -> list[list[int] | None]:
    """The most likely continuation of each prompt, token by token. None where a logit is NaN or +inf."""
    longest = max(len(prompt) for prompt in prompts)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    ids = torch.full((len(prompts), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    device = device_of(model)
    ids, mask = ids.to(device), mask.to(device)
    broken = torch.zeros(len(prompts), dtype=torch.bool)

    def watch(_: Tensor, logits: Tensor) -> Tensor:
        """Keep in mind which rows are no numbers: their argmax looks like any other."""
        nonlocal broken
        broken = broken.to(logits.device) | (logits.isnan() | logits.isposinf()).any(dim=-1)
        return logits

    generate = getattr(model, "generate", None)
    if callable(generate):
        from transformers import GenerationConfig, LogitsProcessorList

        # Every field that a model's own generation config could bend greedy decoding with is given.
        settings = GenerationConfig(
            max_new_tokens=new,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            use_cache=True,
            pad_token_id=pad,
        )
        watching = LogitsProcessorList([watch])
        ids = generate(input_ids=ids, attention_mask=mask, generation_config=settings, logits_processor=watching)
        return _unbroken(ids[:, longest:], broken)
    if len(prompts) > 1:
        raise ValueError(f"batch_size={len(prompts)} needs a model with `generate`; {type(model).__name__} has none.")
    for _ in range(new):  # a module of one's own
        best = watch(ids, logits_of(model, ids, ids.shape[1] - 1)[:, -1]).argmax(-1, keepdim=True)
        ids = torch.cat([ids, best], dim=1)
    return _unbroken(ids[:, longest:], broken)


def _unbroken(replies: Tensor, broken: Tensor) -> list[list[int] | None]:
    pairs = zip(replies.tolist(), broken.tolist(), strict=True)
    return [None if bad else reply for reply, bad in pairs]
