"""Perplexity: which tokens are scored, with which context, and that nothing but the text and the model decides the
number."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_posenc.evaluation import perplexity, pseudo_perplexity
from hf_posenc.evaluation.likelihood import PerplexityResult
from hf_posenc.evaluation.scoring import TokenScorer
from hf_posenc.evaluation.windows import DEFINITIONS, windows

transformers = pytest.importorskip("transformers")
VOCABULARY = 97


def tiny(kind: str, positions: int = 64, **changes: Any) -> Any:
    """A random model whose wrong results are far from its right ones (initializer_range=0.3)."""
    torch.manual_seed(0)
    changes |= {"bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=positions,
            initializer_range=0.3,
            **changes,
        )
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


def text(n: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def stride_of(definition: str) -> int | None:
    return None if definition == "disjoint" else 5


class ByToken(nn.Module):
    """A stub whose next token depends on the last one and on how many it has seen: `table[last] - 0.1 * seen`."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table
        self.seen: list[list[int]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        assert attention_mask is None or attention_mask.all()
        self.seen += input_ids.tolist()
        return SimpleNamespace(logits=self.table[input_ids])


class ByContext(nn.Module):
    """A stub that gives every target exactly `cost(tokens seen)` nats, whatever the target."""

    def __init__(self, cost: Any, vocabulary: int = 5) -> None:
        super().__init__()
        self.cost, self.vocabulary = cost, vocabulary

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        batch, length = input_ids.shape
        logits = torch.full((batch, length, self.vocabulary), -math.inf, dtype=torch.float64)
        for position in range(length):
            p = math.exp(-self.cost(position + 1))
            for row in range(batch):
                follower = int(input_ids[row, position + 1]) if position + 1 < length else 0
                logits[row, position] = math.log((1 - p) / (self.vocabulary - 1)) if p < 1 else -math.inf
                logits[row, position, follower] = math.log(p)
        return SimpleNamespace(logits=logits)


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("n", "window", "stride", "definition", "expected"),
    [
        (20, 10, 5, "strided", [(0, 10, 1), (5, 15, 10), (10, 20, 15)]),
        (20, 10, 5, "window_means", [(0, 10, 1), (5, 15, 10), (10, 20, 15)]),
        (20, 10, 5, "full_windows", [(0, 10, 1), (5, 15, 6), (10, 20, 11)]),
        (23, 10, 5, "strided", [(0, 10, 1), (5, 15, 10), (10, 20, 15), (15, 23, 20)]),
        (20, 10, 10, "strided", [(0, 10, 1), (9, 19, 10), (18, 20, 19)]),
        (20, 10, 1, "strided", [(0, 10, 1)] + [(k, k + 10, k + 9) for k in range(1, 11)]),
        (20, 20, 5, "strided", [(0, 20, 1)]),
        (20, 64, None, "strided", [(0, 20, 1)]),
        (2, 2, 1, "strided", [(0, 2, 1)]),
        (21, 10, None, "disjoint", [(0, 11, 1), (10, 21, 11)]),
        (20, 6, None, "disjoint", [(0, 7, 1), (6, 13, 7), (12, 19, 13), (13, 20, 19)]),
        (5, 6, None, "disjoint", [(0, 5, 1)]),
    ],
)
def test_windows_are_these(n: int, window: int, stride: int | None, definition: str, expected: list[Any]) -> None:
    assert list(windows(n, window, stride, definition)) == expected


@pytest.mark.parametrize("definition", ["strided", "disjoint"])
def test_each_target_is_scored_once_with_context_and_within_the_window(definition: str) -> None:
    for n in range(2, 30):
        for window in range(2, 12):
            for stride in range(1, window + 1):
                targets = []
                for begin, end, first in windows(n, window, stride, definition):
                    assert 0 <= begin < first < end <= n
                    assert len(range(begin, end)[:window]) >= end - 1 - begin  # all but the last target are fed
                    targets += range(first, end)
                assert targets == list(range(1, n))


