"""Perplexity at every context length from one pass, for a few encodings.

    python examples/perplexity_by_length.py MODEL TEXT LENGTH [ENCODING ...]

MODEL is a hub id, a folder, or a .gguf file; TEXT a file of at least LENGTH tokens. Encodings without a factor are made
for LENGTH (default: yarn linear ntk).
"""

import sys
from pathlib import Path

import torch

import hf_posenc
from hf_posenc.evaluation import perplexity
from hf_posenc.models import load_model


def main(source: str, text: str, length: str, *encodings: str) -> None:
    """Print a line for each encoding, a column for each doubling of the length."""
    model, tokenizer = load_model(source)
    token_ids = torch.tensor(tokenizer(Path(text).read_text(encoding="utf-8")).input_ids)[: int(length)]
    edges = [int(length) >> halvings for halvings in (3, 2, 1, 0)]
    print(f"{'tokens of context below':>24}", *(f"{edge:>9,}" for edge in edges))
    for encoding in ("native", *(encodings or ("yarn", "linear", "ntk"))):
        if encoding != "native":
            hf_posenc.patch(model, encoding, context_length=int(length))
        result = perplexity(model, token_ids, window=int(length))
        print(f"{encoding:>24}", *(f"{value:>9.2f}" for _, _, value, _ in result.by_context(edges)))


if __name__ == "__main__":
    main(*sys.argv[1:])
