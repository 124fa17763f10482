"""What is measured: models of the usual sizes with random weights, and one attention call of such a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import hf_posenc
from hf_posenc.attention import biased_sdpa
from hf_posenc.positions import Call
from hf_posenc.sites import HERE


@dataclass(frozen=True)
class Size:
    """Of a model: width and heads are GPT-2's, so that attention has its usual share of the time."""

    length: int = 4096
    hidden: int = 768
    heads: int = 12
    layers: int = 2
    vocabulary: int = 97


def gpt2(size: Size, positions: int | None = None) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.hidden,
        n_head=size.heads,
        n_layer=size.layers,
        n_positions=positions or size.length,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _built(GPT2LMHeadModel, config)


def llama(size: Size, positions: int | None = None) -> LlamaForCausalLM:
    """Three query heads to a key head, as in SmolLM2."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 3 if size.heads % 3 == 0 else size.heads,
        num_hidden_layers=size.layers,
        max_position_embeddings=positions or size.length,
        bos_token_id=1,
        eos_token_id=1,
    )
    return _built(LlamaForCausalLM, config)


def bert(size: Size, positions: int | None = None) -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_attention_heads=size.heads,
        num_hidden_layers=size.layers,
        max_position_embeddings=positions or size.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _built(BertForMaskedLM, config)


BUILD: dict[str, Callable[..., PreTrainedModel]] = {"bert": bert, "gpt2": gpt2, "llama": llama}


def _built(cls: Any, config: Any) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    config.loss_type = "ForCausalLM" if cls is not BertForMaskedLM else "ForMaskedLM"
    return cls(config)


def tokens(size: Size, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, size.vocabulary, (batch, size.length), generator=generator)


def forward(model: PreTrainedModel, ids: Tensor, **options: Any) -> Callable[[], object]:
    model.eval()
    if model.config.model_type != "bert":
        options["use_cache"] = False

    def run() -> object:
        with torch.no_grad():
            return model(input_ids=ids, **options)

    return run


def train_step(model: PreTrainedModel, ids: Tensor, **options: Any) -> Callable[[], object]:
    """Forward and backward; no optimizer, which knows nothing of positions."""
    model.train()
    if model.config.model_type != "bert":
        options["use_cache"] = False

    def run() -> object:
        model.zero_grad()
        return model(input_ids=ids, labels=ids, **options).loss.backward()

    return run


# ---------------------------------------------------------------------- a bias as a tensor, as it is usually done


def dense_bias(model: PreTrainedModel, length: int, causal: bool) -> Tensor:
    """[1, heads, length, length]: the whole bias of the encoding in force, the future hidden by -inf."""
    owner: Any = model.base_model.get_submodule("hf_posenc")
    positions = torch.arange(length)[None]
    bias: Tensor = owner.plan.resolved.bias(positions, positions, owner(positions), owner.plan.shape)
    if causal:
        bias = bias.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return bias


def with_dense_bias(kind: str, size: Size, encoding: str) -> PreTrainedModel:
    """A model without positions that gets the bias as a tensor, made once in each forward pass and added in each layer:
    what BLOOM, MPT and T5 do."""
    model = hf_posenc.patch(BUILD[kind](size), "nope")
    source = hf_posenc.patch(BUILD[kind](Size(length=8, hidden=size.hidden, heads=size.heads, layers=1)), encoding)

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        bias = dense_bias(source, ids.shape[1], kind != "bert")
        return args, {**kwargs, "attention_mask": bias.expand(len(ids), -1, -1, -1)}

    model.register_forward_pre_hook(give, with_kwargs=True)
    for name, weight in source.base_model.get_submodule("hf_posenc").named_parameters():
        model.register_parameter(f"bias_{name}", weight)
    return model


# ---------------------------------------------------------------------- one attention call


class Attention:
    """One attention call: the shapes of a layer, and the function that a patched model runs."""

    def __init__(self, encoding: str, size: Size, *, kind: str = "llama", backward: bool = False) -> None:
        small = Size(length=8, hidden=size.hidden, heads=size.heads, layers=1)
        self.model = hf_posenc.patch(BUILD[kind](small), encoding)
        self.owner: Any = self.model.base_model.get_submodule("hf_posenc")
        self.causal = kind != "bert"
        self.backward = backward
        self.length = size.length
        generator = torch.Generator().manual_seed(0)
        shape = (1, size.heads, size.length, size.hidden // size.heads)
        self.query, self.key, self.value = (
            torch.randn(shape, generator=generator).requires_grad_(backward) for _ in range(3)
        )
        self.module = torch.nn.Module()
        self.module.is_causal = self.causal  # type: ignore[assignment]
        self.module.eval()

    def _finish(self, attend: Callable[[], Tensor]) -> Tensor:
        with torch.set_grad_enabled(self.backward):
            out = attend()
            if self.backward:
                out.sum().backward()
            return out

    def ours(self) -> Tensor:
        """As a layer calls it; [1, heads, length, head_dim]."""
        positions = torch.arange(self.length)[None]
        call: Any = {HERE: Call(self.owner.plan, self.owner(positions), positions, positions, None, None, None)}
        return self._finish(
            lambda: biased_sdpa(self.module, self.query, self.key, self.value, None, **call)[0].transpose(1, 2)
        )

    def plain(self) -> Tensor:
        """The same call without a bias: the limit."""
        return self._finish(
            lambda: scaled_dot_product_attention(self.query, self.key, self.value, is_causal=self.causal)
        )

    def dense(self) -> Tensor:
        """With the bias as a tensor."""

        def attend() -> Tensor:
            bias = dense_bias(self.model, self.length, self.causal)
            return scaled_dot_product_attention(self.query, self.key, self.value, attn_mask=bias)

        return self._finish(attend)

    def exact(self) -> Tensor:
        """In float64, one head at a time."""
        out = []
        bias = dense_bias(self.model, self.length, self.causal)
        for head in range(self.query.shape[1]):
            q, k, v = (part[0, head].detach().double() for part in (self.query, self.key, self.value))
            scores = q @ k.t() * q.shape[-1] ** -0.5 + bias[0, head].detach()
            out.append(torch.softmax(scores, dim=-1) @ v)
        return torch.stack(out)[None]
