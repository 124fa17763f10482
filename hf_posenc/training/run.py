"""A fine-tuning from its arguments to a folder that opens: load, patch, adapt, measure, save."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import TrainingArguments, get_scheduler, set_seed

from hf_posenc.data import (
    Collator,
    Curriculum,
    DataReport,
    Masking,
    Preparation,
    TrainingBlocks,
    make_blocks,
    tokenize_documents,
)
from hf_posenc.data.documents import hash_of_sources, load_documents
from hf_posenc.evaluation.limits import hard_limit
from hf_posenc.evaluation.processes import Processes, leave
from hf_posenc.training import estimate
from hf_posenc.training.arguments import (
    Arguments,
    FinetuneArguments,
    check,
    checkpoints_layers,
    context_parts,
    parse_arguments,
    replicas,
    samples_per_step,
    settings,
    training_settings,
)
from hf_posenc.training.callbacks import FadeNative, Fading, StopOnSignal
from hf_posenc.training.files import move_whole, write_whole
from hf_posenc.training.output import check_output, model_card, set_aside, write_record
from hf_posenc.training.trainer import LongContextTrainer, NonFiniteLossError

logger = logging.getLogger(__name__)

PROGRAM = "hf-posenc finetune"
"""The command line that is there wherever this package is installed."""
STOPPED = 143
"""Exit status of a run that SIGTERM ended, as shells count it: 128 + 15."""


@dataclass(frozen=True)
class FinetuneResult:
    """What came of a fine-tuning."""

    output_dir: Path
    steps: int
    """Optimizer steps of the whole run, those before a resume included."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation, and the mean training loss."""
    stopped: bool = False
    """True where a signal ended it: a checkpoint was saved, the model was not."""
    plan: str = ""
    """What would happen or happened, for people."""
    summary: str = ""
    """The results, where they are and what to do next, for people; empty where nothing was saved."""


