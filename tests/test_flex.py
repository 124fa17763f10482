"""A bias inside flex attention. On a GPU it is compiled; here the same functions and masks run in its plain steps."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from encodings_under_test import EVERY
from test_attention import ARRIVALS, COUNTED, HEADS, LENGTH, SCORES, close, expected, inputs, ours, owner_of
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hf_posenc import attention, flex

DEVICE = "cuda"
IN_FLEX = [name for name in SCORES if name != "sandwich"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Flex attention in plain steps, on the CPU and for short inputs; whether each call got a result from it."""
    results: list[bool] = []
    real = flex.attend

    def spy(*args: Any) -> Tensor | None:
        out = real(*args)
        results.append(out is not None)
        return out

    monkeypatch.setattr(flex, "DEVICES", ("cpu",))
    monkeypatch.setattr(flex, "kernel", lambda variant: flex_attention)
    monkeypatch.setattr(flex, "attend", spy)
    monkeypatch.setattr(flex, "_failed", set())
    monkeypatch.setattr(attention, "BLOCK", 64)
    return results


def frozen(architecture: str, encoding: str) -> Any:
    return owner_of(architecture, encoding).requires_grad_(False)


def given(owner: Any, length: int = LENGTH) -> list[Tensor]:
    return [part.detach() for part in inputs(length, key_heads=owner.plan.shape.key_heads)]


def compare(owner: Any, arrival: str) -> None:
    positions, hidden = ARRIVALS[arrival]
    parts = given(owner)
    real = torch.ones(2, LENGTH, dtype=torch.bool) if hidden is None else ~hidden
    with torch.no_grad():
        found, right = (attend(owner, parts, positions, hidden) for attend in (ours, expected))
    close(found * real[:, None, :, None], right * real[:, None, :, None], 3e-6)


@pytest.mark.parametrize("architecture", ["llama", "bert"])
@pytest.mark.parametrize("name", [name for name, encoding in EVERY.items() if encoding.site == "score"])
def test_score_function_is_the_bias(name: str, architecture: str) -> None:
    owner = owner_of(architecture, str(EVERY[name]))
    shape, encoding = owner.plan.shape, owner.plan.resolved
    weights = owner(COUNTED)
    at = encoding.score_function(weights, shape, torch.device("cpu"))
    if at is None:
        assert name == "sandwich"  # 64 waves for every score
        return
    queries, keys = COUNTED[:, :40] * 3 + 100, COUNTED[:, :50] * 2
    bias = encoding.bias(queries, keys, weights, shape)
    heads = torch.arange(HEADS)[:, None, None]
    close(at(queries[0, :, None], keys[0], heads), bias[0], 1e-6)


@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("architecture", ["llama", "bert"])
@pytest.mark.parametrize("encoding", IN_FLEX)
def test_values_against_float64(encoding: str, architecture: str, arrival: str, taken: list[bool]) -> None:
    compare(frozen(architecture, encoding), arrival)
    as_columns = encoding == "alibi" and architecture == "llama"
    assert taken == [True] or as_columns


@pytest.mark.parametrize(("queries", "causal"), [(256, True), (300, True), (100, True), (300, False)])
@pytest.mark.parametrize("padded", [False, True])
def test_blocks_are_those_of_the_whole_mask(queries: int, causal: bool, padded: bool) -> None:
    hidden = torch.zeros(2, queries, dtype=torch.bool)
    hidden[1, 3:5] = True  # no whole block: torch would leave that out, where we only do not see it
    found = flex.seen(queries, queries, causal, hidden if padded else None, torch.device("cpu"))
    if not causal and not padded:
        assert found is None
        return
    whole = create_block_mask(found.mask_mod, 2 if padded else None, None, queries, queries, device="cpu")
    assert torch.equal(found.to_dense(), whole.to_dense())
    assert found.seq_lengths == whole.seq_lengths
    if not padded:
        # Blocks in which all is seen are those that torch finds, apart from the last, which may not be full.
        assert torch.equal(found.full_kv_num_blocks[..., :-1], whole.full_kv_num_blocks[..., :-1])


def test_a_bias_that_trains_goes_another_way(taken: list[bool]) -> None:
    owner = owner_of("llama", "t5")
    parts = given(owner)
    out = ours(owner, parts, COUNTED)
    assert not taken
    assert out.requires_grad
    with torch.no_grad():
        close(ours(owner, parts, COUNTED), out, 1e-6)
    assert taken == [True]


@pytest.mark.parametrize("what", ["mask", "dropout", "few"])
def test_what_it_cannot_do_goes_another_way(what: str, taken: list[bool]) -> None:
    owner = frozen("llama", "t5")
    length = 50 if what == "few" else LENGTH
    options: dict[str, Any] = {"dropout": 0.5} if what == "dropout" else {}
    if what == "mask":
        options["mask"] = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    ours(owner, given(owner, length), COUNTED[:, :length], **options)
    assert not taken


def test_where_it_does_not_compile_blocks_are_taken(
    taken: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def broken(variant: Any) -> Any:
        def run(*inputs: Any) -> Tensor:
            tried.append(1)
            raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no compiler"), None)

        return run

    monkeypatch.setattr(flex, "kernel", broken)
    for _ in range(2):
        compare(frozen("bert", "kerple"), "left")
    assert taken == [False, False]
    assert len(tried) == 1, "what failed once is not tried again"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("architecture", ["llama", "bert"])
@pytest.mark.parametrize("encoding", IN_FLEX)
def test_compiled(encoding: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the CPU. Unlike the plain steps it leaves blocks out, and more variants than torch makes of one."""
    monkeypatch.setattr(flex, "DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "BLOCK", 64)
    owner = frozen(architecture, encoding)
    for arrival in ARRIVALS:
        compare(owner, arrival)
    assert not flex._failed


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "bert"])
@pytest.mark.parametrize("encoding", IN_FLEX)
def test_compiled_on_a_gpu(encoding: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and gradients of q, k and v, against float64; heads as wide as Triton's kernels want them."""
    length, width, device = 600, 32, torch.device(DEVICE)
    owner = owner_of(architecture, encoding, hidden_size=HEADS * width).requires_grad_(False).to(device)
    assert owner.plan.shape.head_dim == width
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, length, width) for heads in (HEADS, *[owner.plan.shape.key_heads] * 2)]
    parts = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    positions = torch.arange(length, device=device)[None]
    hidden = torch.zeros(2, length, dtype=torch.bool, device=device)
    hidden[1, 200:] = True
    for mask in (None, hidden):
        real = torch.ones(2, length, device=device) if mask is None else (~mask).float()
        found = []
        for attend in (ours, expected):
            out = attend(owner, parts, positions, mask) * real[:, None, :, None]
            found.append([out, *torch.autograd.grad(out.square().sum(), parts)])
        for mine, theirs in zip(*found, strict=True):
            close(mine, theirs, 5e-3)  # products in TF32
    assert not flex._failed
