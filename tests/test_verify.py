"""`verify` passes where an encoding is in force, fails where it was sabotaged, and leaves the model as it was."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from encodings_under_test import EVERY, fresh, on, stir
from torch import nn
from transformers import BertConfig, BertLMHeadModel

import hf_posenc
from hf_posenc import patch, sites
from models import ARCHITECTURES, POSITIONS, VOCABULARY


def failed(model: Any, **options: Any) -> set[str]:
    """Names of the checks that fail."""
    return {check.name for check in hf_posenc.verify(model, **options).checks if check.passed is False}


# ---------------------------------------------------------------------- what is in force passes


@on()
def test_passes_for_every_encoding_on_every_architecture(architecture: str, name: str, backend: str) -> None:
    report = hf_posenc.verify(fresh(architecture, name, backend))
    assert report.ok and report.passed, str(report)
    assert all(check.passed for check in report.checks), f"something was not measured:\n{report}"
    names = [check.name for check in report.checks]
    assert {"rotation", "score", "shift", "swap", "left padding", "right padding", "backend", "embedding"} <= set(names)
    assert ("cache" in names) == ("future" in names) == (architecture != "bert")


def test_passes_on_models_as_they_come(model: Any) -> None:
    report = hf_posenc.verify(model)
    assert all(check.passed for check in report.checks), str(report)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["alibi", "sinusoidal_concat", "rope", "t5"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_passes_while_the_native_encoding_fades(architecture: str, name: str, weight: float) -> None:
    model = stir(patch(ARCHITECTURES[architecture](), EVERY[name], keep_native=True))
    report = hf_posenc.verify(hf_posenc.set_native_weight(model, weight))
    assert all(check.passed for check in report.checks), str(report)


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2.0}])
def test_passes_on_a_scaling_that_the_config_declares(scaling: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": POSITIONS, **scaling}
    assert hf_posenc.verify(ARCHITECTURES["llama"](rope_parameters=parameters)).passed


def test_passes_on_a_bert_that_decodes() -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=POSITIONS, initializer_range=0.3, is_decoder=True,
    )  # fmt: skip
    report = hf_posenc.verify(patch(BertLMHeadModel(config).eval(), "alibi"))
    assert all(check.passed for check in report.checks), str(report)
    assert "cache" in {check.name for check in report.checks}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["yarn", "alibi", "t5", "sinusoidal"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_passes_in_half_precision(architecture: str, name: str, dtype: torch.dtype) -> None:
    report = hf_posenc.verify(patch(ARCHITECTURES[architecture](dtype=dtype), EVERY[name]))
    assert report.passed, str(report)
    assert {c.name for c in report.checks if c.passed is None} <= {"swap", "shift"}


@pytest.mark.parametrize("name", ["t5", "learned", "yarn"])
def test_passes_under_a_wrapper(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = patch(ARCHITECTURES["gpt2"](), EVERY[name])
    model = peft.get_peft_model(model, hf_posenc.lora_config(model, r=2))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:  # zero at the start: the projections would be the plain ones
            nn.init.normal_(parameter)
    report = hf_posenc.verify(model)
    assert report.passed, str(report)
    assert ("gradient" in {c.name for c in report.checks}) == (name != "yarn")


def test_order_counts_for_nothing_in_an_encoder_without_positions() -> None:
    by_name = {check.name: check for check in hf_posenc.verify(fresh("bert", "nope")).checks}
    assert by_name["swap"].relation == "<=" and by_name["swap"].passed
    by_name = {check.name: check for check in hf_posenc.verify(fresh("gpt2", "nope")).checks}
    assert by_name["swap"].relation == ">" and by_name["swap"].passed


@pytest.mark.parametrize(("name", "relation"), [("sinusoidal", ">"), ("learned", ">"), ("yarn", "<="), ("alibi", "<=")])
def test_shift_is_expected_to_change_only_absolute_encodings(architecture: str, name: str, relation: str) -> None:
    by_name = {check.name: check for check in hf_posenc.verify(fresh(architecture, name)).checks}
    assert by_name["shift"].relation == relation


def nearly_uniform(architecture: str, seed: int = 0, **fields: Any) -> Any:
    """A model as it is drawn: its scores are all about 0, and little depends on the other tokens."""
    return ARCHITECTURES[architecture](initializer_range=0.02, seed=seed, **fields)


@pytest.mark.parametrize("name", [None, "alibi", "rope", "t5", "fire", "sinusoidal", "learned"])
def test_passes_where_attention_is_nearly_uniform(architecture: str, name: str | None) -> None:
    for seed in range(3):
        model = nearly_uniform(architecture, seed)
        report = hf_posenc.verify(model if name is None else patch(model, EVERY[name]))
        assert report.passed, str(report)
        assert {check.name for check in report.checks if check.passed is None} <= {"swap", "shift"}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_nothing_is_concluded_from_a_model_that_shows_nothing(architecture: str) -> None:
    """Other tokens count for nothing in it: order cannot show, and what enters attention is still proved."""
    model = patch(ARCHITECTURES[architecture](initializer_range=1e-5), "alibi")
    report = hf_posenc.verify(model)
    swap = next(check for check in report.checks if check.name == "swap")
    assert swap.passed is None and "too little to tell" in swap.explanation
    assert report.passed and report.inconclusive == 1
    assert "in force (1 of" in str(report).splitlines()[0] and "swap            inconclusive" in str(report)
    assert not dataclasses.replace(report, checks=(swap,)).passed
    assert str(dataclasses.replace(report, checks=(swap,))).splitlines()[0].endswith(": nothing can be concluded")


def test_fails_where_order_should_count_and_does_not() -> None:
    """In half and in full attention: a BERT whose encoding is gone, however little it shows of other tokens."""
    for spread in (0.3, 0.1):
        model = patch(ARCHITECTURES["bert"](initializer_range=spread), "alibi")
        assert "swap" not in failed(model)
        model.config.__class__ = type(model.config).__mro__[2]
        assert {"swap", "score"} <= failed(model)


# ---------------------------------------------------------------------- what was sabotaged fails


def unhooked(model: Any, *functions: Any) -> Any:
    """The model without those of the patch's hooks."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in functions]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    return model


