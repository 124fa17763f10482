"""Two processes come to what one comes to: data parallel and FSDP2, on the CPU, through gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_data import sentences, tiny_tokenizer

from hf_posenc.models import load_model
from models import tiny_bert, tiny_gpt2, tiny_llama

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))
EXPERIMENTS = sorted((ROOT / "examples").glob("*.yaml"))

DDP_THAT_ENDS = """
# Under DDP no thread of gloo's outlives main(): one could abort the interpreter as it goes down. DeepSpeed, where it is
# installed, keeps the group.
import importlib.util
import os
import sys
from hf_posenc.training import main
from models import threads

status = main()
if importlib.util.find_spec("deepspeed") is not None:
    sys.stdout.flush()
    os._exit(status)
assert not any("gloo" in name for name in threads()), threads()
sys.exit(status)
"""

SHARDED_ON_CPU = """
# accelerate shards over GPUs only. Told that these processes have one each, it does the same on the CPU.
import os
import sys
import accelerate.state
import torch
from accelerate.utils import DistributedType

if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    from deepspeed import comm
    comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
else:
    torch.distributed.init_process_group("gloo")
state = accelerate.state.PartialState
state._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
state.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
from hf_posenc.training import main

status = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)  # torch's FSDP2 keeps the group, and so gloo's threads, one of which aborts the process now and then
"""

SHARDED_BY_TRANSFORMERS = """
# A patched checkpoint whose weights transformers shares out (FSDP2) while it loads them.
import sys
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig
import hf_posenc
from hf_posenc.training import LongContextTrainer

source, output, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"distributed_config": DistributedConfig(fsdp_size=processes)} if processes > 1 else {}
model = AutoModelForCausalLM.from_pretrained(source, **options)
assert hf_posenc.encoding_of(model).name == "alibi"
assert any(type(p).__name__ == "DTensor" for p in model.parameters()) == (processes > 1)
ids = torch.randint(3, 97, (8, 24), generator=torch.Generator().manual_seed(0))
labels = ids.clone()
labels[:, ::3] = -100
labels[0, 2:] = -100
data = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels)]
training = TrainingArguments(
    output, max_steps=2, per_device_train_batch_size=4 // processes, learning_rate=0.01, optim="sgd", use_cpu=True,
    report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1, train_sampling_strategy="sequential",
)
trainer = LongContextTrainer(model=model, args=training, train_dataset=data)
result = trainer.train()
assert trainer._sliced, "the loss was not made in slices"
trainer.save_model(output)
if training.process_index == 0:
    import json, pathlib
    pathlib.Path(output, "loss.json").write_text(json.dumps(result.training_loss))
import os
sys.stderr.flush()
os._exit(0)  # as in SHARDED_ON_CPU
"""


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Folders of tiny models without dropout, and of a text."""
    found = {}
    builders: dict[str, Callable[..., Any]] = {"llama": tiny_llama, "gpt2": tiny_gpt2, "bert": tiny_bert}
    quiet = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
    quiet["bert"] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for name, build in builders.items():
        found[name] = str(tmp_path / name)
        build(**quiet.get(name, {})).save_pretrained(found[name])
        tiny_tokenizer(encoder=name == "bert").save_pretrained(found[name])
    found["text"] = str(tmp_path / "text.jsonl")
    rows = [json.dumps({"id": f"doc{i}", "text": text}) for i, text in enumerate(sentences(21))]
    Path(found["text"]).write_text("\n".join(rows), encoding="utf-8")
    return found


