"""Blocks as training samples: positions, masks and masked words are made when a sample is read.

Everything random comes from (seed, epoch, sample index), never from a running generator. So a resumed run, another
number of processes or of loading workers sees the same samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
from torch.utils.data import Dataset

from hf_posenc.data.blocks import IGNORED, cut_blocks, pack_blocks
from hf_posenc.data.documents import load_documents
from hf_posenc.data.positions import random_positions, skip_positions
from hf_posenc.data.tokens import documents_of, special_tokens, tokenize_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Packing = Literal["pack", "cut"]
Skipping = Literal["none", "pose", "random"]
_VERSION = 1  # part of the cache key: raise it when blocks come out differently


@dataclass(frozen=True)
class Masking:
    """Masked language modelling as BERT does it: of the chosen tokens 80 % masked, 10 % random, 10 % left alone."""

    mask_id: int
    vocabulary: int
    """Random tokens are drawn from 0 .. vocabulary - 1."""
    special_ids: tuple[int, ...]
    """Tokens that are never chosen."""
    fraction: float = 0.15
    """Share of the tokens that are chosen (Devlin et al. 2019)."""


@dataclass(frozen=True)
class Preparation:
    """A stored block to a training sample."""

    seed: int = 0
    packing: Packing = "pack"
    skipping: Skipping = "none"
    target_length: int | None = None
    """Positions that skipping spreads a block over, in tokens."""
    chunks: int = 2
    """Pieces of a block under `skipping="pose"`."""
    masking: Masking | None = None
    """None for causal models."""

    def __post_init__(self) -> None:
        if self.skipping != "none" and self.target_length is None:
            raise ValueError(f"skipping={self.skipping!r} needs target_length, the positions to be covered.")
        if self.skipping != "none" and self.packing == "pack":
            raise ValueError("Skipped positions need one document in a block: use packing='cut'.")

    def __call__(self, block: Mapping[str, Any], index: int, epoch: int = 0) -> dict[str, Any]:
        """A sample {"input_ids", "labels", "sample_id"}, with "position_ids" where they are not simply 0, 1, 2, ..."""
        rng = numpy.random.default_rng([self.seed, epoch, index])
        input_ids = torch.tensor(block["input_ids"], dtype=torch.long)
        labels = torch.tensor(block["labels"], dtype=torch.long)
        sample: dict[str, Any] = {"sample_id": index}
        if self.masking is not None:
            input_ids, labels = mask_tokens(input_ids, self.masking, rng, allowed=labels != IGNORED)
        length = len(input_ids)
        if self.packing == "pack":
            sample["position_ids"] = packed_positions(block["starts"], length)
        elif self.target_length is not None and self.skipping != "none":
            sample["position_ids"] = self.skip(length, self.target_length, rng)
        return {**sample, "input_ids": input_ids, "labels": labels}

    def skip(self, length: int, target_length: int, rng: numpy.random.Generator) -> torch.Tensor:
        """Positions [length] below `target_length`, skipped as this says."""
        if self.skipping == "random":
            return random_positions(length, target_length, rng)
        return skip_positions(length, target_length, min(self.chunks, length), rng)


@dataclass(frozen=True)
class Curriculum:
    """Skipped positions whose reach grows with the steps: from the trained length to the whole context length.

    A function of (seed, step, sample), so that a resumed run draws the same.
    """

    preparation: Preparation
    start_length: int
    """Positions covered at step 0."""
    steps: int
    """Steps until all of `preparation.target_length` is covered."""

    def reach(self, step: int) -> int:
        """Positions covered at a step."""
        target = self.preparation.target_length
        assert target is not None
        return self.start_length + round((target - self.start_length) * min(step / self.steps, 1.0))

    def positions(self, sample_ids: torch.Tensor, attention_mask: torch.Tensor, step: int) -> torch.Tensor:
        """Position ids [batch, length] for a batch of samples, padding as in `Collator`."""
        rows = []
        for number, length in zip(sample_ids.tolist(), attention_mask.sum(-1).tolist(), strict=True):
            rng = numpy.random.default_rng([self.preparation.seed, step, number])
            skipped = self.preparation.skip(length, max(self.reach(step), length), rng)
            rows.append(_pad_positions(skipped, attention_mask.shape[1]))
        return torch.stack(rows).to(attention_mask.device)


def packed_positions(starts: Sequence[int], length: int) -> torch.Tensor:
    """Positions [length] that begin again at 0 where each document starts."""
    first = torch.zeros(length, dtype=torch.long)
    first[list(starts)] = torch.tensor(list(starts))
    return torch.arange(length) - first.cummax(0).values


def mask_tokens(
    input_ids: torch.Tensor, masking: Masking, rng: numpy.random.Generator, *, allowed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with some hidden, and labels that name what was hidden; both [length]. At least one token is chosen."""
    candidates = (allowed & ~torch.isin(input_ids, torch.tensor(masking.special_ids, dtype=torch.long))).nonzero()[:, 0]
    labels = torch.full_like(input_ids, IGNORED)
    if len(candidates) == 0:
        return input_ids, labels
    count = max(1, round(masking.fraction * len(candidates)))
    chosen = candidates[torch.from_numpy(rng.choice(len(candidates), size=count, replace=False))]
    labels[chosen] = input_ids[chosen]
    what = torch.from_numpy(rng.random(count))
    random = torch.from_numpy(rng.integers(0, masking.vocabulary, size=count))
    hidden = input_ids.clone()
    hidden[chosen] = torch.where(what < 0.8, masking.mask_id, torch.where(what < 0.9, random, input_ids[chosen]))
    return hidden, labels


