"""In which precision angles are worked out.

An angle is a position times a frequency, in radians. Its error is the position times the rounding of the frequency: at
position 100,000 that is 0.006 rad in float32, which is why angles are taken in float64 and only sin and cos are cast.
"""

from __future__ import annotations

import torch
from torch import Tensor


def angle_dtype(device: torch.device) -> torch.dtype:
    """float64, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def wave_angles(positions: Tensor, base: float, width: int) -> Tensor:
    """Angles `position / base**(2i / width)` of the transformer's sinusoid (Vaswani et al. 2017, section 3.5).

    Args:
        positions: [...], integer.
        base: the longest wavelength is about 2 pi times it, in tokens.
        width: dimensions of a sinusoidal vector, two for each frequency.

    Returns:
        [..., ceil(width / 2)], radians, float64.
    """
    dtype = angle_dtype(positions.device)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    return positions.to(dtype).unsqueeze(-1) * torch.pow(base, -exponents)