@dataclass(frozen=True)
class _Setup:
    """A model ready to train, and what is known of it."""

    model: Any
    tokenizer: Any
    encoding: str
    encoding_record: dict[str, Any] | None
    """The encoding as data, where the model is patched."""
    trained_length: int
    context_length: int
    block_length: int
    use_cache: Any
    """What the config says; the Trainer turns it off."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0 done, 1 failed, 2 a mistake in the arguments, 130 or 143 stopped.

    `accelerate launch` follows every status but 0 with a traceback of its own; `accelerate launch --quiet` does not.
    """
    # Under the script, the name it was started by would put a folder of this machine on the card.
    program = "accelerate launch scripts/finetune.py" if Path(sys.argv[0]).name == "finetune.py" else PROGRAM
    command = f"{program} {shlex.join(sys.argv[1:] if argv is None else argv)}"
    try:
        arguments = parse_arguments(argv)
        if arguments.training.process_index == 0:
            logging.basicConfig(format="%(message)s", level=logging.WARNING)
            logging.getLogger("hf_posenc").setLevel(logging.INFO)
        result = finetune(arguments, command=command)
        leave()
    except ValueError as error:
        print(f"finetune: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("finetune: interrupted; the same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except (NonFiniteLossError, OSError) as error:
        print(f"finetune: {error}", file=sys.stderr)
        return 1
    if arguments.training.process_index == 0:
        said = result.plan if arguments.ours.dry_run else result.summary
        print(said, end="\n" if said else "")
    return STOPPED if result.stopped else 0


def finetune(arguments: Arguments, *, command: str | None = None) -> FinetuneResult:
    """Adapt a model as the arguments say, and write it to `arguments.training.output_dir`.

    Args:
        arguments: from `parse_arguments`, or `Arguments(FinetuneArguments(...), TrainingArguments(...))`.
        command: how to make it again, for the model card.

    Raises:
        ValueError: arguments, model or text that do not work; before anything is written.
        NonFiniteLossError: training diverged.
        OSError: something could not be written; the last whole checkpoint is still there.
    """
    ours, training = check(*arguments)
    asked = settings(ours) | {"train_text_sha256": hash_of_sources(ours.train_text or [], streaming=ours.streaming)}
    folder = Path(training.output_dir or "")
    checkpoint = check_output(str(folder), asked, training_settings(training), training.resume_from_checkpoint)
    set_seed(training.seed)
    setup = _prepare_model(ours, training)
    with training.main_process_first(desc="preparing the text"):
        train, report = _prepare_data(ours, training, setup)
        measured = _prepare_evaluation(ours, training, setup)
    model = _add_adapter(setup.model, ours, training)
    steps = estimate.steps(training, report.blocks if report else None, replicas(training))
    _check_optimizer(training, model, steps)
    fading = Fading.parse(ours.native_weight_schedule) if ours.native_weight_schedule is not None else None
    if fading is not None and steps is not None and steps < fading.end:
        raise ValueError(
            f"--native_weight_schedule {ours.native_weight_schedule} ends at step {fading.end}, after the training of "
            f"{steps} steps: the native encoding would still be in use. Let it end sooner, or train longer."
        )
    plan = _plan_text(ours, training, setup, model, report, steps)
    if ours.dry_run:
        return FinetuneResult(folder, 0, plan=plan)
    for line in plan.splitlines():
        logger.info("%s", line)
    if training.should_save:
        aside = set_aside(folder) if checkpoint is None else None
        if aside is not None:
            logger.info("What the run before left is kept in %s.", aside)
        if checkpoint is not None:
            logger.info("Going on from %s.", checkpoint)
        write_record(folder, {"settings": asked, "finished": False, "training": training_settings(training)})

    parts = context_parts(training)
    stop = StopOnSignal()
    callbacks: list[Any] = [stop]
    if fading is not None:
        callbacks.append(FadeNative(model, fading))
    trainer = LongContextTrainer(
        model=model,
        args=training,
        train_dataset=train,
        # The Trainer insists on one; where there is a measurement, it is not looked at.
        eval_dataset=None if measured is None else [],  # type: ignore[arg-type]
        data_collator=Collator(_pad_id(setup.tokenizer), ours.packing, 2 * parts if parts > 1 else 1),  # type: ignore[arg-type]
        processing_class=setup.tokenizer,
        callbacks=callbacks,
        slice_length=ours.loss_slice,
        document_names=train.documents if isinstance(train, TrainingBlocks) else None,
        curriculum=_curriculum(ours, training, setup),
    )
    if measured is not None:
        limit = setup.trained_length if fading is not None and _has_table(setup.model) else None
        trainer.measure = _measurement(trainer, measured, fading, limit)
    done = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    if stop.stopped:
        logger.info("Stopped by SIGTERM at step %d; the same command goes on from there.", done.global_step)
        return FinetuneResult(folder, done.global_step, dict(done.metrics), stopped=True, plan=plan)
    metrics = dict(done.metrics)
    if measured is not None:
        metrics |= trainer.evaluate()
    _save(trainer, ours, setup, report, metrics, asked, command or "")
    summary = _summary(ours, folder, setup.context_length, done.global_step, metrics)
    return FinetuneResult(folder, done.global_step, metrics, plan=plan, summary=summary)


# ---------------------------------------------------------------------- the model


def _prepare_model(ours: FinetuneArguments, training: TrainingArguments) -> _Setup:
    from hf_posenc.architecture import architecture_of
    from hf_posenc.checkpoint import pretrained_length
    from hf_posenc.encoding import EncodingError, as_encoding
    from hf_posenc.encodings.rope import RoPE
    from hf_posenc.patch import encoding_of, patch

    _check_objective(ours)
    model, tokenizer = _load(ours, training)
    if ours.attn_implementation is not None:
        try:
            model.set_attn_implementation(ours.attn_implementation)
        except (ImportError, ValueError) as error:
            raise ValueError(f"--attn_implementation {ours.attn_implementation}: {error}") from error
    if ours.encoding is None and ours.context_length is None:
        trained = int(model.config.max_position_embeddings)
        encoding, record, length = "native", None, trained
    else:
        trained = pretrained_length(model.config, architecture_of(model.config))
        wanted = as_encoding(ours.encoding) if ours.encoding is not None else encoding_of(model)
        keep = ours.native_weight_schedule is not None
        try:
            patch(model, wanted, context_length=ours.context_length, keep_native=keep)
        except EncodingError as error:
            length = ours.context_length or 0
            if type(wanted) is RoPE and length > trained:  # it cannot be made for a length, but be trained at one
                patch(model, wanted, keep_native=keep)
                if training.process_index == 0:
                    logger.warning(
                        "--context_length %d: %s reaches the %d tokens that the model was pretrained with, and only "
                        "this training can take it further. A scaling needs less of it: --encoding yarn, ntk, linear.",
                        *(length, wanted, trained),
                    )
            elif ours.encoding is not None:
                raise
            else:
                shorter = length < int(model.config.max_position_embeddings)
                remedy = f"give --block_length {length} instead" if shorter else f"{_encoding_needed(model)} with it"
                raise ValueError(
                    f"--context_length {length} does not go with the model's own encoding, {wanted}: {remedy}."
                ) from error
        found = encoding_of(model)
        if context_parts(training) > 1:
            _check_context_parallel(found, ours)
        encoding, record = str(found), found.to_dict()
        length = ours.context_length or max(trained, int(model.config.max_position_embeddings))
    if ours.native_weight_schedule is not None and length > trained and _has_table(model):
        # The native table has no rows beyond its own.
        if (ours.block_length or 0) > trained or ours.position_skipping != "none":
            raise ValueError(
                f"--native_weight_schedule: the native table has {trained} positions, so that samples are no longer "
                f"while it fades: --block_length {trained}, without --position_skipping."
            )
        ours.block_length = ours.block_length or trained
    block = ours.block_length or min(length, trained if ours.position_skipping != "none" else length)
    if ours.position_skipping != "none" and block >= length:
        raise ValueError(
            f"--position_skipping with samples of {block} tokens skips nothing of --context_length {length}: "
            "give a smaller --block_length."
        )
    if block > length:
        raise ValueError(
            f"--block_length {block} is longer than the {length} tokens that the model takes: give --context_length "
            f"{block}" + (f", and {_encoding_needed(model)} with it." if ours.encoding is None else ".")
        )
    if ours.eval_lengths and max(ours.eval_lengths) > length and ours.encoding is None:
        raise ValueError(
            f"--eval_lengths {max(ours.eval_lengths)} is longer than the {length} tokens that the model takes."
        )
    if tokenizer.model_max_length < length or ours.context_length is not None:
        tokenizer.model_max_length = length
    return _Setup(model, tokenizer, encoding, record, trained, length, block, getattr(model.config, "use_cache", None))


def _check_objective(ours: FinetuneArguments) -> None:
    """Raise where a model would learn to copy what it sees, or has no way to fill in words; before it is loaded."""
    config = _config(ours)
    if config is None:
        return
    causal = _is_causal(config)
    name = str(config.model_type).removeprefix("hf_posenc_")
    if causal is False and ours.objective == "causal":
        raise ValueError(f"{name} sees both sides: give --objective mlm.")
    if causal is True and ours.objective == "mlm":
        raise ValueError(f"{name} is a decoder: use --objective causal.")


def _config(ours: FinetuneArguments) -> Any:
    """The config alone; None where there is none to be found, of which the loading of the model says more."""
    import transformers

    import hf_posenc  # noqa: F401  (teaches transformers the configs of patched models)

    source = Path(str(ours.model if ours.model is not None else ours.from_scratch)).expanduser()
    try:
        if source.suffix.lower() == ".gguf":
            return transformers.AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
        return transformers.AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError):
        return None


