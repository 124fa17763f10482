#!/usr/bin/env python
"""Measure perplexity by context length under several position encodings (`hf-posenc evaluate`, for a launcher).

On one device:

    python scripts/evaluate.py MODEL --encoding native --encoding yarn:factor=2 --text book.txt \\
        --lengths 2048,8192,16384 --output report

On several, with the same numbers:

    accelerate launch --num_processes 2 scripts/evaluate.py MODEL --encoding native --encoding yarn:factor=2 \\
        --text book.txt --lengths 2048,8192,16384 --output report

Without a GPU, `accelerate launch --config_file examples/accelerate/cpu_2.yaml` starts two processes; `--num_processes`
alone starts one there.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("hf_posenc") is None:  # run from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_posenc.cli import evaluate

if __name__ == "__main__":
    evaluate(prog_name="accelerate launch scripts/evaluate.py")
