"""Training: a loss without whole logits that is the model's own, and runs that come to the same however they go."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data import sentences, tiny_tokenizer
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_posenc import patch
from hf_posenc.models import load_model
from hf_posenc.patch import encoding_of, position_parameters
from hf_posenc.training import (
    Arguments,
    Fading,
    FinetuneArguments,
    LongContextTrainer,
    NonFiniteLossError,
    finetune,
    last_checkpoint,
    main,
    parse_arguments,
    sliced_cross_entropy,
)
from hf_posenc.training.arguments import make_parser
from hf_posenc.training.loss import output_layer, shift
from hf_posenc.training.merge import merge
from models import ARCHITECTURES, tiny_gpt2, tiny_llama, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21

SURE: dict[str, dict[str, float]] = {
    "llama": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
"""Fields of a config that take dropout out."""


def tiny(name: str, encoding: str | None = None) -> PreTrainedModel:
    """A tiny model without dropout, with the same new weights every time."""
    model = ARCHITECTURES[name](**SURE[name])
    torch.manual_seed(0)
    return model if encoding is None else patch(model, encoding)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found in, or left in, the user's cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file of 40 documents."""
    path = tmp_path / "text.jsonl"
    lines = [json.dumps({"id": f"doc{i}", "text": t}) for i, t in enumerate(sentences(40))]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Folder of a tiny model of a name, with a tokenizer."""

    def make(name: str, **overrides: Any) -> str:
        folder = tmp_path / name
        if not folder.exists():
            ARCHITECTURES[name](**overrides).save_pretrained(folder)
            tiny_tokenizer(encoder=name == "bert").save_pretrained(folder)
        return str(folder)

    return make


def arguments(output: Path | str, *options: str) -> Arguments:
    """Parsed arguments for a run on the CPU."""
    quiet = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--learning_rate", "1e-2"]
    return parse_arguments([*quiet, "--warmup_steps", "0", "--output_dir", str(output), *options])


# ---------------------------------------------------------------------- the loss


def _whole_loss(hidden: torch.Tensor, targets: torch.Tensor, head: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("slice_length", [1, 7, 1000])
@pytest.mark.parametrize("ignored", [False, True])
def test_sliced_loss_is_the_whole_loss(slice_length: int, ignored: bool) -> None:
    head = nn.Linear(16, 97)
    hidden = torch.randn(2, 25, 16, requires_grad=True)
    targets = tokens(25, batch=2)
    if ignored:
        targets[:, ::3] = -100
    results = []
    for loss in (_whole_loss(hidden, targets, head), sliced_cross_entropy(hidden, targets, head, slice_length)):
        gradients = torch.autograd.grad(loss / 50, [hidden, *head.parameters()])
        results.append([loss.detach(), *gradients])
    for whole, sliced in zip(*results, strict=True):
        torch.testing.assert_close(sliced, whole, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(sliced_cross_entropy(hidden, targets, head, slice_length), results[0][0])


def test_sliced_loss_in_bfloat16_is_summed_in_float32() -> None:
    """Hundreds of slices: a sum in bfloat16 would stand still long before the end."""
    head = nn.Linear(16, 97, bias=False).to(torch.bfloat16)
    hidden = torch.randn(1, 4096, 16, dtype=torch.bfloat16, requires_grad=True)
    targets = tokens(4096)
    loss = sliced_cross_entropy(hidden, targets, head, 8) / 4096
    assert loss.dtype == torch.float32
    loss.backward()
    exact = nn.Linear(16, 97, bias=False).double()
    exact.load_state_dict(head.state_dict())
    wide = hidden.detach().double().requires_grad_()
    (_whole_loss(wide, targets, exact) / 4096).backward()
    assert float(loss) == pytest.approx(float(_whole_loss(wide, targets, exact)) / 4096, rel=2e-3)
    assert exact.weight.grad is not None and head.weight.grad is not None
    difference = (head.weight.grad.double() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert float(difference) < 5e-3


def test_a_batch_without_targets_still_reaches_every_weight() -> None:
    head = nn.Linear(16, 97)
    hidden = torch.randn(1, 5, 16, requires_grad=True)
    loss = sliced_cross_entropy(hidden, torch.full((1, 5), -100), head)
    loss.backward()
    assert float(loss) == 0.0
    assert hidden.grad is not None and head.weight.grad is not None and not hidden.grad.any()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("slice_length", [5, 512])
def test_trainer_loss_is_the_models_own(tmp_path: Path, name: str, slice_length: int) -> None:
    batch = {"input_ids": tokens(20, batch=3), "labels": tokens(20, batch=3, seed=1)}
    batch["labels"][:, ::4] = -100
    theirs = tiny(name)
    outputs = theirs(**batch)
    outputs.loss.backward()
    ours = tiny(name)
    trainer = _trainer(ours, tmp_path, slice_length=slice_length)
    largest = [0]
    head = ours.get_output_embeddings()
    original = type(head).forward
    head.__class__ = type("Watched", (type(head),), {"forward": _watched(original, largest)})
    loss = trainer.compute_loss(ours.train(), batch)
    loss.backward()
    assert largest[0] <= slice_length  # whole logits were never made
    torch.testing.assert_close(loss.detach(), outputs.loss.detach(), atol=1e-6, rtol=1e-6)
    _same_gradients(ours, theirs)


def _watched(original: Callable[..., Any], largest: list[int]) -> Callable[..., Any]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        largest[0] = max(largest[0], x.shape[:-1].numel())
        return original(self, x)

    return forward


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sliced_loss_under_autocast(tmp_path: Path, name: str) -> None:
    """The cast of the output weights is shared by all slices; each must still reach the float32 weights."""
    batch = {"input_ids": tokens(20, batch=3), "labels": tokens(20, batch=3, seed=1)}
    models = []
    for sliced in (False, True):
        model = tiny(name)
        trainer = _trainer(model, tmp_path, slice_length=7, bf16=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = trainer.compute_loss(model, batch) if sliced else model(**batch).loss
        loss.backward()
        models.append((model, float(loss.detach())))
    assert trainer._sliced
    assert models[1][1] == pytest.approx(models[0][1], rel=1e-3)
    for (path, ours), theirs in zip(models[1][0].named_parameters(), models[0][0].parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, path
        assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 0.05, path


def test_logits_that_are_changed_afterwards_fall_back_to_the_models_own_loss(tmp_path: Path) -> None:
    """Gemma 2 caps its logits behind the output layer: the sliced loss would be another one."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, initializer_range=0.3,
        attn_implementation="eager",
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    batch = {"input_ids": tokens(20), "labels": tokens(20)}
    trainer = _trainer(model, tmp_path)
    with torch.no_grad():
        expected = model(**batch).loss
        for _ in range(2):
            torch.testing.assert_close(trainer.compute_loss(model, batch), expected)


def test_classifiers_have_no_output_layer_to_slice() -> None:
    from transformers import LlamaForSequenceClassification

    assert output_layer(LlamaForSequenceClassification(tiny_llama().config)) is None
    assert output_layer(tiny_gpt2()) is not None


