"""YaRN: NTK-by-parts, and sharper attention to make up for the many more tokens that a score competes with.

Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models" (arXiv 2309.00071), sections 3.2
and 3.4 (attention temperature: sqrt(1 / t) = 0.1 ln(factor) + 1). The usual choice for fine-tuning to 4-32 times the
length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hf_posenc.encoding import EncodingError, ModelShape, check_choice, check_number
from hf_posenc.encodings.ntk_by_parts import blended_frequencies, check_betas
from hf_posenc.encodings.rope import Scaling


@dataclass(frozen=True)
class YaRN(Scaling):
    """Frequencies blended as in NTK-by-parts; cos and sin multiplied by the attention factor."""

    name: ClassVar[str] = "yarn"
    rope_type: ClassVar[str | None] = "yarn"

    beta_fast: float = 32
    """Turns within `original_context_length` from which on a pair is kept (default: section 3.2 of the paper)."""
    beta_slow: float = 1
    """Turns within `original_context_length` up to which a pair is divided by `factor` (default: section 3.2)."""
    attention_factor: float | None = None
    """Multiplies cos and sin, so scores grow by its square (default: 0.1 ln(factor) + 1, section 3.4; see `mscale`)."""
    truncate: bool = True
    """Widen the ramp between kept and divided pairs to whole pairs (default: as the paper's own code)."""
    mscale: float | None = None
    """With `mscale_all_dim`, as in DeepSeek's checkpoints: the attention factor is the quotient of 0.1 m ln(factor) + 1
    for m = `mscale` and for m = `mscale_all_dim` (default: not used; both must be given)."""
    mscale_all_dim: float | None = None
    """See `mscale`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self)
        check_number(self, "attention_factor", low=0, strict=True, optional=True)
        check_choice(self, "truncate", (True, False))
        check_number(self, "mscale", low=0, strict=True, optional=True)
        check_number(self, "mscale_all_dim", low=0, strict=True, optional=True)
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise EncodingError(
                f"yarn: mscale={self.mscale!r} with mscale_all_dim={self.mscale_all_dim!r} is not allowed; they "
                "work only as a pair. Give both or none."
            )

    def frequencies(self, rotary_dim: int, length: Tensor | None = None) -> Tensor:
        return blended_frequencies(self, rotary_dim, self.beta_fast, self.beta_slow, self.truncate)

    @classmethod
    def from_stock_form(cls, entries: dict[str, Any]) -> YaRN:
        parameters = dict(entries["rope_parameters"])
        if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):  # stock reads them only as a pair
            parameters["mscale"] = parameters["mscale_all_dim"] = None
        return super().from_stock_form({**entries, "rope_parameters": parameters})

    def _rope_parameters(self, shape: ModelShape) -> dict[str, Any]:
        optional = {
            name: getattr(self, name) for name in ("mscale", "mscale_all_dim") if getattr(self, name) is not None
        }
        return {
            **super()._rope_parameters(shape),
            "original_max_position_embeddings": self._known("original_context_length"),
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "attention_factor": self.amplitude(),
            "truncate": self.truncate,
            **optional,
        }

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        growth = 0.1 * math.log(self._known("factor"))
        if self.mscale is not None and self.mscale_all_dim is not None:
            return (self.mscale * growth + 1) / (self.mscale_all_dim * growth + 1)
        return growth + 1