def _is_causal(config: Any) -> bool | None:
    """Whether a token sees only its past; None for a family of which that is not known."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    from hf_posenc.architecture import architectures

    family = str(config.model_type).removeprefix("hf_posenc_")
    row = architectures().get(family)
    if row is not None:
        return bool(getattr(config, row.causal)) if isinstance(row.causal, str) else row.causal
    if getattr(config, "is_encoder_decoder", False):
        return None
    if family in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return bool(getattr(config, "is_decoder", False))
    return True


def _encoding_needed(model: Any) -> str:
    """What to give where the encoding that a model has does not reach a length."""
    return "give --encoding " + ("learned (or alibi, rope, ...)" if _has_table(model) else "yarn (or ntk, linear, ...)")


def _has_table(model: Any) -> bool:
    from hf_posenc.architecture import architecture_of

    return architecture_of(model.config).table is not None


def _load(ours: FinetuneArguments, training: TrainingArguments) -> tuple[Any, Any]:
    import transformers

    from hf_posenc.models import load_model

    masked = ours.objective == "mlm"
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    name = _dtype_name(ours, training)
    if ours.from_scratch is not None:
        assert ours.tokenizer is not None
        try:
            config = transformers.AutoConfig.from_pretrained(ours.from_scratch)
        except OSError as error:
            raise ValueError(
                f"--from_scratch {ours.from_scratch!r}: no config there: {str(error).splitlines()[0]}"
            ) from error
        tokenizer = _tokenizer(ours.tokenizer)
        if config.vocab_size < len(tokenizer):
            raise ValueError(
                f"The config's vocab_size {config.vocab_size} is below the tokenizer's {len(tokenizer)} words."
            )
        return auto.from_config(config).to(getattr(torch, name)), tokenizer
    assert ours.model is not None
    task = "masked" if masked else "causal"
    if ours.qlora:
        from peft import prepare_model_for_kbit_training

        products = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32
        four_bits = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=products
        )
        model, tokenizer = load_model(ours.model, task=task, quantization_config=four_bits)
        # Whether layers are recomputed is the Trainer's to say: --gradient_checkpointing.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    else:
        model, tokenizer = load_model(ours.model, name, task=task)
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"--model {ours.model!r} is an adapter. Merge it first: hf-posenc merge {ours.model} --output DIR."
        )
    return model, tokenizer if ours.tokenizer is None else _tokenizer(ours.tokenizer)


def _tokenizer(name: str) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(f"No tokenizer in {name!r}: {str(error).splitlines()[0]}") from error


def _dtype_name(ours: FinetuneArguments, training: TrainingArguments) -> str:
    if ours.dtype != "auto":
        return ours.dtype
    # A whole model trains in float32 (autocast lowers its products); under an adapter its weights only have to be read.
    return "bfloat16" if ours.lora and training.bf16 else "float32"


def _add_adapter(model: Any, ours: FinetuneArguments, training: TrainingArguments) -> Any:
    if not ours.lora:
        return model
    from peft import get_peft_model

    from hf_posenc.adapters import lora_config

    options: dict[str, Any] = {"train_norms": ours.train_norms, "train_embeddings": ours.train_embeddings}
    if ours.lora_targets is not None:
        options["target_modules"] = ours.lora_targets
    alpha = ours.lora_alpha if ours.lora_alpha is not None else 2 * ours.lora_r
    config = lora_config(model, r=ours.lora_r, lora_alpha=alpha, lora_dropout=ours.lora_dropout, **options)
    config.base_model_name_or_path = ours.model
    adapted = get_peft_model(model, config)
    config.base_model_name_or_path = ours.model  # PEFT puts the config's name there, which a .gguf file does not have
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            # Small steps would be rounded away.
            parameter.data = parameter.data.float()
    if checkpoints_layers(training):
        adapted.enable_input_require_grads()
    return adapted


def _check_optimizer(training: TrainingArguments, model: Any, steps: int | None) -> None:
    """Raise where the optimizer or the schedule of the learning rate could not be made."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    schedule, specific = training.lr_scheduler_type, cast(Any, training.lr_scheduler_kwargs)
    try:
        option = f"--optim {getattr(training.optim, 'value', training.optim)}"
        LongContextTrainer.get_optimizer_cls_and_kwargs(training, model)
        option = f"--lr_scheduler_type {getattr(schedule, 'value', schedule)}"
        get_scheduler(schedule, optimizer, 0, steps, scheduler_specific_kwargs=specific)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from error


