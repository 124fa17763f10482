"""Rotary positions in a BERT, trained with its other weights: which weights are new, and that they are saved.

    python examples/bert_with_rope.py FOLDER

Builds a small BERT from a config (no download), gives it RoPE and then a learned table twice as long, and saves it.
"""

import sys

from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

import hf_posenc


def main(folder: str) -> None:
    """Patch, save, load, and compare."""
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    model = BertForMaskedLM(config).eval()
    hf_posenc.patch(model, "rope")
    print("rope brings no new weights:", hf_posenc.position_parameters(model))
    hf_posenc.patch(model, "learned:init=interpolate", context_length=1024)
    print("a learned table brings:", hf_posenc.position_parameters(model))
    model.save_pretrained(folder)
    again = AutoModelForMaskedLM.from_pretrained(folder)
    print("saved and loaded as:", hf_posenc.encoding_of(again))


if __name__ == "__main__":
    main(*sys.argv[1:])