def _run(command: list[str], cache: Path, **environment: str) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    fixed = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(cache)}
    done = subprocess.run(
        command, env={**os.environ, **fixed, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _torchrun(script: Path, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return [*launcher, str(script), *arguments]


def _finetune(output: Path, models: dict[str, str], name: str, *options: str) -> list[str]:
    quiet = ["--use_cpu", "--disable_tqdm", "true", "--report_to", "none", "--optim", "sgd", "--learning_rate", "0.02"]
    text = ["--train_text", models["text"], "--eval_text", models["text"], "--block_length", "24"]
    schedule = ["--warmup_steps", "0", "--max_steps", "3", "--save_steps", "2", "--gradient_accumulation_steps", "2"]
    schedule += ["--logging_steps", "1"]  # else the Trainer reports the mean loss of the first process alone
    return ["--model", models[name], "--output_dir", str(output), *quiet, *text, *schedule, *options]


def _same(one: Path, other: Path) -> None:
    first, second = (
        json.loads((folder / "finetune.json").read_text(encoding="utf-8"))["metrics"] for folder in (one, other)
    )
    measured = [key for key in first if key == "train_loss" or key.startswith(("eval_loss", "eval_perplexity"))]
    assert len(measured) >= 2
    for key in measured:
        assert second[key] == pytest.approx(first[key], rel=1e-5), key
    ours, theirs = (load_model(folder)[0].state_dict() for folder in (one, other))  # names in files differ: DeepSpeed
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert float((value - theirs[name]).abs().max()) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", ["--encoding", "yarn", "--context_length", "64", "--pose_chunks", "2"]),
        ("gpt2", ["--encoding", "t5", "--context_length", "64", "--lora", "true", "--train_embeddings", "false"]),
        ("bert", ["--encoding", "alibi", "--context_length", "64", "--objective", "mlm"]),
    ],
    ids=["llama-pose", "gpt2-lora", "bert-mlm"],
)
@pytest.mark.parametrize("how", ["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_two_processes_equal_one(
    tmp_path: Path, models: dict[str, str], name: str, options: list[str], how: str
) -> None:
    if (name, how) == ("bert", "fsdp2"):
        pytest.skip("accelerate 1.15 cannot share out BERT's tied output bias, patched or not")
    script = str(ROOT / "scripts" / "finetune.py")
    one = _finetune(tmp_path / "one", models, name, *options, "--per_device_train_batch_size", "2")
    _run([sys.executable, script, *one], tmp_path / "cache")
    two = _finetune(tmp_path / "two", models, name, *options, "--per_device_train_batch_size", "1")
    worker = tmp_path / "worker.py"
    if how.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
        worker.write_text(SHARDED_ON_CPU, encoding="utf-8")
        _run([*_launch(_for_cpu(how, tmp_path)), str(worker), *two], tmp_path / "cache", DS_ACCELERATOR="cpu")
    elif how == "ddp":
        worker.write_text(DDP_THAT_ENDS, encoding="utf-8")
        _run([*_launch(), str(worker), *two], tmp_path / "cache")
    else:
        worker.write_text(SHARDED_ON_CPU, encoding="utf-8")
        _run(_torchrun(worker, *two), tmp_path / "cache", **_fsdp_environment())
        assert (tmp_path / "two" / "checkpoint-2" / "pytorch_model_fsdp_0").is_dir()  # it was sharded indeed
    _same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_processes_evaluate_as_one(tmp_path: Path, models: dict[str, str]) -> None:
    script = str(ROOT / "scripts" / "evaluate.py")
    asked = [models["llama"], "--encoding", "yarn:factor=2", "--text", models["text"], "--lengths", "8,16,32"]
    asked += ["--concatenate", "--passkey_trials", "0", "--stride", "8", "--device", "cpu"]
    _run([sys.executable, script, *asked, "--output", str(tmp_path / "one")], tmp_path / "cache")
    two = [*asked, "--output", str(tmp_path / "two")]
    _run([*_launch(), script, *two], tmp_path / "cache")
    alone, shared = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert (alone["processes"], shared["processes"]) == (1, 2)
    assert shared["command"].startswith("accelerate launch scripts/evaluate.py ")
    rows, others = (
        [row for entry in (*results["encodings"], results["native"]) for row in entry["rows"]]
        for results in (alone, shared)
    )
    assert len(rows) == len(others) >= 4
    for row, other in zip(rows, others, strict=True):
        assert other["tokens"] == row["tokens"]
        assert other["perplexity"] == pytest.approx(row["perplexity"], rel=1e-6)


def _for_cpu(config: str, folder: Path) -> Path:
    """One of the examples, with two processes and in float32."""
    import yaml

    values = yaml.safe_load((ROOT / "examples" / "accelerate" / f"{config}.yaml").read_text(encoding="utf-8"))
    place = folder / f"{config}.yaml"
    place.write_text(yaml.safe_dump({**values, "num_processes": 2, "mixed_precision": "no"}), encoding="utf-8")
    return place


def _launch(config: Path = ROOT / "examples" / "accelerate" / "cpu_2.yaml") -> list[str]:
    """`accelerate launch` with two processes."""
    port = str(29500 + os.getpid() % 1000)
    module = [sys.executable, "-m", "accelerate.commands.launch"]
    return [*module, "--config_file", str(config), "--main_process_port", port]


def _fsdp_environment() -> dict[str, str]:
    """What `accelerate launch` makes of examples/accelerate/fsdp2.yaml."""
    import yaml

    config = yaml.safe_load((ROOT / "examples" / "accelerate" / "fsdp2.yaml").read_text(encoding="utf-8"))[
        "fsdp_config"
    ]
    values = {key.upper(): str(value) for key, value in config.items()}
    return {**values, "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}


@pytest.mark.slow
def test_weights_shared_out_by_transformers(tmp_path: Path, models: dict[str, str]) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from hf_posenc import patch

    patch(AutoModelForCausalLM.from_pretrained(models["llama"]), "alibi").save_pretrained(tmp_path / "patched")
    worker = tmp_path / "worker.py"
    worker.write_text(SHARDED_BY_TRANSFORMERS, encoding="utf-8")
    source, one, two = (str(tmp_path / name) for name in ("patched", "one", "two"))
    _run([sys.executable, str(worker), source, one, "1"], tmp_path / "cache")
    _run(_torchrun(worker, source, two, "2"), tmp_path / "cache", ACCELERATE_USE_CPU="true")
    losses = [json.loads(Path(folder, "loss.json").read_text(encoding="utf-8")) for folder in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    ours, theirs = (load_file(Path(folder, "model.safetensors")) for folder in (one, two))
    before = load_file(tmp_path / "patched" / "model.safetensors")
    assert max(float((value - before[name]).abs().max()) for name, value in ours.items()) > 1e-4
    for name, value in ours.items():
        assert float((value - theirs[name]).abs().max()) < 1e-6, name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_every_config(config: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    values = load_config_from_file(str(config))
    assert values.num_processes >= 1
    assert config.read_text(encoding="utf-8").startswith("# ")


def test_every_way_of_running_has_its_config() -> None:
    names = {path.stem for path in CONFIGS}
    wanted = {
        "one_gpu",
        "ddp",
        "fsdp2",
        "fsdp2_cpu_offload",
        "deepspeed_zero2",
        "deepspeed_zero3",
        "context_parallel",
        "cpu_2",
    }
    assert wanted <= names


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_is_understood(experiment: Path, tmp_path: Path) -> None:
    from hf_posenc.training import parse_arguments

    text = experiment.read_text(encoding="utf-8")
    more = [] if "\nmodel:" in text or "\nfrom_scratch:" in text else ["--model", "m"]
    ours, _ = parse_arguments([str(experiment), *more, "--train_text", "t", "--output_dir", str(tmp_path), "--use_cpu"])
    assert ours.train_text == ["t"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--encoding", "alibi"], "alibi.*adds a bias"),
        (["--encoding", "dynamic_ntk", "--context_length", "64"], "dynamic_ntk.*length"),
        (["--encoding", "yarn", "--context_length", "64", "--packing", "pack"], "--packing cut"),
    ],
)
def test_what_context_parallelism_would_break_is_refused(
    models: dict[str, str], tmp_path: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_posenc.training import finetune, parse_arguments

    monkeypatch.setattr("hf_posenc.training.run.context_parts", lambda training: 2)
    line = _finetune(tmp_path / "out", models, "llama", *options)
    with pytest.raises(ValueError, match=message):
        finetune(parse_arguments(line))
    assert not (tmp_path / "out").exists()
