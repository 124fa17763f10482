"""Which tokens a model is shown, and which of them it is scored on: the whole difference between published
perplexities.

A document of `n` tokens is cut into windows `(begin, end, first_target)`. The window spans the tokens `[begin, end)`,
of which at most `window` are fed to the model (the last one, if it is left over, is only predicted); the targets are
the tokens `[first_target, end)`, each predicted from the tokens of the window before it.

Two published habits are faulty and not offered: shifting the labels twice, which drops a target in each window, and
dividing by the number of tokens instead of the number of targets.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import Literal, get_args

Definition = Literal["strided", "window_means", "full_windows", "disjoint"]
DEFINITIONS: tuple[str, ...] = get_args(Definition)
Window = tuple[int, int, int]

DESCRIPTIONS = {
    "strided": "sliding windows; each target scored exactly once, with all the context that its window gives; mean"
    " over targets",
    "window_means": "the windows of 'strided'; mean over the means of the windows, so that a short window counts as"
    " much as a long one",
    "full_windows": "the windows of 'strided', each scored in full; mean over all scores, so that most targets"
    " count several times",
    "disjoint": "windows without overlap, as lm-evaluation-harness's rolling log-likelihood; each target scored"
    " exactly once",
    "pseudo": "each token masked in turn and predicted from both sides; mean over targets",
}
"""One line on each definition, for reports."""


def windows(n: int, window: int, stride: int | None = None, definition: str = "strided") -> Iterator[Window]:
    """Cut a document of `n` tokens into windows.

    For all but `disjoint`, window k begins at `k * stride`, and its targets start where those of the window before it
    ended (`full_windows`: at its own second token). The last window is shorter where `stride` does not divide what is
    left; it is never padded. A first token has no context and is no target. With `stride == window` neighbours share
    one token, because the first token of a window would have no context either.

    For `disjoint`, the first window scores tokens 1 .. window, and each further one the next `window` tokens with the
    one token before them as context; the last window is moved back so that the model sees `window` tokens there too.
    This is what lm-evaluation-harness does with `context_len=1`, its prefix token being token 0 here.

    Args:
        n: tokens in the document, at least 2.
        window: the most tokens that the model is fed at once, at least 2 (`disjoint`: 1).
        stride: tokens between the beginnings of neighbouring windows, 1 .. window (default: window // 2). Not used by
            `disjoint`.
        definition: one of `DEFINITIONS`.

    Yields:
        (begin, end, first_target), in order.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    if definition not in DEFINITIONS:
        raise ValueError(f"definition={definition!r} is not known; choose one of {', '.join(DEFINITIONS)}.")
    n = check_int("n", n, low=2, why="a document needs one token to predict from and one to predict")
    low = 1 if definition == "disjoint" else 2
    window = check_int("window", window, low=low, why="it is the number of tokens fed at once")
    if definition == "disjoint":
        yield from _disjoint(n, window)
        return
    if stride is None:
        stride = max(1, window // 2)
    stride = check_int("stride", stride, low=1, why="it is the number of tokens between windows")
    if stride > window:
        raise ValueError(
            f"stride={stride} is not allowed; it may be at most window={window}, or tokens would be skipped."
        )
    step = min(stride, window - 1)
    scored = 1  # targets below this one are done
    for begin in range(0, n, step):
        end = min(begin + window, n)
        yield begin, end, begin + 1 if definition == "full_windows" else scored
        scored = end
        if end == n:
            return


def _disjoint(n: int, window: int) -> Iterator[Window]:
    scored = 1
    while scored < n:
        end = min(scored + window, n)
        yield max(0, end - window - 1), end, scored
        scored = end


def check_int(name: str, value: object, *, low: int, why: str) -> int:
    """`value` as Python's int (numpy's numbers are integers too).

    Raises:
        ValueError: it is no integer, or below `low`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"{name}={value!r} is not allowed; it must be an integer of at least {low} ({why}).")
    return int(value)
