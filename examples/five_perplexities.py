"""Five numbers that papers call sliding-window perplexity, of one model on one text.

    python examples/five_perplexities.py MODEL TEXT [TOKENS [WINDOW [STRIDE]]]

MODEL is a hub id, a folder, or a .gguf file; the first TOKENS tokens of the file TEXT are read (default: 2,048), in
windows of WINDOW tokens (512) at a stride of STRIDE tokens (64).
"""

import sys
from pathlib import Path

import torch

from hf_posenc.evaluation import perplexity
from hf_posenc.models import load_model


def main(source: str, text: str, tokens: str = "2048", window: str = "512", stride: str = "64") -> None:
    """Print a Markdown table."""
    model, tokenizer = load_model(source)
    ids = torch.tensor(tokenizer(Path(text).read_text(encoding="utf-8")).input_ids)[: int(tokens)]
    size, step = int(window), int(stride)
    print("| definition | means | perplexity |\n|---|---|---:|")
    for definition, means in {
        "window_means": "mean over the means of the windows",
        "strided": "each target once, with the context that its window gives; the default here",
        "full_windows": "every window scored in full",
        "disjoint": "windows side by side, as lm-evaluation-harness has it",
    }.items():
        print(
            f"| `{definition}` | {means} | {perplexity(model, ids, size, step, definition=definition).perplexity:.2f} |"
        )
    first = perplexity(model, ids[:size], size).perplexity
    print(f"| - | the first window alone, as if the text ended there | {first:.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
