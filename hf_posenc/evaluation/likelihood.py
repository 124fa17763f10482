"""Perplexity of a language model on documents, by any of the published definitions, and by context length from one
pass.

Under a causal model the loss at position p *is* the loss at context length p, so that one long pass gives the whole
curve: see `PerplexityResult.by_context`. (Not where the encoding's own numbers depend on the length of the sequence, as
`dynamic_ntk` and `longrope`: the table of the long pass then also serves its short positions.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.processes import Processes
from hf_posenc.evaluation.scoring import TokenScorer, device_of, evaluating, unwrap, vocabulary_of
from hf_posenc.evaluation.windows import DEFINITIONS, check_int, windows


@dataclass(frozen=True)
class PerplexityResult:
    """What was measured, target by target."""

    definition: str
    """How targets were chosen and averaged: one of `DEFINITIONS`, or "pseudo"."""
    window: int
    """The most tokens that the model was fed at once."""
    stride: int | None
    """Tokens between neighbouring windows; None where the definition has no stride."""
    bos: int | None
    """The token put before each window (`disjoint`: before each document); None for none."""
    token_nll: Tensor = field(repr=False)
    """Nats of each target, in order, float64 [tokens]. Under `full_windows` most targets appear several times."""
    token_context: Tensor = field(repr=False)
    """Tokens that the model saw before each target, int64 [tokens]."""
    document_of: Tensor = field(repr=False)
    """Index of each target's document, int64 [tokens]."""
    window_of: Tensor = field(repr=False)
    """Index of each target's window, int64 [tokens]."""
    documents: int
    """Documents given."""
    num_bytes: int | None = None
    """UTF-8 bytes of the documents, where they were given."""

    @property
    def tokens(self) -> int:
        """Targets scored."""
        return len(self.token_nll)

    @property
    def windows(self) -> int:
        """Windows scored."""
        return int(self.window_of[-1]) + 1 if self.tokens else 0

    @property
    def nll(self) -> float:
        """Nats over all targets."""
        return float(self.token_nll.sum())

    @property
    def mean_nll(self) -> float:
        """Nats per target, averaged as the definition says: `perplexity` is its exponential. NaN without a target."""
        if not self.tokens:
            return math.nan
        if self.definition == "window_means":
            total = torch.zeros(self.windows, dtype=torch.float64).index_add_(0, self.window_of, self.token_nll)
            return float((total / torch.bincount(self.window_of)).mean())
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens); for `window_means`, exp of the mean over windows of their means."""
        return _exp(self.mean_nll)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits over all targets per byte of text: comparable between tokenizers. None where `num_bytes` was not given.

        The first token of a document is not scored, but its bytes are counted (as in lm-evaluation-harness).
        """
        return None if self.num_bytes is None else self.nll / math.log(2) / self.num_bytes

    def by_context(self, edges: Sequence[int]) -> list[tuple[int, int, float, int]]:
        """Perplexity of the targets in each range of context length.

        Args:
            edges: upper ends in tokens, growing: [1024, 2048] gives the ranges [0, 1024) and [1024, 2048).

        Returns:
            [(low, high, perplexity, tokens)], for targets with `low <= tokens seen before < high`: the high - low
            targets that complete a sequence of low + 1 .. high tokens. Perplexity is NaN where there is no target.
        """
        edges = [int(edge) for edge in edges]
        if not edges or edges[0] < 1 or any(a >= b for a, b in itertools.pairwise(edges)):
            raise ValueError(f"edges={edges} is not allowed; it must be a growing list of positive lengths in tokens.")
        rows = []
        for low, high in zip([0, *edges[:-1]], edges, strict=True):
            part = self.within(low, high)
            rows.append((low, high, _exp(part.nll / part.tokens) if part.tokens else math.nan, part.tokens))
        return rows

    def within(self, low: int, high: int) -> PerplexityResult:
        """The part of the result whose targets have `low <= tokens seen before < high`. It may hold none.

        Raises:
            ValueError: `low` is not below `high`.
        """
        low = check_int("low", low, low=0, why="it is a number of tokens seen")
        high = check_int("high", high, low=1, why="it is a number of tokens seen")
        if low >= high:
            raise ValueError(f"low={low}, high={high} is not allowed; low must be below high.")
        chosen = (self.token_context >= low) & (self.token_context < high)
        windows_left = torch.unique_consecutive(self.window_of[chosen], return_inverse=True)[1]
        return dataclasses.replace(
            self,
            token_nll=self.token_nll[chosen],
            token_context=self.token_context[chosen],
            document_of=self.document_of[chosen],
            window_of=windows_left,
        )

    def by_position(self, per_octave: int = 8) -> list[tuple[float, float, int]]:
        """The loss by position, in bins of equal width on a log scale: [(tokens seen before, nats, targets)].

        The first is the mean of the bin's targets, as is the loss. Bins without a target are left out.
        """
        check_int("per_octave", per_octave, low=1, why="it is the number of bins between a length and its double")
        if not self.tokens:
            return []
        # Computed on the few distinct contexts, so that rounding of the logarithm cannot split equal ones.
        contexts, place = torch.unique(self.token_context.clamp(min=1), return_inverse=True)
        bins = (contexts.double().log2() * per_octave + 1e-9).floor().long()[place]
        size = int(bins.max()) + 1
        count = torch.bincount(bins, minlength=size)
        loss = torch.zeros(size, dtype=torch.float64).index_add_(0, bins, self.token_nll)
        seen = torch.zeros(size, dtype=torch.float64).index_add_(0, bins, self.token_context.double())
        return [
            (float(seen[i] / count[i]), float(loss[i] / count[i]), int(count[i])) for i in count.nonzero().flatten()
        ]

    def confidence_interval(
        self, level: float = 0.95, samples: int = 1000, seed: int = 0
    ) -> tuple[float, float] | None:
        """Bootstrap interval of the perplexity over documents: what another draw of documents could have given.

        Documents, not tokens, are drawn: the tokens of one document are not independent. `window_means` is resampled by
        its token-weighted form. None for fewer than two documents.
        """
        if not 0 < level < 1:
            raise ValueError(f"level={level!r} is not allowed; it must lie between 0 and 1.")
        count = torch.bincount(self.document_of, minlength=self.documents).double()
        used = count > 0
        documents = int(used.sum())
        if documents < 2:
            return None
        total = torch.zeros(self.documents, dtype=torch.float64).index_add_(0, self.document_of, self.token_nll)
        count, total = count[used], total[used]
        draw = torch.randint(documents, (samples, documents), generator=torch.Generator().manual_seed(seed))
        means = total[draw].sum(1) / count[draw].sum(1)
        tail = (1 - level) / 2
        low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return _exp(low), _exp(high)


