"""The attention functions of a patched model: every way through them against float64, their memory, their gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from encodings_under_test import CACHE
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import hf_posenc
from hf_posenc import attention, blockwise
from hf_posenc.attention import biased_sdpa
from hf_posenc.encodings.fire import CHUNK, Fire
from hf_posenc.positions import Call
from hf_posenc.sites import HERE
from models import ARCHITECTURES, tokens

HEADS, WIDTH = 4, 8
SCORES = ("alibi", "t5", "kerple", "kerple:variant=power", "fire", "sandwich")
LENGTH = 150
"""More than two blocks of 64."""


def owner_of(architecture: str, encoding: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return hf_posenc.patch(ARCHITECTURES[architecture](**config), encoding).base_model.hf_posenc


def inputs(length: int, key_heads: int = HEADS, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, length, WIDTH) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def ours(owner: Any, parts: list[Tensor], positions: Tensor, hidden: Tensor | None = None, **options: Any) -> Tensor:
    module = torch.nn.Module()
    module.is_causal = owner.plan.shape.causal
    module.eval()
    call: Any = {HERE: Call(owner.plan, owner(positions), positions, positions, hidden, None, None)}
    out, weights = biased_sdpa(module, *parts, options.pop("mask", None), **options, **call)
    assert weights is None
    return out.transpose(1, 2)


def expected(owner: Any, parts: list[Tensor], positions: Tensor, hidden: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(d) + bias) v, in float64 apart from the bias."""
    query, key, value = (part.double().repeat_interleave(HEADS // part.shape[1], dim=1) for part in parts)
    shape = owner.plan.shape
    bias = owner.plan.resolved.bias(positions, positions, owner(positions), shape).double()
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
    length = scores.shape[-1]
    if shape.causal:
        future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -1e300)
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None, None, :], -1e300)
    return torch.softmax(scores, dim=-1) @ value


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    a, b = a.detach().double(), b.detach().double()
    difference = (a - b).abs().max() / max(1.0, float(b.abs().max()))
    assert difference <= tolerance, f"differs by {float(difference):.2e}, allowed {tolerance:.0e}"


def numbered(hidden: Tensor) -> Tensor:
    return ((~hidden).long().cumsum(-1) - 1).clamp(min=0)


COUNTED = torch.arange(LENGTH)[None]
LEFT = torch.zeros(2, LENGTH, dtype=torch.bool)
LEFT[1, :70] = True
RIGHT = LEFT.flip(1)
HOLE = torch.zeros(2, LENGTH, dtype=torch.bool)
HOLE[1, 60:75] = True
ARRIVALS: dict[str, tuple[Tensor, Tensor | None]] = {
    "plain": (COUNTED, None),
    "from 1000": (COUNTED + 1000, None),
    "skipped": (COUNTED + (COUNTED > 40) * 77, None),
    "rows apart": (torch.cat([COUNTED, COUNTED * 2]), None),
    "left": (numbered(LEFT), LEFT),
    "right": (numbered(RIGHT), RIGHT),
    "hole": (numbered(HOLE), HOLE),
}
"""Positions of the tokens, and which keys a mask hides."""


@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("architecture", ["llama", "bert"])
@pytest.mark.parametrize("encoding", SCORES)
def test_values_and_gradients_against_float64(encoding: str, architecture: str, arrival: str) -> None:
    owner = owner_of(architecture, encoding)
    positions, hidden = ARRIVALS[arrival]
    parts = inputs(LENGTH, key_heads=owner.plan.shape.key_heads)
    real = torch.ones(2, LENGTH, dtype=torch.bool) if hidden is None else ~hidden
    weigh = torch.randn(2, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2)) * real[:, None, :, None]
    learned = list(owner.parameters())
    found = []
    for attend in (ours, expected):
        out = attend(owner, parts, positions, hidden)
        gradients = torch.autograd.grad((out * weigh.to(out.dtype)).sum(), [*parts, *learned])
        found.append([out * real[:, None, :, None], *gradients])
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs, 3e-5)


def way(
    monkeypatch: pytest.MonkeyPatch, owner: Any, positions: Tensor, hidden: Tensor | None = None, **options: Any
) -> str:
    """Which way a call takes."""
    taken = []

    def spy(module: Any, name: str, label: Any) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: (taken.append(label(args)), real(*args, **kwargs))[1])

    spy(blockwise, "attend", lambda args: type(args[3]).__name__)
    spy(attention, "_widened", lambda args: "columns")
    spy(attention, "_in_blocks", lambda args: "blocks")
    with torch.no_grad():
        ours(owner, inputs(LENGTH, key_heads=owner.plan.shape.key_heads), positions, hidden, **options)
    (only,) = taken
    return only


