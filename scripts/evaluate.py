"""Measure a model's perplexity by context length under several position encodings. On one device:

    python scripts/evaluate.py MODEL --encoding native --encoding yarn:factor=2 --text book.txt --lengths
    2048,8192,16384 \
        --output report

On several, with the same numbers:

    accelerate launch --num_processes 2 scripts/evaluate.py MODEL --encoding native --text book.txt --lengths 2048,8192
    \
        --output report

MODEL is a hub id, a folder, or a .gguf file. `--text` is a file, a folder, or the name of a data set; repeatable.
Run again after an interrupt: finished parts in DIR/parts are reused.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, evaluate, print the tables and where the report is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="hub id, folder, or .gguf file")
    parser.add_argument("--encoding", action="append", help="native, saved, yarn:factor=4, ... (default: native)")
    parser.add_argument("--text", action="append", required=True, help="file, folder, or data set; repeatable")
    parser.add_argument("--lengths", required=True, type=_lengths, help="context lengths in tokens: 2048,8192,16384")
    parser.add_argument("--output", required=True, help="folder for results.json, report.md, report.html and pictures")
    parser.add_argument("--concatenate", action="store_true", help="join all documents into one stream")
    parser.add_argument("--max-tokens", "--max_tokens", type=int, help="use at most so many tokens of text")
    parser.add_argument("--definition", default="strided", help="strided, window_means, full_windows or disjoint")
    parser.add_argument("--stride", type=int, help="tokens between sliding windows (default: blocks without overlap)")
    parser.add_argument("--batch-size", "--batch_size", type=int, help="windows run together")
    parser.add_argument(
        "--bos", choices=["auto", "always", "never"], default="auto", help="a start token in each window"
    )
    parser.add_argument("--cost", action="store_true", help="also time one pass at each length")
    parser.add_argument("--passkey-trials", "--passkey_trials", type=int, default=0, help="passkeys a length and depth")
    parser.add_argument("--passkey-lengths", "--passkey_lengths", type=_lengths, help="where (default: --lengths)")
    parser.add_argument("--seed", type=int, default=0, help="of the passkeys")
    parser.add_argument("--dtype", help="float32, bfloat16, float16 or auto (default: the checkpoint's)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the first accelerator there is)")
    parser.add_argument("--fresh", action="store_true", help="measure finished parts again")
    given = parser.parse_args(arguments)

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState()
    from hf_posenc.evaluation import evaluate
    from hf_posenc.evaluation.processes import Processes
    from hf_posenc.evaluation.report import summary

    try:
        results = evaluate(
            given.model,
            given.encoding or ["native"],
            given.text,
            given.lengths,
            given.output,
            concatenate=given.concatenate,
            max_tokens=given.max_tokens,
            definition=given.definition,
            stride=given.stride,
            bos={"auto": None, "always": True, "never": False}[given.bos],
            batch_size=given.batch_size,
            cost=given.cost,
            passkey_trials=given.passkey_trials,
            passkey_lengths=given.passkey_lengths,
            seed=given.seed,
            dtype=given.dtype,
            device=given.device,
            fresh=given.fresh,
        )
    except ValueError as error:
        parser.error(str(error))
    if Processes.find().is_first:
        print(summary(results))
        print(f"\nReport: {os.path.join(given.output, 'report.html')}")


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths; write 2048,8192,16384.") from None


if __name__ == "__main__":
    main(sys.argv[1:])
