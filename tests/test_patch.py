"""Patching changes one model, whole or not at all, and can be taken back bit for bit."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from encodings_under_test import (
    CAUSAL,
    EVERY,
    LENGTH,
    assert_differs,
    assert_equal,
    fresh,
    logits,
    on,
    stir,
)
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertLMHeadModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_posenc
from hf_posenc.encoding import EncodingError
from hf_posenc.patch import drop_silent_native
from models import ARCHITECTURES, tokens

IDS = tokens(LENGTH, batch=2)
AUTO = {"bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM}


def snapshot(model: Any) -> dict[str, Any]:
    """Everything of a model that somebody could see: bits, names, order, flags, hooks, classes, config."""
    return {
        "class": type(model),
        "config class": type(model.config),
        "config": copy.deepcopy(model.config.to_dict()),
        "config on disk": model.config.to_json_string(),
        "state dict": [(name, value.clone()) for name, value in model.state_dict().items()],
        "buffers": [(name, value.clone()) for name, value in model.named_buffers()],
        "parameters": [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        "modules": [(name, type(module), module.training) for name, module in model.named_modules()],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": [
            (name, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_with_kwargs))
            for name, m in model.named_modules()
        ],
        "attention": model.config._attn_implementation,
        "tied": getattr(model, "all_tied_weights_keys", None),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Two snapshots, bit for bit."""
    assert before.keys() == after.keys()
    for what in before:
        if what in ("state dict", "buffers"):
            assert [name for name, _ in before[what]] == [name for name, _ in after[what]], what
            for (name, old), (_, new) in zip(before[what], after[what], strict=True):
                assert old.dtype == new.dtype and torch.equal(old, new), (what, name)
        else:
            assert before[what] == after[what], what


# ---------------------------------------------------------------------- there and back


@on(both=False)
def test_unpatch_is_bit_exact(architecture: str, name: str, backend: str) -> None:
    model = ARCHITECTURES[architecture](attn_implementation=backend)
    before, out = snapshot(model), logits(model, IDS)
    config, rotary = model.config, getattr(model.base_model, "rotary_emb", None)
    hf_posenc.patch(model, EVERY[name])
    logits(model, IDS)
    assert type(model).__name__ == before["class"].__name__ and isinstance(model, before["class"])
    assert hf_posenc.unpatch(model) is model
    assert_same(before, snapshot(model))
    assert model.config is config and getattr(model.base_model, "rotary_emb", None) is rotary
    assert torch.equal(logits(model, IDS), out)
    assert_same(before, snapshot(hf_posenc.unpatch(model)))  # once more does nothing


@on(both=False)
def test_a_patch_replaces_an_earlier_one(architecture: str, name: str, backend: str) -> None:
    """Whatever stood before: the result is that of the last patch alone, and unpatch goes back to stock."""
    model = ARCHITECTURES[architecture](attn_implementation=backend)
    stock = snapshot(model)
    alone = fresh(architecture, name, backend)
    for earlier in ("alibi", "dynamic_ntk", "learned_concat", "learned", "rope_half", name):
        hf_posenc.patch(model, EVERY[earlier])
    hf_posenc.patch(model, EVERY["t5"], keep_native=True)
    torch.manual_seed(1)
    stir(hf_posenc.patch(model, EVERY[name]))
    assert torch.equal(logits(model, IDS), logits(alone, IDS))
    assert hf_posenc.encoding_of(model) == EVERY[name]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in alone.named_parameters()]
    assert model.config.to_json_string() == alone.config.to_json_string()
    assert_same(stock, snapshot(hf_posenc.unpatch(model)))


@on(both=False)
def test_patching_again_in_the_same_way_changes_nothing(architecture: str, name: str, backend: str) -> None:
    torch.manual_seed(3)
    model = hf_posenc.patch(ARCHITECTURES[architecture](), EVERY[name])
    out, keys = logits(model, IDS), list(model.state_dict())
    torch.manual_seed(3)
    hf_posenc.patch(model, EVERY[name])
    assert torch.equal(logits(model, IDS), out) and list(model.state_dict()) == keys


# ---------------------------------------------------------------------- whole or not at all


class Broken(RuntimeError):
    """The fault that the next test plants."""


STEPS = [
    (nn.Module, "add_module"),
    (nn.Module, "set_submodule"),
    (nn.Module, "register_forward_hook"),
    (nn.Module, "register_forward_pre_hook"),
]


