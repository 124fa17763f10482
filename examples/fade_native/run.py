"""From a learned table to ALiBi or RoPE, at once or fading: how many steps until the model is as good as it was?

    python examples/fade_native/run.py TRAINED OUTPUT [STEPS]

TRAINED is the folder that `examples/train_short_test_long` wrote: its small GPT-2 with a learned table is adapted. A
control keeps the table and takes the same steps, because a model that is trained further gets better anyway.
"""

import json
import sys
from pathlib import Path

from hf_posenc.evaluation.files import write_json
from hf_posenc.training import finetune, parse_arguments

LENGTH = 128
EVERY = 20
RUNS = {
    "learned (control)": [],
    "alibi, at once": ["--encoding", "alibi"],
    "alibi, fading": ["--encoding", "alibi", "--native_weight_schedule", "linear:{half}"],
    "rope, at once": ["--encoding", "rope"],
    "rope, fading": ["--encoding", "rope", "--native_weight_schedule", "linear:{half}"],
}


def main(trained: str, output: str, steps: str = "160") -> None:
    """Run what an earlier call has not finished; write `results.json` and `losses.png`, and print a table."""
    folder = Path(output)
    curves = {}
    for name, given in RUNS.items():
        curves[name] = adapt(
            Path(trained), folder / name.split(" (")[0].replace(", ", "-").replace(" ", "-"), given, steps
        )
    before = curves["learned (control)"][0][1]
    print(f"Loss of the model with its learned table, at {LENGTH} tokens: {before:.4f} nats a token")
    print("| run | loss at step 0 | steps until as good as before | loss at the end |\n|---|---:|---:|---:|")
    for name, curve in curves.items():
        recovered = next((step for step, loss in curve if loss <= before), f"over {steps}")
        print(f"| {name} | {curve[0][1]:.3f} | {recovered} | {curve[-1][1]:.3f} |")
    write_json(folder / "results.json", {"length": LENGTH, "before": before, "curves": curves})
    draw(curves, before, folder / "losses.png")


def adapt(trained: Path, output: Path, given: list[str], steps: str) -> list[tuple[int, float]]:
    """Fine-tune once. [(steps taken, nats a token on the held-out text)]."""
    if not (output / "config.json").is_file():
        print(f"{output.name}: training", flush=True)
        options = {
            "model": trained / "native",
            "context_length": LENGTH,
            "train_text": trained / "train.jsonl",
            "eval_text": trained / "held-out.jsonl",
            "eval_lengths": LENGTH,
            "eval_tokens": 16384,
            "eval_strategy": "steps",
            "eval_steps": EVERY,
            "eval_on_start": "true",
            "output_dir": output,
            "max_steps": steps,
            "per_device_train_batch_size": 16,
            "learning_rate": 5e-4,
            "lr_scheduler_type": "cosine",
            "seed": 1,  # other samples first than in the training before
            "logging_steps": 50,
            "save_steps": steps,
            "report_to": "none",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += [word.format(half=int(steps) // 2) for word in given]
        if finetune(parse_arguments(words)).stopped:  # by SIGTERM, with a checkpoint saved
            raise SystemExit(143)
    state = json.loads((output / f"checkpoint-{steps}" / "trainer_state.json").read_text(encoding="utf-8"))
    return [(row["step"], row["eval_loss"]) for row in state["log_history"] if "eval_loss" in row]


def draw(curves: dict[str, list[tuple[int, float]]], before: float, path: Path) -> None:
    """Loss against steps, readable in grey."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.4, 4.4), layout="constrained")
    styles = ["k:", "C3-", "C3--", "C0-", "C0--"]
    for (name, curve), style in zip(curves.items(), styles, strict=True):
        axes.plot(*zip(*curve, strict=True), style, label=name, marker="os^Dv"[styles.index(style)], markersize=4)
    axes.axhline(before, color="0.6", linewidth=0.8)
    axes.set(xlabel="optimizer steps", ylabel=f"loss at {LENGTH} tokens (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
