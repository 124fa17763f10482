"""What a model is said to do with positions at each site, read from its patch or, where there is none, from its config.

This is the claim. Whether the model does it is measured elsewhere, from what its attention really receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import checkpoint
from hf_posenc.architecture import Architecture, architecture_of
from hf_posenc.encoding import Encoding, ModelShape, Weights
from hf_posenc.patch import _plan_of, _shape_of, transformers_model
from hf_posenc.positions import CALL, Plan


@dataclass(frozen=True)
class Rotation:
    """A rotation of queries and keys."""

    frequencies: Tensor
    """Radians per token of each pair, float64: [pairs]."""
    amplitude: float
    """What cos and sin are multiplied with."""
    rotary_dim: int
    """How many of a head's dimensions are rotated, from the first on."""
    interleaved: bool
    """Pairs are (0, 1), (2, 3) …; otherwise (i, i + rotary_dim / 2)."""

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, length, 1, rotary_dim] of positions [batch, length], float64, as `rotate` takes them."""
        angles = positions.to("cpu", torch.float64).unsqueeze(-1) * self.frequencies
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([angles, angles], dim=-1)
        return angles.cos().unsqueeze(2) * self.amplitude, angles.sin().unsqueeze(2) * self.amplitude


@dataclass(frozen=True)
class InForce:
    """A model, and what stands at its three sites."""

    top: PreTrainedModel
    """The transformers model inside any wrapper."""
    base: PreTrainedModel
    architecture: Architecture
    shape: ModelShape
    plan: Plan | None
    """None where the model is not patched."""
    encoding: Encoding
    """As it was asked for; the native one where the model is not patched."""
    resolved: Encoding
    native: Encoding
    """What the model came with, resolved."""
    native_weight: float
    """How much of the native encoding acts beside the new one; 1 where the model is not patched."""

    @property
    def native_beside(self) -> bool:
        """True where a native encoding acts beside the one that a patch brought."""
        return self.plan is not None and self.plan.keep_native and self.native_weight > 0

    @property
    def absolute(self) -> bool:
        """True where the vector of a token depends on the number of its position."""
        return self.resolved.site == "embedding" or (self.native_beside and self.native.site == "embedding")

    @property
    def position_limit(self) -> int | None:
        """Positions that exist, where a table has only so many rows; None where any position may be used."""
        limits = []
        if self.resolved.site == "embedding":
            limits.append(self.resolved.usable_length(self.shape))
        if self.native_beside and self.native.site == "embedding":
            limits.append(self.native.usable_length(self.shape))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def usable_length(self) -> int | None:
        """Tokens up to which everything in force is meant to be used; None where nothing sets a limit."""
        limits = [self.resolved.usable_length(self.shape)]
        if self.native_beside:
            limits.append(self.native.usable_length(self.shape))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def table_runs_natively(self) -> bool:
        """True where the model's own table module supplies the encoding in force."""
        return self.resolved.site == "embedding" and (self.plan is None or self.plan.expressed)

    def weights(self, anchor: Tensor) -> Weights:
        """The live weights that the patch brought; `anchor` is any tensor on the model's device."""
        return {} if self.plan is None else getattr(self.base, CALL)(anchor)

    def rotation(self, length: int | None = None) -> Rotation | None:
        """The rotation in force; None where there is none.

        Args:
            length: tokens of the sequence, for an encoding that depends on it.
        """
        encoding: Any = self.resolved
        rotates = encoding.site == "rotary"
        native: Any = self.native if self.native_beside and self.native.site == "rotary" else None
        if not rotates and native is None:
            return None
        frequencies, amplitude = torch.zeros(1, dtype=torch.float64), 1.0
        rotary_dim, interleaved = self.shape.head_dim, False
        if rotates:
            rotary_dim, interleaved = encoding.rotary_dim(self.shape), encoding.interleaved
            lengths = torch.tensor([length]) if encoding.length_dependent and length is not None else None
            frequencies = encoding.frequencies(rotary_dim, lengths).reshape(-1).double().cpu()
            amplitude = float(encoding.amplitude())
        if native is not None:
            frequencies = frequencies + self.native_weight * native.frequencies(rotary_dim).double().cpu()
            amplitude *= float(native.amplitude())
        return Rotation(frequencies, amplitude, rotary_dim, interleaved)


def in_force(model: nn.Module) -> InForce:
    """What a model is said to do with positions.

    Raises:
        ArchitectureError: not a transformers model, or of a model type that is not registered.
        CheckpointError: a rotary type in its config that no encoding stands for.
    """
    top, base = transformers_model(model)
    architecture = architecture_of(base.config)
    plan = _plan_of(base)
    if plan is not None:
        native_weight = float(getattr(base, CALL).native_weight)
        native = plan.native.resolve(plan.shape)
        return InForce(
            top, base, architecture, plan.shape, plan, plan.encoding, plan.resolved, native, native_weight
        )  # fmt: skip
    shape = _shape_of(base, architecture)
    encoding = checkpoint.native_encoding(base.config, architecture)
    resolved = encoding.resolve(shape)
    return InForce(top, base, architecture, shape, None, encoding, resolved, resolved, 1.0)