def test_shift_is_transformers_shift() -> None:
    assert shift(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]


# ---------------------------------------------------------------------- the Trainer


def _trainer(model: PreTrainedModel, folder: Path, data: Sequence[Any] = (), **options: Any) -> LongContextTrainer:
    fields = {"learning_rate": 1e-2, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    ours = {name: options.pop(name) for name in ("slice_length", "document_names", "callbacks") if name in options}
    known = TrainingArguments.__dataclass_fields__
    if "activation_checkpointing" not in known:  # older releases call it so
        options = {name.replace("activation_", "gradient_"): value for name, value in options.items()}
    in_order = options.get("train_sampling_strategy") == "sequential"
    if "train_sampling_strategy" not in known:  # as in transformers 5.0
        options.pop("train_sampling_strategy", None)
    training = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, remove_unused_columns=False,
        prediction_loss_only=True, logging_nan_inf_filter=False, save_strategy="no", **{**fields, **options},
    )  # fmt: skip
    trainer = LongContextTrainer(model=model, args=training, train_dataset=list(data), data_collator=_stack, **ours)
    if in_order:
        trainer._get_train_sampler = SequentialSampler  # type: ignore[assignment]
    return trainer


def _stack(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}


def _samples(targets: Sequence[int], length: int = 12) -> list[dict[str, Any]]:
    """Samples with so many targets each."""
    rows = []
    for number, count in enumerate(targets):
        ids = tokens(length, seed=number)[0]
        labels = torch.full_like(ids, -100)
        labels[1 : count + 1] = ids[1 : count + 1]
        rows.append({"input_ids": ids, "labels": labels, "sample_ids": torch.tensor(number)})
    return rows


