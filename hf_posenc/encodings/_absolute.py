"""What absolute encodings share: how a position vector is scaled and fused with the vector of the token.

Notation: x is the token's vector and p the position's, both [batch, length, hidden].
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.encoding import Encoding, EncodingError, ModelShape, Site, Weights, check_choice, check_number
from hf_posenc.encodings._angles import wave_angles


class Absolute(Encoding):
    """An encoding that fuses one vector for each position with the token vectors.

    Weights:
        scale: [1], the factor on every position vector, where it is learned or was matched to a native table.
        fuse: [hidden, 2 hidden], with `fusion="concat"`.
    """

    site: ClassVar[Site] = "embedding"

    # Fields of the subclasses, which put them last.
    scale: float | str
    learn_scale: bool
    fusion: str

    def _check_fusion(self) -> None:
        if self.scale != "match":
            if isinstance(self.scale, str):
                raise EncodingError(f"{self.name}: scale={self.scale!r} is not allowed; give a number or 'match'.")
            check_number(self, "scale", low=0, strict=True)
        check_choice(self, "learn_scale", (True, False))
        check_choice(self, "fusion", ("add", "concat"))

    def _vectors(self, positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        """Unscaled position vectors [batch, length, hidden], float32."""
        raise NotImplementedError

    def _fusion_weights(self, rows: Tensor, shape: ModelShape, native_table: Tensor | None) -> Weights:
        """Weights `scale` and `fuse`. `rows` [positions, hidden] are the unscaled vectors whose norm is to match."""
        weights: Weights = {}
        if self.scale == "match":
            if native_table is None:
                raise EncodingError(
                    f"{self.name}: scale='match' takes the size of the table that is replaced; this model has none. "
                    "Give scale= a number (the row norm wanted, divided by sqrt(hidden / 2) for a sinusoid)."
                )
            weights["scale"] = (_row_norm(native_table) / _row_norm(rows).clamp(min=1e-12)).reshape(1)
        elif self.learn_scale:
            weights["scale"] = torch.tensor([float(self.scale)], dtype=torch.float32, device="cpu")
        if self.fusion == "concat":
            identity = torch.eye(shape.hidden, dtype=torch.float32, device="cpu")
            weights["fuse"] = torch.cat([identity, identity], dim=1)
        return weights

    def frozen_weights(self) -> frozenset[str]:
        # A matched scale cannot be worked out again once the native table is gone, so it is saved even if it is fixed.
        return frozenset({"scale"}) if self.scale == "match" and not self.learn_scale else frozenset()

    def embed(self, x: Tensor, positions: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
        # Autocast would round p, and hand back a residual stream of another dtype than x.
        with torch.autocast(x.device.type, enabled=False):
            p = self._vectors(positions, weights, shape)
            if "scale" in weights:
                p = p * weights["scale"].float()
            elif self.scale != 1.0:
                p = p * float(self.scale)
            p = p.to(x.dtype)
            if self.fusion == "add":
                return x + p
            both = torch.cat([x, p.expand_as(x)], dim=-1)
            return functional.linear(both, weights["fuse"].to(x.dtype))


def sinusoid(positions: Tensor, base: float, width: int) -> Tensor:
    """Sinusoidal vectors: column 2i is sin(position / base**(2i / width)), column 2i + 1 its cos.

    Args:
        positions: [...], integer.
        base: see `Sinusoidal.base`.
        width: any, odd too (the last column is then a sin).

    Returns:
        [..., width], float32.
    """
    angles = wave_angles(positions, base, width)
    pairs = torch.stack([angles.sin().float(), angles.cos().float()], dim=-1)
    return pairs.flatten(-2)[..., :width]


def native_rows(table: Tensor) -> Tensor:
    """A native table as float32 on the CPU; one on the meta device has no values and stays there."""
    table = table.detach().float()
    return table if table.is_meta else table.cpu()


def _row_norm(table: Tensor) -> Tensor:
    return native_rows(table).norm(dim=-1).mean()