@pytest.mark.parametrize(
    ("name", "check"),
    [
        *((name, "embedding") for name in ("sinusoidal", "sinusoidal_concat", "learned_concat")),
        *((name, "rotation") for name in ("rope_half", "rope_interleaved", "dynamic_ntk_interleaved")),
        *((name, "score") for name in ("alibi", "t5", "kerple", "fire", "sandwich")),
    ],
)
def test_fails_without_the_hooks_of_the_patch(architecture: str, name: str, check: str) -> None:
    model = fresh(architecture, name)
    assert check not in failed(model)
    assert check in failed(unhooked(model, sites.announce, sites.receive))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "fire", "sandwich"])
def test_fails_where_the_bias_is_dropped(architecture: str, name: str, backend: str) -> None:
    model = fresh(architecture, name, backend)
    config = model.config
    config.__class__ = type(config).__mro__[2]  # the stock class, which does not put our attention in stock's place
    assert config._attn_implementation == backend
    assert "score" in failed(model)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_fails_where_the_bias_is_too_weak(architecture: str) -> None:
    model = fresh(architecture, "alibi")
    owner = model.base_model.hf_posenc
    claimed = hf_posenc.ALiBi(slopes=[0.25, 0.0625, 0.015625, 0.004])  # the last should be 0.00390625
    owner.plan = dataclasses.replace(owner.plan, encoding=claimed, resolved=claimed)
    assert hf_posenc.verify(model).passed
    model = _disagreeing(model, hf_posenc.ALiBi())
    assert "score" in failed(model)


def _disagreeing(model: Any, used: Any) -> Any:
    """Attention is given a plan other than the one that the model claims."""

    def swap(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        call = kwargs.get(sites.HERE)
        if call is not None:
            kwargs[sites.HERE] = dataclasses.replace(call, plan=dataclasses.replace(call.plan, resolved=used))
        return args, kwargs

    for module in model.base_model.modules():
        if sites.receive in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(swap, with_kwargs=True)
    return model


@pytest.mark.parametrize("name", ["yarn", "linear", "ntk", "llama3", "ntk_by_parts"])
def test_fails_where_the_native_rotation_is_back(name: str) -> None:
    model = patch(ARCHITECTURES["llama"](), EVERY[name])
    model.base_model.rotary_emb = ARCHITECTURES["llama"]().base_model.rotary_emb
    assert "rotation" in failed(model)


@pytest.mark.parametrize("name", ["alibi", "nope", "sinusoidal"])
def test_fails_where_the_native_rotation_is_not_silent(name: str) -> None:
    model = patch(ARCHITECTURES["llama"](), EVERY[name])
    model.base_model.rotary_emb = ARCHITECTURES["llama"]().base_model.rotary_emb
    assert "rotation" in failed(model)


@pytest.mark.parametrize("name", ["alibi", "nope", "rope", "sinusoidal"])
@pytest.mark.parametrize(("architecture", "path"), [("gpt2", "wpe"), ("bert", "embeddings.position_embeddings")])
def test_fails_where_the_native_table_is_not_silent(architecture: str, path: str, name: str) -> None:
    model = fresh(architecture, name)
    model.base_model.get_submodule(path).amount = 0.01
    assert "embedding" in failed(model)


def test_fails_where_the_amplitude_is_forgotten() -> None:
    model = patch(ARCHITECTURES["llama"](), "yarn:factor=4")
    table = model.base_model.rotary_emb
    table._stock = (table._stock[0], 1.0)
    assert {"rotation", "score"} <= failed(model)


def test_fails_where_one_slow_pair_is_turned_wrongly() -> None:
    """A wavelength of thousands of tokens shows only far out; near by the model computes almost the same."""
    model = patch(ARCHITECTURES["llama"](), "yarn:factor=4")
    table = model.base_model.rotary_emb
    frequencies = table._stock[0].clone()
    frequencies[-1] *= 1.01
    table._stock = (frequencies, table._stock[1])
    assert failed(model) == {"rotation", "score"}


def test_fails_where_a_weight_cannot_learn() -> None:
    model = fresh("gpt2", "sinusoidal_concat")

    def detached(module: nn.Module, args: Any, output: dict[str, Any]) -> dict[str, Any]:
        return {name: weight.detach() for name, weight in output.items()}

    model.base_model.hf_posenc.register_forward_hook(detached)
    assert failed(model) == {"gradient"}


def test_fails_where_the_future_is_seen() -> None:
    model = fresh("gpt2", "nope")
    for block in model.transformer.h:
        block.attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)}), with_kwargs=True
        )
    assert "future" in failed(model)


