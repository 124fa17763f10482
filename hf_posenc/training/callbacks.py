"""What happens between the steps of a training: an orderly end when asked for one, and the fading of an encoding."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class StopOnSignal(TrainerCallback):
    """On SIGTERM (a batch system's warning): finish the step, save a checkpoint, stop. All processes stop at one step.

    The Trainer's own `enable_jit_checkpoint` decides in each process alone and may save at different steps.
    """

    def __init__(self) -> None:
        self.stopped = False
        """True once a training was ended by a signal."""
        self._asked = False
        self._previous: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start to listen; signals reach the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True
        os.write(2, b"SIGTERM: a checkpoint is saved after this step.\n")  # logging is not safe in a signal handler

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop where any process was asked to."""
        asked = self._asked
        if args.world_size > 1:
            flag = torch.tensor([float(asked)], device=args.device)
            torch.distributed.all_reduce(flag)
            asked = bool(flag.item() > 0)
        if asked:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the signal back."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)


@dataclass(frozen=True)
class Fading:
    """The weight of the native encoding over the steps: 1 up to `start`, 0 from `end` on."""

    shape: str
    """"linear" or "cosine"."""
    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Fading:
        """From `linear:1000` (steps 0 to 1000) or `cosine:200-1000`.

        Raises:
            ValueError: anything else.
        """
        shape, _, steps = text.strip().partition(":")
        start, dash, end = steps.rpartition("-")
        try:
            first, last = int(start) if dash else 0, int(end)
        except ValueError:
            first = last = -1
        if shape not in ("linear", "cosine") or not 0 <= first < last:
            raise ValueError(
                f"native_weight_schedule={text!r} is not allowed. Write SHAPE:END or SHAPE:START-END in steps, "
                "with SHAPE linear or cosine, such as 'linear:1000' or 'cosine:200-1000'."
            )
        return cls(shape, first, last)

    def weight(self, step: int) -> float:
        """Weight of the native encoding at a step, between 1 and 0."""
        done = min(max((step - self.start) / (self.end - self.start), 0.0), 1.0)
        return 1.0 - done if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class FadeNative(TrainerCallback):
    """Moves a model from its native encoding to the new one. A function of the step alone, so a resumed run agrees."""

    def __init__(self, model: Any, fading: Fading) -> None:
        self.model = model
        self.fading = fading

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the weight that a resumed run goes on with; one that had come to its end takes no further step."""
        self._set(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the weight that this step trains with."""
        self._set(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set the weight that this step has earned, so that what is evaluated and saved now goes with it."""
        self._set(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the weight beside the loss."""
        if logs is not None:
            logs["native_weight"] = self.fading.weight(state.global_step)

    def _set(self, step: int) -> None:
        from hf_posenc.patch import set_native_weight

        set_native_weight(self.model, self.fading.weight(step))
