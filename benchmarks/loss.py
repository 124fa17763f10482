"""The loss of a long text: whole logits, and slices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posenc.training.loss import sliced_cross_entropy


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