# ---------------------------------------------------------------------- the text


def _prepare_data(ours: FinetuneArguments, training: TrainingArguments, setup: _Setup) -> tuple[Any, DataReport | None]:
    assert ours.train_text is not None and ours.packing != "auto"
    seed = training.data_seed if training.data_seed is not None else training.seed
    blocks, report = make_blocks(
        ours.train_text,
        setup.tokenizer,
        setup.block_length,
        packing=ours.packing,
        overlap=ours.overlap,
        min_document_tokens=ours.min_document_tokens,
        encoder=ours.objective == "mlm",
        weights=ours.train_weights,
        text_field=ours.text_field,
        streaming=ours.streaming,
        num_proc=ours.data_processes,
        seed=seed,
    )
    preparation = _preparation(ours, training, setup)
    if report is None:
        return blocks.map(preparation, with_indices=True, remove_columns=["starts", "documents"]), None
    return TrainingBlocks(blocks, preparation), report


def _preparation(ours: FinetuneArguments, training: TrainingArguments, setup: _Setup) -> Preparation:
    assert ours.packing != "auto"
    return Preparation(
        seed=training.data_seed if training.data_seed is not None else training.seed,
        packing=ours.packing,
        skipping=ours.position_skipping,
        target_length=setup.context_length if ours.position_skipping != "none" else None,
        chunks=ours.pose_chunks or 2,
        masking=_masking(ours, setup),
    )