class TrainingBlocks(Dataset):  # type: ignore[type-arg]
    """Prepared samples of stored blocks, the same for the same (seed, epoch, index)."""

    def __init__(self, blocks: Any, preparation: Preparation) -> None:
        self.blocks = blocks
        self.preparation = preparation
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the loader at each epoch: other positions and masks for the same blocks."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.preparation(self.blocks[index], index, self.epoch)

    def documents(self, index: int) -> list[str]:
        """Ids of the documents in a block."""
        return list(self.blocks[index]["documents"])


@dataclass(frozen=True)
class Collator:
    """Samples of unequal length to a batch of tensors [batch, length].

    Packed rows get no attention mask: transformers tells their documents apart by positions that begin again, and only
    does so without one. All other rows get a mask, above all those with skipped positions, which would be taken for
    packed documents without it.
    """

    pad_id: int
    packing: Packing
    multiple_of: int = 1
    """Lengths are padded up to a multiple of this (context parallelism cuts them into equal parts)."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        length = -(-longest // self.multiple_of) * self.multiple_of
        batch = {
            "input_ids": torch.stack([_pad(sample["input_ids"], length, self.pad_id) for sample in samples]),
            "labels": torch.stack([_pad(sample["labels"], length, IGNORED) for sample in samples]),
            "sample_ids": torch.tensor([int(sample["sample_id"]) for sample in samples]),
        }
        if self.packing == "cut":
            ones = [_pad(torch.ones(len(sample["input_ids"]), dtype=torch.long), length, 0) for sample in samples]
            batch["attention_mask"] = torch.stack(ones)
        if "position_ids" in samples[0]:
            batch["position_ids"] = torch.stack([_pad_positions(sample["position_ids"], length) for sample in samples])
        return batch


def _pad(values: Any, length: int, fill: int) -> torch.Tensor:
    values = torch.as_tensor(values, dtype=torch.long)
    return torch.cat([values, torch.full((length - len(values),), fill, dtype=torch.long)])


def _pad_positions(values: Any, length: int) -> torch.Tensor:
    """Padding counts from 0: a document of its own in a packed row, and rows that every table has elsewhere."""
    values = torch.as_tensor(values, dtype=torch.long)
    return torch.cat([values, torch.arange(length - len(values))])


@dataclass(frozen=True)
class DataReport:
    """What the data came to."""

    documents: int
    short_documents: int
    """Documents left out for having too few tokens."""
    tokens: int
    """Tokens of the documents that were kept."""
    blocks: int
    block_tokens: int
    """Tokens in the blocks, overlap and special tokens included."""
    targets: int
    """Tokens that are a target; under masking, those that can be chosen."""

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents ({self.short_documents:,} more were too short), {self.tokens:,} tokens; "
            f"{self.blocks:,} blocks with {self.block_tokens:,} tokens, {self.targets:,} of them targets"
        )

    def to_dict(self) -> dict[str, int]:
        """Plain data, for a report."""
        return asdict(self)


def make_blocks(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    *,
    packing: Packing = "pack",
    overlap: int = 0,
    min_document_tokens: int = 2,
    encoder: bool = False,
    weights: Sequence[float] | None = None,
    text_field: str = "text",
    streaming: bool = False,
    num_proc: int | None = None,
    seed: int = 0,
) -> tuple[Any, DataReport | None]:
    """Stored blocks {"input_ids", "labels", "starts", "documents"} of all sources, and what they came to.

    Args:
        weights: share of each source in the blocks; None takes every block of each once.
        encoder: put the tokenizer's special tokens around each block instead of each document.
        streaming: read the text while training instead of storing it; there is no report then.

    Raises:
        ValueError: a source that cannot be read, weights that do not fit the sources, no block at all, or no target.
    """
    if weights is not None and not (len(weights) == len(sources) and all(0 < weight < math.inf for weight in weights)):
        raise ValueError(
            f"weights={list(weights)} is not allowed; give one positive number for each of {len(sources)} sources."
        )
    around = special_tokens(tokenizer) if encoder else ([], [])
    groups = [[source] for source in sources] if weights is not None else [list(sources)]
    parts, reports = [], []
    for group in groups:
        documents = load_documents(group, text_field=text_field, streaming=streaming)
        tokenized = tokenize_documents(
            documents, tokenizer, min_tokens=min_document_tokens, add_special_tokens=not encoder, num_proc=num_proc
        )
        blocks = _cut(tokenized, packing, block_length, overlap, around, num_proc)
        parts.append(blocks)
        names = ", ".join(group)
        if streaming:
            _check_stream(names, documents, blocks, min_document_tokens)
        else:
            report = _report(len(documents), tokenized, blocks)
            if report.blocks == 0:
                raise ValueError(
                    f"{names}: no block of text came out of {report.documents + report.short_documents} documents; "
                    f"{report.short_documents} have fewer than min_document_tokens={min_document_tokens} tokens."
                )
            if report.targets == 0:
                raise ValueError(_no_target(names, f"{report.block_tokens:,}"))
            reports.append(report)
    if weights is None:
        blocks = parts[0]
    else:
        from datasets import interleave_datasets

        total = sum(weights)
        shares = [weight / total for weight in weights]
        blocks = interleave_datasets(parts, probabilities=shares, seed=seed, stopping_strategy="all_exhausted")
    if streaming:
        return blocks.shuffle(seed=seed, buffer_size=1000), None
    totals = {name: sum(report.to_dict()[name] for report in reports) for name in DataReport.__dataclass_fields__}
    if weights is not None:
        mixed = _report(0, None, blocks)
        totals |= {"blocks": mixed.blocks, "block_tokens": mixed.block_tokens, "targets": mixed.targets}
    return blocks, DataReport(**totals)


def _no_target(names: str, tokens: str) -> str:
    return (
        f"{names}: there is nothing to learn, none of the {tokens} tokens is a target. In a conversation only what the "
        "assistant says is one."
    )


def _check_stream(names: str, documents: Any, blocks: Any, min_document_tokens: int) -> None:
    """Raise where a stream has nothing to train on; reads no further than to the first block that has."""
    tokens = 0
    for block in blocks:
        tokens += len(block["input_ids"])
        if any(label != IGNORED for label in block["labels"]):
            return
    if tokens:
        raise ValueError(_no_target(names, f"{tokens:,}"))
    if next(iter(documents), None) is None:
        raise ValueError(f"{names!r} holds no text: every document in it is blank.")
    raise ValueError(
        f"{names}: no block of text came out of it; every document has fewer than "
        f"min_document_tokens={min_document_tokens} tokens."
    )


def _cut(
    tokenized: Any,
    packing: Packing,
    block_length: int,
    overlap: int,
    around: tuple[list[int], list[int]],
    num_proc: int | None,
) -> Any:
    def blocks_of(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        documents = documents_of(rows)
        if packing == "pack":
            blocks = pack_blocks(documents, block_length)
        else:
            blocks = cut_blocks(documents, block_length, overlap=overlap, prefix=around[0], suffix=around[1])
        columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "starts": [], "documents": []}
        for block in blocks:
            for name, column in columns.items():
                column.append(getattr(block, name))
        return columns

    options = {"batched": True, "batch_size": 1000, "remove_columns": ["id"]}
    if not hasattr(tokenized, "_fingerprint"):
        return tokenized.map(blocks_of, **options)
    from datasets import Features, List, Value
    from datasets.fingerprint import Hasher

    key = Hasher.hash((tokenized._fingerprint, packing, block_length, overlap, around, _VERSION))
    numbers = List(Value("int32"))
    features = Features(
        {"input_ids": numbers, "labels": numbers, "starts": numbers, "documents": List(Value("string"))}
    )
    return tokenized.map(
        blocks_of, **options, features=features, num_proc=num_proc, new_fingerprint=key, desc="Making blocks"
    )


def _report(read: int, tokenized: Any, blocks: Any) -> DataReport:
    kept = len(tokenized) if tokenized is not None else 0
    tokens = _count(tokenized, "input_ids") if tokenized is not None else 0
    return DataReport(
        kept, read - kept, tokens, len(blocks), _count(blocks, "input_ids"), _count(blocks, "labels", IGNORED)
    )


def _count(rows: Any, column: str, without: int | None = None) -> int:
    """Values in a column of lists, without those that equal `without`."""
    total = 0
    for batch in rows.select_columns(column).with_format("arrow").iter(batch_size=1000):
        values = batch[column].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        total += len(values) if without is None else int((values != without).sum())
    return total
