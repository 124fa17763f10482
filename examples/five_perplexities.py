"""Five numbers that papers call sliding-window perplexity, of one model on one text.

    python examples/five_perplexities.py MODEL TEXT [TOKENS [WINDOW [STRIDE]]]

MODEL is a hub id, a folder, or a .gguf file; the first TOKENS tokens of the file TEXT are read (default: 2,048), in
windows of WINDOW tokens (512) at a stride of STRIDE tokens (64).
"""

import argparse
import sys
from pathlib import Path

import torch

from hf_posenc.evaluation import perplexity
from hf_posenc.models import load_model


def main(*arguments: str) -> None:
    """Print a Markdown table. Arguments as on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="hub id, folder, or .gguf file")
    parser.add_argument("text", type=Path, help="file of UTF-8 text")
    parser.add_argument("tokens", nargs="?", type=int, default=2048, help="tokens to read (default: %(default)s)")
    parser.add_argument("window", nargs="?", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("stride", nargs="?", type=int, default=64, help="tokens between windows (default: %(default)s)")
    asked = parser.parse_args(arguments)
    model, tokenizer = load_model(asked.model)
    ids = torch.tensor(tokenizer(asked.text.read_text(encoding="utf-8")).input_ids)[: asked.tokens]
    print("| definition | means | perplexity |\n|---|---|---:|")
    for definition, means in {
        "window_means": "mean over the means of the windows",
        "strided": "each target once, with the context that its window gives; the default here",
        "full_windows": "every window scored in full",
        "disjoint": "windows side by side, as lm-evaluation-harness has it",
    }.items():
        stride = None if definition == "disjoint" else asked.stride
        value = perplexity(model, ids, asked.window, stride, definition=definition).perplexity
        print(f"| `{definition}` | {means} | {value:.2f} |")
    first = perplexity(model, ids[: asked.window], asked.window).perplexity
    print(f"| - | the first window alone, as if the text ended there | {first:.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