def _curriculum(ours: FinetuneArguments, training: TrainingArguments, setup: _Setup) -> Curriculum | None:
    if ours.length_curriculum is None:
        return None
    start = min(setup.trained_length, setup.context_length)
    return Curriculum(_preparation(ours, training, setup), start, ours.length_curriculum)


def _masking(ours: FinetuneArguments, setup: _Setup) -> Masking | None:
    if ours.objective != "mlm":
        return None
    if setup.tokenizer.mask_token_id is None:
        raise ValueError("--objective mlm needs a tokenizer with a mask token; this one has none.")
    special = tuple(setup.tokenizer.all_special_ids)
    return Masking(setup.tokenizer.mask_token_id, len(setup.tokenizer), special, ours.mlm_probability)


def _prepare_evaluation(ours: FinetuneArguments, training: TrainingArguments, setup: _Setup) -> Any:
    """None, or a function that measures: perplexity by length, or for encoders the loss of filling in masked words."""
    if not ours.eval_text:
        return None
    if ours.objective == "mlm":
        blocks, _ = make_blocks(ours.eval_text, setup.tokenizer, setup.block_length, packing="cut", encoder=True)
        samples = TrainingBlocks(blocks, Preparation(training.seed, "cut", masking=_masking(ours, setup)))
        return _fill_in(samples, Collator(_pad_id(setup.tokenizer), "cut"), training.per_device_eval_batch_size)
    lengths = sorted(set(ours.eval_lengths or [min(setup.block_length, setup.trained_length), setup.context_length]))
    _check_eval_length(ours, setup.model, lengths[-1])
    documents = tokenize_documents(
        load_documents(ours.eval_text, text_field=ours.text_field),
        setup.tokenizer,
        min_tokens=max(2, ours.min_document_tokens),
    )
    chosen, left = [], ours.eval_tokens
    for ids in documents["input_ids"]:
        if left < 2:
            break
        chosen.append(torch.tensor(ids[:left]))
        left -= len(chosen[-1])
    if not chosen:
        raise ValueError(
            f"--eval_text {' '.join(ours.eval_text)}: no document has min_document_tokens={ours.min_document_tokens}."
        )

    def measure(model: nn.Module, distributed: bool | None, longest: int | None) -> dict[str, float]:
        from hf_posenc.evaluation import perplexity

        found = {}
        for length in lengths:
            if longest is not None and length > longest:
                logger.info("%d tokens are not measured while the native table, of %d rows, fades.", length, longest)
                continue
            result = perplexity(model, chosen, window=length, progress=False, distributed=distributed)
            found[f"perplexity_{length}"] = result.perplexity
            found["loss"] = result.mean_nll
        return found

    return measure


