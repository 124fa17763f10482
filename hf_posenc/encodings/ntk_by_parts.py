"""NTK-by-parts: pairs that turn often within the trained length are kept, those that never complete a turn are divided.

bloc97 2023; Peng et al. 2023, "YaRN" (arXiv 2309.00071), section 3.2. Also here: the ramp between the
two kinds of pairs, which YaRN shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.encoding import EncodingError, ModelShape, check_number
from hf_posenc.encodings.rope import Scaling, inverse_powers


@dataclass(frozen=True)
class NTKByParts(Scaling):
    """A blend, pair by pair, of the plain frequency and the frequency divided by `factor`."""

    name: ClassVar[str] = "ntk_by_parts"
    rope_type: ClassVar[str | None] = None

    beta_fast: float = 32
    """Turns within `original_context_length` from which on a pair is kept (default: section 3.2 of the paper)."""
    beta_slow: float = 1
    """Turns within `original_context_length` up to which a pair is divided by `factor` (default: section 3.2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        return blended_frequencies(self, rotary_dim, self.beta_fast, self.beta_slow, truncate=True)

    def _rope_parameters(self, shape: ModelShape) -> dict[str, Any]:
        # Stock has no name for it, but opens any fixed table as a LongRoPE whose two lists are the same.
        rotary_dim = self.rotary_dim(shape)
        divisors = (inverse_powers(self._known("theta"), rotary_dim) / self.frequencies(rotary_dim)).tolist()
        return {
            **super()._rope_parameters(shape),
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": self._known("original_context_length"),
        }


def check_betas(encoding: Scaling) -> None:
    """Raise unless `beta_fast` and `beta_slow` are positive numbers, the fast one not below the slow one."""
    check_number(encoding, "beta_fast", low=0, strict=True)
    check_number(encoding, "beta_slow", low=0, strict=True)
    fast, slow = encoding.beta_fast, encoding.beta_slow  # type: ignore[attr-defined]
    if fast < slow:
        raise EncodingError(
            f"{encoding.name}: beta_fast={fast!r} with beta_slow={slow!r} is not allowed; beta_fast must be at "
            "least as large (turns within the trained length)."
        )


def blended_frequencies(
    encoding: Scaling, rotary_dim: int, beta_fast: float, beta_slow: float, truncate: bool
) -> Tensor:
    """Frequencies of NTK-by-parts and YaRN: kept where pairs turn `beta_fast` times, divided where `beta_slow` times.

    Args:
        truncate: widen the ramp to whole pairs, as the paper's own code does.

    Returns:
        [rotary_dim / 2], radians per token, float64.
    """
    theta, factor, original = (encoding._known(field) for field in ("theta", "factor", "original_context_length"))

    def pair_that_turns(times: float) -> float:
        # Solves original * theta**(-2i / rotary_dim) = 2 pi times for the index i of the pair.
        return rotary_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper clip is at rotary_dim - 1, not at the last pair: so in the paper's code, and every trained checkpoint
    # has it.
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
    divided = ((pairs - first) / (last - first)).clamp(0, 1)
    plain = inverse_powers(theta, rotary_dim)
    return plain / factor * divided + plain * (1 - divided)
