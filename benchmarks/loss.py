"""The loss of a long text: whole logits, and slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posenc.training.loss import loss_instead_of_logits, shift, sliced_cross_entropy


class Step:
    """Forward and backward of the output layer and its loss, by both ways."""

    def __init__(self, length: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(length, hidden).to(dtype).requires_grad_()
        self.head = nn.Linear(hidden, vocabulary, bias=False).to(dtype)
        self.targets = torch.randint(0, vocabulary, (length,))

    def whole(self) -> Tensor:
        """As transformers computes it: logits, in float32, then the loss."""
        return self._backward(functional.cross_entropy(self.head(self.hidden).float(), self.targets))

    def sliced(self) -> Tensor:
        return self._backward(sliced_cross_entropy(self.hidden, self.targets, self.head) / len(self.targets))

    def _backward(self, loss: Tensor) -> Tensor:
        self.hidden.grad = self.head.weight.grad = None
        loss.backward()
        return loss.detach()


def sliced_step(model: Any, ids: Tensor) -> Callable[[], object]:
    """Forward and backward of a whole model, as LongContextTrainer makes its loss."""
    model.train()

    def run() -> object:
        model.zero_grad()
        with loss_instead_of_logits(model.get_output_embeddings(), shift(ids), 512):
            total = model(input_ids=ids, use_cache=False).logits
        return (total / (ids.numel() - len(ids))).backward()

    return run