def perplexity(
    model: nn.Module,
    token_ids: Any,
    window: int | None = None,
    stride: int | None = None,
    *,
    definition: str = "strided",
    batch_size: int | None = None,
    bos: int | None = None,
    num_bytes: int | None = None,
    progress: bool | None = None,
    distributed: bool | None = None,
) -> PerplexityResult:
    """Measure the perplexity of a causal language model.

    Args:
        model: any module whose forward takes `input_ids` and answers with `.logits`: of transformers, patched or not, a
            PeftModel, or your own. It is put in evaluation mode and back.
        token_ids: one document as a 1-D tensor or a list of ints, or several: a list of those, or a 2-D tensor. No
            document is context for another. Join them yourself to measure a concatenated stream.
        window: the most tokens to feed at once (default: what the model's config says it takes, or the longest
            document if that is shorter).
        stride: tokens between neighbouring windows; smaller gives every target more context and takes longer
            (default: window // 2, so that every target but the first few has at least half a window of context).
            None for `disjoint`, whose windows do not overlap.
        definition: one of `DEFINITIONS`; `hf_posenc.evaluation.windows.windows` says what each does.
        batch_size: windows of equal length run together (default: what the device runs fastest). No effect on the
            result.
        bos: id of a token to put before each window, in one of the window's places. It is context and never a target,
            and is not put before a document that already begins with it. Under `disjoint` it stands only before each
            document, as lm-evaluation-harness has it; the first token then has a context and is scored too, so that
            there is one target more in each document. None (default): tokens are fed as they are.
        num_bytes: UTF-8 bytes of all documents, for `bits_per_byte`.
        progress: True shows a progress bar, False none; None shows one on a terminal after a few seconds.
        distributed: share the windows among the processes of torch.distributed, all of which must make this call and
            get the same result (None: where it is initialised).

    Raises:
        ValueError: a document of fewer than two tokens, an id outside the vocabulary, a window that the model cannot
            be fed, or an argument of another type or out of range. Raised before the model runs.
        FloatingPointError: NaN or +inf among the logits, naming the first document and position.
    """
    model = unwrap(model)
    documents = as_documents(token_ids)
    if definition not in DEFINITIONS:
        raise ValueError(f"definition={definition!r} is not known; choose one of {', '.join(DEFINITIONS)}.")
    limits.check_causal(model)
    longest = max(len(document) for document in documents)
    if window is None:
        window = max(2, min(limits.context_length(model) or longest, longest))
    window = check_int("window", window, low=2, why="one token to predict from, one to predict")
    limits.check_length(model, "window", min(window, longest))
    if definition == "disjoint":
        if stride is not None:
            raise ValueError(
                f'stride={stride} is not allowed with definition="disjoint", whose windows do not overlap.'
            )
    elif stride is None:
        stride = max(1, window // 2)
    else:
        stride = check_int("stride", stride, low=1, why="it is the number of tokens between windows")
        if stride > window:
            raise ValueError(
                f"stride={stride} is not allowed; it may be at most window={window}, or tokens would be skipped."
            )
    if batch_size is not None:
        batch_size = check_int("batch_size", batch_size, low=1, why="it is the number of windows run together")
    if num_bytes is not None:
        num_bytes = check_int("num_bytes", num_bytes, low=1, why="it is the number of bytes of the text")
    check_ids(model, documents)
    if bos is not None:
        bos = check_token(model, "bos", bos)

    passes = list(_passes(documents, window, stride, definition, bos))
    if not passes:
        raise ValueError(f"window={window} leaves no target to score.")
    starts = [0]
    for item in passes:
        starts.append(starts[-1] + item.end - item.first_target)
    scores = torch.zeros(starts[-1], dtype=torch.float64)
    processes = Processes.find(distributed)
    batches = _batches(passes, batch_size, tokens_in_batch(model))
    total = sum(len(passes[i].inputs) for batch in batches for i in batch)
    with evaluating(model):
        scorer = TokenScorer(model, documents[0])
        with processes.progress(total, "perplexity", progress) as bar:
            for number, batch in enumerate(batches):
                fed = sum(len(passes[i].inputs) for i in batch)
                if processes.mine(number):
                    nats = scorer(
                        torch.stack([passes[i].inputs for i in batch]), torch.stack([passes[i].targets for i in batch])
                    )
                    parts = nats.split([starts[i + 1] - starts[i] for i in batch])
                    for i, part in zip(batch, parts, strict=True):
                        scores[starts[i] : starts[i + 1]] = part
                        if processes.count == 1:
                            _refuse_nan(part, passes[i])
                bar.update(fed)
    scores = processes.sum(scores, scorer.device)  # each slot was filled by one process, so that the sum is exact
    for i, item in enumerate(passes):
        _refuse_nan(scores[starts[i] : starts[i + 1]], item)
    sizes = torch.tensor([item.end - item.first_target for item in passes])
    return PerplexityResult(
        definition=definition,
        window=window,
        stride=stride,
        bos=bos,
        token_nll=scores,
        token_context=torch.cat([item.contexts() for item in passes]),
        document_of=torch.repeat_interleave(torch.tensor([item.document for item in passes]), sizes),
        window_of=torch.repeat_interleave(torch.arange(len(passes)), sizes),
        documents=len(documents),
        num_bytes=num_bytes,
    )


def as_documents(token_ids: Any) -> list[Tensor]:
    """Token ids in any of the accepted forms as a list of int64 tensors [length].

    Raises:
        ValueError: no document, one of fewer than two tokens (named by its index), or something else than integers.
    """
    if isinstance(token_ids, Tensor) and token_ids.ndim == 2:
        items: list[Any] = list(token_ids)
    elif isinstance(token_ids, Tensor) or (
        isinstance(token_ids, Sequence) and token_ids and isinstance(token_ids[0], numbers.Integral)
    ):
        items = [token_ids]
    elif hasattr(token_ids, "ndim") and hasattr(token_ids, "tolist") and not isinstance(token_ids, Sequence):  # numpy
        items = [token_ids] if token_ids.ndim == 1 else list(token_ids)
    elif isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
        items = list(token_ids)
    else:
        raise ValueError(
            f"token_ids of type {type(token_ids).__name__} is not allowed; pass a 1-D tensor of token ids, or a"
            " list of them"
            " (from a tokenizer: tokenizer(text).input_ids)."
        )
    if not items:
        raise ValueError("token_ids is empty; pass at least one document.")
    documents = []
    for index, item in enumerate(items):
        try:
            tensor = torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"token_ids: document {index} is not a list of token ids ({type(item).__name__})."
            ) from error
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            raise ValueError(f"token_ids: document {index} holds {tensor.dtype}, not token ids.")
        if tensor.ndim != 1:
            raise ValueError(f"token_ids: document {index} has shape {tuple(tensor.shape)}; a document is 1-D.")
        if len(tensor) < 2:
            raise ValueError(
                f"token_ids: document {index} has {len(tensor)} token(s); at least 2 are needed, one to predict"
                " from and one to"
                " predict. Leave such documents out."
            )
        documents.append(tensor.detach().to("cpu", torch.int64))
    return documents


