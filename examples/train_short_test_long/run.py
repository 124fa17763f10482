"""Train a small GPT-2 at 128 tokens with four encodings, from scratch, and measure it at 1 to 8 times that length.

    python examples/train_short_test_long/run.py OUTPUT [STEPS]

The shape of the first figure of the ALiBi paper (Press et al. 2022, arXiv 2108.12409), in minutes on a CPU. The text is
Python's own library: every tenth file is held out. A run that was interrupted goes on. A fifth model keeps GPT-2's own
learned table, which has no positions beyond 128: it is what `examples/fade_native` starts from.
"""

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

from hf_posenc.comparison import combined
from hf_posenc.evaluation import evaluate
from hf_posenc.evaluation.report import summary, write_report
from hf_posenc.training import finetune, parse_arguments

LENGTH = 128
LENGTHS = [LENGTH * times for times in (1, 2, 3, 4, 6, 8)]
ENCODINGS = ("sinusoidal:scale=match", "rope", "t5", "alibi")
"""Unscaled waves are fifty times as large as the vectors of new tokens, and a model learns little in so few steps."""
SHAPE: dict[str, Any] = {
    "n_embd": 192,
    "n_layer": 4,
    "n_head": 6,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
END = "<|endoftext|>"


def main(output: str, steps: str = "400") -> None:
    """Do every part that an earlier run has not finished, and write the report into `output`."""
    folder = Path(output)
    if not (folder / "new" / "config.json").is_file():
        prepare(folder)
    evaluations = []
    for encoding in (*ENCODINGS, "native"):
        train(folder, encoding, int(steps))
        if encoding in ENCODINGS:
            evaluations.append((encoding, measure(folder, encoding)))
    results = combined(evaluations, f"GPT-2 trained at {LENGTH} tokens, measured at 1 to 8 times that")
    for entry, (encoding, _) in zip(results["encodings"], evaluations, strict=True):
        entry["label"] = encoding
    write_report(results, folder)
    print(summary(results))


def prepare(folder: Path) -> None:
    """Texts, a tokenizer trained on them, and the config of a GPT-2 that has not been trained."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.glob("*.py")) if path.stat().st_size > 8_000]
    files += [
        path
        for name in ("asyncio", "email", "http", "json", "logging", "xml")
        for path in sorted((library / name).glob("**/*.py"))
    ]
    texts = [path.read_text(encoding="utf-8") for path in files]
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", [t for i, t in enumerate(texts) if i % 10]), ("held-out", texts[::10])):
        (folder / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": text}) for text in chosen), encoding="utf-8"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for i, text in enumerate(texts) if i % 10], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)
    config = GPT2Config(vocab_size=len(fast), n_positions=LENGTH, bos_token_id=0, eos_token_id=0, **SHAPE)
    fast.save_pretrained(folder / "new")
    config.save_pretrained(folder / "new")


def train(folder: Path, encoding: str, steps: int) -> None:
    """One model from scratch, as `hf-posenc finetune --from_scratch` does it."""
    output = folder / encoding.partition(":")[0]
    if (output / "config.json").is_file():
        return
    options = {
        "from_scratch": folder / "new",
        "tokenizer": folder / "new",
        "context_length": LENGTH,
        "train_text": folder / "train.jsonl",
        "output_dir": output,
        "max_steps": steps,
        "per_device_train_batch_size": 16,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 40,
        "weight_decay": 0.1,
        "logging_steps": 50,
        "save_steps": 200,
        "save_total_limit": 1,
        "report_to": "none",
    }
    if encoding != "native":
        options["encoding"] = encoding
    print(f"{encoding}: training", flush=True)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if finetune(parse_arguments(words)).stopped:  # by SIGTERM, with a checkpoint saved
        raise SystemExit(143)


def measure(folder: Path, encoding: str) -> dict[str, Any]:
    """Perplexity of the held-out files by length, in windows without overlap."""
    name = encoding.partition(":")[0]
    results = evaluate(
        folder / name, ["saved"], [folder / "held-out.jsonl"], LENGTHS, folder / "measured" / name,
        concatenate=True, max_tokens=64 * LENGTHS[-1],
    )  # fmt: skip
    return results | {"native": None}  # GPT-2's own table was never trained in this model: nothing to compare with


if __name__ == "__main__":
    main(*sys.argv[1:])
