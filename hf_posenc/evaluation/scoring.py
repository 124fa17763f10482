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
    asked. Which of the two holds is found out on a few tokens.
    """

    def __init__(self, model: nn.Module, probe: Tensor) -> None:
        """`probe`: a few token ids [length] to find out on whether the model is its two parts."""
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
        """Whether the output layer is given what the base model gives, and nothing is done to what it gives.

        Its own logits may be too small for a cap to show, or too large for a bias: the whole model is run with others
        in their place, which have to come out as they are.
        """
        assert self.base is not None and self.head is not None
        ids = probe[:8].unsqueeze(0).to(self.device)
        calls: list[tuple[Tensor, Tensor]] = []

        def exchange(_: nn.Module, given: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            ramp = torch.linspace(-1, 1, logits.numel(), device=logits.device) ** 3 * 1e4  # fits float16
            made = ramp.reshape(logits.shape).to(logits.dtype)
            made[..., 0, :] = 0  # one row in which any bias shows
            calls.append((given[0] if given else logits, made))
            return made

        handle = self.head.register_forward_hook(exchange)
        try:
            with torch.compiler.set_stance("force_eager"):  # a graph compiled now would keep the hook
                whole = logits_of(self.model, ids, 0)
        finally:
            handle.remove()
        options = _supported(self.base, attention_mask=torch.ones_like(ids), use_cache=False)
        hidden = _first_output(self.base(input_ids=ids, **options))
        if len(calls) != 1 or not isinstance(hidden, Tensor):
            return False
        given, made = calls[0]
        return torch.equal(made.float().to(whole.device), whole.float()) and _same(given, hidden.to(given.device))


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of `targets` [n] under `logits` [n, vocabulary], float32 [n].

    NaN where a logit is NaN or +inf, which is no distribution; a target of logit -inf costs inf.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    total = total.masked_fill(total == torch.inf, torch.nan)
    return total - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


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
    """The model inside DistributedDataParallel, whose forward would only cost a synchronisation.

    Raises:
        ValueError: something that is no module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={model!r} is not allowed; it must be a loaded model (a torch.nn.Module), such as"
            " hf_posenc.models.load_model gives."
        )
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
        if hasattr(model, "get_base_model"):
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


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of a few additions, which on a GPU is not always the same. NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    room = 4 * torch.finfo(a.dtype).eps
    largest = float(a.float().nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(a.float(), b.float(), rtol=room, atol=room * largest, equal_nan=True)


def _first_output(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]


def _supported(module: nn.Module, **options: Any) -> dict[str, Any]:
    """Those of `options` that the module's forward names. One that only says **kwargs gets none of them."""
    inner: Any = module
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):  # a PeftModel, whose own says **kwargs
        inner = inner.get_base_model()
    names = inspect.signature(inner.forward).parameters
    return {name: value for name, value in options.items() if name in names}