def _check_eval_length(ours: FinetuneArguments, model: Any, longest: int) -> None:
    """Raise where the model cannot be fed the longest of --eval_lengths, also once a native table has faded."""
    from hf_posenc.patch import set_native_weight

    fades = ours.native_weight_schedule is not None
    if fades:
        set_native_weight(model, 0.0)
    limit = hard_limit(model)
    if fades:
        set_native_weight(model, 1.0)
    if limit is not None and longest > limit[0]:
        with_it = f", and {_encoding_needed(model)} with it" if ours.encoding is None else ""
        raise ValueError(
            f"--eval_lengths {longest} is longer than this model can be fed: {limit[1]}. Give at most {limit[0]}, or "
            f"--context_length {longest}{with_it}."
        )


def _fill_in(samples: TrainingBlocks, collate: Collator, batch_size: int) -> Callable[..., dict[str, float]]:
    """A function that measures the mean loss over all masked words: the same however they are batched or shared out."""

    def measure(model: nn.Module, distributed: bool | None, longest: int | None) -> dict[str, float]:
        processes = Processes.find(distributed)
        device = next(model.parameters()).device
        sums = torch.zeros(2, dtype=torch.float64)
        for start in range(0, len(samples), batch_size):
            if not processes.mine(start // batch_size):
                continue
            batch = collate([samples[i] for i in range(start, min(start + batch_size, len(samples)))])
            batch = {name: value.to(device) for name, value in batch.items() if name != "sample_ids"}
            labels = batch.pop("labels")
            with torch.no_grad():
                logits = model(**batch).logits[labels != -100]
            loss = nn.functional.cross_entropy(logits.float(), labels[labels != -100], reduction="sum")
            sums += torch.tensor([float(loss), len(logits)], dtype=torch.float64)
        total, count = processes.sum(sums, device).tolist()
        return {"loss": total / max(count, 1)}

    return measure


def _measurement(
    trainer: LongContextTrainer,
    measure: Callable[[nn.Module, bool | None, int | None], dict[str, float]],
    fading: Fading | None,
    limit: int | None,
) -> Callable[[nn.Module], dict[str, float]]:
    """`measure` in the trainer's precision, shared by the processes where each holds the whole model.

    While a native table fades, lengths above its `limit` cannot be measured.
    """

    def run(wrapped: nn.Module) -> dict[str, float]:
        fades = fading is not None and fading.weight(trainer.state.global_step) > 0
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        # Processes that hold parts of the weights must all make the same calls, and only of the whole model.
        model: nn.Module = _Whole(wrapped) if sharded else trainer.accelerator.unwrap_model(wrapped)
        with trainer.accelerator.autocast():
            return measure(model, False if sharded else None, limit if fades else None)

    return run


class _Whole(nn.Module):
    """A model that can only be called as a whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = getattr(model, "config", None)
        self.device = next(model.parameters()).device

    def forward(self, input_ids: torch.Tensor, **more: torch.Tensor) -> Any:
        """[batch, length] to the model's answer."""
        return self.model(input_ids=input_ids, **more)


def _pad_id(tokenizer: Any) -> int:
    """Any token does: padding is masked, or a document of its own, and has no loss."""
    return next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)


