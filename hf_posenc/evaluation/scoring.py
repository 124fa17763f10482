"""From token ids to nats per target, without ever holding more than a slice of logits.

A row of logits is as wide as the vocabulary: those of 16,384 tokens over 49,152 words are 3 GB. Only the hidden states
of the targets that are scored go through the output layer, `SLICE` of them at a time, and the log-softmax is float32.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SLICE = 1024
"""Targets whose logits are held at once."""


class TokenScorer:
    """Scores targets under one model: base model as a module (so that its hooks run), then the output layer in slices.

    Where base model + output layer is not the whole model (soft-capped logits, a transform before the output layer, a
    stub without either), the whole model is called, and asked for no more logits than are needed where it can be
    asked. Which of the two holds is found out by comparing both on a few tokens.
    """

    def __init__(self, model: nn.Module, probe: Tensor) -> None:
        """`probe`: a few token ids [length] to compare the two ways on."""
        self.model = unwrap(model)
        self.device = device_of(self.model)
        self.base, self.head = _split(self.model)
        if self.base is not None and not self._split_is_exact(probe):
            self.base = self.head = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Score the targets of a batch of windows.

        Args:
            input_ids: [batch, length], all of one length: there is no padding.
            targets: [batch, length]; the token that follows each input token, or -1 where it is not scored.

        Returns:
            Nats of each scored target, row by row, float64 on the CPU [targets].
        """
        input_ids = input_ids.to(self.device)
        scored = targets >= 0
        wanted = targets[scored]
        if self.base is not None and self.head is not None:
            hidden = _first_output(self.base(input_ids=input_ids, **_supported(self.base, use_cache=False)))
            vectors, head = hidden[scored.to(hidden.device)], self.head
        else:
            first = int(scored.any(dim=0).int().argmax())  # no logits before the first target of any row
            vectors, head = logits_of(self.model, input_ids, first)[scored[:, first:].to(self.device)], None
        pieces = []
        for start in range(0, len(wanted), SLICE):
            piece = vectors[start : start + SLICE]
            if head is not None:
                piece = head(piece.unsqueeze(0)).squeeze(0)
            goal = wanted[start : start + SLICE].to(piece.device)
            pieces.append(nats(piece, goal).double().cpu())
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float64)

    @torch.no_grad()
    def _split_is_exact(self, probe: Tensor) -> bool:
        assert self.base is not None and self.head is not None
        ids = probe[:8].unsqueeze(0).to(self.device)
        whole = logits_of(self.model, ids, 0).float()
        hidden = _first_output(self.base(input_ids=ids, **_supported(self.base, use_cache=False)))
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            return False
        try:
            parts = self.head(hidden).float().to(whole.device)
        except RuntimeError:  # another width: something stands between the two
            return False
        return parts.shape == whole.shape and bool(
            torch.allclose(parts, whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))
        )


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of `targets` [n] under `logits` [n, vocabulary], float32 [n]."""
    logits = logits.float()
    return logits.logsumexp(dim=-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and every module's own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose forward would only cost a synchronisation."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module
    return model


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its inputs; the CPU for one without weights."""
    device = getattr(model, "device", None)
    if isinstance(device, torch.device):
        return device
    weight = next(model.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


def vocabulary_of(model: nn.Module) -> int | None:
    """Rows of the input embeddings; None where the model does not tell."""
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return getattr(embeddings, "num_embeddings", None)


def _split(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """(base model, output layer) of a causal language model; (None, None) where it has no such parts."""
    if hasattr(model, "peft_config"):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            return None, None  # the virtual tokens enter in the outer forward
        if callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()  # type: ignore[operator]
    base = getattr(model, "base_model", None)
    find_head = getattr(model, "get_output_embeddings", None)
    if not isinstance(base, nn.Module) or base is model or not callable(find_head):
        return None, None
    if model._forward_hooks or model._forward_pre_hooks:  # somebody listens to, or changes, the outer forward
        return None, None
    head = find_head()
    return (base, head) if isinstance(head, nn.Module) else (None, None)


def logits_of(model: nn.Module, input_ids: Tensor, first: int) -> Tensor:
    """Logits [batch, length - first, vocabulary] of the positions from `first` on."""
    keep = input_ids.shape[1] - first
    options = _supported(
        model, attention_mask=torch.ones_like(input_ids), use_cache=False, **({"logits_to_keep": keep} if first else {})
    )
    output = model(input_ids=input_ids, **options)
    logits = output[0] if type(output) is tuple else output
    logits = logits if isinstance(logits, Tensor) else getattr(logits, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ValueError(
            f"model: the output of {type(model).__name__} has no logits of shape [batch, length, vocabulary];"
            " perplexity needs"
            " a model with a language-modelling head, such as AutoModelForCausalLM loads."
        )
    return logits[:, -keep:]


def _first_output(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]


def _supported(module: nn.Module, **options: Any) -> dict[str, Any]:
    """Those of `options` that the module's forward names. One that only says **kwargs gets none of them."""
    forward = module.get_base_model().forward if hasattr(module, "peft_config") else module.forward  # type: ignore[operator]
    names = inspect.signature(forward).parameters
    return {name: value for name, value in options.items() if name in names}