@pytest.mark.parametrize("patched_before", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
@pytest.mark.parametrize("name", ["alibi", "learned", "sinusoidal_concat", "dynamic_ntk"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_patch_that_fails_half_way_leaves_the_model_as_it_was(
    architecture: str, name: str, owner: Any, step: str, patched_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (
        fresh(architecture, "t5" if name == "alibi" else "learned") if patched_before else ARCHITECTURES[architecture]()
    )
    before, out = snapshot(model), logits(model, IDS)
    original = getattr(owner, step)
    calls = 0

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = original(self, *args, **kwargs)
        calls += any(frame.function == "_change" for frame in inspect.stack(0))  # not while an earlier patch is undone
        if calls == 1:
            calls += 1  # putting things back must not meet the fault again
            raise Broken
        return result

    monkeypatch.setattr(owner, step, once)
    try:
        hf_posenc.patch(model, EVERY[name])
    except Broken:
        monkeypatch.undo()
        same = snapshot(model)
        for volatile in ("parameters",) if patched_before else ():  # tables may be put back as equal copies
            strip = [(n, flag) for n, _, flag in before[volatile]], [(n, flag) for n, _, flag in same[volatile]]
            assert strip[0] == strip[1]
            before[volatile] = same[volatile]
        assert_same(before, same)
        assert torch.equal(logits(model, IDS), out)
    else:
        assert calls == 0, "the fault was swallowed"


REFUSED: list[tuple[str, Any, dict[str, Any], list[str]]] = [
    # architecture, encoding, options, what the message must say: the argument, its value, what is allowed
    ("gpt2", "yarm:factor=2", {}, ["'yarm'", "Did you mean 'yarn'?", "Available: alibi"]),
    ("gpt2", 3, {}, ["Expected an encoding", "int: 3"]),
    ("gpt2", None, {}, ["Expected an encoding", "None"]),
    ("gpt2", {"factor": 2}, {}, ["'name'", "alibi"]),
    ("gpt2", {"name": "alibi", "slope": 1}, {}, ["'slope'", "Did you mean 'slopes'?"]),
    ("llama", "yarn", {}, ["factor=None", "at least 1", "context_length="]),
    ("llama", "linear:factor=0.5", {}, ["factor=0.5", "at least 1"]),
    ("llama", "linear:factor=4", {"context_length": 64}, ["factor=4", "context_length=64", "factor=2"]),
    ("llama", "alibi:slopes=[1.0,0.5]", {}, ["slopes has 2 numbers", "must have 4"]),
    ("llama", "longrope:factor=2", {}, ["short_factor", "None", "list of 4 numbers"]),
    (
        "llama",
        {"name": "longrope", "factor": 2, "short_factor": [1, 1], "long_factor": [1] * 4},
        {},
        ["a list of 2", "4"],
    ),
    ("llama", "rope:rotary_fraction=0.1", {}, ["rotary_fraction=0.1", "0 dimensions", "at least 2"]),
    ("llama", "sinusoidal:scale=match", {}, ["scale='match'", "has none"]),
    ("gpt2", "learned:num_positions=16", {}, ["num_positions=16", "32"]),
    ("bert", "learned", {"context_length": 16}, ["num_positions=16", "32"]),
    ("gpt2", "learned:num_positions=64", {"context_length": 48}, ["num_positions=64", "48"]),
    ("gpt2", "learned:num_positions=1025,init=hierarchical", {}, ["num_positions=1025", "1024"]),
    ("llama", "rope", {"context_length": 33}, ["context_length=33", "32 tokens", "yarn"]),
    ("llama", "rope:theta=10000.0", {"context_length": 10**6}, ["context_length=1000000", "32 tokens"]),
    ("bert", "learned:num_positions=100000000000000", {}, ["num_positions=100000000000000", "GiB"]),
    ("llama", "learned", {"context_length": 10**14}, ["num_positions=100000000000000", "GiB"]),
    ("gpt2", "fire:width=100000000000000", {}, ["width=100000000000000", "GiB"]),
    ("llama", "rope:interleaved=true", {"keep_native": True}, ["keep_native=True", "interleaved=False"]),
    ("llama", "alibi", {"keep_native": "yes"}, ["keep_native='yes'", "True or False"]),
    *[
        ("llama", "yarn", {"context_length": length}, [f"context_length={length!r}", "whole number of tokens above 0"])
        for length in (0, -1, 2.5, True, "64")
    ],
]


@pytest.mark.parametrize("patched_before", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize(("architecture", "encoding", "options", "said"), REFUSED, ids=lambda x: str(x)[:40])
def test_bad_arguments_are_refused_before_the_model_is_touched(
    architecture: str, encoding: Any, options: dict[str, Any], said: list[str], patched_before: bool
) -> None:
    model = fresh(architecture, "kerple") if patched_before else ARCHITECTURES[architecture]()
    before = snapshot(model)
    with pytest.raises(ValueError) as caught:
        hf_posenc.patch(model, encoding, **options)
    for words in said:
        assert words in str(caught.value), (words, str(caught.value))
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more")])
def test_weights_that_find_no_memory_are_refused(
    architecture: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh(architecture, "kerple")
    before = snapshot(model)

    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(hf_posenc.T5Bias, "new_weights", full)
    with pytest.raises(EncodingError, match=r"t5:num_buckets=64: its new weights cannot be made: .*memory$"):
        hf_posenc.patch(model, "t5:num_buckets=64")
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("length", [16, 32, 64])
@pytest.mark.parametrize("name", sorted(hf_posenc.encodings()))
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_what_a_context_length_means(architecture: str, name: str, length: int) -> None:
    """It is worked into the encoding, or needs nothing, or is refused; never taken and forgotten."""
    left_open = ("factor", "num_positions", "original_context_length")
    asked = EVERY[name].replace(**{field: None for field in left_open if hasattr(EVERY[name], field)})
    model = ARCHITECTURES[architecture]()
    too_long = name == "rope" and architecture == "llama" and length > 32
    too_short = name == "learned" and architecture != "llama" and length < 32
    if too_long or too_short:
        with pytest.raises(EncodingError, match=rf"{length}\b.*32"):
            hf_posenc.patch(model, asked, context_length=length)
        return
    found = hf_posenc.encoding_of(hf_posenc.patch(model, asked, context_length=length))
    if hasattr(found, "factor"):
        assert found.factor == max(1.0, length / 32)
    elif name == "learned":
        assert found.num_positions == length
    else:
        assert found == asked
    assert torch.isfinite(logits(model, tokens(length))).all()


@pytest.mark.parametrize("weight", [-0.1, 1.5, float("nan"), "1", True, None])
def test_a_native_weight_that_cannot_be_is_refused(weight: Any) -> None:
    model = hf_posenc.patch(ARCHITECTURES["gpt2"](), "alibi", keep_native=True)
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"weight={weight!r} is not allowed; it must be a number from 0 to 1"):
        hf_posenc.set_native_weight(model, weight)
    assert_same(before, snapshot(model))


def test_fading_needs_a_native_encoding() -> None:
    for model in (ARCHITECTURES["gpt2"](), fresh("llama", "alibi")):
        with pytest.raises(hf_posenc.PatchError, match="set_native_weight needs a model patched with keep_native=True"):
            hf_posenc.set_native_weight(model, 0.5)


def other_families() -> list[Any]:
    small = dict(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    t5 = T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return [RobertaForMaskedLM(RobertaConfig(**small)), T5ForConditionalGeneration(t5)]


def test_families_that_are_not_registered_are_refused() -> None:
    """RoBERTa is no BERT: its positions start at two."""
    for model in other_families():
        before = snapshot(model)
        for call in (lambda m: hf_posenc.patch(m, "alibi"), hf_posenc.encoding_of):
            with pytest.raises(hf_posenc.ArchitectureError) as caught:
                call(model)
            message = str(caught.value)
            assert repr(model.config.model_type) in message and "Supported: bert, gpt2, llama" in message
        assert_same(before, snapshot(model))
    with pytest.raises(hf_posenc.ArchitectureError, match="not the same as 'bert'"):
        hf_posenc.patch(other_families()[0], "alibi")


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), None, "gpt2", GPT2Config()])
def test_things_that_are_no_model_are_refused(thing: Any) -> None:
    for call in (lambda m: hf_posenc.patch(m, "alibi"), hf_posenc.unpatch, hf_posenc.encoding_of):
        with pytest.raises(hf_posenc.ArchitectureError, match=f"Expected a transformers model.*{type(thing).__name__}"):
            call(thing)


# ---------------------------------------------------------------------- backends that would drop a bias

SCORES = [name for name, e in EVERY.items() if e.site == "score"]


@pytest.mark.parametrize("backend", ["flash_attention_2", "flex_attention", "sdpa_paged", "paged|eager"])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_backend_that_cannot_apply_a_bias_is_refused_before_and_after(
    architecture: str, name: str, backend: str
) -> None:
    model = ARCHITECTURES[architecture]()
    model.config._attn_implementation_internal = backend  # as on a machine where it is installed
    before = snapshot(model)
    with pytest.raises(
        ValueError, match=r"attn_implementation='.*' cannot apply the score bias of .*Use 'eager' or 'sdpa'"
    ):
        hf_posenc.patch(model, EVERY[name])
    assert_same(before, snapshot(model))

    model = fresh(architecture, name)
    out = logits(model, IDS)
    with pytest.raises(ValueError, match="cannot apply the score bias"):
        model.config._attn_implementation = backend
    with pytest.raises((ValueError, ImportError)):
        model.set_attn_implementation(backend)
    assert torch.equal(logits(model, IDS), out), "the bias must still be there"


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_backend_can_be_changed_after_patching(architecture: str, name: str) -> None:
    model = fresh(architecture, name, "sdpa")
    expected = logits(model, IDS)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "hf_posenc_eager"
    assert_equal(logits(model, IDS), expected)
    assert len(model(IDS, output_attentions=True).attentions) == 2
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, IDS), expected)
    hf_posenc.unpatch(model)
    assert model.config._attn_implementation == "sdpa"


def test_encodings_without_a_bias_keep_the_backend() -> None:
    for name in ("rope", "sinusoidal", "nope", "yarn", "learned"):
        assert fresh("llama", name, "eager").config._attn_implementation == "eager"


# ---------------------------------------------------------------------- nobody else notices


@on(both=False)
def test_other_models_notice_nothing(architecture: str, name: str, backend: str) -> None:
    """One that shares the config object, one that shares the class, one that shares the weights; and the classes."""
    model = ARCHITECTURES[architecture](attn_implementation=backend)
    sharing = type(model)(model.config).eval()
    assert sharing.config is model.config
    other = ARCHITECTURES[architecture](seed=5, attn_implementation=backend)
    twin = copy.deepcopy(model)
    classes = [cls for cls in {type(m) for m in model.modules()} | {type(model.config)}]
    contents = [dict(vars(cls)) for cls in classes]
    functions = {key: AttentionInterface()[key] for key in ("sdpa",)}
    before = [(snapshot(m), logits(m, IDS)) for m in (sharing, other, twin)]
    hf_posenc.patch(model, EVERY[name])
    logits(model, IDS)
    for (seen, out), m in zip(before, (sharing, other, twin), strict=True):
        assert_same(seen, snapshot(m))
        assert torch.equal(logits(m, IDS), out)
    assert sharing.config is not model.config
    for cls, content in zip(classes, contents, strict=True):
        assert dict(vars(cls)) == content, cls
    assert functions == {key: AttentionInterface()[key] for key in ("sdpa",)}


@on(both=False)
def test_copies_and_pickles_are_models_of_their_own(architecture: str, name: str, backend: str) -> None:
    model = fresh(architecture, name, backend)
    out = logits(model, IDS)
    stock = logits(ARCHITECTURES[architecture](attn_implementation=backend), IDS)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        assert torch.equal(logits(twin, IDS), out)
        assert hf_posenc.encoding_of(twin) == EVERY[name]
        mine, theirs = ({id(p) for p in m.parameters()} for m in (model, twin))
        assert not mine & theirs
        with torch.no_grad():
            twin.get_input_embeddings().weight.zero_()
            for parameter in twin.base_model.hf_posenc.parameters():
                parameter.zero_()
        assert_differs(logits(twin, IDS), out)
        assert torch.equal(logits(model, IDS), out)
    twin = copy.deepcopy(model)
    hf_posenc.unpatch(twin)
    assert torch.equal(logits(twin, IDS), stock)
    assert torch.equal(logits(model, IDS), out) and hf_posenc.encoding_of(model) == EVERY[name]
    again = pickle.loads(pickle.dumps(copy.deepcopy(twin)))
    assert torch.equal(logits(again, IDS), stock)
    with torch.no_grad():
        again.get_input_embeddings().weight.zero_()
    assert torch.equal(logits(twin, IDS), stock)


@pytest.mark.parametrize("name", ["alibi", "learned", "longrope", "sinusoidal_concat"])
def test_wrappers_are_seen_through(name: str) -> None:
    class Wrapper(nn.Module):
        """What DDP and DataParallel look like."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    expected = logits(fresh("gpt2", name), IDS)
    for wrap in (Wrapper, lambda m: torch.compile(m, backend="eager"), lambda m: Wrapper(Wrapper(m))):
        inner = ARCHITECTURES["gpt2"]()
        wrapped = wrap(inner)
        stock = snapshot(inner)
        torch.manual_seed(1)
        assert hf_posenc.patch(wrapped, EVERY[name]) is wrapped
        stir(wrapped)
        assert torch.equal(logits(inner, IDS), expected)
        assert hf_posenc.encoding_of(wrapped) == EVERY[name]
        assert all(n in dict(wrapped.named_parameters()) for n in hf_posenc.position_parameters(wrapped))
        hf_posenc.unpatch(wrapped)
        assert_same(stock, snapshot(inner))


@pytest.mark.parametrize("name", EVERY)
def test_a_model_without_a_head_is_patched_alike(name: str) -> None:
    with_head = fresh("gpt2", name)
    base = GPT2Model(ARCHITECTURES["gpt2"]().config).eval()
    base.load_state_dict(ARCHITECTURES["gpt2"]().transformer.state_dict())
    torch.manual_seed(1)
    stir(hf_posenc.patch(base, EVERY[name]))
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, with_head.transformer(IDS).last_hidden_state)
    assert hf_posenc.encoding_of(with_head.transformer) == EVERY[name]  # the base model inside says the same


# ---------------------------------------------------------------------- new weights


@on(both=False)
def test_every_trainable_weight_gets_a_gradient(architecture: str, name: str, backend: str) -> None:
    """One without would stop DistributedDataParallel; a silent native table is frozen, and thaws when it is back."""
    model = fresh(architecture, name, backend).train()
    model(IDS, labels=IDS).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad and "pooler" not in parameter_name:
            assert parameter.grad is not None, parameter_name
            assert bool(parameter.grad.isfinite().all()), parameter_name
    names = hf_posenc.position_parameters(model)
    assert set(names) <= {n for n, p in model.named_parameters() if p.requires_grad}
    for n in names:
        gradient = dict(model.named_parameters())[n].grad
        assert gradient is not None and bool(gradient.abs().sum() > 0), n
    hf_posenc.unpatch(model)
    assert all(p.requires_grad for p in model.parameters())
    assert hf_posenc.position_parameters(model) == []


def test_names_of_new_weights() -> None:
    expected = {
        "alibi": [],
        "nope": [],
        "yarn": [],
        "t5": ["transformer.hf_posenc.buckets"],
        "kerple": ["transformer.hf_posenc.raw_r1", "transformer.hf_posenc.raw_r2"],
        "learned": ["transformer.wpe.weight"],
        "learned_concat": ["transformer.hf_posenc.table", "transformer.hf_posenc.fuse"],
        "sinusoidal_concat": ["transformer.hf_posenc.scale", "transformer.hf_posenc.fuse"],
    }
    for name, names in expected.items():
        assert hf_posenc.position_parameters(fresh("gpt2", name)) == names, name


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_concatenation_starts_out_equal_to_addition(architecture: str, name: str) -> None:
    """W [x; p] with W = [I, I]. The output embeddings stay tied to the input embeddings, and W is not in between."""
    made = []
    for fusion in ("add", "concat"):
        model = ARCHITECTURES[architecture](tie_word_embeddings=True)
        fields = {"num_positions": 64} if name == "learned" else {}
        hf_posenc.patch(model, {"name": name, "fusion": fusion, **fields})
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        made.append(model)
    assert_equal(logits(made[1], IDS), logits(made[0], IDS), 1e-5)
    fuse = made[1].base_model.hf_posenc.fuse
    assert torch.equal(fuse, torch.cat([torch.eye(32), torch.eye(32)], dim=1))
    with torch.no_grad():
        fuse[:, 32:].zero_()
    silent = logits(hf_posenc.patch(ARCHITECTURES[architecture](tie_word_embeddings=True), "nope"), IDS)
    assert_equal(logits(made[1], IDS), silent, 1e-5)  # the second half is the position's


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_a_longer_table_keeps_its_ends_and_is_active_at_once(architecture: str) -> None:
    model = ARCHITECTURES[architecture]()
    path = "wpe" if architecture == "gpt2" else "embeddings.position_embeddings"
    old, out = model.base_model.get_submodule(path).weight.detach().clone(), logits(model, IDS)

    hf_posenc.patch(model, "learned:num_positions=32")
    assert torch.equal(model.base_model.get_submodule(path).weight, old) and torch.equal(logits(model, IDS), out)

    hf_posenc.patch(model, "learned:num_positions=64")
    new = model.base_model.get_submodule(path).weight
    assert new.shape == (64, 32) and torch.equal(new[0], old[0]) and torch.equal(new[63], old[31])
    assert model.config.max_position_embeddings == 64 and hf_posenc.encoding_of(model).num_positions == 64
    assert logits(model, tokens(64)).shape == (1, 64, 97)
    with pytest.raises((IndexError, ValueError)):
        logits(model, tokens(65))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert any(p is new for group in optimizer.param_groups for p in group["params"])
    row, before = new[40].detach().clone(), logits(model, tokens(50))
    model(tokens(50), labels=tokens(50)).loss.backward()
    optimizer.step()
    assert not torch.equal(new[40], row), "a row beyond the old table must train"
    assert_differs(logits(model, tokens(50)), before)


@pytest.mark.parametrize("init", ["interpolate", "repeat", "hierarchical", "sinusoidal", "random"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_start_of_a_table_runs_beyond_the_trained_length(architecture: str, init: str) -> None:
    model = hf_posenc.patch(ARCHITECTURES[architecture](), f"learned:init={init}", context_length=96)
    assert bool(logits(model, tokens(96)).isfinite().all())
    assert hf_posenc.encoding_of(model).num_positions == 96
    if architecture == "bert":
        assert_equal(
            logits(model, tokens(96)), logits(model, tokens(96), token_type_ids=torch.zeros(1, 96).long()), 0.0
        )


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_a_matched_sinusoid_is_as_large_as_the_table_it_replaces(architecture: str) -> None:
    model = ARCHITECTURES[architecture](initializer_range=0.02)
    path = "wpe" if architecture == "gpt2" else "embeddings.position_embeddings"
    old = model.base_model.get_submodule(path).weight.norm(dim=-1).mean().item()
    hf_posenc.patch(model, "sinusoidal:scale=match")
    owner = model.base_model.hf_posenc
    with torch.no_grad():
        weights = dict(owner.named_parameters())
        vectors = owner.plan.resolved.embed(torch.zeros(1, 32, 32), torch.arange(32)[None], weights, owner.plan.shape)
    assert vectors[0].norm(dim=-1).mean().item() == pytest.approx(old, rel=0.01)
    assert not hf_posenc.position_parameters(model)
    assert model(IDS, labels=IDS).loss.item() < math.log(97) + 1


@pytest.mark.parametrize("width", [1, 2, 3, 31])
def test_odd_widths_have_sinusoids(width: int) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=width, n_layer=1, n_head=1, n_positions=32)).eval()
    hf_posenc.patch(model, "sinusoidal")
    assert bool(logits(model, IDS).isfinite().all())
    owner = model.base_model.hf_posenc
    vectors = owner.plan.resolved.embed(torch.zeros(1, 5, width), torch.arange(5)[None], {}, owner.plan.shape)
    assert vectors.shape == (1, 5, width)
    assert_equal(vectors[0, :, 0], torch.arange(5).float().sin(), 1e-6)


# ---------------------------------------------------------------------- beside the native encoding


def fused(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Token vectors after the embedding site of a patched model."""
    owner = model.base_model.hf_posenc
    positions, vectors = torch.arange(ids.shape[1])[None], model.get_input_embeddings()(ids)
    return owner.plan.resolved.embed(vectors, positions, dict(owner.named_parameters()), owner.plan.shape)


@on("bert", "gpt2", both=False)
def test_a_native_table_is_added_with_its_weight(architecture: str, name: str, backend: str) -> None:
    """The model without it, given vectors to which w times the native table was added."""
    model = ARCHITECTURES[architecture](attn_implementation=backend)
    path = "wpe" if architecture == "gpt2" else "embeddings.position_embeddings"
    table = model.base_model.get_submodule(path).weight.detach().clone()
    torch.manual_seed(1)
    stir(hf_posenc.patch(model, EVERY[name], keep_native=True))
    without = fresh(architecture, "nope" if EVERY[name].site == "embedding" else name, backend)
    for weight in (1.0, 0.5, 0.0):
        assert hf_posenc.set_native_weight(model, weight) is model
        expected = logits(without, inputs_embeds=fused(model, IDS) + weight * table[:LENGTH])
        assert_equal(logits(model, IDS), expected, what=f"weight {weight}")
        assert model.base_model.get_submodule(path).weight.requires_grad == (weight > 0)
    replaced = fresh(architecture, name, backend)
    if not replaced.base_model.hf_posenc.plan.expressed:
        assert_equal(logits(model, IDS), logits(replaced, IDS), 1e-6, what="weight 0, against replacing")
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model, IDS), logits(ARCHITECTURES[architecture](attn_implementation=backend), IDS))


