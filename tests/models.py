"""The tiny models that every test uses, one for each architecture.

Vocabulary 97, width 32, 2 layers, 4 heads, 32 positions. The weights are drawn with `initializer_range=0.3`: with the
usual 0.02 some wrong results lie only 1e-4 from the right ones, and a broken build would pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 97
HIDDEN = 32
LAYERS = 2
HEADS = 4
KEY_HEADS = 2
"""Key and value heads of the tiny LLaMA."""
POSITIONS = 32
"""The trained length, in tokens."""


def tiny_gpt2(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> GPT2LMHeadModel:
    """A GPT-2 in eval mode; `overrides` are fields of its config (also `attn_implementation`)."""
    fields: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=POSITIONS,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _build(GPT2LMHeadModel, GPT2Config, fields | overrides, seed, dtype)


def tiny_llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> LlamaForCausalLM:
    """A LLaMA with grouped keys (4 query heads, 2 key heads) in eval mode; `overrides` are fields of its config."""
    fields: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _build(LlamaForCausalLM, LlamaConfig, fields | overrides, seed, dtype)


def tiny_bert(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> BertForMaskedLM:
    """A BERT (masked language model) in eval mode; `overrides` are fields of its config."""
    fields: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        pad_token_id=0,
    )
    return _build(BertForMaskedLM, BertConfig, fields | overrides, seed, dtype)


ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {"bert": tiny_bert, "gpt2": tiny_gpt2, "llama": tiny_llama}
"""Builder of a tiny model by transformers' model type."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for a newline and each printable ASCII character but the last two and the backtick; vocabulary 97."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    characters = ["\n"] + [chr(code) for code in range(32, 125) if chr(code) != "`"]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    assert len(vocabulary) == VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def tokens(length: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length] that avoid the special ids 0 to 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def _build(model_class: Any, config_class: Any, fields: dict[str, Any], seed: int, dtype: torch.dtype) -> Any:
    """Build with a seed of its own, leaving the random state of the caller as it was."""
    attention = fields.pop("attn_implementation", None)
    config = config_class(**fields)
    if attention is not None:
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.to(dtype).eval()


def threads() -> list[str]:
    """Names of this process's threads, those of C++ libraries too (Linux)."""
    return [place.read_text().strip() for place in Path("/proc/self/task").glob("*/comm")]
