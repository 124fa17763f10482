"""Swap the encoding of a model, see what changed, and take it back.

    python examples/swap_encoding.py MODEL [ENCODING]

MODEL is a hub id, a folder, or a .gguf file; ENCODING is a name or name:field=value (default: alibi).
"""

import sys

import torch

import hf_posenc
from hf_posenc.models import load_model


def main(source: str, encoding: str = "alibi") -> None:
    """Compare the model's outputs before, under, and after the patch."""
    model, tokenizer = load_model(source)
    inputs = tokenizer("Position is where a word stands.", return_tensors="pt")
    with torch.no_grad():
        before = model(**inputs).logits
        hf_posenc.patch(model, encoding)
        print(hf_posenc.describe(model))
        under = model(**inputs).logits
        hf_posenc.unpatch(model)
        after = model(**inputs).logits
    print(f"\nlogits changed by {(under - before).abs().max():.3g} under {encoding}; after unpatch by", end=" ")
    print(f"{(after - before).abs().max():.3g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