def test_disjoint_cuts_as_the_harness_does() -> None:
    """The harness's published behaviour on `[prefix] + tokens`: inputs of at most `window` tokens, one token of
    context."""

    def harness(tokens: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
        first = min(length, len(tokens))
        rows, done = [([prefix, *tokens[: first - 1]], tokens[:first])], first
        while done < len(tokens):
            end = min(done + length, len(tokens))
            rows.append((tokens[end - length - 1 : end - 1], tokens[done:end]))
            done = end
        return rows

    for n in range(1, 25):
        for length in range(1, 9):
            tokens = list(range(100, 100 + n))
            ours = [
                (([7, *tokens][begin:end])[:length][: end - 1 - begin], [7, *tokens][first:end])
                for begin, end, first in windows(n + 1, length, None, "disjoint")
            ]
            assert ours == harness(tokens, 7, length), (n, length)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((20, 10, 11), "stride=11"),
        ((20, 10, 0), "stride=0"),
        ((20, 1, 1), "window=1"),
        ((1, 10, 5), "n=1"),
        ((20, 10, 5, "sliding"), "definition='sliding'"),
        ((20, 10.5, 5), "window=10.5"),
    ],
)
def test_windows_refuse(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(windows(*arguments))


# ---------------------------------------------------------------------- values known by hand


def test_total_is_the_sum_by_hand() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.5]])
    ids = [0, 1, 1, 2, 0]
    expected = [
        math.log(math.e + 2) - 0.0,  # 0 -> 1
        math.log(math.e**2 + 2) - 2.0,  # 1 -> 1
        math.log(math.e**2 + 2) - 0.0,  # 1 -> 2
        math.log(math.e**0.5 + 2) - 0.0,  # 2 -> 0
    ]
    result = perplexity(ByToken(logits), ids, window=5)
    assert result.token_nll.tolist() == pytest.approx(expected, abs=1e-6)
    assert result.nll == pytest.approx(sum(expected), abs=1e-6)
    assert result.tokens == 4
    assert result.perplexity == pytest.approx(math.exp(sum(expected) / 4), abs=1e-6)


def test_a_model_that_knows_the_next_token_has_perplexity_one() -> None:
    table = torch.full((7, 7), -1e4)
    for token in range(7):
        table[token, (token + 1) % 7] = 1e4
    ids = [i % 7 for i in range(40)]
    for definition in DEFINITIONS:
        assert perplexity(ByToken(table), ids, 10, stride_of(definition), definition=definition).perplexity == 1.0
    wrong = [i % 5 for i in range(40)]
    assert perplexity(ByToken(table), wrong, 10, 5).perplexity > 1e3


def test_the_definitions_differ_as_they_should() -> None:
    """Context of c tokens costs 1/c nats: every definition by hand for n=20, window 10, stride 5."""

    def cost(context: int) -> float:
        return 1 / context

    first = [cost(c) for c in range(1, 10)]
    later = [cost(c) for c in range(5, 10)]
    expected = {
        "strided": (sum(first) + 2 * sum(later)) / 19,
        "window_means": (sum(first) / 9 + 2 * sum(later) / 5) / 3,
        "full_windows": sum(first) / 9,
        # fed 10 tokens at once: targets 1..10 with 1..10 tokens of context, then 11..19 with 2..10 (moved back by one)
        "disjoint": (sum(cost(c) for c in range(1, 11)) + sum(cost(c) for c in range(2, 11))) / 19,
    }
    counts = {"strided": 19, "window_means": 19, "full_windows": 27, "disjoint": 19}
    # The last token's follower is unknown to the stub when it is only predicted, so all tokens are alike.
    ids = [0] * 20
    for definition in DEFINITIONS:
        result = perplexity(ByContext(cost), ids, 10, stride_of(definition), definition=definition)
        assert result.definition == definition
        assert result.tokens == counts[definition]
        assert math.log(result.perplexity) == pytest.approx(expected[definition], abs=1e-6), definition
    # The fifth that is published: the text is cut off after its first window.
    first_window = perplexity(ByContext(cost), ids[:10], 10, 5)
    assert math.log(first_window.perplexity) == pytest.approx(sum(first) / 9, abs=1e-6)


def test_tokens_are_weighted_not_windows() -> None:
    """Means of 2.0 over nine tokens and 4.0 over one: 9.025014, not 20.085537."""
    result = PerplexityResult(
        definition="strided",
        window=10,
        stride=9,
        bos=None,
        token_nll=torch.tensor([2.0] * 9 + [4.0], dtype=torch.float64),
        token_context=torch.arange(1, 11),
        document_of=torch.zeros(10, dtype=torch.int64),
        window_of=torch.tensor([0] * 9 + [1]),
        documents=1,
        num_bytes=20,
    )
    assert result.perplexity == pytest.approx(9.025013, abs=1e-5)
    assert result.bits_per_byte == pytest.approx(22 / math.log(2) / 20)
    means = PerplexityResult(**{**vars(result), "definition": "window_means"})
    assert means.perplexity == pytest.approx(20.085537, abs=1e-5)


