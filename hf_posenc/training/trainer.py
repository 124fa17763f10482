"""transformers' Trainer with what long contexts lack: a loss without whole logits, and endings that lose nothing."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_posenc.data.dataset import Curriculum
from hf_posenc.training.loss import loss_instead_of_logits, output_layer, shift

logger = logging.getLogger(__name__)


class NonFiniteLossError(RuntimeError):
    """The loss became NaN or infinite. The message names the step, the documents, and where the state was saved."""


class LongContextTrainer(Trainer):
    """Trainer whose loss is made in slices of the text, so that memory does not grow with length × vocabulary.

    The loss is the model's own to rounding, with the same label shift and the same division by the targets of all
    accumulated batches. Models without a plain output layer keep their own loss.

    Args:
        slice_length: tokens whose logits exist at the same time.
        document_names: ids of the documents in a sample, by its number (for the report of a loss that is not finite).
        curriculum: positions of training samples that reach further with every step.
        measure: what `evaluate` calls instead of the evaluation loop; takes the model, gives metrics by name.
    """

    def __init__(
        self,
        *args: Any,
        slice_length: int = 512,
        document_names: Callable[[int], list[str]] | None = None,
        measure: Callable[[nn.Module], dict[str, float]] | None = None,
        curriculum: Curriculum | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.slice_length = slice_length
        self.document_names = document_names
        self.measure = measure
        self.curriculum = curriculum
        found = output_layer(self.accelerator.unwrap_model(self.model))
        if (
            found is not None
        ):  # transformers 5.24 misses models without a `loss_type`, GPT-2 for one, and counts a target too many
            self._loss_shifts_labels = found[1]
        self._sliced: bool | None = None  # None until the first batch has shown whether the model's logits pass through
        self._sample_ids: list[int] = []

    # ------------------------------------------------------------------ the loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The mean loss of a batch, without whole logits wherever nobody asks for them."""
        inputs = dict(inputs)
        samples = inputs.pop("sample_ids", None)
        if model.training and samples is not None:
            self._sample_ids += samples.reshape(-1).tolist()
            if self.curriculum is not None:
                step = self.state.global_step
                inputs["position_ids"] = self.curriculum.positions(samples, inputs["attention_mask"], step)
        if "position_ids" in inputs and "attention_mask" not in inputs:
            inputs["use_cache"] = False  # transformers tells packed documents apart only where there is no cache
        plain = self.accelerator.unwrap_model(self.model)
        found = output_layer(plain) if "labels" in inputs and self._may_slice(return_outputs) else None
        if found is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        head, shifted = found
        labels, targets = inputs.pop("labels"), inputs.pop("shift_labels", None)
        if targets is None:
            targets = shift(labels) if shifted else labels
        with loss_instead_of_logits(head, targets, self.slice_length) as captured:
            outputs = model(**inputs)
        total = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if self._sliced is None:
            self._sliced = self._passed_through(total, captured.loss)
            if not self._sliced:
                logger.warning(
                    "%s changes its logits after the output layer: its own loss is used.", type(plain).__name__
                )
                inputs["labels"] = labels
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        items = num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum()
        loss = total / torch.as_tensor(items, device=total.device).clamp(min=1)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, {"loss": loss}) if return_outputs else loss

    def _may_slice(self, return_outputs: bool) -> bool:
        """False where logits are wanted whole, or where hooks on the output layer do not hold."""
        wants_logits = return_outputs and not self.args.prediction_loss_only
        return not (
            self._sliced is False
            or wants_logits
            or self.label_smoother is not None
            or self.compute_loss_func is not None
            or not self.model_accepts_loss_kwargs  # the Trainer would scale the loss for accumulation once more
            or self.args.use_liger_kernel
            or self.args.torch_compile
            or self.args.n_gpu > 1
            or self.get_tp_size() > 1
            or self.get_sp_size() > 1
        )

    @staticmethod
    def _passed_through(total: torch.Tensor, loss: torch.Tensor | None) -> bool:
        """True where what came out as logits is what the output layer answered (no cap, no scale, no other layer)."""
        same = loss is not None and total.shape == loss.shape
        return same and torch.equal(total.detach().nan_to_num(), loss.detach().nan_to_num())  # type: ignore[union-attr]

    # ------------------------------------------------------------------ a loss that is not finite

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One forward and backward pass.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; the weights of before this step have been saved.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        known = loss.detach().float().reshape(1)
        known = torch.cat([(~torch.isfinite(known)).float(), known])
        if self.accelerator.num_processes > 1:  # all stop together, or the others would wait for ever
            known = self.accelerator.reduce(known.to(self.args.device), reduction="mean")
        bad, mean = known.tolist()
        if bad > 0:
            self._stop(float(loss))
        self._losses["sum"] += mean
        if self.accelerator.sync_gradients:
            self._losses["steps"] += 1
            self._sample_ids.clear()
        return loss

    @property
    def _losses(self) -> dict[str, float]:
        """Sum of the losses of so many steps, kept in the state, so that checkpoints hold it and bring it back."""
        kept: Any = self.state.stateful_callbacks
        return kept.setdefault("LongContextTrainer", {"sum": 0.0, "steps": 0})  # type: ignore[no-any-return]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the mean loss of all steps at the end: the Trainer's leaves out those before a resume."""
        if "train_loss" in logs and self._losses["steps"]:
            logs["train_loss"] = self._losses["sum"] / self._losses["steps"]
        super().log(logs, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch; none where a resumed run has taken all its steps, after which the Trainer would take one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _stop(self, loss: float) -> None:
        step = self.state.global_step + 1
        samples = {i: self.document_names(i) if self.document_names is not None else [] for i in self._sample_ids}
        folder = Path(self.args.output_dir or "") / f"nonfinite-step-{step}"
        self.save_model(str(folder), _internal_call=True)
        folder.mkdir(parents=True, exist_ok=True)
        report = {"step": step, "loss": str(loss), "samples": samples, "learning_rate": self._get_learning_rate()}
        path = folder / f"batch-rank{self.args.process_index}.json"
        path.write_text(json.dumps(report, indent=2), encoding="utf-8")
        names = sorted({name for documents in samples.values() for name in documents})
        raise NonFiniteLossError(
            f"The loss is {loss} at step {step}, in a batch of these documents: {', '.join(names) or sorted(samples)}. "
            f"The weights from before this step and the batch are in {str(folder)!r}. Try a lower learning rate, a "
            "longer warm-up or bf16 instead of fp16; or look at the documents."
        )

    # ------------------------------------------------------------------ checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A checkpoint, or nothing: one that cannot be written whole is removed, and the last whole one is named."""
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:
            if not _is_writing_error(error):
                raise
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            last = last_checkpoint(folder.parent)
            free = shutil.disk_usage(folder.parent).free / 2**20
            raise OSError(
                f"The checkpoint {str(folder)!r} could not be written ({error}); {free:,.0f} MB are free there. "
                f"The last whole checkpoint is {str(last) if last else 'none'}. "
                "Make room and run the same command again."
            ) from error

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """After a checkpoint was loaded to go on from.

        Raises:
            ValueError: it lacks weights, which would go on from where the run began. The Trainer only warns of it.
        """
        state = self.accelerator.unwrap_model(self.model).state_dict(keep_vars=True)
        lacking = set(load_result.missing_keys)
        there = {id(value) for name, value in state.items() if name not in lacking}
        lost = sorted(name for name in lacking & state.keys() if id(state[name]) not in there)  # tied ones are there
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            raise ValueError(f"The checkpoint cannot be resumed from: it lacks {', '.join(lost[:3])}{more}.")
        super()._issue_warnings_after_load(load_result)

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of the model as it is: those of `measure` where there is one, else the mean loss."""
        if self.measure is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        model: Any = self.model
        was_training = model.training
        model.eval()
        try:
            measured = self.measure(self.model_wrapped)
        finally:
            model.train(was_training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in a folder; None where there is none. A killed run may leave a broken one."""
    found = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.rpartition("-")[2]
        if number.isdigit() and is_whole(path):
            found.append((int(number), path))
    return max(found)[1] if found else None


def is_whole(checkpoint: Path) -> bool:
    """True where the file that the Trainer writes last is there and can be read."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


def _is_writing_error(error: BaseException) -> bool:
    """True for a full disk or a lost folder, however the library that met it says so."""
    words = ("no space", "i/o error", "write", "disk", "file")
    named = type(error).__name__ in ("SafetensorError", "RuntimeError") and any(w in str(error).lower() for w in words)
    return isinstance(error, OSError) or named
