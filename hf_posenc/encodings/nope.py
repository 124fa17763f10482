"""No positions at all: a causal model can count tokens by itself.

Haviv et al. 2022 (arXiv 2203.16634) and Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length
Generalization" (arXiv 2305.19466). In an encoder nothing then tells the order of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.encoding import Encoding, Site


@dataclass(frozen=True)
class NoPE(Encoding):
    """Silences the native encoding and puts nothing in its place."""

    name: ClassVar[str] = "nope"
    site: ClassVar[Site] = "none"
