"""Pseudo-perplexity of a fill-in encoder: each token masked in turn and predicted from both sides.

Salazar et al., "Masked Language Model Scoring", 2020 (arXiv 1910.14659), equation 1. It compares encodings on one
model; it is no likelihood, and not comparable with the perplexity of a causal model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.likelihood import PerplexityResult, as_documents, check_ids, check_token, tokens_in_batch
from hf_posenc.evaluation.processes import Processes
from hf_posenc.evaluation.scoring import device_of, evaluating, logits_of, nats, unwrap
from hf_posenc.evaluation.windows import check_int


def pseudo_perplexity(
    model: nn.Module,
    token_ids: Any,
    mask_token_id: int,
    window: int | None = None,
    *,
    prefix: int | None = None,
    suffix: int | None = None,
    max_targets: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    num_bytes: int | None = None,
    progress: bool | None = None,
    distributed: bool | None = None,
) -> PerplexityResult:
    """Measure the pseudo-perplexity of a masked-language-model encoder. One pass over the window for each token scored.

    Args:
        model: a module whose forward takes `input_ids` and answers with `.logits`, such as `BertForMaskedLM`.
        token_ids: documents without special tokens, in any form that `perplexity` takes.
        mask_token_id: the id that stands for a masked token.
        window: the most tokens to feed at once, special ones included (default: what the model takes, or the longest
            document if that is shorter). Documents are cut into windows without overlap.
        prefix, suffix: ids put at the ends of each window, such as those of [CLS] and [SEP] (default: none).
        max_targets: score only so many tokens in each window, drawn with `seed` (default: all of them).
        batch_size, num_bytes, progress, distributed: as for `perplexity`.

    Returns:
        A result with the definition "pseudo"; `token_context` counts the other tokens in the window, on both sides.

    Raises:
        ValueError: as for `perplexity`.
        FloatingPointError: as for `perplexity`.
    """
    model = unwrap(model)
    documents = as_documents(token_ids)
    check_ids(model, documents)
    mask_token_id = check_token(model, "mask_token_id", mask_token_id)
    prefix = None if prefix is None else check_token(model, "prefix", prefix)
    suffix = None if suffix is None else check_token(model, "suffix", suffix)
    extra = (prefix is not None) + (suffix is not None)
    longest = max(len(document) for document in documents) + extra
    if window is None:
        window = min(limits.context_length(model) or longest, longest)
    window = check_int("window", window, low=2 + extra, why="special tokens, the masked token and another")
    limits.check_length(model, "window", min(window, longest))
    if max_targets is not None:
        check_int("max_targets", max_targets, low=1, why="it is the number of tokens scored in each window")
    if batch_size is not None:
        batch_size = check_int("batch_size", batch_size, low=1, why="it is the number of masked copies run together")
    if num_bytes is not None:
        num_bytes = check_int("num_bytes", num_bytes, low=1, why="it is the number of bytes of the text")
    seed = check_int("seed", seed, low=0, why="it draws the tokens that are scored")
    generator = torch.Generator().manual_seed(seed)
    before = torch.tensor([] if prefix is None else [prefix], dtype=torch.int64)
    after = torch.tensor([] if suffix is None else [suffix], dtype=torch.int64)
    chunks: list[tuple[int, int, Tensor, list[int]]] = []  # document, begin, ids, positions to mask
    for index, document in enumerate(documents):
        for begin in range(0, len(document), window - extra):
            chunk = document[begin : begin + window - extra]
            chosen = list(range(len(chunk)))
            if max_targets is not None and max_targets < len(chunk):
                chosen = sorted(torch.randperm(len(chunk), generator=generator)[:max_targets].tolist())
            chunks.append((index, begin, torch.cat([before, chunk, after]), [i + len(before) for i in chosen]))
    jobs: list[tuple[int, list[int], int]] = []  # chunk, positions, where their scores go
    total = 0
    for number, (_, _, ids, positions) in enumerate(chunks):
        size = batch_size or max(1, tokens_in_batch(model) // len(ids))
        for start in range(0, len(positions), size):
            part = positions[start : start + size]
            jobs.append((number, part, total))
            total += len(part)
    scores = torch.zeros(total, dtype=torch.float64)
    processes = Processes.find(distributed)
    device = device_of(model)
    with (
        evaluating(model),
        torch.no_grad(),
        processes.progress(total, "pseudo-perplexity", progress, unit="target") as bar,
    ):
        for job, (number, positions, start) in enumerate(jobs):
            if processes.mine(job):
                ids = chunks[number][2]
                rows, columns = torch.arange(len(positions)), torch.tensor(positions)
                masked = ids.repeat(len(positions), 1)
                masked[rows, columns] = mask_token_id
                logits = logits_of(model, masked.to(device), 0)[rows.to(device), columns.to(device)]
                scores[start : start + len(positions)] = nats(logits, ids[columns].to(logits.device)).double().cpu()
            bar.update(len(positions))
    scores = processes.sum(scores, device)
    done = 0
    for index, begin, _, positions in chunks:
        wrong = torch.isnan(scores[done : done + len(positions)]).nonzero()
        if len(wrong):
            position = begin + positions[int(wrong[0])] - len(before)
            raise FloatingPointError(
                f"The model's score is not a number in document {index} at token position {position}."
            )
        done += len(positions)
    sizes = torch.tensor([len(positions) for *_, positions in chunks])
    return PerplexityResult(
        definition="pseudo",
        window=window,
        stride=None,
        bos=prefix,
        token_nll=scores,
        token_context=torch.repeat_interleave(torch.tensor([len(ids) - 1 for _, _, ids, _ in chunks]), sizes),
        document_of=torch.repeat_interleave(torch.tensor([index for index, *_ in chunks]), sizes),
        window_of=torch.repeat_interleave(torch.arange(len(chunks)), sizes),
        documents=len(documents),
        num_bytes=num_bytes,
    )
