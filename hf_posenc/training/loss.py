"""The loss of a long text without its logits: they are made slice by slice, and their gradient with them.

Whole logits of 16,384 tokens and 49,152 words take 3.2 GB in float32, and their gradient as much again. A slice of 512
tokens takes 100 MB, and as its gradient is computed at once, nothing is kept of it and nothing is computed twice.

The loss has to be computed while the wrapped model's forward runs (under FSDP and DeepSpeed that is where the weights
of the output layer are whole, and only what forward returns starts their backward). So for one call two hooks stand on
the output layer: one hands it no tokens, the other answers with the loss in place of the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100


class _SlicedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of `head(hidden)`, with its gradient computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: nn.Module, slice_length: int, *weights: Tensor
    ) -> Tensor:
        """`hidden` [tokens, width] and `targets` [tokens] to a float32 scalar. `weights` are those of `head`."""
        want_hidden, wanted = hidden.requires_grad, [weight for weight in weights if weight.requires_grad]
        hidden_gradient = torch.empty_like(hidden) if want_hidden else None
        # Summed over slices in float32: in bfloat16 each addition would round away what a late slice brings.
        sums = [torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in wanted]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), slice_length):
            part = slice(start, start + slice_length)
            with torch.enable_grad():
                inputs = hidden[part].detach().requires_grad_(want_hidden)
                loss = _slice_loss(inputs, targets[part], head)
            total += loss.detach().to(total.dtype)
            sources = ([inputs] if want_hidden else []) + wanted
            # A weight may be unused in this call (an adapter that is switched off).
            gradients = list(torch.autograd.grad(loss, sources, allow_unused=True))
            if hidden_gradient is not None:
                hidden_gradient[part] = gradients.pop(0)
            for summed, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    summed += gradient
        ctx.gradients = [hidden_gradient, *sums]
        ctx.wanted = [weight.requires_grad for weight in weights]
        ctx.dtypes = [weight.dtype for weight in weights]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Every stored gradient times the one number that arrives here (in float32, then in the input's dtype)."""
        (outer,) = gradients
        hidden_gradient, *sums = ctx.gradients
        ctx.gradients = None
        if hidden_gradient is not None:
            for part in hidden_gradient.split(
                4096
            ):  # in float32: a factor rounded to bfloat16 would scale every gradient
                part.copy_(part.to(outer.dtype) * outer)
        rest = iter(sums)
        of_weights = [
            next(rest).mul_(outer).to(dtype) if wanted else None
            for wanted, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
        ]
        return hidden_gradient, None, None, None, *of_weights


def _slice_loss(hidden: Tensor, targets: Tensor, head: nn.Module) -> Tensor:
    # `forward`, not the module itself: its hooks are running already, around all the slices.
    logits = head.forward(hidden)
    return functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum"
    )


def sliced_cross_entropy(hidden: Tensor, targets: Tensor, head: nn.Module, slice_length: int = 512) -> Tensor:
    """Sum over tokens of the cross entropy between `head(hidden)` and `targets`, a float32 scalar.

    Args:
        hidden: what goes into the output layer, [..., width].
        targets: the right word of each, [...], already shifted; -100 where there is none.
        head: the output layer, called a slice at a time; its weights get their gradients.
        slice_length: tokens in a slice. Memory grows with it, speed hardly.
    """
    if slice_length < 1:
        raise ValueError(f"slice_length={slice_length} is not allowed; it must be at least 1.")
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(hidden.device)
    kept = targets != IGNORED
    if not bool(kept.all()):  # masked words and chat answers are few: the others never reach the output layer
        flat, targets = flat[kept], targets[kept]
    weights = list(head.parameters())
    if len(flat) == 0:
        # No target, but every process still needs a backward pass through everything.
        return hidden.float().sum() * 0.0 + sum(
            (weight.float().sum() * 0.0 for weight in weights), start=hidden.new_zeros(())
        )
    if not torch.is_grad_enabled() or not (flat.requires_grad or any(weight.requires_grad for weight in weights)):
        pairs = zip(flat.split(slice_length), targets.split(slice_length), strict=True)
        return torch.stack([_slice_loss(*pair, head).float() for pair in pairs]).sum()
    return _SlicedCrossEntropy.apply(flat, targets, head, slice_length, *weights)


@dataclass
class Captured:
    """What the hooks saw during one call."""

    loss: Tensor | None = None
    """Sum of the cross entropies; None where the output layer was not called."""


@contextmanager
def loss_instead_of_logits(head: nn.Module, targets: Tensor, slice_length: int) -> Iterator[Captured]:
    """While this holds, one call of the model that owns `head` answers with the summed loss as its logits."""
    captured = Captured()
    hidden: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        hidden.append(args[0])
        return (args[0][:, :0],)

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        captured.loss = sliced_cross_entropy(hidden.pop(), targets, module, slice_length)
        return captured.loss

    # First in line both ways: sharded weights are gathered before this and given back after it.
    handles = [head.register_forward_pre_hook(before, prepend=True), head.register_forward_hook(after, prepend=True)]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def output_layer(model: nn.Module) -> tuple[nn.Module, bool] | None:
    """The layer that makes a language model's logits, and whether its labels are shifted; None where it has none.

    None also where the logits are not all there is to the loss: experts with a balancing loss, or a model that is not
    a plain language model.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss

    plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = getattr(plain, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False) or getattr(config, "output_router_logits", False):
        return None
    kind = getattr(plain, "loss_type", None)
    if kind is None and type(plain).__name__.endswith(("LMHeadModel", "ForCausalLM")):
        kind = "ForCausalLM"  # what transformers falls back to, for instance for GPT-2
    loss = LOSS_MAPPING.get(str(kind))
    find = getattr(plain, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None or loss not in (ForCausalLMLoss, ForMaskedLMLoss):
        return None
    if "labels" not in inspect.signature(plain.forward).parameters:
        return None
    return head, loss is ForCausalLMLoss


def shift(labels: Tensor) -> Tensor:
    """The targets of a causal model: the label of the next token; the last has none. As transformers does it."""
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