TURNED_ELSEWHERE = ["rope_interleaved", "rope_half", "dynamic_ntk_interleaved"]


@on("llama", names=[name for name in EVERY if name not in TURNED_ELSEWHERE], both=False)
def test_a_native_rotation_is_added_with_its_weight(architecture: str, name: str, backend: str) -> None:
    """Stock's rotation by w times its angles, plus those of the new encoding."""
    encoding = EVERY[name]
    model = ARCHITECTURES["llama"](attn_implementation="eager")
    torch.manual_seed(1)
    stir(hf_posenc.patch(model, encoding, keep_native=True))
    owner = model.base_model.hf_posenc
    native = ARCHITECTURES["llama"]().model.rotary_emb.inv_freq.double()
    for weight in (1.0, 0.5, 0.0):
        hf_posenc.set_native_weight(model, weight)
        stock = ARCHITECTURES["llama"](attn_implementation="eager")
        rotary = stock.model.rotary_emb
        rotary.inv_freq = (weight * native).float()
        extra: dict[str, Any] = {}
        if encoding.site == "rotary":
            lengths = torch.tensor(LENGTH)
            rotary.inv_freq = (weight * native + owner.plan.resolved.frequencies(8, lengths)).float()
            rotary.attention_scaling = owner.plan.resolved.amplitude()
        elif encoding.site == "score":
            counted = torch.arange(LENGTH)[None]
            bias = encoding.bias(counted, counted, dict(owner.named_parameters()), owner.plan.shape)
            hidden = ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            extra["attention_mask"] = bias.detach().masked_fill(hidden, -torch.inf).expand(2, -1, -1, -1)
        expected = logits(stock, inputs_embeds=fused(model, IDS), **extra)
        assert_equal(logits(model, IDS), expected, what=f"weight {weight}")
    assert_equal(logits(model, IDS), logits(fresh("llama", name, "eager"), IDS), what="weight 0, against replacing")
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model, IDS), logits(ARCHITECTURES["llama"](attn_implementation="eager"), IDS))


