"""`torch.compile` without graph breaks, for every encoding whose numbers do not depend on the length."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from encodings_under_test import CACHE, CAUSAL, EVERY, assert_equal, cases, fresh, logits
from transformers import StaticCache

from models import tokens

STATIC = [name for name, e in EVERY.items() if not e.length_dependent]


def sharp(*default: str, **options: Any) -> Any:
    """Cases of static encodings. A compilation takes seconds, so only the default ones run outside the full run."""
    made = []
    for case in cases(names=STATIC, **options):
        marks = [] if case.id.removesuffix("-sdpa") in default else [pytest.mark.full]
        made.append(pytest.param(*case.values, id=case.id, marks=marks))
    assert sum(not case.marks for case in made) == len(default)
    return pytest.mark.parametrize(("architecture", "name", "backend"), made)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are and counts how many were made."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        return graph.forward


@sharp("llama-alibi", "llama-rope_half", "llama-yarn", "gpt2-t5", "gpt2-sinusoidal_concat", "bert-alibi")
def test_one_graph_serves_all_lengths(architecture: str, name: str, backend: str) -> None:
    """At most one recompilation, when the length is found to vary."""
    model = fresh(architecture, name, backend)
    expected = {length: logits(model, tokens(length, batch=2)) for length in (16, 32, 24)}
    counting = Counting()
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    for length, out in expected.items():
        use = {"use_cache": False} if architecture in CAUSAL else {}
        assert_equal(logits(compiled, tokens(length, batch=2), **use), out, what=f"length {length}")
    assert 1 <= counting.graphs <= 2


@sharp("gpt2-alibi", "bert-rope_half")
def test_compiled_with_padding(architecture: str, name: str, backend: str) -> None:
    model = fresh(architecture, name, backend)
    ids, mask = tokens(16, batch=2), torch.ones(2, 16, dtype=torch.long)
    mask[0, :5] = 0
    real = mask == 1  # what a row says of its own padding is nobody's business
    expected = logits(model, ids, attention_mask=mask)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_equal(logits(compiled, ids, attention_mask=mask)[real], expected[real])


@sharp("llama-alibi", "gpt2-rope_half", "llama-t5", architectures=CAUSAL)
def test_a_static_cache_decodes_in_one_graph(architecture: str, name: str, backend: str) -> None:
    """The whole of decoding after the prompt: no graph break, no recompilation for each token."""
    model = fresh(architecture, name, backend)
    ids = tokens(16, batch=2)
    expected = logits(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=20)
    first = logits(model, ids[:, :8], use_cache=True, **{CACHE: cache})
    counting = Counting()
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    steps = []
    for at in range(8, 16):
        # Early transformers 5 has `generate` tell the model where it is; left to find out, GPT-2 cannot be compiled.
        told = "cache_position" in inspect.signature(type(model).forward).parameters
        place = {"cache_position": torch.tensor([at])} if told else {}
        steps.append(logits(compiled, ids[:, at : at + 1], use_cache=True, **{CACHE: cache}, **place))
    assert_equal(torch.cat([first, *steps], dim=1), expected)
    assert 1 <= counting.graphs <= 2


@sharp("llama-t5", "gpt2-rope_half")
def test_compiled_training_steps(architecture: str, name: str, backend: str) -> None:
    ids = tokens(16, batch=2)
    found = []
    for compiled in (False, True):
        model = fresh(architecture, name, backend)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        # Stock GPT-2 logs from its loss, which no graph takes: the loss is outside.
        out = run(ids, **({"use_cache": False} if architecture in CAUSAL else {})).logits
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert_equal(found[1][0], found[0][0], 1e-5)
    assert found[0][1].keys() == found[1][1].keys()
    for parameter, gradient in found[0][1].items():
        assert_equal(found[1][1][parameter], gradient, 1e-5 * max(1.0, gradient.abs().max().item()), what=parameter)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param(
            a, n, marks=[] if (a, n) in (("llama", "dynamic_ntk"), ("gpt2", "longrope")) else [pytest.mark.full]
        )
        for a in CAUSAL
        for n, e in EVERY.items()
        if e.length_dependent
    ],
)
def test_length_dependent_encodings_still_run_when_compiled(architecture: str, name: str) -> None:
    """Without fullgraph: their table is chosen by a length that is read back."""
    model = fresh(architecture, name)
    compiled = torch.compile(model, backend="eager")
    for length in (12, 24):
        assert_equal(logits(compiled, tokens(length)), logits(model, tokens(length)))
