#!/usr/bin/env python
"""Give a pretrained model a longer context or another position encoding.

    accelerate launch scripts/finetune.py --model MODEL --encoding yarn --context_length 16384 \
        --train_text FILE --output_dir DIR --max_steps 100

A long context from short samples (PoSE), with an adapter:

    accelerate launch scripts/finetune.py --model MODEL --encoding yarn --context_length 16384 --block_length 2048 \
        --pose_chunks 2 --lora true --train_text FILE --eval_text FILE --output_dir DIR --max_steps 200

An experiment is a file of the same options: scripts/finetune.py examples/finetune_pose.yaml --output_dir DIR.
On several devices: accelerate launch --config_file examples/accelerate/fsdp2.yaml scripts/finetune.py ...
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("hf_posenc") is None:  # run from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def run() -> int:
    """The exit status. The imports take seconds, and may be interrupted like everything after them."""
    try:
        from hf_posenc.training import main

        return main()
    except KeyboardInterrupt:
        print("finetune: interrupted before it began.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