@pytest.mark.parametrize("name", TURNED_ELSEWHERE)
def test_another_pairing_cannot_stand_beside_a_native_rotation(name: str) -> None:
    with pytest.raises(EncodingError, match="keep_native=True needs the pairing"):
        hf_posenc.patch(ARCHITECTURES["llama"](), EVERY[name], keep_native=True)


def test_a_faded_model_trains_its_table_only_while_it_speaks() -> None:
    model = hf_posenc.patch(ARCHITECTURES["gpt2"](), "alibi", keep_native=True).train()
    for weight in (1.0, 0.0, 0.25):
        hf_posenc.set_native_weight(model, weight)
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        gradient = model.transformer.wpe.weight.grad
        assert (gradient is not None and bool(gradient.abs().sum() > 0)) == (weight > 0), weight


@on(names=[name for name in EVERY if name not in TURNED_ELSEWHERE], both=False)
def test_a_native_encoding_that_fell_silent_is_dropped(architecture: str, name: str, backend: str) -> None:
    """The same numbers, the form on disk of a model that never kept it, and the same way back."""
    model = ARCHITECTURES[architecture](attn_implementation=backend)
    native = copy.deepcopy(model)
    stir(hf_posenc.patch(model, EVERY[name], keep_native=True))
    hf_posenc.set_native_weight(model, 0.5)
    speaking = snapshot(model)
    assert drop_silent_native(model) is model
    assert_same(speaking, snapshot(model))
    hf_posenc.set_native_weight(model, 0.0)
    out, torch_state = logits(model, IDS), torch.get_rng_state()
    drop_silent_native(model)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert_equal(logits(model, IDS), out, 1e-5)
    replaced = fresh(architecture, name, backend)
    assert model.config.to_json_string() == replaced.config.to_json_string()
    assert list(model.state_dict()) == list(replaced.state_dict())
    assert hf_posenc.position_parameters(model) == hf_posenc.position_parameters(replaced)
    once = snapshot(model)
    assert_same(once, snapshot(drop_silent_native(model)))
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model, IDS), logits(native, IDS))