def test_by_context_tells_the_length_curve() -> None:
    result = perplexity(ByContext(lambda context: 1 / context), [0] * 32, window=32)
    rows = result.by_context([8, 16, 32, 64])
    assert [row[:2] + row[3:] for row in rows] == [(0, 8, 7), (8, 16, 8), (16, 32, 16), (32, 64, 0)]
    for low, high, value, tokens in rows[:3]:
        mean = sum(1 / c for c in range(max(low, 1), high)) / tokens
        assert math.log(value) == pytest.approx(mean, abs=1e-6)
    assert math.isnan(rows[3][2])
    for edges in ([], [0, 4], [8, 4], [8, 8]):
        with pytest.raises(ValueError, match="edges"):
            result.by_context(edges)


def test_an_overflow_is_infinite_not_an_error() -> None:
    table = torch.zeros(3, 3)
    table[0, 1] = 1e5
    assert perplexity(ByToken(table), [0, 0, 0], window=3).perplexity == math.inf


# ---------------------------------------------------------------------- a start token


def test_bos_stands_in_each_window_and_is_no_target() -> None:
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    model, ids = ByToken(table), (text(20) % 90).tolist()
    plain = perplexity(model, ids, window=10, stride=5, batch_size=1)
    model.seen.clear()
    result = perplexity(model, ids, window=10, stride=5, bos=95, batch_size=1)
    assert len(model.seen) >= result.windows > 1
    assert all(row[0] == 95 and row.count(95) == 1 and len(row) <= 10 for row in model.seen if len(row) > 8)
    assert result.tokens == plain.tokens == 19
    assert result.nll == pytest.approx(plain.nll, abs=1e-5)  # this stub sees only the last token: the same targets
    assert result.token_context.max() <= 9


def test_bos_is_not_doubled() -> None:
    model, ids = ByToken(torch.zeros(VOCABULARY, VOCABULARY)), [95, *range(19)]
    perplexity(model, ids, window=10, stride=5, bos=95, batch_size=1)
    rows = [row for row in model.seen if len(row) > 8]
    assert rows[0][0] == 95 and rows[0][1] == 0
    assert all(row.count(95) == 1 for row in rows)


def test_disjoint_with_bos_scores_the_first_token_too() -> None:
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    ids = (text(20) % 90).tolist()
    result = perplexity(ByToken(table), ids, window=6, definition="disjoint", bos=95)
    by_hand = torch.log_softmax(table[[95, *ids[:-1]]].double(), -1)[torch.arange(20), ids]
    assert result.tokens == 20
    assert torch.allclose(result.token_nll, -by_hand, atol=1e-5)


# ---------------------------------------------------------------------- real modules


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_one_window_equals_one_pass(kind: str) -> None:
    model, ids = tiny(kind), text(40)
    loss = float(model(input_ids=ids[None], labels=ids[None]).loss.detach())
    for window in (40, 64):
        result = perplexity(model, ids, window=window)
        assert result.tokens == 39
        assert result.mean_nll == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_strided_equals_the_loop_by_hand(kind: str) -> None:
    model, ids = tiny(kind).requires_grad_(False), text(45)
    expected, done = [], 1
    for begin in (0, 5, 10, 15, 20, 25):
        end = begin + 20
        logits = model(input_ids=ids[None, begin:end]).logits[0].double().log_softmax(-1)
        expected += [-float(logits[t - 1 - begin, ids[t]]) for t in range(done, end)]
        done = end
    result = perplexity(model, ids, window=20, stride=5)
    assert result.token_nll.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_batch_size_does_not_matter(definition: str) -> None:
    model, documents = tiny("llama"), [text(40, 1), text(17, 2), text(2, 3), text(55, 4)]
    results = [
        perplexity(model, documents, 16, stride_of(definition), definition=definition, batch_size=size).token_nll
        for size in (1, 2, 7, None)
    ]
    for other in results[1:]:
        assert torch.allclose(results[0], other, rtol=0, atol=1e-5)
        assert float(other.mean()) == pytest.approx(float(results[0].mean()), abs=1e-6)


