"""How long a model can be fed, and how long it was trained to be."""

from __future__ import annotations

from typing import Any

from torch import nn

# Families whose positions are rows of a table: past its end there is nothing, only an index error.
_TABLES = frozenset(
    {"gpt2", "bert", "distilbert", "electra", "opt", "gpt_neo", "gpt_bigcode", "xlm", "albert", "openai-gpt"}
)
# Families that see both sides unless their config says is_decoder.
_ENCODERS = frozenset(
    {"bert", "electra", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "ernie", "roformer", "rembert"}
    | {"megatron-bert", "data2vec-text", "big_bird", "roberta-prelayernorm", "xmod", "bert-generation"}
)
# Families whose table keeps rows up to the padding token's free: a table of 514 rows takes 512 tokens.
_PADDED_TABLES = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "roberta-prelayernorm", "xmod"}
)


def text_config(model: nn.Module) -> Any:
    """The config of the language part; None for a module without one."""
    config = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def context_length(model: nn.Module) -> int | None:
    """Tokens that the model's config says it takes; None where it does not say."""
    value = getattr(text_config(model), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


def trained_length(model: nn.Module) -> int | None:
    """Tokens that the model was pretrained with, before any scaling; None where its config does not say."""
    config = text_config(model)
    record = getattr(getattr(model, "config", None), "hf_posenc", None)
    for source in (record, getattr(config, "rope_parameters", None)):
        for key in ("trained_length", "original_max_position_embeddings"):
            value = source.get(key) if isinstance(source, dict) else None
            if isinstance(value, int) and value > 0:
                return value
    return context_length(model)


def hard_limit(model: nn.Module) -> tuple[int, str] | None:
    """(tokens, why) where a longer window cannot be fed at all, because positions are rows of a table."""
    config = text_config(model)
    if config is None:
        return None
    kind = getattr(config, "model_type", None)
    record = getattr(getattr(model, "config", None), "hf_posenc", None)
    if isinstance(record, dict):
        resolved = record.get("resolved") or {}
        rows = resolved.get("num_positions")
        if isinstance(rows, int):
            return rows, f"the {resolved.get('name')} table that the patch gave this model ({kind}) has {rows} rows"
        rows = record.get("trained_length")
        if record.get("keep_native") and record.get("native_weight", 1) and kind in _TABLES and isinstance(rows, int):
            return rows, f"the native table that the patch kept in this model ({kind}) has {rows} rows"
        return None
    rows = context_length(model)
    if kind in _PADDED_TABLES and rows is not None:
        free = (getattr(config, "pad_token_id", None) or 0) + 1
        return rows - free, f"the position table of this model ({kind}) has {rows} rows, {free} of them reserved"
    if kind in _TABLES and rows is not None:
        return rows, f"the position table of this model ({kind}) has {rows} rows"
    return None


def check_causal(model: nn.Module) -> None:
    """Raise a ValueError for a model that sees the targets it would be scored on."""
    inner: Any = model
    if callable(getattr(model, "get_base_model", None)):  # PEFT's wrapper; transformers' own adapters have none
        inner = model.get_base_model()  # type: ignore[operator]
    config, name = text_config(inner), type(inner).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"model: {name} is an encoder-decoder; perplexity needs a causal language model.")
    # GPT-2 and its like have the field is_decoder and do not need it.
    encoder = getattr(config, "model_type", None) in _ENCODERS and getattr(config, "is_decoder", True) is False
    if name.endswith("ForMaskedLM") or encoder:
        raise ValueError(
            f"model: {name} sees both sides of a token, so that its perplexity would be that of a model that knows"
            " the answer. Use pseudo_perplexity, or definition='pseudo' of hf_posenc.evaluation.evaluate."
        )


def check_length(model: nn.Module, name: str, value: int) -> None:
    """Raise a ValueError where the model cannot be fed `value` tokens at all."""
    limit = hard_limit(model)
    if limit is not None and value > limit[0]:
        raise ValueError(
            f"{name}={value} is longer than this model can be fed: {limit[1]}. Use at most {limit[0]}, or patch the"
            " model first"
            f' (for example hf_posenc.patch(model, "learned", context_length={value})).'
        )