def test_the_weight_of_a_native_encoding_reaches_the_copy_that_an_adapter_trains() -> None:
    peft = pytest.importorskip("peft")
    model = hf_posenc.patch(ARCHITECTURES["gpt2"](), "t5", keep_native=True)
    adapted = peft.get_peft_model(model, hf_posenc.lora_config(model, r=2))
    hf_posenc.set_native_weight(adapted, 0.25)
    merged = adapted.merge_and_unload()
    assert merged.transformer.hf_posenc.native_weight == merged.transformer.wpe.amount == 0.25
    assert hf_posenc.describe(merged).native_weight == 0.25


# ---------------------------------------------------------------------- what is in force


def test_an_unpatched_model_names_its_own_encoding() -> None:
    assert hf_posenc.encoding_of(ARCHITECTURES["gpt2"]()) == hf_posenc.Learned(num_positions=32)
    assert hf_posenc.encoding_of(ARCHITECTURES["bert"]()) == hf_posenc.Learned(num_positions=32)
    assert hf_posenc.encoding_of(ARCHITECTURES["llama"]()) == hf_posenc.RoPE(theta=10000.0)  # not a scaling
    scaled = dict(rope_type="linear", factor=4.0, rope_theta=500000.0)
    stock = ARCHITECTURES["llama"](rope_parameters=scaled)
    assert hf_posenc.encoding_of(stock) == hf_posenc.LinearScaling(theta=500000.0, factor=4.0)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_patching_with_the_native_encoding_changes_no_logit(architecture: str) -> None:
    model = ARCHITECTURES[architecture]()
    out, native = logits(model, IDS), hf_posenc.encoding_of(model)
    hf_posenc.patch(model, native)
    assert torch.equal(logits(model, IDS), out)
    assert hf_posenc.encoding_of(model) == native


