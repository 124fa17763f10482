"""A patched model on a GPU gives what it gives on a CPU, by other ways through the same code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encodings_under_test import CAUSAL, ENCODINGS, assert_equal, fresh, in_pieces
from torch import Tensor

from hf_posenc.evaluation import perplexity
from hf_posenc.training.loss import sliced_cross_entropy
from models import ARCHITECTURES, tokens

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BOTH = pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
EACH = pytest.mark.parametrize("name", ENCODINGS)


def pair(architecture: str, name: str) -> tuple[Any, Any]:
    """The same model on the CPU and on the GPU, without dropout, its heads as wide as kernels want them."""
    width = 32 if name == "longrope" else 128  # whose factors are for the tiny model's heads
    here, there = (fresh(architecture, name, hidden_size=width).eval() for _ in range(2))
    there.load_state_dict(here.state_dict())
    return here, there.to(DEVICE)


def padded(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return mask


@BOTH
@EACH
@pytest.mark.parametrize("how", ["plain", "padded"])
def test_logits_and_gradients(architecture: str, name: str, how: str) -> None:
    here, there = pair(architecture, name)
    ids = tokens(30, batch=2)
    mask = padded(ids) if how == "padded" else torch.ones_like(ids)
    found = []
    for model, device in ((here, "cpu"), (there, DEVICE)):
        out = model(ids.to(device), attention_mask=mask.to(device)).logits * mask.to(device)[..., None]
        out.square().mean().backward()
        found.append([out.cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    for cpu, gpu in zip(*found, strict=True):
        assert_equal(gpu, cpu, 1e-3 * max(1.0, float(cpu.abs().max())))


@BOTH
@pytest.mark.parametrize("name", ["alibi", "sandwich", "t5", "kerple", "fire"])
def test_long_enough_for_every_way_of_attention(architecture: str, name: str) -> None:
    """Longer than a block: columns, flex attention, or blocks."""
    here, there = pair(architecture, name)
    table = getattr(here.config, "max_position_embeddings", 32)
    ids = tokens(600, batch=2)
    assert ids.shape[1] > table
    mask = padded(ids)
    with torch.no_grad():
        cpu, gpu = (m(ids.to(d), attention_mask=mask.to(d)).logits.cpu() for m, d in ((here, "cpu"), (there, DEVICE)))
    real = mask[..., None]
    assert_equal(gpu * real, cpu * real, 2e-3 * float(cpu.abs().max()))


@pytest.mark.parametrize("architecture", CAUSAL)
@EACH
def test_decoding(architecture: str, name: str) -> None:
    here, there = pair(architecture, name)
    ids = tokens(24, batch=2)
    whole = in_pieces(here, ids, [24])
    assert_equal(in_pieces(there, ids.to(DEVICE), [10, 1, 1, 12]).cpu(), whole, 1e-3 * float(whole.abs().max()))


@EACH
def test_bfloat16(name: str) -> None:
    here, there = pair("llama", name)
    ids = tokens(30)
    with torch.no_grad():
        cpu, gpu = here(ids).logits, there.to(torch.bfloat16)(ids.to(DEVICE)).logits.float().cpu()
    assert (gpu - cpu).abs().mean() < 0.15 * cpu.abs().mean()


def test_sliced_loss() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 97).to(DEVICE)
    hidden = torch.randn(50, 16, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, 97, (50,), device=DEVICE)
    whole = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="sum")
    right = torch.autograd.grad(whole, [hidden, head.weight])
    ours = torch.autograd.grad(sliced_cross_entropy(hidden, targets, head, 7), [hidden, head.weight])
    for mine, theirs in zip(ours, right, strict=True):
        assert_equal(mine, theirs, 1e-4)


def test_perplexity() -> None:
    here, there = pair("llama", "t5")
    ids = tokens(100)[0]
    ours, theirs = (perplexity(model, ids, 32, 8) for model in (there, here))
    assert ours.nll == pytest.approx(theirs.nll, rel=1e-4)
