"""Documents to token ids, once: `datasets` caches them on disk under a key of text, tokenizer and options."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hf_posenc.data.blocks import IGNORED, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 1  # part of the cache key: raise it when tokens come out differently


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text: ([BOS], []), ([CLS], [SEP]), or nothing."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def tokenize_documents(
    documents: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    min_tokens: int = 1,
    add_special_tokens: bool = True,
    num_proc: int | None = None,
) -> Any:
    """A data set with the columns `id`, `input_ids`, `labels` from one with `id`, `text`, `messages`.

    A text becomes its tokens between the tokenizer's special ones, with the end-of-text token last where there is one.
    A conversation goes through the tokenizer's chat template; only what the assistant says is a target.

    Args:
        min_tokens: documents with fewer tokens are left out.
        add_special_tokens: False for encoders, whose special tokens go around each block instead.
        num_proc: processes to tokenise with.

    Raises:
        ValueError: a conversation and a tokenizer without a chat template, or one that is none (see `tokenize_chat`);
            the document is named.
    """
    prefix, suffix = special_tokens(tokenizer) if add_special_tokens else ([], [])
    if add_special_tokens and not suffix and tokenizer.eos_token_id is not None:
        suffix = [tokenizer.eos_token_id]

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"id": [], "input_ids": [], "labels": []}
        texts = [text for text, chat in zip(batch["text"], batch["messages"], strict=True) if not chat]
        plain = iter(_encode(tokenizer, texts))
        for identity, chat in zip(batch["id"], batch["messages"], strict=True):
            if chat:
                try:
                    ids, labels = tokenize_chat(json.loads(chat), tokenizer)
                except ValueError as error:
                    raise ValueError(f"Document {identity!r}: {error}") from error
            else:
                ids = [*prefix, *next(plain), *suffix]
                labels = ids
            if len(ids) >= max(min_tokens, 1):
                columns["id"].append(identity)
                columns["input_ids"].append(ids)
                columns["labels"].append(labels)
        return columns

    options = {"batched": True, "remove_columns": ["text", "messages"]}
    if not hasattr(documents, "_fingerprint"):  # streaming: nothing is kept
        return documents.map(tokenize, **options)
    from datasets.fingerprint import Hasher

    # The default key pickles the tokenizer, whose inner state changes when it is used: nothing would be found again.
    key = Hasher.hash((documents._fingerprint, _key(tokenizer), prefix, suffix, min_tokens, _VERSION))
    features = _features()
    return documents.map(
        tokenize, **options, features=features, num_proc=num_proc, new_fingerprint=key, desc="Tokenising documents"
    )


def tokenize_chat(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and labels that leave out everything but the assistant's answers.

    Raises:
        ValueError: a message without a role or without text, or a tokenizer whose chat template is missing, fails, or
            rewrites earlier messages when later ones come.
    """
    from jinja2 import TemplateError

    for number, message in enumerate(messages, start=1):
        _check_message(number, message)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "The text holds conversations, and this tokenizer has no chat template. "
            "Set tokenizer.chat_template, or give plain text."
        )

    def render(upto: int, prompt: bool) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=prompt))
        except (TemplateError, TypeError, LookupError) as error:
            raise ValueError(f"the tokenizer's chat template fails at its first {upto} messages: {error}") from error

    whole = render(len(messages), False)
    spans = []
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = render(i, True), render(i + 1, False)
        if not whole.startswith(after) or not after.startswith(before):
            raise ValueError(
                "The tokenizer's chat template rewrites earlier messages; the answers cannot be told apart."
            )
        spans.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    labels = [
        token if any(low < end and start < high for low, high in spans) else IGNORED
        for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return ids, labels


def _check_message(number: int, message: Any) -> None:
    """Raise where a template would fail or write something that nobody said."""
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is not an object with a role and a content; it is {message!r:.80}.")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role, such as 'user' or 'assistant'.")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"message {number} has no text in its content; it must be a string, and is {content!r:.80}.")


def documents_of(rows: Any) -> list[Document]:
    """The rows of a batch {"id", "input_ids", "labels"} as documents."""
    return [Document(*row) for row in zip(rows["id"], rows["input_ids"], rows["labels"], strict=True)]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    # `verbose=False`: texts longer than the model are what this is for, so no warning about them.
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, truncation=False, verbose=False)
    return list(encoded["input_ids"])


def _features() -> Any:
    from datasets import Features, List, Value

    return Features({"id": Value("string"), "input_ids": List(Value("int32")), "labels": List(Value("int32"))})


def _key(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return f"{type(tokenizer).__name__} {rules} {getattr(tokenizer, 'chat_template', None)}"
