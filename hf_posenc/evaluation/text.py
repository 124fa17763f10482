"""The text of an evaluation: documents as token ids, and how they are cut into blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.evaluation.windows import check_int


@dataclass(frozen=True)
class Text:
    """Documents as token ids."""

    sources: list[str]
    documents: list[Tensor]
    num_bytes: int
    bos: int | None
    concatenated: bool

    @property
    def digest(self) -> str:
        """A hash of all token ids and of where documents end."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{len(document)} ".encode() + document.numpy().tobytes())
        return digest.hexdigest()

    def blocks(self, length: int) -> list[Tensor]:
        """Documents cut into blocks of `length` tokens that share one token with the next, so that no target is
        lost."""
        room = length - (self.bos is not None)
        blocks = []
        for document in self.documents:
            for begin in range(0, len(document) - 1, room - 1):
                blocks.append(document[begin : begin + room])
        return blocks

    def facts(self) -> dict[str, Any]:
        """What `results.json` says of it."""
        return {
            "sources": self.sources,
            "documents": len(self.documents),
            "longest": max(len(document) for document in self.documents),
            "tokens": sum(len(document) for document in self.documents),
            "bytes": self.num_bytes,
            "sha256": self.digest,
            "concatenated": self.concatenated,
        }


def read_text(
    tokenizer: Any,
    texts: str | Path | Sequence[str | Path],
    documents: Sequence[str] | None,
    concatenate: bool,
    max_tokens: int | None,
    longest: int,
    bos: bool | None,
) -> Text:
    """Load and tokenize; the arguments are those of `evaluate`, `longest` is the longest length.

    Raises:
        ValueError: no text, only special tokens, no document of `longest` tokens, or a tokenizer that cuts texts off.
    """
    if max_tokens is not None:
        check_int("max_tokens", max_tokens, low=longest, why="it must hold at least one block of the longest length")
    given = [texts] if isinstance(texts, (str, Path)) else texts
    if not isinstance(given, Sequence) or not all(isinstance(item, (str, Path)) for item in given):
        raise ValueError(f"texts={texts!r} is not allowed; name files, folders or data sets.")
    if documents is not None and (isinstance(documents, str) or not all(isinstance(item, str) for item in documents)):
        raise ValueError("documents is not a list of texts; give each document as one string.")
    sources = [str(item) for item in given]
    if documents is None:
        if not sources or not all(source.strip() for source in sources):
            raise ValueError("texts is empty, or one of them is ''; name a text file, a folder of them, or a data set.")
        documents = _load_texts(sources, tokenizer)
    elif sources:
        raise ValueError("texts and documents are both given; give one of them.")
    else:
        sources = ["given directly"]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"There is no text in {', '.join(sources)}: every document in it is blank.")
    bos_id = _bos(tokenizer, bos)
    budget = None if max_tokens is None or concatenate else max_tokens
    tokens: list[Tensor] = []
    written: list[str] = []
    for document in documents:
        ids = tokenize(tokenizer, document)
        if len(ids) > 1:
            tokens.append(ids)
            written.append(document)
        if concatenate and max_tokens is not None and sum(map(len, tokens)) >= max_tokens:
            break
        # Documents that hold a whole block come first, so the budget may be full before the last one is read.
        if budget is not None and sum(len(ids) for ids in tokens if len(ids) >= longest) >= budget:
            break
    special = set(tokenizer.all_special_ids)
    if all(token in special for ids in tokens for token in ids.tolist()):
        raise ValueError(f"There is nothing to predict in {', '.join(sources)}: it holds only special tokens.")
    end = tokenizer.eos_token_id if concatenate else None
    separator = torch.tensor([] if end is None else [end], dtype=torch.int64)
    lengths = [len(ids) + len(separator) for ids in tokens]
    found = sum(lengths) - len(separator) if concatenate else max(lengths)
    if found < longest:
        more = "" if concatenate else " Or join the documents: concatenate=True."
        raise ValueError(
            f"The longest document has {found} tokens, which is less than the longest length asked for ({longest})."
            f" Give longer text, or lengths up to {found}.{more}"
        )
    # Documents that hold a block of the longest length first, in their order, unless all are one.
    order = sorted(range(len(tokens)), key=lambda i: not concatenate and len(tokens[i]) < longest)
    left = sum(lengths) if max_tokens is None else max_tokens
    kept: list[Tensor] = []
    num_bytes = 0
    for i in order:
        if left < (1 if concatenate else 2):
            break
        ids = tokens[i][:left]
        kept.append(ids)
        left -= lengths[i]
        num_bytes += _bytes(tokenizer, written[i], len(ids), whole=len(ids) == len(tokens[i]))
    if concatenate:
        pieces = [piece for ids in kept for piece in (ids, separator)]
        joined = torch.cat(pieces[:-1])
        kept = [joined if max_tokens is None else joined[:max_tokens]]
    return Text(sources, kept, num_bytes, bos_id, concatenate)


def _bytes(tokenizer: Any, text: str, count: int, whole: bool) -> int:
    """Bytes of UTF-8 that the first `count` tokens of `text` stand for."""
    if whole:
        return len(text.encode("utf-8"))
    if not getattr(tokenizer, "is_fast", False):
        ids = tokenize(tokenizer, text)[:count].tolist()
        return len(tokenizer.decode(ids, clean_up_tokenization_spaces=False).encode("utf-8"))
    encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    return len(text[: encoded["offset_mapping"][count - 1][1]].encode("utf-8"))


def _load_texts(sources: list[str], tokenizer: Any) -> list[str]:
    from hf_posenc.data import load_documents

    documents = []
    for row in load_documents(sources):
        text = row["text"]
        if not text and row.get("messages"):
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError(
                    f"Document {row['id']!r} is a conversation, and the tokenizer has no chat template to write it"
                    " with."
                )
            text = tokenizer.apply_chat_template(json.loads(row["messages"]), tokenize=False)
        documents.append(text)
    return documents


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """The whole text as token ids [length], without special tokens.

    Raises:
        ValueError: the tokenizer cut the text off, whatever it was told.
    """
    offsets = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=offsets)
    if offsets and encoded["offset_mapping"]:
        end = encoded["offset_mapping"][-1][1]
        if len(text[end:].strip()) > 64:  # a few characters may be normalised away
            raise ValueError(
                f"The tokenizer ({type(tokenizer).__name__}, model_max_length={tokenizer.model_max_length}) cut a text"
                f" of {len(text)} characters off after {end}, although it was told not to. Load it without truncation."
            )
    return torch.tensor(encoded["input_ids"], dtype=torch.int64)


def _bos(tokenizer: Any, wanted: bool | None) -> int | None:
    token = getattr(tokenizer, "bos_token_id", None)
    if wanted is False:
        return None
    if wanted is True:
        if token is None:
            raise ValueError("bos=True, but the tokenizer has no BOS token. Leave it out, or give the tokenizer one.")
        return token
    ids = tokenizer("a")["input_ids"]
    return token if token is not None and ids and ids[0] == token else None