def test_a_scaled_model_is_patched_from_what_it_was_pretrained_with() -> None:
    """theta survives, and factors do not multiply: they count from the pretrained length."""
    scaled = dict(rope_type="yarn", factor=4.0, rope_theta=500000.0, original_max_position_embeddings=32)
    model: LlamaForCausalLM = ARCHITECTURES["llama"](rope_parameters=scaled, max_position_embeddings=128)
    hf_posenc.patch(model, "linear", context_length=256)
    assert hf_posenc.encoding_of(model) == hf_posenc.LinearScaling(factor=8.0, original_context_length=32)
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    hf_posenc.patch(model, "yarn", context_length=64)
    assert hf_posenc.encoding_of(model).factor == 2.0
    assert model.config.rope_parameters["rope_theta"] == 500000.0 and model.config.max_position_embeddings == 64


@pytest.mark.parametrize("architecture", CAUSAL)
def test_training_mode_is_kept(architecture: str) -> None:
    for mode in (True, False):
        model = ARCHITECTURES[architecture]().train(mode)
        hf_posenc.patch(model, "sinusoidal:fusion=concat")
        assert all(m.training == mode for m in model.modules())
        model.train(not mode)
        hf_posenc.unpatch(model)
        assert all(m.training != mode for m in model.modules())