def test_documents_are_no_context_for_each_other() -> None:
    model, parts = tiny("gpt2"), [text(30, 1), text(12, 2), text(21, 3)]
    alone = [perplexity(model, part, 16, 8) for part in parts]
    together = perplexity(model, parts, 16, 8)
    assert torch.allclose(together.token_nll, torch.cat([r.token_nll for r in alone]), rtol=0, atol=1e-5)
    assert together.document_of.tolist() == [0] * 29 + [1] * 11 + [2] * 20
    assert together.perplexity == pytest.approx(
        math.exp(sum(r.nll for r in alone) / sum(r.tokens for r in alone)), rel=1e-6
    )
    joined = perplexity(model, torch.cat(parts), 16, 8)
    assert joined.tokens == together.tokens + 2


def test_forms_of_input_agree() -> None:
    model, ids = tiny("gpt2"), text(20)
    expected = perplexity(model, ids, 16).token_nll
    sizes: list[Any] = [np.int64(16), np.int64(8)]
    assert torch.equal(perplexity(model, ids, *sizes).token_nll, expected)
    for form in (
        list(ids.numpy()),
        ids.tolist(),
        [ids],
        [ids.tolist()],
        ids[None],
        ids.numpy(),
        tuple(ids.tolist()),
        ids.to(torch.int32),
    ):
        assert torch.equal(perplexity(model, form, 16).token_nll, expected)


def test_only_scored_positions_reach_the_output_layer() -> None:
    model, ids = tiny("llama"), text(60)
    widths: list[int] = []
    model.lm_head.register_forward_hook(lambda m, i, o: widths.append(o.shape[-2]))
    calls: list[int] = []
    model.model.register_forward_hook(lambda m, i, o: calls.append(1))
    result = perplexity(model, ids, window=30, stride=10, batch_size=1)
    assert widths[-result.windows :] == [29, 10, 10, 10]
    assert len(calls) >= result.windows  # the base model is called as a module, so that hooks on it run


def test_slices_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), text(60)
    whole = perplexity(model, ids, 60).token_nll
    monkeypatch.setattr("hf_posenc.evaluation.scoring.SLICE", 7)
    assert torch.allclose(perplexity(model, ids, 60).token_nll, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("cap", "spread"), [(2.0, 0.3), (30.0, 0.02)])
def test_a_model_with_capped_logits_is_scored_whole(cap: float, spread: float) -> None:
    """Gemma 2 caps its logits after the output layer: base model + output layer alone would be another model.

    With small weights the cap does nothing to the first logits that 1e-3 of them would show.
    """
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        final_logit_softcapping=cap,
        initializer_range=spread,
    )
    model, ids = transformers.Gemma2ForCausalLM(config).eval(), text(40)
    assert TokenScorer(model, ids).base is None
    loss = float(model(input_ids=ids[None], labels=ids[None]).loss.detach())
    assert perplexity(model, ids, 40).mean_nll == pytest.approx(loss, abs=1e-5)
    assert perplexity(model, ids, 20, 5).tokens == 39


