"""What a training will take: parameters, steps, and a rough count of memory on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import TrainingArguments

from hf_posenc.training.arguments import checkpoints_layers


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, without sharding."""

    weights: int
    gradients: int
    optimizer: int
    """Two float32 moments a trainable parameter (Adam)."""
    activations: int
    """What backward needs of one batch: about 34 bytes a token, width and layer; far less under checkpointing."""
    logits: int
    """One slice of logits with its gradient, in float32."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all) parameters; a weight that is used in two places counts once."""
    sizes = [(p.requires_grad, p.numel()) for p in model.parameters()]
    return sum(size for trains, size in sizes if trains), sum(size for _, size in sizes)


def estimate(model: nn.Module, training: TrainingArguments, length: int, loss_slice: int) -> Estimate:
    """A rough count for batches of `length` tokens a row.

    Activations after Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", eq. 2,
    without the term of whole attention scores (fused attention keeps none).
    """
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    tokens = training.per_device_train_batch_size * length
    size = 2 if training.bf16 or training.fp16 else 4
    per_layer = tokens * config.hidden_size * (34 if size == 2 else 68)
    checkpointed = checkpoints_layers(training)
    layers = config.num_hidden_layers
    activations = per_layer + layers * tokens * config.hidden_size * size if checkpointed else layers * per_layer
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Estimate(
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        gradients=sum(p.numel() * p.element_size() for p in trainable),
        optimizer=8 * sum(p.numel() for p in trainable),
        activations=activations,
        logits=2 * 4 * min(loss_slice, tokens) * config.vocab_size,
    )


def steps(training: TrainingArguments, blocks: int | None, processes: int) -> int | None:
    """Optimizer steps of a run; None where the text is streamed and so has no length."""
    if training.max_steps > 0:
        return training.max_steps
    if blocks is None:
        return None
    shares = blocks / (training.train_batch_size * processes)
    batches = math.floor(shares) if training.dataloader_drop_last else math.ceil(shares)
    return math.ceil(training.num_train_epochs * max(1, math.ceil(batches / training.gradient_accumulation_steps)))