# ---------------------------------------------------------------------- parts of models, and threads


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_base_model_inside_another_is_refused(architecture: str) -> None:
    """The outer model's config would not follow, and it would be saved as the plain one."""
    model = ARCHITECTURES[architecture]()
    with pytest.raises(ValueError, match=rf"is part of a {type(model).__name__}"):
        hf_posenc.patch(model.base_model, "alibi")
    hf_posenc.patch(model, "dynamic_ntk:factor=4")
    with pytest.raises(ValueError, match=rf"The {type(model).__name__} is what must be unpatched"):
        hf_posenc.unpatch(model.base_model)
    assert torch.isfinite(model(IDS).logits).all()
    alone = ARCHITECTURES[architecture]().base_model  # nobody holds the rest any more
    assert hf_posenc.encoding_of(hf_posenc.patch(alone, "alibi")).name == "alibi"


@pytest.mark.parametrize("name", ["alibi", "t5", "learned", "yarn", "longrope"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_patched_base_model_put_into_another_head(architecture: str, name: str, tmp_path: Path) -> None:
    """By itself it is saved whole; through a head whose config knows nothing of it, not at all."""
    base = hf_posenc.patch(ARCHITECTURES[architecture]().base_model, EVERY[name])
    head = ARCHITECTURES[architecture]()
    attribute = head.base_model_prefix
    base.save_pretrained(tmp_path / "base")
    assert hf_posenc.encoding_of(AutoModel.from_pretrained(tmp_path / "base")) == EVERY[name]
    nn.ModuleList([base]).state_dict()  # a container of one's own has no config that could be wrong
    setattr(head, attribute, base)
    with pytest.raises(
        hf_posenc.PatchError, match=rf"put into a {type(head).__name__}, .* Patch the {type(head).__name__} in the"
    ):
        head.save_pretrained(tmp_path / "wrong")
    torch.manual_seed(1)
    hf_posenc.patch(head, EVERY[name])
    out = logits(head, IDS)
    head.save_pretrained(tmp_path / "head")
    loaded = AUTO[architecture].from_pretrained(tmp_path / "head")
    assert_equal(logits(loaded, IDS), out, 2e-5)
    assert hf_posenc.encoding_of(loaded) == EVERY[name]
    own = ARCHITECTURES[architecture]()
    hf_posenc.unpatch(head)
    assert type(head.config) is type(own.config) and not hasattr(head.config, "hf_posenc")
    assert not head.base_model._state_dict_pre_hooks
    assert torch.equal(logits(head, IDS), logits(own, IDS))


def test_a_patched_encoder_in_a_model_of_two_is_not_saved_as_a_plain_one(tmp_path: Path) -> None:
    encoder = hf_posenc.patch(ARCHITECTURES["bert"]().base_model, "alibi")
    decoder = BertLMHeadModel(ARCHITECTURES["bert"](is_decoder=True, add_cross_attention=True).config)
    both = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    assert torch.isfinite(both(IDS, decoder_input_ids=IDS).logits).all()
    with pytest.raises(hf_posenc.PatchError, match=r"into a EncoderDecoderModel, .* or save the BertModel by itself"):
        both.save_pretrained(tmp_path)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("name", ["rope:interleaved=true", "dynamic_ntk:factor=4"])
def test_threads_do_not_get_each_others_positions(architecture: str, name: str) -> None:
    model = hf_posenc.patch(ARCHITECTURES[architecture](), name)
    inputs = [tokens(length) for length in (9, 20, 31, 60)]
    with torch.no_grad():
        alone = [model(ids).logits for ids in inputs]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(len(inputs)) as pool:
                together = list(pool.map(lambda ids: [model(ids).logits for _ in range(15)], inputs))
        finally:
            sys.setswitchinterval(interval)
    for expected, found in zip(alone, together, strict=True):
        for logits_found in found:
            assert_equal(logits_found, expected)