def check_ids(model: nn.Module, documents: list[Tensor]) -> None:
    """Raise where a token id lies outside the model's vocabulary: on a GPU that is an assertion which kills the
    process."""
    size = vocabulary_of(model)
    for index, document in enumerate(documents):
        low, high = int(document.min()), int(document.max())
        if low < 0 or (size is not None and high >= size):
            wrong = low if low < 0 else high
            raise ValueError(f"token_ids: document {index} holds the id {wrong}; {_allowed(size)}")


def check_token(model: nn.Module, name: str, value: Any) -> int:
    """`value` as an int, where it is a token id of the model's vocabulary (True and False are none)."""
    size = vocabulary_of(model)
    possible = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    if not possible or value < 0 or (size is not None and value >= size):
        raise ValueError(f"{name}={value!r} is not allowed; it must be a token id: {_allowed(size)}")
    return int(value)


def _allowed(size: int | None) -> str:
    return (
        "ids start at 0."
        if size is None
        else f"this model's vocabulary is 0 .. {size - 1}. Is it another tokenizer's text?"
    )


class _Pass(NamedTuple):
    """One window, ready to be fed."""

    document: int
    begin: int
    """Position in the document of the first token fed (after `lead` tokens put before it)."""
    end: int
    first_target: int
    lead: int
    """Tokens put before the window's own: 1 for a BOS, else 0."""
    inputs: Tensor
    targets: Tensor

    def contexts(self) -> Tensor:
        """Tokens seen before each target."""
        return torch.arange(self.first_target, self.end) - self.begin + self.lead