def test_raise_if_failed_says_what_failed() -> None:
    model = fresh("gpt2", "alibi")
    hf_posenc.verify(model).raise_if_failed()
    model.transformer.wpe.amount = 1.0
    with pytest.raises(RuntimeError, match=r"NOT in force[\s\S]*embedding +FAIL"):
        hf_posenc.verify(model).raise_if_failed()


# ---------------------------------------------------------------------- the model is left as it was


@pytest.mark.parametrize("name", [None, "alibi", "yarn", "rope_interleaved", "learned", "dynamic_ntk", "t5"])
def test_leaves_the_model_as_it_was(architecture: str, name: str | None) -> None:
    model = ARCHITECTURES[architecture]()
    if name is not None:
        patch(model, EVERY[name])
    model.train()
    next(module for module in model.modules() if isinstance(module, nn.Dropout | nn.Embedding)).eval()
    before = _state(model)
    torch.manual_seed(5)
    hf_posenc.verify(model)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    _assert_same(before, _state(model))


def test_leaves_the_buffers_of_stock_scalings_as_they_were() -> None:
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    parameters |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    model = ARCHITECTURES["llama"](rope_parameters=parameters)
    before = _state(model)
    hf_posenc.verify(model, length=8)
    _assert_same(before, _state(model))


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        "modes": [module.training for module in model.modules()],
        "hooks": [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()],
        "marks": [
            (dict(m._forward_hooks_with_kwargs), dict(m._forward_pre_hooks_with_kwargs)) for m in model.modules()
        ],
        "own": [sorted(module.__dict__) for module in model.modules()],
        "tensors": {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "gradients": [p.grad for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "config": copy.deepcopy(model.config.__dict__),
        "class": type(model),
    }


def _assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in before:
        if name == "tensors":
            assert list(before[name]) == list(after[name])
            assert all(torch.equal(t, after[name][n]) for n, t in before[name].items())
        else:
            assert before[name] == after[name], name


# ---------------------------------------------------------------------- the report


def test_report_is_a_table_and_plain_data() -> None:
    report = hf_posenc.verify(fresh("gpt2", "t5"))
    text = str(report)
    assert text.splitlines()[0] == "t5 on gpt2: in force"
    assert max(len(line) for line in text.splitlines()) <= 100
    for check in report.checks:
        assert check.name in text
        assert check.measured <= check.bound if check.relation == "<=" else check.measured > check.bound
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["passed"] is True and len(data["checks"]) == len(report.checks)
    assert data["length"] == 24 and data["attention"] == "sdpa" and data["dtype"] == "float32"


def test_the_same_seed_gives_the_same_report() -> None:
    model = fresh("bert", "kerple")
    assert hf_posenc.verify(model, seed=3) == hf_posenc.verify(model, seed=3)
    assert hf_posenc.verify(model, seed=3) != hf_posenc.verify(model, seed=4)


@pytest.mark.parametrize("length", [3, 0, -1, 2.5, True, "8", POSITIONS + 1])
def test_refuses_a_length_that_cannot_be(length: Any) -> None:
    with pytest.raises(ValueError, match=r"length=.* is not allowed"):
        hf_posenc.verify(ARCHITECTURES["gpt2"](), length=length)


@pytest.mark.parametrize("length", [4, POSITIONS])
def test_takes_any_length_that_the_table_has(model: Any, length: int) -> None:
    report = hf_posenc.verify(model, length=length)
    assert report.passed, str(report)
    assert report.length == length


def test_refuses_a_model_without_values() -> None:
    with torch.device("meta"):
        model = ARCHITECTURES["llama"]()
    with pytest.raises(ValueError, match="meta device"):
        hf_posenc.verify(model)
