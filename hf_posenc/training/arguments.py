"""The arguments of a fine-tuning: all of transformers' TrainingArguments, and ours, from a command line or a file.

An experiment is a YAML file of the same names. Options on the command line win over the file.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from accelerate.utils import parse_flag_from_env
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool
from transformers.integrations import get_reporting_integration_callbacks

from hf_posenc.training.callbacks import Fading


def _help(text: str, default: Any = None) -> Any:
    """A field with its help."""
    return field(default=default, metadata={"help": text})


@dataclass
class FinetuneArguments:
    """What TrainingArguments lacks: the model, its encoding, and the text."""

    _argument_group_name = "long context (hf_posenc)"

    model: str | None = _help("Model to adapt: a hub id, a folder, or a .gguf file.")
    encoding: str | None = _help("Encoding to give it, such as yarn or alibi or yarn:factor=4. Default: its own.")
    context_length: int | None = _help(
        "Tokens that the model shall take; the factor of a scaling is worked out from it."
    )
    from_scratch: str | None = _help(
        "Train a new model from this config (a folder, a config.json, or a hub id) instead."
    )
    tokenizer: str | None = _help("Tokenizer, where it is not the model's own (needed with --from_scratch).")
    objective: Literal["causal", "mlm"] = _help("causal: predict the next token. mlm: fill in masked words.", "causal")

    train_text: list[str] | None = _help("Text to train on: files, folders, or names of data sets.")  # noqa: RUF009
    train_weights: list[float] | None = _help("Share of each --train_text in the mixture. Default: all of each, once.")  # noqa: RUF009
    eval_text: list[str] | None = _help("Text to measure perplexity on, during and after training.")  # noqa: RUF009
    eval_lengths: list[int] | None = _help(  # noqa: RUF009
        "Context lengths to measure, in tokens. Default: block length and context length."
    )
    eval_tokens: int = _help("At most this many tokens of --eval_text are used.", 65536)
    text_field: str = _help(
        "Field of .jsonl and .parquet rows with the text ('messages' holds a conversation).", "text"
    )
    min_document_tokens: int = _help("Documents with fewer tokens are left out.", 2)
    block_length: int | None = _help(
        "Tokens in a training sample. Default: the context length, or what it was trained with."
    )
    packing: Literal["auto", "pack", "cut"] = _help(
        "pack: fill each sample with documents, which do not see each other. cut: one document, or a window of one, "
        "in each sample. auto: cut where positions are skipped and for mlm, else pack.",
        "auto",
    )
    overlap: int = _help("Tokens that a cut window repeats from the one before, as context without a loss.", 0)
    streaming: bool = _help(
        "Read the text while training instead of storing its tokens on disk. Needs --max_steps.", False
    )
    data_processes: int | None = _help("Processes that tokenise.")

    position_skipping: Literal["none", "pose", "random"] = _help(
        "Learn a long context from short samples: pose spreads pieces of a sample over the context length "
        "(Zhu et al. 2023), random spreads every token (Ruoss et al. 2023).",
        "none",
    )
    pose_chunks: int | None = _help(
        "Pieces of a sample under pose, 2 in the paper. Giving it means --position_skipping pose."
    )
    length_curriculum: int | None = _help(
        "With skipped positions: reach from the trained length to the context length step by step, over so many steps."
    )
    native_weight_schedule: str | None = _help(
        "Fade from the native encoding to the new one: linear:1000 over the first 1000 steps, "
        "cosine:200-1000 between two."
    )

    lora: bool = _help("Train an adapter (LoRA) with norms, embeddings and new position weights beside it.", False)
    lora_r: int = _help("Rank of the adapter.", 8)
    lora_alpha: int | None = _help("Its scale; default: twice the rank.")
    lora_dropout: float = _help("Its dropout.", 0.0)
    lora_targets: list[str] | None = _help("Modules that get it. Default: the attention projections.")  # noqa: RUF009
    train_norms: bool = _help("Train the normalisation layers beside the adapter (LongLoRA).", True)
    train_embeddings: bool = _help("Train the embeddings beside the adapter (LongLoRA).", True)
    merge: bool = _help(
        "Save the model with the adapter merged in, beside the adapter. False: save the adapter alone.", True
    )
    qlora: bool = _help("Hold the model in 4 bits under the adapter. Needs bitsandbytes.", False)

    mlm_probability: float = _help("Share of the tokens that are masked under mlm.", 0.15)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _help(
        "Weights in memory. auto: float32; bfloat16 under an adapter when training in bf16.", "auto"
    )
    attn_implementation: str | None = _help("Attention of the model: eager, sdpa, flash_attention_2, ...")
    loss_slice: int = _help("Tokens whose logits exist at the same time.", 512)
    dry_run: bool = _help(
        "Say what would happen (lengths, parameters, tokens, steps, memory), and train nothing.", False
    )


class Arguments(NamedTuple):
    """Both halves of the arguments."""

    ours: FinetuneArguments
    training: TrainingArguments


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Arguments from a command line: `[EXPERIMENT.yaml] --option value ...`, with underscores or hyphens.

    A mistake (an unknown option, with the nearest known one; a wrong value; options that exclude each other) is printed
    and ends the program with status 2, before anything is loaded.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    plain = {name: action.default for name, action in _options(parser).items()}
    try:
        in_file = _apply_file(parser, argv.pop(0)) if argv and not argv[0].startswith("-") else {}
        named, unknown = parser.parse_known_args(argv)
        if unknown:
            _reject(unknown, parser)
        given = {word.partition("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")}
        _check_level({name: getattr(named, name) for name in given if hasattr(named, name)})
        parser.set_defaults(**{name: plain[name] for name in _outdone(vars(named), given) - given if name in plain})
        _check_level({name: value for name, value in in_file.items() if name not in given})
        if not named.output_dir:
            raise ValueError("--output_dir is needed: the folder that the adapted model is written to.")
        ours, training = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)[:2]
        return Arguments(*check(ours, training))
    except (ValueError, ImportError) as error:
        parser.error(str(error))


def _outdone(values: Mapping[str, Any], given: set[str]) -> set[str]:
    """Options of a file that have no say any more beside what was `given` on the command line."""
    rivals: dict[str, Any] = {
        "pose_chunks": {"position_skipping"},
        "position_skipping": {"none": {"pose_chunks", "length_curriculum"}, "random": {"pose_chunks"}},
        "lora": {False: {"qlora"}},
        "model": {"from_scratch"},
        "from_scratch": {"model"},
        "num_train_epochs": {"max_steps"},
        "gradient_checkpointing": {"activation_checkpointing"},
    }
    found: set[str] = set()
    for name in given & rivals.keys():
        rival = rivals[name]
        found |= rival.get(values[name], set()) if isinstance(rival, dict) else rival
    return found


def _check_level(values: Mapping[str, Any]) -> None:
    """Raise where options given in one place, a command line or a file, contradict each other."""
    skipping = values.get("position_skipping", "pose")
    if values.get("pose_chunks") is not None and skipping != "pose":
        raise ValueError(f"--pose_chunks goes with --position_skipping pose, not {skipping}.")
    if values.get("qlora") and values.get("lora") is False:
        raise ValueError("--qlora is an adapter over 4 bits: it does not go with --lora false.")


def make_parser() -> HfArgumentParser:
    """The parser, with this project's defaults where they are not transformers'."""
    import torch

    parser = HfArgumentParser(
        (FinetuneArguments, TrainingArguments),  # type: ignore[arg-type]
        prog="finetune",
        usage="finetune [EXPERIMENT.yaml] --model MODEL --encoding E --train_text TEXT --output_dir DIR [options]",
        description="Give a pretrained model a longer context or another position encoding.",
        allow_abbrev=False,
    )
    parser._optionals.title = "training (transformers.TrainingArguments)"
    parser._action_groups.insert(0, parser._action_groups.pop())  # ours come first in --help
    on_cuda = torch.cuda.is_available()
    shares_cpu = _processes() > 1 and not torch.accelerator.is_available()
    parser.set_defaults(
        # Long samples fill a device one by one.
        per_device_train_batch_size=1,
        # Position Interpolation, YaRN and LongLoRA all train with 2e-5 after a warm-up of 20 steps.
        learning_rate=2e-5,
        warmup_steps=20,
        lr_scheduler_type="constant_with_warmup",
        logging_steps=10,
        bf16=on_cuda and torch.cuda.is_bf16_supported(including_emulation=False),
        report_to="tensorboard" if importlib.util.find_spec("tensorboard") else "none",
        # Processes on a CPU find each other only where this is said; accelerate launch does not tell several.
        use_cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or shares_cpu,
    )
    return parser


def check(ours: FinetuneArguments, training: TrainingArguments) -> tuple[FinetuneArguments, TrainingArguments]:
    """The arguments with what follows from others filled in.

    Raises:
        ValueError: arguments that are missing, out of range, or exclude each other.
    """
    if not ours.train_text:
        raise ValueError("--train_text is needed: a file, a folder, or the name of a data set to train on.")
    if (ours.model is None) == (ours.from_scratch is None):
        raise ValueError("Give either --model, the model to adapt, or --from_scratch, the config of a new one.")
    if ours.from_scratch is not None and ours.tokenizer is None:
        raise ValueError("--from_scratch needs --tokenizer: a new model has none of its own.")
    _check_numbers(ours)
    _check_training(training)
    if ours.pose_chunks is not None and ours.position_skipping == "random":
        raise ValueError("--pose_chunks goes with --position_skipping pose, not random.")
    if ours.pose_chunks is not None:
        ours.position_skipping = "pose"
    if ours.position_skipping != "none":
        if ours.context_length is None:
            raise ValueError("--position_skipping needs --context_length, the length that is to be learned.")
        if ours.packing == "pack":
            raise ValueError("--position_skipping needs one document in a sample: --packing cut, not pack.")
        if ours.block_length is not None and ours.block_length >= ours.context_length:
            raise ValueError(
                f"--position_skipping with --block_length {ours.block_length} skips nothing: it must be below "
                f"--context_length {ours.context_length}."
            )
    elif ours.length_curriculum is not None:
        raise ValueError("--length_curriculum needs --position_skipping: it is the skipped distances that grow.")
    if ours.objective == "mlm" and ours.packing == "pack":
        raise ValueError("--objective mlm needs --packing cut: an encoder does not tell packed documents apart.")
    if ours.packing == "auto":
        ours.packing = "cut" if ours.position_skipping != "none" or ours.objective == "mlm" else "pack"
    if ours.overlap and ours.packing == "pack":
        raise ValueError("--overlap goes with --packing cut; packed samples hold every token once.")
    if ours.block_length is not None and ours.context_length is not None and ours.block_length > ours.context_length:
        raise ValueError(f"--block_length {ours.block_length} is above --context_length {ours.context_length}.")
    if ours.train_weights is not None and len(ours.train_weights) != len(ours.train_text):
        raise ValueError(
            f"--train_weights has {len(ours.train_weights)} numbers for {len(ours.train_text)} sources of --train_text."
        )
    if ours.streaming and training.max_steps <= 0:
        raise ValueError("--streaming needs --max_steps: the length of the text is not known.")
    if ours.qlora:
        ours.lora = True
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError("--qlora needs the package bitsandbytes: pip install 'hf-posenc[qlora]', or use --lora.")
    if ours.lora and ours.from_scratch is not None:
        raise ValueError("--lora trains beside a pretrained model; --from_scratch has none.")
    if ours.native_weight_schedule is not None:
        fading = Fading.parse(ours.native_weight_schedule)
        if ours.encoding is None:
            raise ValueError("--native_weight_schedule needs --encoding, the encoding to move to.")
        if 0 < training.max_steps < fading.end:
            raise ValueError(
                f"--native_weight_schedule {ours.native_weight_schedule} ends at step {fading.end}, after the training "
                f"(--max_steps {training.max_steps}): the native encoding would still be in use."
            )
    if str(
        training.eval_strategy.value if hasattr(training.eval_strategy, "value") else training.eval_strategy
    ) != "no" and (not ours.eval_text):
        raise ValueError(f"--eval_strategy {training.eval_strategy} needs --eval_text, the text to measure.")
    training.remove_unused_columns = False  # the collator makes exactly what the model takes
    training.logging_nan_inf_filter = False  # a loss that is not finite must be seen
    training.prediction_loss_only = True
    return ours, training


def checkpoints_layers(training: TrainingArguments) -> bool:
    """True where activations are recomputed in backward. The option has another name from transformers 5.2x on."""
    return bool(getattr(training, "activation_checkpointing", None) or training.gradient_checkpointing)


def _check_numbers(ours: FinetuneArguments) -> None:
    lows = {"block_length": 2, "context_length": 2, "overlap": 0, "min_document_tokens": 1, "eval_tokens": 2}
    lows |= {
        "pose_chunks": 1,
        "lora_r": 1,
        "lora_alpha": 1,
        "loss_slice": 1,
        "length_curriculum": 1,
        "data_processes": 1,
    }
    for name, low in lows.items():
        value = getattr(ours, name)
        if value is not None and value < low:
            raise ValueError(f"--{name} {value} is not allowed; it must be at least {low}.")
    if not 0 < ours.mlm_probability < 1:
        raise ValueError(f"--mlm_probability {ours.mlm_probability} is not allowed; it must lie between 0 and 1.")
    if not 0 <= ours.lora_dropout < 1:
        raise ValueError(f"--lora_dropout {ours.lora_dropout} is not allowed; it must be at least 0 and below 1.")
    if ours.eval_lengths is not None and min(ours.eval_lengths) < 2:
        raise ValueError(f"--eval_lengths {min(ours.eval_lengths)} is not allowed; it must be at least 2.")
    for weight in ours.train_weights or ():
        if not 0 < weight < math.inf:
            raise ValueError(f"--train_weights {weight} is not allowed; it must be a number above 0.")


def _processes() -> int:
    """As many as a launcher says that it started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def _check_training(training: TrainingArguments) -> None:
    """What TrainingArguments takes without a word and the Trainer fails at, or does something else with.

    Raises:
        ValueError: a number out of its range, a reporter whose package is missing, or processes that do not find each
            other.
    """
    processes = _processes()
    if processes > 1 and training.world_size == 1:
        raise ValueError(
            f"{processes} processes were started (WORLD_SIZE), and each would train for itself: give --use_cpu where "
            "they shall run on the CPU, or start one."
        )
    if training.max_steps != -1 and training.max_steps < 1:
        raise ValueError(
            f"--max_steps {training.max_steps} is not allowed; it must be at least 1, or -1 to go by "
            "--num_train_epochs."
        )
    if training.max_steps == -1 and not 0 < training.num_train_epochs < math.inf:
        raise ValueError(f"--num_train_epochs {training.num_train_epochs} is not allowed; it must be above 0.")
    lows = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1}
    lows |= {"learning_rate": 0, "weight_decay": 0, "warmup_steps": 0, "max_grad_norm": 0, "seed": 0, "data_seed": 0}
    lows |= {"dataloader_num_workers": 0, "adam_epsilon": 0}
    for name, low in lows.items():
        value = getattr(training, name)
        if value is not None and not low <= value < math.inf:
            raise ValueError(f"--{name} {value} is not allowed; it must be at least {low}, and finite.")
    for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
        if not 0 <= getattr(training, name) < 1:
            raise ValueError(f"--{name} {getattr(training, name)} is not allowed; it must be at least 0 and below 1.")
    if training.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("--use_liger_kernel needs the package liger-kernel.")
    for reporter in training.report_to or ():
        try:
            for callback in get_reporting_integration_callbacks([reporter]):
                callback()
        except (ImportError, RuntimeError, ValueError) as error:
            raise ValueError(f"--report_to {reporter}: {error} Or give --report_to none.") from error