def _check_context_parallel(encoding: Any, ours: FinetuneArguments) -> None:
    """Raise where a sample cut along its length would be trained wrongly without a word."""
    if encoding.site == "score":
        raise ValueError(
            f"--encoding {encoding.name} adds a bias to the scores, which context parallelism drops with the mask. "
            "Use a rotary encoding, or FSDP without context parallelism."
        )
    if encoding.length_dependent:
        raise ValueError(
            f"--encoding {encoding.name} depends on the length of the sequence, of which a process sees only a part "
            "under context parallelism. Use yarn, ntk or linear."
        )
    if ours.packing == "pack":
        raise ValueError("Context parallelism drops the masks that keep packed documents apart: use --packing cut.")


# ---------------------------------------------------------------------- reports and files


def _plan_text(
    ours: FinetuneArguments,
    training: TrainingArguments,
    setup: _Setup,
    model: Any,
    report: DataReport | None,
    steps: int | None,
) -> str:
    trainable, everything = estimate.parameters(model)
    memory = estimate.estimate(model, training, setup.block_length, ours.loss_slice)
    rows = samples_per_step(training)
    skipping = {
        "none": "none",
        "pose": f"PoSE, {ours.pose_chunks or 2} pieces over {setup.context_length} positions",
        "random": f"random positions below {setup.context_length}",
    }
    lines = [
        ("model", ours.model or f"new, from {ours.from_scratch}"),
        (
            "encoding",
            setup.encoding + (f", fading {ours.native_weight_schedule}" if ours.native_weight_schedule else ""),
        ),
        (
            "length",
            f"{setup.context_length} tokens (pretrained with {setup.trained_length}), samples of {setup.block_length}",
        ),
        ("position skipping", skipping[ours.position_skipping]),
        ("objective", ours.objective),
        ("method", _method(ours)),
        ("trainable", f"{trainable:,} of {everything:,} parameters ({trainable / max(everything, 1):.2%})"),
        ("text", str(report) if report else f"streamed from {', '.join(ours.train_text or [])}"),
        (
            "steps",
            f"{steps if steps is not None else 'unknown'}, each of {rows} samples, "
            f"at most {rows * setup.block_length:,} tokens",
        ),
        (
            "memory, roughly",
            f"{_size(memory.total)} a device, unsharded: weights {_size(memory.weights)}, "
            f"gradients {_size(memory.gradients)}, optimizer {_size(memory.optimizer)}, "
            f"activations {_size(memory.activations)}, logits {_size(memory.logits)}",
        ),
        ("output", training.output_dir or ""),
    ]
    return "\n".join(f"{name + ':':<19}{text}" for name, text in lines)


def _summary(ours: FinetuneArguments, folder: Path, context_length: int, steps: int, metrics: dict[str, float]) -> str:
    """What came of it, for the end of the output."""
    lines = [
        f"Trained {steps} steps" + (f", mean loss {metrics['train_loss']:.4f}." if "train_loss" in metrics else ".")
    ]
    measured = [(key.rpartition("_")[2], value) for key, value in metrics.items() if key.startswith("eval_perplexity_")]
    lines += [f"Perplexity at {length} tokens: {value:,.4g}" for length, value in measured]
    if not measured and "eval_loss" in metrics:
        lines.append(f"Loss on --eval_text: {metrics['eval_loss']:.4f}")
    unmerged = ours.lora and (ours.qlora or not ours.merge)
    saved = folder / "adapter" if unmerged else folder
    lines.append(f"{'Adapter' if unmerged else 'Model'}: {saved}   (how it was made: {folder / 'README.md'})")
    if unmerged:
        lines.append(f"Next: hf-posenc merge {shlex.quote(str(saved))} --output DIR")
    else:
        definition = " --definition pseudo" if ours.objective == "mlm" else ""
        what = f"--text FILE --lengths {context_length}{definition}"
        lines.append(f"Next: hf-posenc evaluate {shlex.quote(str(saved))} --encoding saved {what} --output DIR")
    return "\n".join(lines)


