"""One sentence in a long text: with which position encodings does a sentence encoder still find it, without training?

    python examples/encoder_retrieval.py MODEL [ENCODING ...] [--lengths 128,256,512,1024,2048] [--picture FILE.png]

MODEL is a hub id or a folder of an encoder whose vectors are the means of its tokens'. The first two rows are what one
does without this package: cut documents off at the length that the encoder takes, or encode them in windows of it. The
last columns are the accuracy for sentences in the first and in the last quarter of the longest documents, and how well
the similarities of short texts correlate with those that the encoder gave them before.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import hf_posenc
from hf_posenc.evaluation import planted_sentence
from hf_posenc.evaluation.embedding_retrieval import FACTS, PASS_KEYS, ROLES, accuracy_curve, mean_pool
from hf_posenc.evaluation.limits import trained_length
from hf_posenc.evaluation.plots import render
from hf_posenc.models import load_model

LEARNED = ("learned:init=interpolate", "learned:init=repeat", "learned:init=hierarchical")
OTHERS = ("rope", "alibi", "nope", "sinusoidal:scale=match")
SENTENCES = {"facts": FACTS, "roles": ROLES, "pass_keys": PASS_KEYS}


def main(*arguments: str) -> None:
    """Print a row for each encoding, a column for each length; draw the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("encodings", metavar="ENCODING", nargs="*", default=[*LEARNED, *OTHERS])
    parser.add_argument("--lengths", default="128,256,512,1024,2048", help="tokens of a document")
    parser.add_argument("--sentences", choices=SENTENCES, default="facts", help="roles: told apart by word order only")
    parser.add_argument("--text", type=Path, help="what the sentences are hidden in (default: Python's documentation)")
    parser.add_argument("--documents", type=int, default=20, help="in a trial, with a query each (default: 20)")
    parser.add_argument("--trials", type=int, default=3, help="sets of documents at each length (default: 3)")
    parser.add_argument("--picture", type=Path, help="a PNG file to draw")
    given = parser.parse_intermixed_args(arguments or None)

    lengths = [int(length) for length in given.lengths.split(",")]
    haystack = "\n\n".join(topics[name] for name in sorted(topics))
    if given.text is not None:
        haystack = given.text.read_text(encoding="utf-8")
    model, tokenizer = load_model(given.model, task="features")
    native = trained_length(model)
    as_it_was = similarities(model, tokenizer, haystack)
    results = {}

    def measure(label: str, **options: Any) -> None:
        result = planted_sentence(
            model,
            tokenizer,
            lengths,
            given.documents,
            given.trials,
            facts=SENTENCES[given.sentences],
            haystack=haystack,
            batch_size=1,
            **options,
        )
        cells = [f"{result.accuracy[length]:>7.2f} ({result.ranks[length]:.2f})" for length in lengths]
        first, *_, last = result.by_depth(4)[max(lengths)]
        likeness = torch.corrcoef(torch.stack([as_it_was, similarities(model, tokenizer, haystack)]))[0, 1]
        print(f"{label:>26}", *cells, f"{first:>11.2f} {last:.2f} {likeness:>13.3f}", flush=True)
        results[label] = result

    print(f"{'accuracy@1 (MRR), tokens:':>26}", *(f"{length:>14,}" for length in lengths), end=" ")
    print("1st, last 1/4   short texts")
    measure(f"truncated to {native}", truncate=native)
    measure(f"windows of {native}", windows=native)
    for encoding in given.encodings:
        hf_posenc.patch(model, encoding, context_length=max(native or 0, *lengths))
        measure(encoding)
    widest = max((high - low) / 2 for result in results.values() for low, high in result.intervals.values())
    print(f"{given.documents * given.trials} queries: 95 % intervals of up to ±{widest:.2f};", end=" ")
    print(f"guessing gives {1 / given.documents:.2f}")
    if given.picture is not None:
        given.picture.write_bytes(render(accuracy_curve(results, baselines=2, trained_length=native), "png"))


def similarities(model: Any, tokenizer: Any, text: str, count: int = 100) -> Tensor:
    """Cosines of all pairs of `count` paragraphs of the text, cut off at 64 tokens: what the encoder makes of them."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if len(paragraph.split()) > 10]
    batch = tokenizer(
        paragraphs[:: max(1, len(paragraphs) // count)][:count],
        padding=True,
        truncation=True,
        max_length=min(64, trained_length(model) or 64),
        return_tensors="pt",
    )
    with torch.no_grad():
        vectors = torch.nn.functional.normalize(mean_pool(model(**batch)[0], batch["attention_mask"]), dim=-1)
    first, second = torch.triu_indices(len(vectors), len(vectors), 1)
    return (vectors @ vectors.T)[first, second]


if __name__ == "__main__":
    main()