def _same_gradients(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _same_weights(one: nn.Module, other: nn.Module, atol: float = 1e-6) -> None:
    theirs = other.state_dict()
    assert one.state_dict().keys() == theirs.keys()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, theirs[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def _moved(one: nn.Module, other: nn.Module) -> float:
    """The largest change of a weight, so that equality of two runs means something."""
    return max(float((a - b).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("patched", [None, "alibi", "t5"])
def test_accumulated_batches_equal_one_batch(tmp_path: Path, name: str, patched: str | None) -> None:
    """Micro-batches with 1 to 9 targets: dividing each by its own count would be another gradient."""
    results = []
    for per_device, accumulation in ((8, 1), (1, 8), (2, 4)):
        model = tiny(name, patched)
        samples = _samples([3, 9, 1, 7, 2, 8, 5, 4])
        trainer = _trainer(
            model, tmp_path, samples, max_steps=1, per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential", logging_steps=1,
        )  # fmt: skip
        trainer.train()
        results.append((model, trainer.state.log_history[0]["loss"]))
    assert _moved(results[0][0], tiny(name, patched)) > 1e-3
    for model, loss in results[1:]:
        _same_weights(model, results[0][0])
        assert loss == pytest.approx(results[0][1], abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("encoding", ["yarn:factor=2", "t5", "alibi"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_change_nothing(tmp_path: Path, name: str, encoding: str, reentrant: bool) -> None:
    if name == "gpt2" and encoding.startswith("yarn"):
        encoding = "rope"
    models = []
    for checkpointing in (False, True):
        model = tiny(name, encoding)
        trainer = _trainer(
            model, tmp_path, _samples([9, 11]), max_steps=2, per_device_train_batch_size=1,
            activation_checkpointing=checkpointing, activation_checkpointing_kwargs={"use_reentrant": reentrant},
        )  # fmt: skip
        trainer.train()
        models.append(model)
    _same_weights(*models)
    assert _moved(models[0], tiny(name, encoding)) > 1e-3


def test_a_loss_that_is_not_finite_stops_with_the_documents_named(tmp_path: Path) -> None:
    model = tiny_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    class Poison(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                before.update({name: value.clone() for name, value in model.state_dict().items()})
                model.model.norm.weight.data[0] = math.nan
                before["model.norm.weight"] = model.model.norm.weight.data.clone()

    trainer = _trainer(
        model, tmp_path, _samples([5, 6, 7, 8]), max_steps=4, per_device_train_batch_size=2,
        train_sampling_strategy="sequential", document_names=lambda i: [f"doc{i}"], callbacks=[Poison()],
    )  # fmt: skip
    with pytest.raises(NonFiniteLossError, match=r"step 2, in a batch of these documents: doc2, doc3") as caught:
        trainer.train()
    folder = tmp_path / "nonfinite-step-2"
    assert str(folder) in str(caught.value)
    report = json.loads((folder / "batch-rank0.json").read_text(encoding="utf-8"))
    assert (report["step"], report["samples"]) == (2, {"2": ["doc2"], "3": ["doc3"]})
    kept = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in kept.state_dict().items():
        torch.testing.assert_close(value, before[name], equal_nan=True)


def test_a_checkpoint_that_cannot_be_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(
        tiny_llama(), tmp_path, _samples([5, 6, 7, 8]), max_steps=4, per_device_train_batch_size=1, save_steps=2,
    )  # fmt: skip
    trainer.args.save_strategy = "steps"
    save = trainer._save_optimizer_and_scheduler

    def full(folder: str) -> None:
        if folder.endswith("-4"):
            raise OSError(28, "No space left on device")
        save(folder)

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(OSError, match=r"checkpoint-4.*No space left.*last whole checkpoint is .*checkpoint-2"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]


def test_a_checkpoint_that_lacks_weights_is_not_resumed_from(tmp_path: Path) -> None:
    """The Trainer would go on with the weights of the beginning. What is tied to another is not lacking."""
    from safetensors.torch import load_file, save_file

    def trainer() -> LongContextTrainer:
        options = {"per_device_train_batch_size": 2, "max_steps": 2, "save_steps": 1}
        made = _trainer(tiny_gpt2(tie_word_embeddings=True), tmp_path, _samples([5, 6, 7, 8]), **options)
        made.args.save_strategy = "steps"
        return made

    trainer().train()
    path = tmp_path / "checkpoint-1" / "model.safetensors"
    weights = load_file(path)
    assert "lm_head.weight" not in weights
    trainer().train(resume_from_checkpoint=str(path.parent))
    del weights["transformer.ln_f.bias"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"cannot be resumed from: it lacks transformer\.ln_f\.bias\."):
        trainer().train(resume_from_checkpoint=str(path.parent))


def test_the_last_whole_checkpoint_is_found(tmp_path: Path) -> None:
    for step, content in ((2, '{"global_step": 2}'), (10, '{"global_step": 10}'), (12, '{"global_st')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(content, encoding="utf-8")
    (tmp_path / "checkpoint-14").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert last_checkpoint(tmp_path / "checkpoint-14") is None


# ---------------------------------------------------------------------- whole runs


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", ["--encoding", "yarn", "--context_length", "64"]),
        ("llama", ["--encoding", "ntk", "--context_length", "64", "--pose_chunks", "2", "--block_length", "16"]),
        (
            "llama",
            [
                *["--encoding", "ntk", "--context_length", "64", "--pose_chunks", "2", "--block_length", "16"],
                *["--length_curriculum", "3"],
            ],
        ),
        ("gpt2", ["--encoding", "t5", "--context_length", "64"]),
        ("gpt2", ["--encoding", "alibi", "--lora", "true"]),
        ("gpt2", ["--encoding", "learned:scale=1.5", "--context_length", "64", "--lora", "true"]),
        ("gpt2", ["--encoding", "rope", "--native_weight_schedule", "linear:4"]),
        ("bert", ["--encoding", "rope", "--context_length", "64", "--objective", "mlm"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(word.strip("-") for word in value[1::2]),
)
def test_interrupted_and_resumed_equals_uninterrupted(
    saved: Callable[..., str], text: str, tmp_path: Path, name: str, options: list[str]
) -> None:
    """4 steps against 2, SIGTERM, 2: weights, optimizer state, losses."""
    common = ["--model", saved(name), "--train_text", text, "--max_steps", "4", "--logging_steps", "1", *options]
    common += ["--save_steps", "4", "--gradient_accumulation_steps", "2", "--merge", "false"]
    if "--pose_chunks" not in options and name != "bert":
        common += ["--block_length", "32"]
    finetune(arguments(tmp_path / "whole", *common))

    before = signal.getsignal(signal.SIGTERM)
    stopped(1, arguments(tmp_path / "parts", *common))
    assert (tmp_path / "parts" / "checkpoint-2").is_dir()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "parts" / "config.json").exists()
    if any(key.endswith("LayerNorm.beta") for key in _weights(tmp_path / "parts" / "checkpoint-2")):
        with pytest.raises(ValueError, match=r"cannot be resumed from: it lacks .*LayerNorm"):
            finetune(arguments(tmp_path / "parts", *common))
        pytest.skip("transformers 5.0 saves a BERT under names that it does not read when it resumes")
    second = finetune(arguments(tmp_path / "parts", *common))
    assert not second.stopped and second.steps == 4

    states = []
    for run in ("whole", "parts"):
        checkpoint = tmp_path / run / "checkpoint-4"
        optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        history = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        weights = _weights(checkpoint)
        states.append((weights, optimizer["state"], [row["loss"] for row in history if "loss" in row]))
    (weights, state, losses), (weights2, state2, losses2) = states
    assert weights.keys() == weights2.keys() and len(losses) == len(losses2) == 4
    for key, value in weights.items():
        torch.testing.assert_close(weights2[key], value, atol=1e-6, rtol=0, msg=lambda m, k=key: f"{k}: {m}")
    for key, moments in state.items():
        for moment, value in moments.items():
            torch.testing.assert_close(state2[key][moment], value, atol=1e-6, rtol=0)
    assert losses2 == pytest.approx(losses, abs=1e-6)
    assert len(set(losses)) == 4


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = folder.glob("*.safetensors")
    return load_file(path)


class Kill(TrainerCallback):
    """SIGTERM in the step after so many."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(after: int, given: Arguments) -> None:
    """A run that SIGTERM stops after so many steps and one."""
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr("hf_posenc.training.run.LongContextTrainer", _made_with(Kill(after)))
        assert finetune(given).stopped


def _made_with(callback: TrainerCallback) -> Any:
    class Watched(LongContextTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(callback)

    return Watched


def test_checkpoints_of_an_earlier_run_are_never_gone_on_from(
    saved: Callable[..., str], text: str, tmp_path: Path
) -> None:
    """Not when the new run is interrupted too, nor do they count for --save_total_limit; but they are kept."""
    output = tmp_path / "out"
    common = ["--model", saved("llama"), "--train_text", text, "--max_steps", "5", "--save_total_limit", "1"]
    old, new = [*common, "--encoding", "ntk:factor=2"], [*common, "--encoding", "alibi"]
    stopped(3, arguments(output, *old))
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-4"]
    stopped(0, arguments(output, *new, "--resume_from_checkpoint", "false"))
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-1"]
    begun: list[int] = []

    class Begin(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(state.global_step)

    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr("hf_posenc.training.run.LongContextTrainer", _made_with(Begin()))
        finetune(arguments(output, *new))
    assert begun == [1]
    assert str(encoding_of(AutoModelForCausalLM.from_pretrained(output))) == "alibi"
    kept = output / "_earlier-1"
    assert (kept / "checkpoint-4" / "model.safetensors").is_file() and (kept / "finetune.json").is_file()
    with pytest.raises(ValueError, match=r"of a run with other settings .encoding: 'ntk:factor=2', now 'alibi'"):
        finetune(arguments(tmp_path / "new", *new, "--resume_from_checkpoint", str(kept / "checkpoint-4")))
    assert not (tmp_path / "new").exists()


def test_nothing_of_an_earlier_run_is_taken_for_the_new_ones(
    saved: Callable[..., str], text: str, tmp_path: Path
) -> None:
    """Neither a model beside a new adapter, nor an adapter beside a new model; both are kept."""
    output = tmp_path / "out"
    common = ["--model", saved("llama"), "--train_text", text, "--max_steps", "1", "--save_strategy", "no"]
    anew = ["--resume_from_checkpoint", "false"]
    finetune(arguments(output, *common, "--encoding", "ntk:factor=2"))
    first = (output / "model.safetensors").read_bytes()
    (output / ".git").mkdir()
    finetune(arguments(output, *common, "--encoding", "alibi", "--lora", "true", "--merge", "false", *anew))
    assert not (output / "model.safetensors").exists() and (output / "adapter").is_dir()
    assert (output / "_earlier-1" / "model.safetensors").read_bytes() == first
    assert (output / ".git").is_dir()
    finetune(arguments(output, *common, "--encoding", "linear:factor=2", *anew))
    assert not (output / "adapter").exists() and (output / "_earlier-2" / "adapter").is_dir()
    assert encoding_of(AutoModelForCausalLM.from_pretrained(output)).name == "linear"
    assert "ntk" in (output / "_earlier-1" / "README.md").read_text(encoding="utf-8")


def test_a_run_does_not_go_on_with_other_text(saved: Callable[..., str], text: str, tmp_path: Path) -> None:
    """Of the same name, size and time."""
    output, book = tmp_path / "out", tmp_path / "book.txt"
    book.write_text(Path(text).read_text(encoding="utf-8"), encoding="utf-8")
    given = ["--model", saved("llama"), "--train_text", str(book), "--max_steps", "3"]
    stopped(1, arguments(output, *given))
    before, times = book.read_text(encoding="utf-8"), (book.stat().st_atime, book.stat().st_mtime)
    book.write_text(before[::-1], encoding="utf-8")
    os.utime(book, times)
    with pytest.raises(ValueError, match="what --train_text holds"):
        finetune(arguments(output, *given))
    book.write_text(before, encoding="utf-8")
    finetune(arguments(output, *given))


def test_a_run_goes_on_only_with_the_options_that_it_began_with(
    saved: Callable[..., str], text: str, tmp_path: Path
) -> None:
    """Those that change what comes of a step; the others may change, and so may the way to the same batch."""
    output = tmp_path / "out"
    common = ["--model", saved("llama"), "--train_text", text, "--per_device_train_batch_size", "2"]
    given = [*common, "--max_steps", "3", "--save_steps", "3"]
    stopped(0, arguments(output, *given))
    record = (output / "finetune.json").read_text(encoding="utf-8")
    for option, value, said in (
        ("learning_rate", "1e-3", "learning_rate: 0.01, now 0.001"),
        ("seed", "7", "seed: 42, now 7"),
        ("gradient_accumulation_steps", "2", "gradient_accumulation_steps x processes: 2, now 4"),
        ("per_device_train_batch_size", "1", "gradient_accumulation_steps x processes: 2, now 1"),
        ("weight_decay", "0.1", "weight_decay: 0.0, now 0.1"),
        ("optim", "sgd", "optim: '?adamw_torch[a-z_]*'?, now 'sgd'"),
        ("lr_scheduler_type", "linear", "lr_scheduler_type: 'constant_with_warmup', now 'linear'"),
        ("warmup_steps", "3", r"warmup_steps: 0[.0]*, now 3"),
    ):
        with pytest.raises(ValueError, match=f"holds a run with other settings .*{said}"):
            finetune(arguments(output, *given, f"--{option}", value))
    assert (output / "finetune.json").read_text(encoding="utf-8") == record
    others = ["--max_steps", "4", "--logging_steps", "1", "--save_steps", "1", "--dataloader_num_workers", "1"]
    others += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"]
    assert finetune(arguments(output, *common, *others)).steps == 4


@pytest.mark.parametrize("logging_steps", ["1", "10"])
def test_the_mean_loss_is_that_of_all_steps(
    saved: Callable[..., str], text: str, tmp_path: Path, logging_steps: str
) -> None:
    common = ["--model", saved("llama"), "--train_text", text, "--max_steps", "4", "--logging_steps", logging_steps]
    common += ["--gradient_accumulation_steps", "2"]
    whole = finetune(arguments(tmp_path / "whole", *common, "--save_steps", "4")).metrics["train_loss"]
    stopped(1, arguments(tmp_path / "parts", *common))
    resumed = finetune(arguments(tmp_path / "parts", *common))
    assert resumed.metrics["train_loss"] == pytest.approx(whole, abs=1e-5)
    assert f"mean loss {whole:.4f}" in resumed.summary
    assert f"| mean training loss | {whole:.4f} |" in (tmp_path / "parts" / "README.md").read_text(encoding="utf-8")
    if logging_steps == "1":
        state = json.loads((tmp_path / "whole" / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
        assert sum(row["loss"] for row in state["log_history"] if "loss" in row) / 4 == pytest.approx(whole, abs=1e-3)


@pytest.mark.skipif(not hasattr(Trainer, "_run_epoch"), reason="transformers 5.0 takes a step before it looks")
def test_a_run_that_is_over_takes_no_further_step(saved: Callable[..., str], text: str, tmp_path: Path) -> None:
    """As one that was stopped while its model was being saved."""
    common = ["--model", saved("llama"), "--train_text", text, "--max_steps", "3", "--save_steps", "3"]
    whole = finetune(arguments(tmp_path / "out", *common))
    over = finetune(arguments(tmp_path / "out", *common, "--resume_from_checkpoint", "last"))
    assert over.steps == 3 and over.metrics["train_loss"] == pytest.approx(whole.metrics["train_loss"], abs=1e-6)
    trained, saved_then = (_weights(tmp_path / "out" / name) for name in (".", "checkpoint-3"))
    assert all(torch.equal(value, saved_then[name]) for name, value in trained.items())


def test_what_is_found_out_late_is_still_refused_before_anything_is_written(
    saved: Callable[..., str], text: str, tmp_path: Path
) -> None:
    fading = ["--encoding", "alibi", "--native_weight_schedule", "linear:5000", "--num_train_epochs", "1"]
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "one two three"}]}\n', encoding="utf-8")
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n", encoding="utf-8")
    streaming = ["--streaming", "true", "--max_steps", "1"]
    model = Path(saved("gpt2"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(model)
    for source, options, message in (
        (text, fading, r"linear:5000 ends at step 5000, after the training of \d+ steps"),
        (text, ["--optim", "galore_adamw"], "--optim galore_adamw: "),
        (text, ["--lr_scheduler_type", "warmup_stable_decay", "--max_steps", "2"], "--lr_scheduler_type warmup_stable"),
        (text, ["--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"a": 1}'], "--lr_scheduler_type cosine: "),
        (text, ["--attn_implementation", "flash_attention_2"], "--attn_implementation flash_attention_2: "),
        (str(chats), [], "nothing to learn, none of the [0-9]+ tokens is a target"),
        (str(chats), streaming, "nothing to learn, none of the [0-9]+ tokens is a target"),
        (str(blank), [], "blank.txt' holds no text: every document in it is blank"),
        (str(blank), streaming, "blank.txt' holds no text: every document in it is blank"),
        (text, [*streaming, "--min_document_tokens", "9999"], "every document has fewer than min_document_tokens=9999"),
    ):
        with pytest.raises(ValueError, match=message):
            finetune(arguments(tmp_path / "out", "--model", str(model), "--train_text", source, *options))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("streaming", [[], ["--streaming", "true", "--max_steps", "1"]], ids=["stored", "streamed"])
@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ('[{"role": "user", "content": null}]', "message 1 has no text in its content"),
        ('[{"role": "user", "content": "a"}, {"role": "assistant"}]', "message 2 has no text in its content"),
        ('[{"role": "user", "content": [{"type": "text", "text": "a"}]}]', "message 1 has no text in its content"),
        ('["hello"]', "message 1 is not an object with a role"),
        ('[{"content": "hello"}]', "message 1 has no role"),
        ('[{"role": "user", "content": "refused"}]', "chat template fails at its first 1 messages: no such word"),
    ],
)
def test_a_conversation_that_is_none_is_named(
    saved: Callable[..., str], tmp_path: Path, messages: str, said: str, streaming: list[str]
) -> None:
    model = Path(saved("llama"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'refused' %}{{ raise_exception('no such word') }}{% endif %}"
        "{{ m.role }} {{ m.content }} {% endfor %}"
    )
    tokenizer.save_pretrained(model)
    good = '{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}'
    chats = tmp_path / "chats.jsonl"
    chats.write_text(good + '\n{"messages": ' + messages + "}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"Document 'chats.jsonl:2': .*{said}"):
        finetune(arguments(tmp_path / "out", "--model", str(model), "--train_text", str(chats), *streaming))
    assert not (tmp_path / "out").exists()


def test_the_adapter_has_a_card_of_its_own(saved: Callable[..., str], text: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ["--model", saved("gpt2"), "--encoding", "alibi", "--train_text", text, "--lora", "true"]
    finetune(arguments(output, *options, "--max_steps", "1"), command="finetune it")
    card = (output / "adapter" / "README.md").read_text(encoding="utf-8")
    assert 'load_model("FOLDER")' in card and "hf_posenc.load_adapter" in card and "library_name: peft" in card
    assert "finetune it" in card and "[More Information Needed]" not in card
    assert "load_adapter" not in (output / "README.md").read_text(encoding="utf-8")


def test_the_saved_folder_opens_and_tells_its_story(saved: Callable[..., str], text: str, tmp_path: Path) -> None:
    base = saved("gpt2")
    (Path(base) / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    output = tmp_path / "out"
    options = [
        "--model",
        base,
        "--encoding",
        "alibi",
        "--context_length",
        "64",
        "--train_text",
        text,
        "--eval_text",
        text,
    ]
    result = finetune(arguments(output, *options, "--max_steps", "2", "--block_length", "16"), command="finetune it")
    assert {"eval_perplexity_16", "eval_perplexity_64", "eval_loss", "train_loss"} <= result.metrics.keys()
    model = AutoModelForCausalLM.from_pretrained(output)
    assert str(encoding_of(model)) == "alibi"
    assert model.config.use_cache  # the Trainer turns it off, and generation would be slow
    again, tokenizer = load_model(output)
    assert tokenizer.model_max_length == 64
    from hf_posenc.evaluation import perplexity

    documents = [torch.tensor(tokenizer(t + " [EOS]")["input_ids"]) for t in sentences(40)]
    assert result.metrics["eval_perplexity_64"] == pytest.approx(
        perplexity(again, documents, window=64).perplexity, rel=1e-5
    )
    card = (output / "README.md").read_text(encoding="utf-8")
    for fact in ("license: mit", "`alibi`", "64 tokens (pretrained with 32)", text, "finetune it", "perplexity_64"):
        assert fact in card
    assert "import hf_posenc" in card and "stride of L // 2" in card and "end-of-text token last" in card
    for line in ("Perplexity at 16 tokens: ", "Perplexity at 64 tokens: ", f"hf-posenc evaluate {output} --encoding"):
        assert line in result.summary
    assert not list(output.glob(".*"))
    record = json.loads((output / "finetune.json").read_text(encoding="utf-8"))
    assert record["finished"] and record["data"]["documents"] == 40
    assert record["evaluation"] in card


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            [],
            [
                "from transformers import AutoModelForCausalLM",
                "",
                'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
            ],
        ),
        (
            ["--lora", "true", "--merge", "false"],
            ["from hf_posenc.models import load_model", "", 'model, tokenizer = load_model("FOLDER/adapter")'],
        ),
    ],
)
def test_the_card_and_the_last_lines_hold_commands(
    saved: Callable[..., str],
    text: str,
    tmp_path: Path,
    options: list[str],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A yarn LLaMA is stock transformers' own: the card asks for nothing more to open it."""
    output = tmp_path / "out"
    line = ["--model", saved("llama"), "--encoding", "yarn", "--context_length", "64", "--train_text", text]
    line += ["--use_cpu", "--report_to", "none", "--max_steps", "1", "--output_dir", str(output), *options]
    assert main(line) == 0
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "\n".join(["```python", *lines, "```"]) in card
    assert f"```\nhf-posenc finetune {shlex.join(line)}\n```" in card
    said = capsys.readouterr().out
    assert f"Next: hf-posenc {'merge' if options else 'evaluate'} {output}" in said


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("gpt2", "t5"), ("llama", "yarn"), ("gpt2", "sinusoidal:learn_scale=true"), ("bert", "alibi"), ("bert", "t5")],
)
def test_adapter_merged_equals_adapter(
    saved: Callable[..., str], text: str, tmp_path: Path, name: str, encoding: str
) -> None:
    output = tmp_path / "out"
    options = ["--encoding", encoding, "--context_length", "64", "--block_length", "32", "--lora", "true"]
    auto: Any = AutoModelForCausalLM
    if name == "bert":
        auto, options = AutoModelForMaskedLM, [*options, "--objective", "mlm"]
    finetune(arguments(output, "--model", saved(name), "--train_text", text, *options, "--max_steps", "3"))
    adapter, _ = load_model(output / "adapter")
    inside, loading = auto.from_pretrained(output, output_loading_info=True)
    assert not loading["missing_keys"]  # as BERT's output bias would be, once the output layer is untied
    again = auto.from_pretrained(merge(output / "adapter", tmp_path / "merged"))
    base = patch(load_model(saved(name))[0], encoding, context_length=64)
    ids = tokens(48, batch=2)
    with torch.no_grad():
        expected = adapter.eval()(ids).logits
        assert float((expected - base(ids).logits).abs().max()) > 1e-2
        for model in (inside, again):
            torch.testing.assert_close(model.eval()(ids).logits, expected, atol=1e-4, rtol=0)
    new = position_parameters(base)
    for parameter in new:  # the position weights were trained, and came with the adapter
        assert float((again.get_parameter(parameter) - base.get_parameter(parameter)).abs().max()) > 1e-4
    with pytest.raises(ValueError, match="not empty"):
        merge(output / "adapter", tmp_path / "merged")
    with pytest.raises(ValueError, match="not an adapter"):
        merge(tmp_path / "merged", tmp_path / "elsewhere")


@pytest.mark.parametrize(("name", "encoding"), [("llama", "yarn"), ("gpt2", "rope"), ("bert", "alibi")])
def test_adapter_over_four_bits(
    saved: Callable[..., str], text: str, tmp_path: Path, name: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QLoRA: the base in 4 bits while it trains, and whole in what it is merged into."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    held: list[bool] = []

    class Look(TrainerCallback):
        def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            held.append(any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules()))

    output = tmp_path / "out"
    options = ["--encoding", encoding, "--context_length", "64", "--block_length", "32", "--max_steps", "2"]
    options += ["--objective", "mlm"] if name == "bert" else []
    given = arguments(output, "--model", saved(name), "--train_text", text, "--qlora", "true", *options)
    monkeypatch.setattr("hf_posenc.training.run.LongContextTrainer", _made_with(Look()))
    finetune(given)
    assert held == [True]
    merged, _ = load_model(
        merge(output / "adapter", tmp_path / "merged"), task="masked" if name == "bert" else "causal"
    )
    base, _ = load_model(saved(name), task="masked" if name == "bert" else "causal")
    assert str(encoding_of(merged)).startswith(encoding)
    moved = dict(base.named_parameters())
    assert all(value.dtype == torch.float32 for value in merged.parameters())
    changed = [n for n, value in merged.named_parameters() if n in moved and not torch.equal(value, moved[n])]
    assert any("attn" in n or "query" in n or "q_proj" in n for n in changed)
    with pytest.raises(ValueError, match="adapter"):
        load_model(output / "adapter", quantization_config={})


def test_a_merge_needs_no_tokenizer_of_the_base_model(
    saved: Callable[..., str], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The adapter's own is saved; without one the base model's; without any the model alone, and that is said."""
    output, base = tmp_path / "out", Path(saved("llama"))
    options = ["--model", str(base), "--train_text", text, "--lora", "true", "--merge", "false", "--max_steps", "1"]
    finetune(arguments(output, *options))
    adapter = output / "adapter"
    of_base = [path for path in base.iterdir() if "token" in path.name]
    assert of_base and (adapter / "tokenizer.json").is_file()
    (base / "tokenizer.json").write_text("{broken", encoding="utf-8")
    merged = merge(adapter, tmp_path / "own")
    assert AutoTokenizer.from_pretrained(merged)("abc").input_ids == tiny_tokenizer()("abc").input_ids
    assert load_model(adapter)[1]("abc").input_ids == tiny_tokenizer()("abc").input_ids
    for path in of_base:
        path.unlink()
    merge(adapter, tmp_path / "still-own")
    assert "no tokenizer" not in caplog.text
    for path in [path for path in adapter.iterdir() if "token" in path.name]:
        path.unlink()
    bare = merge(adapter, tmp_path / "bare")
    assert "no tokenizer" in caplog.text and not (bare / "tokenizer.json").exists()
    assert load_model(bare, tokenizer=False)[1] is None and load_model(adapter, tokenizer=False)[1] is None
    tiny_tokenizer().save_pretrained(base)
    assert (merge(adapter, tmp_path / "of-base") / "tokenizer.json").is_file()


def test_masked_words_for_an_encoder(saved: Callable[..., str], text: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ["--model", saved("bert"), "--encoding", "rope", "--context_length", "64", "--objective", "mlm"]
    options += ["--train_text", text, "--eval_text", text, "--eval_on_start", "true", "--max_steps", "60"]
    finetune(arguments(output, *options, "--per_device_train_batch_size", "4"))
    model = AutoModelForMaskedLM.from_pretrained(output)
    assert str(encoding_of(model)) == "rope"
    card = (output / "README.md").read_text(encoding="utf-8")
    before, after = (float(value) for value in re.findall(r"\| \d+ \| ([\d.]+) \|", card))
    assert after < before - 0.5


def test_from_scratch(text: str, tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path / "config")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = [
        "--from_scratch",
        str(tmp_path / "config"),
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--encoding",
        "nope",
    ]
    finetune(arguments(tmp_path / "out", *options, "--train_text", text, "--max_steps", "2"))
    assert str(encoding_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))) == "nope"


def test_fading_ends_where_only_the_new_encoding_is_left(saved: Callable[..., str], text: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ["--model", saved("gpt2"), "--encoding", "alibi", "--train_text", text, "--max_steps", "4"]
    finetune(arguments(output, *options, "--native_weight_schedule", "cosine:1-3"))
    model = AutoModelForCausalLM.from_pretrained(output).eval()
    ids = tokens(20)
    with torch.no_grad():
        there = model(ids).logits
        shifted = model(ids, position_ids=torch.arange(20).unsqueeze(0) + 7).logits
    torch.testing.assert_close(there, shifted, atol=1e-4, rtol=0)  # a native table would see the shift


def test_lengths_beyond_a_native_table_are_measured_once_it_is_silent(
    saved: Callable[..., str], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--model", saved("gpt2"), "--encoding", "alibi", "--train_text", text, "--eval_text", text]
    options += ["--context_length", "64", "--eval_strategy", "steps", "--eval_steps", "1", "--max_steps", "3"]
    caplog.set_level("INFO", "hf_posenc")
    result = finetune(
        arguments(tmp_path / "out", *options, "--native_weight_schedule", "linear:2", "--save_steps", "3")
    )
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text(encoding="utf-8"))
    measured = {row["step"]: "eval_perplexity_64" in row for row in state["log_history"] if "eval_loss" in row}
    assert measured == {1: False, 2: True, 3: True}
    assert math.isfinite(result.metrics["eval_perplexity_64"])
    assert "64 tokens are not measured while the native table, of 32 rows, fades" in caplog.text


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(
    ("name", "encoding"), [("gpt2", "alibi"), ("gpt2", "learned"), ("llama", "yarn"), ("llama", "t5")]
)
def test_what_has_faded_is_saved_as_if_it_had_never_been_kept(
    saved: Callable[..., str], text: str, tmp_path: Path, name: str, encoding: str, lora: bool
) -> None:
    """The same model as the last checkpoint, which still has it; and in stock's form where there is one."""
    options = ["--model", saved(name), "--encoding", encoding, "--context_length", "64", "--block_length", "32"]
    options += ["--train_text", text, "--native_weight_schedule", "linear:2", "--max_steps", "3", "--save_steps", "3"]
    finetune(arguments(tmp_path / "out", *options, "--lora", str(lora)))
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert not config["hf_posenc"]["keep_native"] and config["hf_posenc"]["native_weight"] == 0.0
    assert (config["model_type"] == name) == (encoding in ("learned", "yarn"))
    checkpoint, _ = load_model(tmp_path / "out" / "checkpoint-3")
    kept = checkpoint.config.hf_posenc
    assert kept["keep_native"] and kept["native_weight"] == 0.0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = tokens(48, batch=2)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, checkpoint(ids).logits, atol=1e-4 if lora else 1e-5, rtol=0)


def test_a_faded_run_that_is_over_is_still_faded_when_it_is_resumed(
    saved: Callable[..., str], text: str, tmp_path: Path
) -> None:
    """It takes no step any more, and is measured and saved once again."""
    options = ["--model", saved("gpt2"), "--encoding", "alibi", "--context_length", "64", "--train_text", text]
    options += ["--eval_text", text, "--native_weight_schedule", "linear:2", "--per_device_train_batch_size", "8"]
    options += ["--num_train_epochs", "1", "--save_strategy", "epoch"]
    first = finetune(arguments(tmp_path / "out", *options))
    again = finetune(arguments(tmp_path / "out", *options, "--resume_from_checkpoint", "last"))
    assert again.steps == first.steps > 2
    assert again.metrics["eval_perplexity_64"] == pytest.approx(first.metrics["eval_perplexity_64"], rel=1e-5)


@pytest.mark.parametrize("options", [[], ["--encoding", "rope"]], ids=["own", "rope"])
def test_a_rotation_of_its_own_is_trained_at_a_longer_length_with_a_warning(
    saved: Callable[..., str], text: str, tmp_path: Path, options: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = ["--model", saved("llama"), "--train_text", text, "--context_length", "64", "--max_steps", "1", *options]
    finetune(arguments(tmp_path / "out", *line))
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING" and "hf_posenc" in record.name)
    for words in ("--context_length 64", "32 tokens", "--encoding yarn"):
        assert words in warning.getMessage()
    assert encoding_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).name == "rope"


def test_a_new_base_is_trained_at_a_longer_length_without_one(
    saved: Callable[..., str], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, encoding in (("llama", "rope:theta=500000.0"), ("gpt2", "rope")):
        line = ["--model", saved(name), "--train_text", text, "--context_length", "64", "--max_steps", "1"]
        finetune(arguments(tmp_path / name / "out", *line, "--encoding", encoding))
    assert not [record for record in caplog.records if "--context_length" in record.getMessage()]


def test_fading_schedules() -> None:
    linear = Fading.parse("linear:1000")
    assert [linear.weight(step) for step in (0, 250, 1000, 2000)] == [1.0, 0.75, 0.0, 0.0]
    cosine = Fading.parse("cosine:200-1000")
    assert [cosine.weight(step) for step in (0, 200, 600, 1000)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    for wrong in ("linear", "quick:5", "linear:0", "linear:9-5", "linear:a"):
        with pytest.raises(ValueError, match="native_weight_schedule"):
            Fading.parse(wrong)


def test_streaming_trains_on_the_text(saved: Callable[..., str], text: str, tmp_path: Path) -> None:
    options = ["--model", saved("llama"), "--train_text", text, "--streaming", "true", "--block_length", "16"]
    result = finetune(arguments(tmp_path / "out", *options, "--max_steps", "3"))
    assert result.steps == 3 and math.isfinite(result.metrics["train_loss"])


def test_dry_run_says_what_would_happen_and_writes_nothing(
    saved: Callable[..., str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    line = [
        "--model",
        saved("llama"),
        "--encoding",
        "yarn",
        "--context_length",
        "64",
        "--train_text",
        text,
        "--use_cpu",
    ]
    assert main([*line, "--output_dir", str(output), "--num_train_epochs", "2", "--dry_run", "--pose_chunks", "3"]) == 0
    said = capsys.readouterr().out
    parameters = sum(p.numel() for p in tiny_llama().parameters())
    for fact in (
        "yarn:factor=2.0",
        "64 tokens (pretrained with 32)",
        f"{parameters:,} of {parameters:,}",
        "40 documents",
    ):
        assert fact in said
    assert re.search(r"PoSE, 3 pieces over 64 positions", said)
    blocks = int(re.search(r"([\d,]+) blocks", said)[1].replace(",", ""))  # type: ignore[index]
    assert f"steps:             {2 * blocks}, each of 1 samples" in said
    assert not output.exists()


# ---------------------------------------------------------------------- arguments


def test_command_line_file_and_hyphens(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(
        "model: some/model\nencoding: {name: yarn, factor: 4}\ntrain-text: a.txt\nlearning_rate: 1e-4\nlora: true\n"
        "output_dir: out\neval_lengths: [16, 32]\nmax_steps: 7\n",
        encoding="utf-8",
    )
    ours, training = parse_arguments([str(experiment), "--max-steps", "9", "--pose_chunks=3", "--context_length", "64"])
    assert (ours.model, ours.encoding, ours.train_text) == ("some/model", "yarn:factor=4", ["a.txt"])
    assert (ours.lora, ours.eval_lengths, ours.position_skipping, ours.packing) == (True, [16, 32], "pose", "cut")
    assert (training.learning_rate, training.max_steps, training.output_dir) == (1e-4, 9, "out")


BASE = ["--model", "m", "--train_text", "t", "--output_dir", "o"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*BASE, "--contxt_length", "5"], "Unknown option --contxt_length. Did you mean --context_length?"),
        ([*BASE, "--learning-rat", "5"], "Unknown option --learning-rat. Did you mean --learning_rate?"),
        ([*BASE, "--context_length", "many"], "invalid int value: 'many'"),
        ([*BASE, "--context_length", "-5"], "--context_length -5 is not allowed"),
        ([*BASE, "--objective", "clm"], "invalid choice: 'clm'"),
        ([*BASE, "--packing", "pack", "--objective", "mlm"], "needs --packing cut"),
        ([*BASE, "--pose_chunks", "2"], "needs --context_length"),
        ([*BASE, "--pose_chunks", "2", "--context_length", "64", "--block_length", "64"], "skips nothing"),
        ([*BASE, "--pose_chunks", "2", "--context_length", "64", "--packing", "pack"], "one document in a sample"),
        ([*BASE, "--length_curriculum", "4"], "needs --position_skipping"),
        ([*BASE, "--overlap", "4"], "--overlap goes with --packing cut"),
        ([*BASE, "--native_weight_schedule", "linear:5"], "needs --encoding"),
        ([*BASE, "--encoding", "rope", "--native_weight_schedule", "linear:5", "--max_steps", "3"], "ends at step 5"),
        ([*BASE, "--from_scratch", "c"], "either --model"),
        ([*BASE, "--streaming", "true"], "needs --max_steps"),
        ([*BASE, "--eval_strategy", "steps"], "needs --eval_text"),
        ([*BASE, "--train_weights", "1", "2"], "2 numbers for 1 sources"),
        ([*BASE, "--pose_chunks", "2", "--position_skipping", "none"], "goes with --position_skipping pose, not none"),
        ([*BASE, "--qlora", "true", "--lora", "false"], "does not go with --lora false"),
        ([*BASE, "--max_steps", "0"], "--max_steps 0 is not allowed"),
        ([*BASE, "--max_steps", "-7"], "--max_steps -7 is not allowed"),
        ([*BASE, "--num_train_epochs", "0"], "--num_train_epochs 0.0 is not allowed"),
        ([*BASE, "--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps 0 is not allowed"),
        ([*BASE, "--per_device_train_batch_size", "0"], "--per_device_train_batch_size 0 is not allowed"),
        ([*BASE, "--learning_rate", "nan"], "--learning_rate nan is not allowed"),
        ([*BASE, "--adam_beta2", "1"], "--adam_beta2 1.0 is not allowed"),
        ([*BASE, "--train_weights", "nan"], "--train_weights nan is not allowed"),
        ([*BASE, "--train_weights", "inf"], "--train_weights inf is not allowed"),
        ([*BASE, "--report_to", "clearml"], "--report_to clearml: "),
        (["--model", "m", "--train_text", "t"], "--output_dir is needed"),
        (["--model", "m", "--output_dir", "o"], "--train_text is needed"),
        (["missing.yaml"], "cannot be read"),
    ],
)
def test_mistakes_end_with_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", [], "bert sees both sides: give --objective mlm"),
        ("llama", ["--objective", "mlm"], "llama is a decoder: use --objective causal"),
        ("gpt2", ["--block_length", "100"], "give --context_length 100, and give --encoding learned (or alibi, rope"),
        ("gpt2", ["--context_length", "100"], "give --encoding learned (or alibi, rope"),
        ("gpt2", ["--context_length", "16"], "give --block_length 16 instead"),
    ],
)
def test_what_the_model_cannot_do_ends_with_status_2(
    saved: Callable[..., str],
    text: str,
    tmp_path: Path,
    name: str,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["--use_cpu", "--report_to", "none", "--model", saved(name), "--train_text", text, "--max_steps", "1"]
    assert main([*line, "--output_dir", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_patched_encoder_is_still_one(saved: Callable[..., str], text: str, tmp_path: Path) -> None:
    patch(load_model(saved("bert"), task="masked")[0], "rope").save_pretrained(tmp_path / "patched")
    with pytest.raises(ValueError, match="bert sees both sides"):
        finetune(arguments(tmp_path / "out", "--model", str(tmp_path / "patched"), "--train_text", text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"max_steps: [2]", "max_steps: [2] is not allowed; it must be a whole number"),
        (b"max_steps: true", "max_steps: True is not allowed; it must be a whole number"),
        (b"max_steps: 2.5", "max_steps: 2.5 is not allowed; it must be a whole number"),
        (b"learning_rate: null", "learning_rate: nothing is given for it"),
        (b"learning_rate: fast", "learning_rate: 'fast' is not allowed; it must be a number"),
        (b"lora: 2", "lora: 2 is not allowed; it must be true or false"),
        (b"train_text: {a: 1}", "train_text: {'a': 1} is not allowed; it must be text"),
        (b"eval_lengths: [16, [32]]", "eval_lengths: [32] is not allowed; it must be a whole number"),
        (b"packing: tight", "packing: 'tight' is not allowed; it must be one of auto, pack, cut"),
        (b"pose_chunks: 2\nposition_skipping: none", "goes with --position_skipping pose, not none"),
        (b"\xff\xfe\x00", "is not YAML"),
    ],
)
def test_values_of_another_type_in_a_file_are_refused(
    tmp_path: Path, line: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_bytes(line)
    with pytest.raises(SystemExit) as caught:
        parse_arguments([str(experiment), *BASE, "--context_length", "64"])
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_values_of_every_type_in_a_file_are_taken(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(
        "train_text: [a, 7]\nlearning_rate: 1e-4\nmax_steps: 8.0\nlora: yes\nmerge: 'false'\nsave_strategy: no\n"
        "lr_scheduler_kwargs: {a: 1}\nreport_to: [none]\nresume_from_checkpoint: true\nrun_name: 5\n"
        "data_seed: null\nwarmup_steps: 0.1\n",
        encoding="utf-8",
    )
    ours, training = parse_arguments([str(experiment), "--model", "m", "--output_dir", "o"])
    assert (ours.train_text, ours.lora, ours.merge) == (["a", "7"], True, False)
    assert (training.learning_rate, training.max_steps, training.warmup_steps) == (1e-4, 8, 0.1)
    assert (training.lr_scheduler_kwargs, training.report_to, training.run_name) == ({"a": 1}, [], "5")
    assert training.save_strategy == "no" and str(training.resume_from_checkpoint).lower() == "true"


def test_the_command_line_wins_over_what_a_file_implies(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.yaml"
    base = "train_text: t\noutput_dir: o\ncontext_length: 64\nblock_length: 16\n"
    experiment.write_text(base + "model: m\npose_chunks: 2\nqlora: false\nmax_steps: 7\n", encoding="utf-8")
    ours, _ = parse_arguments([str(experiment), "--position_skipping", "none"])
    assert (ours.position_skipping, ours.pose_chunks, ours.packing) == ("none", None, "pack")
    ours, _ = parse_arguments([str(experiment), "--position-skipping=random"])
    assert ours.position_skipping == "random"
    ours, _ = parse_arguments([str(experiment), "--position_skipping", "pose"])
    assert (ours.position_skipping, ours.pose_chunks) == ("pose", 2)
    _, training = parse_arguments([str(experiment), "--num_train_epochs", "2"])
    assert (training.num_train_epochs, training.max_steps) == (2, -1)
    ours, _ = parse_arguments([str(experiment), "--from_scratch", "c", "--tokenizer", "t"])
    assert (ours.model, ours.from_scratch) == (None, "c")
    experiment.write_text(base + "model: m\nposition_skipping: none\nqlora: true\n", encoding="utf-8")
    ours, _ = parse_arguments([str(experiment), "--pose_chunks", "3", "--lora", "false"])
    assert (ours.position_skipping, ours.pose_chunks, ours.lora, ours.qlora) == ("pose", 3, False, False)


def test_processes_that_would_not_find_each_other_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(TrainingArguments, "world_size", 1)
    with pytest.raises(SystemExit):
        parse_arguments([*BASE[:-1], str(tmp_path / "out"), "--use_cpu", "false"])
    assert "2 processes were started" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_cpu_is_used_where_accelerate_was_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (("True", True), ("False", False)):
        monkeypatch.setenv("ACCELERATE_USE_CPU", said)
        assert parse_arguments([*BASE, "--report_to", "none"]).training.use_cpu is expected


def test_processes_without_an_accelerator_share_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate launch starts them without ACCELERATE_USE_CPU."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for there in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        assert make_parser().get_default("use_cpu") is not there


def test_unknown_keys_of_a_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text("model: m\nencodng: yarn\n", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        parse_arguments([str(experiment)])
    assert caught.value.code == 2
    assert "unknown option 'encodng'. Did you mean encoding?" in capsys.readouterr().err


def test_folders_of_others_are_refused_and_finished_runs_kept(
    saved: Callable[..., str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved("llama")
    line = ["--use_cpu", "--report_to", "none", "--model", model, "--train_text", text, "--max_steps", "1"]
    assert main([*line, "--output_dir", model]) == 2
    assert "holds something that is not a fine-tuning" in capsys.readouterr().err
    output = str(tmp_path / "out")
    assert main([*line, "--output_dir", output]) == 0
    assert main([*line, "--output_dir", output]) == 2
    assert "holds a finished fine-tuning" in capsys.readouterr().err
    assert main([*line, "--output_dir", output, "--encoding", "yarn", "--resume_from_checkpoint", "last"]) == 2
    assert "with other settings (encoding: None, now 'yarn')" in capsys.readouterr().err
    assert main([*line, "--output_dir", str(tmp_path / "new"), "--encoding", "yarm"]) == 2
    assert "Did you mean 'yarn'?" in capsys.readouterr().err
    table = ["--encoding", "learned", "--context_length", "64", "--eval_text", text, "--eval_lengths", "128"]
    line[4] = saved("gpt2")
    assert main([*line, "--output_dir", str(tmp_path / "new"), *table]) == 2
    assert "--eval_lengths 128 is longer than this model can be fed" in (said := capsys.readouterr().err)
    assert "Give at most 64, or --context_length 128." in said and "hf_posenc.patch" not in said
    assert not (tmp_path / "new").exists()


def test_arguments_made_in_python_are_checked_too() -> None:
    ours = FinetuneArguments(model="m", train_text=["t"], pose_chunks=2)
    with pytest.raises(ValueError, match="needs --context_length"):
        finetune(Arguments(ours, TrainingArguments(output_dir="o", report_to="none", use_cpu=True)))