def _how_measured(ours: FinetuneArguments, tokenizer: Any) -> str | None:
    """What the numbers on --eval_text mean; None where there are none."""
    if not ours.eval_text:
        return None
    text = ", ".join(ours.eval_text)
    if ours.objective == "mlm":
        return (
            f"loss: mean over the masked words ({ours.mlm_probability:.0%} of the tokens, the same in every "
            f"evaluation) of {text}, in nats."
        )
    end = ", its end-of-text token last" if tokenizer.eos_token_id is not None else ""
    return (
        "perplexity_L: definition strided, windows of L tokens at a stride of L // 2, each token scored once "
        f"(a document's first never), over the first {ours.eval_tokens:,} tokens of {text}, each document with the "
        f"tokenizer's special tokens around it{end}. loss: the mean at the longest L measured, in nats. "
        "`hf-posenc evaluate` has other columns: its length L holds only the targets with L/2 to L - 1 tokens before "
        "them. Compare numbers from one of the two only."
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _method(ours: FinetuneArguments) -> str:
    if not ours.lora:
        return "all weights"
    more = [name for name, chosen in (("norms", ours.train_norms), ("embeddings", ours.train_embeddings)) if chosen]
    return f"{'QLoRA' if ours.qlora else 'LoRA'} of rank {ours.lora_r}" + (
        f" with {' and '.join(more)}" if more else ""
    )


def _save(
    trainer: LongContextTrainer,
    ours: FinetuneArguments,
    setup: _Setup,
    report: DataReport | None,
    metrics: dict[str, float],
    asked: dict[str, Any],
    command: str,
) -> None:
    """The finished model into the output folder: whole, or not at all."""
    from hf_posenc.patch import drop_silent_native

    target = Path(trainer.args.output_dir or "")
    temporary = target / ".writing"
    if trainer.args.should_save:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or ours.lora):
        drop_silent_native(setup.model)  # sharded weights cannot be patched, and keep it
    if setup.use_cache is not None:
        setup.model.config.use_cache = setup.use_cache
    trainer.save_model(str(temporary / "adapter" if ours.lora else temporary), _internal_call=True)
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        if ours.lora and ours.merge and not ours.qlora:
            from hf_posenc.training.merge import merged

            model, tokenizer = merged(temporary / "adapter", dtype=None if ours.dtype == "auto" else ours.dtype)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        for leftover in temporary.rglob("training_args.bin"):
            leftover.unlink()
        history = [row for row in trainer.state.log_history if any(key.startswith("eval_") for key in row)]
        keep = ("eval_loss", "eval_perplexity")
        rows = [{key: row[key] for key in row if key == "step" or key.startswith(keep)} for row in history]
        unique = list({row["step"]: row for row in rows}.values())
        base = ours.model or f"new from {ours.from_scratch}"
        args = trainer.args
        measured = _how_measured(ours, setup.tokenizer)
        card = partial(
            model_card,
            measured=measured,
            base=base,
            encoding=setup.encoding,
            trained_length=setup.trained_length,
            context_length=setup.context_length,
            objective=ours.objective,
            data=ours.train_text or [],
            data_report=str(report) if report else "streamed",
            method=_method(ours),
            command=command,
            evaluations=unique,
            training={
                "steps": trainer.state.global_step,
                "samples a step": samples_per_step(args),
                "tokens a sample": setup.block_length,
                "position skipping": ours.position_skipping,
                "learning rate": args.learning_rate,
                "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "float32",
                "mean training loss": f"{metrics['train_loss']:.4f}" if "train_loss" in metrics else "",
            },
            base_folder=Path(ours.model) if ours.model and Path(ours.model).is_dir() else None,
        )
        write_whole(temporary / "README.md", card(saved_in=temporary))
        if ours.lora:
            write_whole(temporary / "adapter" / "README.md", card(saved_in=temporary / "adapter"))
        move_whole(temporary, target)
        record = {"settings": asked, "finished": True, "training": training_settings(args), "metrics": metrics}
        write_record(
            target,
            {
                **record,
                "data": report.to_dict() if report else None,
                "encoding": setup.encoding_record,
                "evaluation": measured,
            },
        )
        if args.push_to_hub:
            trainer.push_to_hub(commit_message="Long-context fine-tuning")
    trainer.accelerator.wait_for_everyone()
