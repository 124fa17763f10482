"""Training as usual: recomputed layers, two passes before one backward, replicas, wrappers and several processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from encodings_under_test import CAUSAL, EVERY, LENGTH, assert_differs, assert_equal, fresh, logits, on
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
)

import hf_posenc
from models import ARCHITECTURES, tokens

IDS = tokens(LENGTH, batch=2)
DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "llama": {"attention_dropout": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}
NO_DROPOUT = {a: dict.fromkeys(fields, 0.0) for a, fields in DROPOUT.items()}


def gradients(model: Any, ids: torch.Tensor = IDS, **arguments: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step from a fixed random state."""
    model.zero_grad()
    torch.manual_seed(4)
    loss = model(ids, labels=ids, **arguments).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    """Equal loss, and equal gradients of the same parameters, relative to the largest number in each."""
    assert_equal(ours[0], theirs[0], tolerance)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert_equal(ours[1][name], gradient, tolerance * max(1.0, gradient.abs().max().item()), what=name)


def recompute(model: Any, reentrant: bool) -> None:
    """Turn gradient checkpointing on, by the name that this release has for it."""
    options = {"use_reentrant": reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


# ---------------------------------------------------------------------- recomputed layers


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@on()
def test_checkpointed_layers_give_the_same_gradients(
    architecture: str, name: str, backend: str, reentrant: bool
) -> None:
    """Positions, weights of the bias and dropout's random state are there again when a layer is recomputed."""
    # Reentrant checkpoints run forward without gradients, for which torch may take another fused kernel.
    tolerance = 1e-5 if reentrant else 1e-6
    for dropout in (NO_DROPOUT, DROPOUT):
        model = fresh(architecture, name, backend, **dropout[architecture]).train()
        model.config.use_cache = False
        plain = gradients(model)
        recompute(model, reentrant)
        calls: list[int] = []
        attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
        handle = attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert_same_step(gradients(model), plain, tolerance)
        handle.remove()
        assert len(calls) == 2, "once forward, once again for the gradient"
        assert set(hf_posenc.position_parameters(model)) <= set(plain[1])


@on(both=False)
def test_dropout_is_applied_as_in_stock(architecture: str, name: str, backend: str) -> None:
    """Dropout of attention weights works in training and is silent in evaluation."""
    model = fresh(architecture, name, backend, **DROPOUT[architecture])
    assert torch.equal(logits(model, IDS), logits(model, IDS))
    assert_equal(logits(model, IDS), logits(fresh(architecture, name, backend), IDS), 0.0)
    model.train()
    assert_differs(logits(model, IDS), logits(model, IDS))


# ---------------------------------------------------------------------- several passes, several copies


@on(both=False)
def test_two_passes_before_one_backward(architecture: str, name: str, backend: str) -> None:
    """Of different lengths and paddings: each keeps its own positions until its gradient is taken."""
    model = fresh(architecture, name, backend, **NO_DROPOUT[architecture]).train()
    short, mask = tokens(9, batch=2, seed=5), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    separate: dict[str, torch.Tensor] = {}
    for ids, extra in ((IDS, {}), (short, {"attention_mask": mask})):
        for parameter, gradient in gradients(model, ids, **extra)[1].items():
            separate[parameter] = separate.get(parameter, 0) + gradient
    for checkpointed in (False, True):
        if checkpointed:
            recompute(model, reentrant=False)
        model.zero_grad()
        first = model(IDS, labels=IDS).loss
        second = model(short, labels=short, attention_mask=mask).loss
        (first + second).backward()
        together = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same_step((first.detach(), together), (first.detach(), separate), 1e-5)


def replicas(model: nn.Module, count: int) -> list[Any]:
    """What `torch.nn.parallel.replicate` makes for each GPU: shallow copies whose parameters are plain tensors."""
    modules = list(model.modules())
    number = {module: i for i, module in enumerate(modules)}
    made = []
    for _ in range(count):
        copies = [module._replicate_for_data_parallel() for module in modules]
        for module, twin in zip(modules, copies, strict=True):
            for name, child in module._modules.items():
                twin._modules[name] = None if child is None else copies[number[child]]
            for name, parameter in module._parameters.items():
                setattr(twin, name, None if parameter is None else parameter * 1)
            for name, buffer in module._buffers.items():
                twin._buffers[name] = None if buffer is None else buffer.clone()
        made.append(copies[0])
    return made


@on(both=False)
def test_replicas_run_at_once_with_their_own_positions(architecture: str, name: str, backend: str) -> None:
    """As DataParallel runs them: in threads, each on its part of the batch."""
    model = fresh(architecture, name, backend).train(False)
    parts = [tokens(LENGTH), tokens(7, seed=3)]
    expected = [logits(model, part) for part in parts]
    copies = replicas(model, 2)
    assert not list(copies[0].parameters())
    out: list[Any] = [None, None]

    def run(place: int) -> None:
        for _ in range(4):
            out[place] = copies[place](parts[place]).logits

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(out, expected, strict=True):
        assert_equal(ours.detach(), theirs, 1e-5)
    (out[0].sum() + out[1].sum()).backward()
    for parameter in hf_posenc.position_parameters(model):
        gradient = dict(model.named_parameters())[parameter].grad
        assert gradient is not None and bool(gradient.abs().sum() > 0), parameter


@on(both=False)
def test_prepared_by_accelerate_and_unwrapped(architecture: str, name: str, backend: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = fresh(architecture, name, backend, **NO_DROPOUT[architecture]).train()
    plain = gradients(copy.deepcopy(model))
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(4)
    loss = prepared(IDS, labels=IDS).loss
    accelerator.backward(loss)
    assert_equal(loss.detach(), plain[0], 1e-6)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    unwrapped = accelerator.unwrap_model(prepared)
    assert unwrapped is model and hf_posenc.encoding_of(unwrapped) == EVERY[name]
    for parameter in hf_posenc.position_parameters(unwrapped):
        assert not torch.equal(dict(unwrapped.named_parameters())[parameter], before[parameter]), parameter
    hf_posenc.unpatch(unwrapped)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_unwrapping_takes_mixed_precision_off(precision: str) -> None:
    """accelerate replaces `forward` for mixed precision; unwrapping must find the patched model under it."""
    accelerate = pytest.importorskip("accelerate")
    model = fresh("llama", "t5")
    out = logits(model, IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        expected = logits(model, IDS).float()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    prepared = accelerator.prepare(model)
    assert_equal(logits(prepared, IDS), expected, 1e-6)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert_equal(logits(unwrapped, IDS), out, 0.0)
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state(True)


def offload(model: Any) -> Any:
    """Keep every weight elsewhere and bring it in for each call, as for a model larger than its device."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


@on(both=False)
def test_offloaded_before_or_after_the_patch(architecture: str, name: str, backend: str) -> None:
    expected = logits(fresh(architecture, name, backend), IDS)
    after = offload(fresh(architecture, name, backend))
    assert all(p.is_meta for p in after.parameters())
    assert_equal(logits(after, IDS), expected, 1e-6, what="patched, then offloaded,")
    before = offload(ARCHITECTURES[architecture](attn_implementation=backend))
    if name == "learned" and architecture != "llama":
        with pytest.raises(hf_posenc.PatchError, match=r"is offloaded.*Patch the model before"):
            hf_posenc.patch(before, EVERY[name])
        assert_equal(logits(before, IDS), logits(ARCHITECTURES[architecture](attn_implementation=backend), IDS), 1e-6)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        hf_posenc.patch(before, EVERY[name])
        torch.manual_seed(1)
        twin = hf_posenc.patch(ARCHITECTURES[architecture](attn_implementation=backend), EVERY[name])
    assert_equal(logits(before, IDS), logits(twin, IDS), 1e-6, what="offloaded, then patched,")
    hf_posenc.unpatch(before)
    assert_equal(logits(before, IDS), logits(hf_posenc.unpatch(twin), IDS), 1e-6, what="offloaded, and unpatched,")


def test_a_table_that_is_offloaded_is_measured_and_guarded() -> None:
    """Its size is read for scale='match'; it cannot stay beside another encoding, nor be put back while it is away."""
    before = hf_posenc.patch(offload(ARCHITECTURES["gpt2"]()), "sinusoidal:scale=match")
    expected = hf_posenc.patch(ARCHITECTURES["gpt2"](), "sinusoidal:scale=match")
    assert_equal(logits(before, IDS), logits(expected, IDS), 1e-6)
    with pytest.raises(hf_posenc.PatchError, match=r"alibi: the native table wpe is offloaded"):
        hf_posenc.patch(offload(ARCHITECTURES["gpt2"]()), "alibi", keep_native=True)
    after = offload(fresh("gpt2", "alibi"))
    with pytest.raises(hf_posenc.PatchError, match="wpe was offloaded since the model was patched"):
        hf_posenc.unpatch(after)
    assert_equal(logits(after, IDS), logits(fresh("gpt2", "alibi"), IDS), 1e-6)
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(after)
    assert_equal(logits(hf_posenc.unpatch(after), IDS), logits(ARCHITECTURES["gpt2"](), IDS), 0.0)


# ---------------------------------------------------------------------- token counts and labels


@on(*CAUSAL, both=False)
def test_accumulated_steps_equal_one_batch(architecture: str, name: str, backend: str) -> None:
    """Micro-batches of 3, 9, 1 and 7 targets, each told the number of all: the token count must not be dropped."""
    model = fresh(architecture, name, backend, **NO_DROPOUT[architecture]).train()
    ids, labels = tokens(12, batch=4), torch.full((4, 12), -100)
    for row, targets in enumerate((3, 9, 1, 7)):
        labels[row, 1 : 1 + targets] = ids[row, 1 : 1 + targets]
    model.zero_grad()
    whole = model(ids, labels=labels).loss
    whole.backward()
    expected = whole.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total = torch.zeros(())
    for row in range(4):
        loss = model(ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=20).loss
        loss.backward()
        total += loss.detach()
    ours = total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert_same_step(ours, expected, 2e-6)


# ---------------------------------------------------------------------- classifiers

CLASSIFIERS: dict[str, Any] = {
    "bert": BertForSequenceClassification,
    "gpt2": GPT2ForSequenceClassification,
    "llama": LlamaForSequenceClassification,
}


def classifier(architecture: str, name: str, backend: str, **fields: Any) -> Any:
    config = ARCHITECTURES[architecture](num_labels=3, **fields).config
    config._attn_implementation = backend
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf_posenc.patch(CLASSIFIERS[architecture](config).eval(), EVERY[name])


@on(both=False)
def test_a_classifier_does_not_see_padding(architecture: str, name: str, backend: str) -> None:
    """On either side, of any width; and eos used as padding does not move the pooled token when it stands inside."""
    model = classifier(architecture, name, backend, pad_token_id=2, eos_token_id=2)
    text = tokens(9)
    text[0, 4] = 2
    alone = logits(model, text)
    for pads, left in ((5, True), (5, False), (1, True), (1, False)):
        padding = torch.full((1, pads), 2)
        ids = torch.cat([padding, text] if left else [text, padding], dim=1)
        mask = torch.cat([padding * 0, text * 0 + 1] if left else [text * 0 + 1, padding * 0], dim=1)
        if architecture == "bert" and left:
            continue  # its head reads the first token, [CLS], whatever that is: stock's own contract
        assert_equal(logits(model, ids, attention_mask=mask), alone, what=f"{pads} pads, left={left}")
    other = text.clone()
    other[0, 4] = 7
    assert_differs(logits(model, other), alone)


@on(*CAUSAL, names=["alibi", "sinusoidal", "rope", "longrope"], both=False)
def test_a_classifier_given_vectors(architecture: str, name: str, backend: str) -> None:
    """Stock cannot know from vectors where padding begins, says so, and pools the last one: right for left padding."""
    model = classifier(architecture, name, backend)
    text = tokens(9)
    alone = logits(model, text)
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), text], dim=1)
    mask = (ids != 0).long()
    vectors = model.get_input_embeddings()(ids)
    assert_equal(logits(model, inputs_embeds=vectors, attention_mask=mask), alone)


@pytest.mark.parametrize("name", ["alibi", "t5", "longrope", "sinusoidal_concat"])
def test_a_classifier_trains_and_is_saved(name: str, tmp_path: Path) -> None:
    for architecture in sorted(CLASSIFIERS):
        model = classifier(architecture, name, "sdpa", **NO_DROPOUT[architecture]).train()
        loss = model(IDS, labels=torch.tensor([0, 2])).loss
        loss.backward()
        assert all(dict(model.named_parameters())[n].grad is not None for n in hf_posenc.position_parameters(model))
        model.eval().save_pretrained(tmp_path / architecture)
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / architecture)
        assert_equal(logits(loaded, IDS), logits(model, IDS), 2e-5)


# ---------------------------------------------------------------------- several processes

WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from encodings_under_test import EVERY, fresh
from models import tokens
import hf_posenc

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
found = {}
for architecture in ("bert", "gpt2", "llama"):
    for name in sys.argv[2].split(","):
        flags = {"gpt2": dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), "llama": {},
                 "bert": dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)}[architecture]
        plain = fresh(architecture, name, **flags).train()
        ids = tokens(20, batch=2 * world)
        plain(ids, labels=ids).loss.backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        model = fresh(architecture, name, **flags).train()
        if kind == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh("cpu", (world,))
            base = model.base_model
            for layer in {"gpt2": "h", "llama": "layers", "bert": "encoder.layer"}[architecture].split("."):
                base = getattr(base, layer)
            for layer in base:
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        for _ in range(2):  # the second step must find nothing unreduced
            model.zero_grad()
            part = ids[2 * rank : 2 * rank + 2]
            wrapped(part, labels=part).loss.backward()
        worst = 0.0
        for n, p in model.named_parameters():
            if p.grad is None:
                assert n not in expected, n
                continue
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            worst = max(worst, ((grad - expected[n]).abs().max() / max(1.0, expected[n].abs().max())).item())
        refused = None
        if kind == "fsdp":
            try:
                hf_posenc.unpatch(model)
            except ValueError as error:
                refused = str(error)
        found[f"{architecture}-{name}"] = [worst, str(hf_posenc.encoding_of(wrapped)), refused]
if rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # a thread of gloo's that is still there when the interpreter goes down aborts the process, now and then
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_take_the_step_of_one(kind: str, tmp_path: Path) -> None:
    """DistributedDataParallel and FSDP2 on two CPU processes: gradients of the whole batch, on every weight."""
    names = ["alibi", "t5", "kerple", "fire", "learned", "sinusoidal_concat", "rope_half", "longrope", "yarn", "nope"]
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent)])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(script), kind, ",".join(names)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert len(found) == 3 * len(names)
    for what, (worst, encoding, refused) in found.items():
        assert worst < 1e-5, (what, worst)
        assert encoding == str(EVERY[what.partition("-")[2]])
        if kind == "fsdp":
            assert refused and "sharded" in refused