class After(nn.Module):
    """A LLaMA whose logits are changed after the output layer."""

    def __init__(self, inner: Any, change: Any) -> None:
        super().__init__()
        self.base_model, self.head, self.change = inner.model, inner.lm_head, change

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = self.base_model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return SimpleNamespace(logits=self.change(self.head(hidden)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_follows_the_output_layer_is_seen(dtype: torch.dtype) -> None:
    model, ids = tiny("llama").to(dtype), text(20)
    assert TokenScorer(After(model, lambda logits: logits), ids).base is not None
    for change in (
        lambda logits: 500 * torch.tanh(logits / 500),
        lambda logits: logits * 1.01,
        lambda logits: logits + 1e-3,
        lambda logits: logits + 1e-3 * (torch.arange(VOCABULARY) == 90).to(dtype),
        lambda logits: logits.float().clamp(max=1000),
    ):
        assert TokenScorer(After(model, change), ids).base is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_stock_models_are_scored_in_slices(kind: str, dtype: torch.dtype) -> None:
    model = tiny(kind).to(dtype)
    assert TokenScorer(model, text(20)).base is not None
    head = model.get_output_embeddings()
    assert not head._forward_hooks


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # PEFT asks for it
def test_adapters_are_scored() -> None:
    peft = pytest.importorskip("peft")
    model, ids = tiny("llama"), text(40)
    plain = perplexity(model, ids, 40).mean_nll
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    ).eval()
    loss = float(adapted(input_ids=ids[None], labels=ids[None]).loss.detach())
    result = perplexity(adapted, ids, 40)
    assert result.mean_nll == pytest.approx(loss, abs=1e-5)
    assert abs(result.mean_nll - plain) > 1e-3


def test_mode_and_gradients_are_left_as_they_were() -> None:
    model = tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    first = perplexity(model, text(30), 30)
    assert [module.training for module in model.modules()] == before
    assert first.nll == perplexity(model, text(30), 30).nll  # no dropout inside
    assert all(weight.grad is None for weight in model.parameters())


def test_window_defaults_to_the_trained_length() -> None:
    model = tiny("llama", positions=16)
    assert perplexity(model, text(40)).window == 16
    assert perplexity(model, text(40)).stride == 8
    assert perplexity(model, [text(5), text(9)]).window == 9


def test_interval_over_documents() -> None:
    model, documents = tiny("llama"), [text(20, seed) for seed in range(8)]
    result = perplexity(model, documents, 20)
    interval = result.confidence_interval()
    assert interval is not None
    low, high = interval
    assert low < result.perplexity < high
    assert interval == result.confidence_interval()
    wide = result.confidence_interval(level=0.99)
    assert wide is not None and wide[0] <= low and wide[1] >= high
    assert perplexity(model, documents[0], 20).confidence_interval() is None


# ---------------------------------------------------------------------- bad input


class Broken(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        logits = torch.zeros(*input_ids.shape, 50)
        logits[input_ids == 13] = math.nan
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_nan_is_named_not_averaged(batch_size: int) -> None:
    documents = [list(range(10)), [1, 2, 3, 4, 5, 13, 7, 8]]
    with pytest.raises(FloatingPointError, match="document 1 at token position 6"):
        perplexity(Broken(), documents, 4, 2, batch_size=batch_size)


@pytest.mark.parametrize(
    ("token_ids", "options", "message"),
    [
        ([], {}, "token_ids is empty"),
        ([[1, 2], []], {}, "document 1 has 0"),
        ([[1, 2, 3], [4]], {}, "document 1 has 1"),
        ([1.5, 2.5], {}, "float"),
        ("some text", {}, "str"),
        ({"input_ids": [1, 2]}, {}, "dict"),
        ([1, 2, 97], {}, "holds the id 97"),
        ([1, -100, 3], {}, "holds the id -100"),
        ([1, 2, 3], {"bos": 97}, "bos=97"),
        ([1, 2, 3], {"bos": True}, "bos=True"),
        ([1, 2, 3], {"bos": False}, "bos=False"),
        ([1, 2, 3], {"bos": 1.0}, "bos=1.0"),
        ([1, 2, 3], {"bos": "<s>"}, "bos='<s>'"),
        ([1, 2, 3], {"window": "64"}, "window='64'"),
        ([1, 2, 3], {"stride": True}, "stride=True"),
        ([1, 2, 3], {"stride": 1, "definition": "disjoint"}, "stride=1 is not allowed with definition"),
        (None, {}, "token_ids of type NoneType"),
        ([1, 2, 3], {"window": 0}, "window=0"),
        ([1, 2, 3], {"window": 2, "stride": 3}, "stride=3"),
        ([1, 2, 3], {"batch_size": 0}, "batch_size=0"),
        ([1, 2, 3], {"definition": "rolling"}, "definition='rolling'"),
        ([1, 2, 3], {"num_bytes": 0}, "num_bytes=0"),
        ([1, 2, 3], {"distributed": True}, "accelerate launch"),
    ],
)
def test_refused(token_ids: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        perplexity(tiny("gpt2"), token_ids, **options)


def test_what_is_no_model_is_named() -> None:
    for measure in (perplexity, lambda model, ids: pseudo_perplexity(model, ids, 3)):
        with pytest.raises(ValueError, match="model='llama'"):
            measure("llama", [1, 2, 3])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_of_nan_is_named(kind: str, value: float) -> None:
    model = tiny(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = value
    with pytest.raises(FloatingPointError, match="document 0 at token position 1 "):
        perplexity(model, text(20), 10)


def test_a_logit_of_infinity_is_no_distribution() -> None:
    table = torch.zeros(3, 3)
    table[1, 2] = math.inf
    with pytest.raises(FloatingPointError, match="document 0 at token position 2 "):
        perplexity(ByToken(table), [0, 1, 0, 0], window=4)
    table[1, 2] = -math.inf  # a token that is ruled out
    assert perplexity(ByToken(table), [0, 1, 0, 0], window=4).perplexity < 3


def test_a_part_without_targets_has_no_perplexity() -> None:
    result = perplexity(tiny("llama"), text(20), 20)
    assert math.isnan(result.within(30, 40).perplexity)
    wrong: list[tuple[Any, Any, str]] = [
        (50, 40, "low=50, high=40"),
        (4, 4, "low=4"),
        (-1, 4, "low=-1"),
        (0, 4.5, "4.5"),
    ]
    for low, high, message in wrong:
        with pytest.raises(ValueError, match=message):
            result.within(low, high)


def test_a_window_beyond_the_table_is_named() -> None:
    model = tiny("gpt2", positions=32)
    with pytest.raises(ValueError, match=r"window=64 .*32 rows"):
        perplexity(model, text(80), window=64)
    assert perplexity(model, text(80), window=32).tokens == 79
    assert perplexity(model, text(20), window=64).tokens == 19  # no window is really that long


def test_a_model_that_sees_the_answer_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    for model in (transformers.BertForMaskedLM(config), transformers.BertLMHeadModel(config)):
        with pytest.raises(ValueError, match="pseudo_perplexity"):
            perplexity(model, [1, 2, 3])
    config.is_decoder = True
    assert perplexity(transformers.BertLMHeadModel(config), [1, 2, 3]).tokens == 2


def test_a_model_without_logits_is_named() -> None:
    with pytest.raises(ValueError, match="GPT2Model has no logits"):
        perplexity(tiny("gpt2").transformer, [1, 2, 3])


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_example_tells_its_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "five_perplexities.py"))["main"]
    with pytest.raises(SystemExit):
        main(*arguments)
    assert "model text [tokens] [window] [stride]" in "".join(capsys.readouterr())


# ---------------------------------------------------------------------- encoders


def test_pseudo_perplexity_masks_each_token_once() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    model, ids = transformers.BertForMaskedLM(config).eval(), text(11)
    expected = []
    for position in range(11):
        masked = torch.cat([torch.tensor([90]), ids, torch.tensor([91])])
        masked[position + 1] = 96
        logits = model(input_ids=masked[None]).logits[0, position + 1].double().log_softmax(-1)
        expected.append(-float(logits[ids[position]].detach()))
    result = pseudo_perplexity(model, ids, 96, prefix=90, suffix=91, batch_size=4)
    assert result.definition == "pseudo"
    assert result.token_nll.tolist() == pytest.approx(expected, abs=1e-4)
    assert result.perplexity == pytest.approx(math.exp(sum(expected) / 11), rel=1e-5)
    assert pseudo_perplexity(model, ids, 96, window=4).tokens == 11
    some = pseudo_perplexity(model, text(30), 96, window=30, max_targets=5)
    assert some.tokens == 5
    with pytest.raises(ValueError, match="32"):
        pseudo_perplexity(model, text(40), 96, window=40)
    for wrong in (True, None, 97, -1):
        with pytest.raises(ValueError, match=f"mask_token_id={wrong}"):
            pseudo_perplexity(model, ids, wrong)  # type: ignore[arg-type]
    for changes in ({"prefix": True}, {"suffix": 97}, {"batch_size": 0}, {"num_bytes": "9"}, {"seed": None}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            pseudo_perplexity(model, ids, 96, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- several processes

WORKER = """
import json, sys, torch
from hf_posenc.evaluation import perplexity
from hf_posenc.evaluation.processes import launched
from models import threads
from test_perplexity import text, tiny
documents = [text(20 + i, i) for i in range(9)]
with launched() as processes:
    values = {d: perplexity(tiny("llama"), documents, 16, stride, definition=d, batch_size=2).token_nll.tolist()
              for d, stride in (("strided", 4), ("disjoint", None))}
    if processes.is_first:
        json.dump({"processes": processes.count, **values}, open(sys.argv[1], "w"))
    assert any("gloo" in name for name in threads())
assert not any("gloo" in name for name in threads()), threads()  # one could abort the interpreter as it goes down
"""


def test_nothing_that_is_imported_later_keeps_the_group() -> None:
    """Default arguments of this module would, if making a model imported it within the group."""
    pytest.importorskip("torch.distributed.nn.functional")
    look = "import sys, hf_posenc.evaluation.processes; print('torch.distributed.nn.functional' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "True", done.stderr


def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import json
    import socket

    script, output = tmp_path / "worker.py", tmp_path / "out.json"
    script.write_text(WORKER)
    root = Path(__file__).parents[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    workers = []
    for rank in ("0", "1"):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        }
        workers.append(subprocess.Popen([sys.executable, str(script), str(output)], env=environment, cwd=root))
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    got = json.loads(output.read_text())
    assert got["processes"] == 2
    documents = [text(20 + i, i) for i in range(9)]
    for definition, stride in (("strided", 4), ("disjoint", None)):
        alone = perplexity(tiny("llama"), documents, 16, stride, definition=definition, batch_size=2)
        assert got[definition] == pytest.approx(alone.token_nll.tolist(), abs=1e-5)
        assert sum(got[definition]) == pytest.approx(alone.nll, abs=1e-6 * alone.tokens)


# ---------------------------------------------------------------------- the harness


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("encoding", [None, "yarn:factor=2;beta_fast=16"])
def test_the_harness_agrees_with_disjoint(encoding: str | None) -> None:
    """Rolling log-likelihood of lm-evaluation-harness itself, on the same patched model."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from test_reports import letters, prose

    from hf_posenc.evaluation import harness

    tokenizer, model = letters(), tiny("llama", positions=64)
    made = harness.register()
    assert harness.register() is made
    theirs = made(model, encoding=encoding, tokenizer=tokenizer, context_length=None, max_length=16, device="cpu")
    documents = [prose(9, 1), prose(20, 2), "a"]
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=i)
        for i, text in enumerate(documents)
    ]
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    for text, value in zip(documents[:2], expected, strict=False):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        ours = perplexity(model, ids, 16, definition="disjoint", bos=theirs.prefix_token_id)
        assert ours.tokens == len(ids)
        assert ours.nll == pytest.approx(-value, rel=1e-5)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A folder with a tiny GPT-2 of 256 positions and its tokenizer."""
    from test_reports import letters

    tiny("gpt2", positions=256).save_pretrained(tmp_path / "gpt2")
    letters().save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("encodng=alibi", "encodng='alibi' is not an argument of hf-posenc. Did you mean 'encoding'"),
        ("revision=abc", "revision='abc'"),
        ("parallelize=True", "parallelize=True"),
        ("load_in_4bit=True", "load_in_4bit=True"),
        ("peft=/does/not/exist", "/does/not/exist"),
        ("context_length=abc", "context_length='abc'"),
        ("context_length=512", "context_length=512 .*256 rows"),
        ("max_length=512", "max_length=512 .*256 rows"),
    ],
)
def test_the_harness_refuses_what_it_would_ignore(saved: str, arguments: str, message: str) -> None:
    pytest.importorskip("lm_eval")
    from hf_posenc.evaluation import harness

    with pytest.raises(ValueError, match=message):
        harness.register().create_from_arg_string(f"pretrained={saved},{arguments}", {"device": "cpu"})


@pytest.mark.filterwarnings("default")
def test_the_harness_puts_an_adapter_on(saved: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    peft = pytest.importorskip("peft")
    import hf_posenc
    from hf_posenc.evaluation import harness

    model = hf_posenc.patch(tiny("gpt2", positions=256), "alibi")
    adapter = peft.get_peft_model(model, hf_posenc.lora_config(model, init_lora_weights=False)).eval()
    adapter.save_pretrained(tmp_path / "adapter")
    given = f"pretrained={saved},peft={tmp_path / 'adapter'},batch_size=4,revision=main,context_length=512"
    theirs = harness.register().create_from_arg_string(given, {"batch_size": 1, "device": "cpu"})
    assert theirs.batch_size == 4 and theirs.max_length == 512
    ids = text(300)[None]
    with torch.no_grad():
        assert torch.allclose(theirs.model(ids).logits, adapter(ids).logits, atol=1e-4)
