"""What position contributes to a score: content and position parts, distance curves, and their pictures."""

from hf_posenc.analysis.curves import DistanceCurve, distance_curve
from hf_posenc.analysis.parts import PARTS, Decomposition, ScoreParts, decompose, score_parts
from hf_posenc.analysis.plots import plot_decomposition, plot_distance_curve
from hf_posenc.analysis.watch import NotSeenError

__all__ = [
    "Decomposition",
    "DistanceCurve",
    "NotSeenError",
    "PARTS",
    "ScoreParts",
    "decompose",
    "distance_curve",
    "plot_decomposition",
    "plot_distance_curve",
    "score_parts",
]
