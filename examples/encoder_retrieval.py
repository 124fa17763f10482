"""One sentence in a long text: with which position encodings does a sentence encoder still find it, without training?

    python examples/encoder_retrieval.py MODEL [ENCODING ...] [--lengths 128,256,512,1024,2048] [--picture FILE.png]

MODEL is a hub id or a folder of an encoder whose vectors are the means of its tokens'. The first two rows are what one
does without this package: cut documents off at the length that the encoder takes, or encode them in windows of it.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import hf_posenc
from hf_posenc.evaluation import planted_sentence
from hf_posenc.evaluation.embedding_retrieval import accuracy_curve
from hf_posenc.evaluation.limits import trained_length
from hf_posenc.evaluation.plots import render
from hf_posenc.models import load_model

LEARNED = ("learned:init=interpolate", "learned:init=repeat", "learned:init=hierarchical")
OTHERS = ("rope", "alibi", "nope", "sinusoidal:scale=match")


def main(*arguments: str) -> None:
    """Print a row for each encoding, a column for each length; draw the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("encodings", metavar="ENCODING", nargs="*", default=[*LEARNED, *OTHERS])
    parser.add_argument("--lengths", default="128,256,512,1024,2048", help="tokens of a document")
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
    results = {}

    def measure(label: str, **options: Any) -> None:
        result = planted_sentence(
            model, tokenizer, lengths, given.documents, given.trials, haystack=haystack, batch_size=1, **options
        )
        first, *_, last = result.by_depth(4)[max(lengths)]
        cells = (f"{result.accuracy[length]:>7.2f} ({result.ranks[length]:.2f})" for length in lengths)
        print(f"{label:>26}", *cells, f"{first:>7.2f} {last:>7.2f}", flush=True)
        results[label] = result

    header = (f"{length:>14,}" for length in lengths)
    print(f"{'accuracy@1 (MRR), tokens:':>26}", *header, "   at the last: first and last quarter")
    measure(f"truncated to {native}", truncate=native)
    measure(f"windows of {native}", windows=native)
    for encoding in given.encodings:
        hf_posenc.patch(model, encoding, context_length=max(native or 0, *lengths))
        measure(encoding)
    widest = max((high - low) / 2 for result in results.values() for low, high in result.intervals.values())
    print(f"{given.documents * given.trials} queries: 95 % intervals of up to ±{widest:.2f};", end=" ")
    print(f"guessing gives {1 / given.documents:.2f}")
    if given.picture is not None:
        given.picture.write_bytes(render(accuracy_curve(results, trained_length=native), "png"))


if __name__ == "__main__":
    main()