@pytest.mark.parametrize(
    ("encoding", "architecture", "arrival", "expected_way"),
    [
        ("alibi", "llama", "plain", "Diagonals"),
        ("alibi", "bert", "plain", "Diagonals"),
        ("alibi", "llama", "left", "Diagonals"),
        ("t5", "llama", "right", "Diagonals"),
        ("sandwich", "bert", "from 1000", "Diagonals"),
        ("alibi", "llama", "skipped", "columns"),
        ("alibi", "llama", "hole", "columns"),
        ("alibi", "bert", "skipped", "Computed"),
        ("t5", "llama", "rows apart", "Computed"),
        ("fire", "llama", "plain", "Computed"),
    ],
)
def test_each_case_takes_the_cheapest_way(
    encoding: str, architecture: str, arrival: str, expected_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are the same either way; the costs are not."""
    assert way(monkeypatch, owner_of(architecture, encoding), *ARRIVALS[arrival]) == expected_way


def test_a_mask_and_dropout_take_ways_that_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    assert way(monkeypatch, owner_of("llama", "t5"), COUNTED, mask=seen) == "blocks"
    monkeypatch.undo()
    assert way(monkeypatch, owner_of("llama", "t5"), COUNTED, dropout=0.5) == "blocks"
    monkeypatch.undo()
    assert way(monkeypatch, owner_of("llama", "alibi"), COUNTED, mask=seen) == "columns"


@pytest.mark.parametrize("encoding", SCORES)
def test_a_mask_equals_what_causal_attention_sees(encoding: str) -> None:
    owner = owner_of("llama", encoding)
    parts = inputs(LENGTH, key_heads=owner.plan.shape.key_heads)
    seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    close(ours(owner, parts, COUNTED, mask=seen), ours(owner, parts, COUNTED), 2e-5)


@pytest.mark.parametrize("architecture", ["llama", "bert"])
@pytest.mark.parametrize("encoding", ["alibi", "t5", "fire", "sandwich"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1.5e-2), (torch.float16, 2e-3), (torch.float64, 1e-6)]
)
def test_other_dtypes(encoding: str, architecture: str, dtype: torch.dtype, tolerance: float) -> None:
    """As near to float64 of the same rounded inputs as the dtype allows, in values and gradients."""
    owner = owner_of(architecture, encoding)
    parts = inputs(LENGTH, dtype=dtype, key_heads=owner.plan.shape.key_heads)
    out = ours(owner, parts, COUNTED)
    assert out.dtype == dtype
    theirs = expected(owner, parts, COUNTED)
    close(out, theirs, tolerance)
    for mine, exact in zip(
        torch.autograd.grad(out.float().sum(), parts), torch.autograd.grad(theirs.sum(), parts), strict=True
    ):
        assert mine.dtype == dtype
        close(mine, exact, 4 * tolerance)


def test_error_at_length_is_that_of_a_float32_bias() -> None:
    """Largest slope 0.25 and 2,048 tokens: a bias of 512 beside contents of about 1."""
    owner = owner_of("gpt2", "alibi")
    positions = torch.arange(2048)[None]
    parts = [part.detach() for part in inputs(2048, batch=1)]
    exact = expected(owner, parts, positions)
    bias = owner.plan.resolved.bias(positions, positions, {}, owner.plan.shape)
    bias = bias.masked_fill(torch.ones(2048, 2048, dtype=torch.bool).triu(1), -torch.inf)
    dense = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=bias)
    mine = float((ours(owner, parts, positions).double() - exact).abs().max())
    assert mine <= 2 * float((dense.double() - exact).abs().max())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("encoding", ["t5", "fire", "alibi"])
def test_recomputed_layers_find_nothing_made_before(encoding: str, reentrant: bool) -> None:
    """Two calls that share one `Call`, as two layers do; recomputed under gradients after a pass without."""
    owner = owner_of("llama", encoding)
    module = torch.nn.Module()
    module.is_causal = True
    found = []
    for recompute in (False, True):
        parts = inputs(LENGTH)
        call: Any = {HERE: Call(owner.plan, owner(COUNTED), COUNTED, COUNTED, None, None, None)}

        def layer(x: Tensor, key: Tensor, value: Tensor, call: Any = call) -> Tensor:
            return biased_sdpa(module, x, key, value, None, **call)[0].transpose(1, 2)

        def run(x: Tensor, parts: list[Tensor] = parts, layer: Any = layer, recompute: bool = recompute) -> Tensor:
            if recompute:
                return checkpoint(layer, x, *parts[1:], use_reentrant=reentrant)  # type: ignore[no-any-return]
            return layer(x, *parts[1:])  # type: ignore[no-any-return]

        owner.zero_grad()
        run(run(parts[0])).square().sum().backward()
        found.append([part.grad for part in parts] + [copy.deepcopy(weight.grad) for weight in owner.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        assert plain is not None
        assert float(plain.abs().max()) > 0
        close(recomputed, plain, 1e-6)


def test_few_queries_share_their_bias_only_where_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of bias for all layers of a decoding step; made anew for the next step, and where it has a gradient."""
    model = hf_posenc.patch(ARCHITECTURES["llama"](attn_implementation="sdpa"), "t5")
    made = []
    real = hf_posenc.T5Bias.bias
    monkeypatch.setattr(hf_posenc.T5Bias, "bias", lambda *args: (made.append(1), real(*args))[1])
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(tokens(20), use_cache=True, **{CACHE: cache})
        made.clear()
        for _ in range(3):
            model(tokens(1), use_cache=True, **{CACHE: cache})
    assert len(made) == 3
    made.clear()
    model(tokens(4))
    assert len(made) == model.config.num_hidden_layers


def test_memory_of_a_learned_bias_does_not_grow_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a forward and backward pass has as many numbers as the scores."""
    monkeypatch.setattr(blockwise, "SCORES", 1 << 14)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().nbytes():
                sizes.append(out.untyped_storage().nbytes() // out.element_size())
            return out

    for encoding in ("alibi", "t5", "kerple", "fire"):
        owner = owner_of("llama", encoding)
        length = 1024
        parts = inputs(length, batch=1)
        with Watch():
            ours(owner, parts, torch.arange(length)[None]).sum().backward()
        assert max(sizes) < HEADS * length**2 / 8, encoding
        sizes.clear()


def test_the_network_of_fire_in_parts_is_the_network() -> None:
    """More distances than one chunk holds, against the formula written out, with every gradient."""
    encoding = Fire()
    shape = owner_of("llama", "fire").plan.shape
    torch.manual_seed(0)
    weights = {name: value.requires_grad_() for name, value in encoding.new_weights(shape, None).items()}
    positions = torch.arange(100)[None]
    assert positions.shape[1] ** 2 > CHUNK
    bias = encoding.bias(positions, positions, weights, shape)
    distance = (positions[0, :, None] - positions[0]).abs().double()
    exact = {name: value.detach().double().requires_grad_() for name, value in weights.items()}
    reach = torch.maximum(positions[0, :, None].double(), exact["L_ratio"].abs() * encoding.init_L)
    part = torch.log1p(exact["c"].abs() * distance) / torch.log1p(exact["c"].abs() * reach)
    hidden = torch.relu(part[..., None] * exact["inner"] + exact["inner_bias"])
    theirs = (hidden @ exact["outer"].t()).permute(2, 0, 1)[None]
    close(bias, theirs, 1e-6)
    weigh = torch.randn(theirs.shape)
    for mine, right in zip(
        torch.autograd.grad((bias * weigh).sum(), list(weights.values())),
        torch.autograd.grad((theirs * weigh).sum(), list(exact.values())),
        strict=True,
    ):
        close(mine, right, 1e-5)


def test_autocast_is_followed() -> None:
    """A model in float32 under autocast attends in bfloat16, as stock's does, and its weights get float32 gradients."""
    for encoding in ("alibi", "t5", "fire"):
        torch.manual_seed(0)
        model = hf_posenc.patch(ARCHITECTURES["gpt2"](attn_implementation="sdpa"), encoding)
        losses = []
        for enabled in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = model(tokens(40, batch=2), labels=tokens(40, batch=2)).loss
            model.zero_grad()
            loss.backward()
            losses.append(float(loss))
        assert losses[0] != losses[1]
        assert abs(losses[0] - losses[1]) < 2e-2
        assert all(weight.grad is None or weight.grad.dtype == torch.float32 for weight in model.parameters())