def _passes(
    documents: list[Tensor], window: int, stride: int | None, definition: str, bos: int | None
) -> Iterator[_Pass]:
    for index, document in enumerate(documents):
        has_bos = bos is not None and int(document[0]) == bos
        prefix = bos is not None and definition == "disjoint" and not has_bos  # scores the document's own first token
        if prefix:
            assert bos is not None
            document = torch.cat([torch.tensor([bos]), document])
        room = window - 1 if bos is not None and definition != "disjoint" else window
        if room < 2 and definition != "disjoint":
            raise ValueError(f"window={window} is too short with a BOS in each window; use at least 3.")
        for begin, end, first in windows(len(document), room, stride and min(stride, room), definition):
            lead = int(bos is not None and definition != "disjoint" and not (has_bos and begin == 0))
            inputs = document[begin:end][:room]
            targets = torch.full((len(inputs) + lead,), -1, dtype=torch.int64)
            where = first - 1 - begin + lead  # the input position that predicts the first target
            targets[where : where + end - first] = document[first:end]
            if lead:
                inputs = torch.cat([torch.tensor([bos]), inputs])
            shift = int(prefix)  # back to the document's own positions
            yield _Pass(index, begin - shift, end - shift, first - shift, lead, inputs, targets)


def tokens_in_batch(model: nn.Module) -> int:
    """Windows are batched up to so many tokens where `batch_size` is not given.

    Enough to fill an accelerator with short ones; on a CPU more would fall out of its caches (7 % slower at 4,096).
    """
    return 1024 if device_of(model).type == "cpu" else 4096


def _batches(passes: list[_Pass], batch_size: int | None, tokens: int) -> list[list[int]]:
    """Indices of windows of equal length, in batches. Equal, because padding is one more thing that can be wrong."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, item in enumerate(passes):
        by_length[len(item.inputs)].append(i)
    batches = []
    for length, members in by_length.items():
        size = batch_size or max(1, tokens // length)
        batches += [members[start : start + size] for start in range(0, len(members), size)]
    return batches


def _refuse_nan(scores: Tensor, item: _Pass) -> None:
    wrong = torch.isnan(scores).nonzero()
    if len(wrong):
        position = item.first_target + int(wrong[0])
        raise FloatingPointError(
            f"The model's score is not a number in document {item.document} at token position {position} (window"
            f" {item.begin} .. {item.end}). In float16 this is usually an overflow: load the model in bfloat16 or"
            " float32."
        )


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