def _options(parser: HfArgumentParser) -> dict[str, Any]:
    """Every option's action by its name."""
    return {action.dest: action for action in parser._actions if action.option_strings and action.dest != "help"}


def _nearest(word: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {match[0]}?" if match else " See --help for all of them."


def _reject(unknown: Sequence[str], parser: HfArgumentParser) -> None:
    first = next((word for word in unknown if word.startswith("-")), unknown[0])
    name = first.partition("=")[0]
    if not name.startswith("-"):
        raise ValueError(f"Unexpected argument {name!r}. Every value belongs to an option: --option value.")
    known = [f"--{option}" for option in _options(parser)]
    raise ValueError(f"Unknown option {name}.{_nearest('--' + name.lstrip('-').replace('-', '_'), known)}")


def _apply_file(parser: HfArgumentParser, name: str) -> dict[str, Any]:
    """Make the values of a YAML file the parser's defaults, and return them."""
    import yaml

    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(
            f"Unexpected argument {name!r}. An experiment is a .yaml file; every other value needs an option."
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"The experiment {name!r} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The experiment {name!r} is not YAML: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"The experiment {name!r} must be a list of `option: value` lines.")
    options = _options(parser)
    defaults = {}
    for key, value in values.items():
        option = key.replace("-", "_")
        if option not in options and option.startswith("activation_"):  # its name before transformers 5.2x
            option = option.replace("activation_", "gradient_", 1)
        if option not in options:
            raise ValueError(f"{name}: unknown option {key!r}.{_nearest(option, list(options))}")
        defaults[option] = _value(value, option, options[option], name)
    parser.set_defaults(**defaults)
    return defaults


def _value(value: Any, option: str, action: Any, file: str) -> Any:
    """A value of a file as the command line would have it.

    Raises:
        ValueError: it is of another type than the option.
    """
    if option == "encoding" and isinstance(value, dict):
        from hf_posenc.encoding import Encoding

        return str(Encoding.from_dict(value))
    if value is None:
        if action.default is not None:
            raise ValueError(f"{file}: {option}: nothing is given for it. Give a value, or leave the line out.")
        return None
    if isinstance(value, dict) and (action.type is dict or option in TrainingArguments._VALID_DICT_FIELDS):
        return value
    if action.nargs == "+" or (option in ("report_to", "optim_target_modules") and isinstance(value, list)):
        return [_scalar(item, option, action, file) for item in (value if isinstance(value, list) else [value])]
    return _scalar(value, option, action, file)


def _scalar(value: Any, option: str, action: Any, file: str) -> Any:
    if action.choices:
        value = "no" if value is False and "no" in action.choices else value  # as YAML reads a bare no
        kind, fits = f"one of {', '.join(map(str, action.choices))}", value in list(action.choices)
    elif action.type in (int, float):
        kind, fits = ("a whole number" if action.type is int else "a number"), _is_number(value, action.type)
        value = action.type(float(value)) if fits else value
    elif action.type is string_to_bool:
        words = ("true", "false", "yes", "no", "on", "off")
        kind, fits = "true or false", isinstance(value, bool) or str(value).lower() in words
        if option == "include_num_input_tokens_seen":
            kind, fits = "true, false, all, non_padding or no", fits or value in ("all", "non_padding")
        elif fits and isinstance(value, str):
            value = value.lower() in ("true", "yes", "on")
    else:
        may_be_true = option in ("resume_from_checkpoint", "fsdp")
        kind, fits = "text", isinstance(value, (str, int, float)) and (may_be_true or not isinstance(value, bool))
        value = str(value) if fits else value
    if not fits:
        raise ValueError(f"{file}: {option}: {value!r} is not allowed; it must be {kind}.")
    return value


def _is_number(value: Any, kind: type) -> bool:
    """YAML reads 1e-4 as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return False
    try:
        number = float(value)
    except ValueError:
        return False
    return kind is float or number.is_integer()


def context_parts(training: TrainingArguments) -> int:
    """Parts that context parallelism cuts a sample into; 1 where it is off."""
    return int(getattr(getattr(training, "parallelism_config", None), "cp_size", 1) or 1)


def replicas(training: TrainingArguments) -> int:
    """Processes that see different samples."""
    return training.world_size // context_parts(training)


def samples_per_step(training: TrainingArguments) -> int:
    """Samples of one optimizer step, on all devices."""
    return training.train_batch_size * training.gradient_accumulation_steps * replicas(training)


def training_settings(training: TrainingArguments) -> dict[str, Any]:
    """The Trainer's arguments as plain data, for records."""
    return {**training.to_sanitized_dict(), "samples_per_step": samples_per_step(training)}


def settings(ours: FinetuneArguments) -> dict[str, Any]:
    """Our arguments as plain data, for records."""
    return {item.name: getattr(ours, item.name) for item in fields(ours)}
