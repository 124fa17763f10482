"""PEFT adapters on patched models: new weights train, are saved, and survive a merge; nothing else is adapted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from encodings_under_test import CACHE, CAUSAL, EVERY, LENGTH, assert_differs, assert_equal, fresh, logits, on

import hf_posenc
from models import ARCHITECTURES, tokens

peft = pytest.importorskip("peft")

IDS = tokens(LENGTH, batch=2)


def adapted(model: Any, **options: Any) -> Any:
    """A LoRA model whose every trainable weight has left its starting point."""
    wrapped = peft.get_peft_model(model, hf_posenc.lora_config(model, r=4, **options))
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return wrapped.eval()


def trained(wrapped: Any) -> set[str]:
    return {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}


@on(both=False)
def test_new_weights_train_beside_lora(architecture: str, name: str, backend: str) -> None:
    model = fresh(architecture, name, backend)
    brought = len(hf_posenc.position_parameters(model))
    wrapped = adapted(model).train()
    positions = set(hf_posenc.position_parameters(wrapped))
    assert len(positions) == brought and positions <= trained(wrapped)
    assert all("lora" in other for other in trained(wrapped) - positions)
    before = {n: p.detach().clone() for n, p in wrapped.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=0.01)
    wrapped(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    for parameter, value in wrapped.named_parameters():
        assert torch.equal(value, before[parameter]) != (parameter in trained(wrapped)), parameter
    assert hf_posenc.encoding_of(wrapped) == EVERY[name]


@on(both=False)
def test_an_adapter_is_saved_loaded_and_merged(architecture: str, name: str, backend: str, tmp_path: Path) -> None:
    wrapped = adapted(fresh(architecture, name, backend))
    out = logits(wrapped, IDS)
    wrapped.save_pretrained(tmp_path / "adapter")
    base = fresh(architecture, name, backend)
    assert_differs(logits(base, IDS), out)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert_equal(logits(loaded, IDS), out, 1e-5, what="loaded")
    merged = loaded.merge_and_unload()
    assert_equal(logits(merged, IDS), out, what="merged")
    assert type(merged) is type(fresh(architecture, name, backend)) and hf_posenc.encoding_of(merged) == EVERY[name]
    assert not [n for n, _ in merged.named_parameters() if "lora" in n or "modules_to_save" in n]
    merged.save_pretrained(tmp_path / "merged")
    from test_checkpoint import AUTO

    again = AUTO[architecture].from_pretrained(tmp_path / "merged")
    assert_equal(logits(again, IDS), out, what="merged, saved and loaded")


@on(both=False)
def test_all_linear_leaves_positions_alone(architecture: str, name: str, backend: str) -> None:
    """A target that catches every layer must not catch the new ones."""
    wrapped = peft.get_peft_model(fresh(architecture, name, backend), peft.LoraConfig(target_modules="all-linear"))
    assert trained(wrapped) and not [n for n in trained(wrapped) if "hf_posenc" in n]
    logits(wrapped, IDS)


@pytest.mark.parametrize("name", ["rope_half", "rope_interleaved", "dynamic_ntk"])
@pytest.mark.parametrize("architecture", CAUSAL)
def test_what_lora_adds_to_queries_and_keys_is_rotated_too(architecture: str, name: str) -> None:
    """The merged model rotates the sum; an adapter behind the rotation would give other logits."""
    for targets in (["c_attn"] if architecture == "gpt2" else ["q_proj", "k_proj"],):
        wrapped = adapted(fresh(architecture, name), target_modules=targets)
        out = logits(wrapped, IDS)
        with wrapped.disable_adapter():
            assert_differs(logits(wrapped, IDS), out)
        assert_equal(logits(wrapped, IDS), out, 0.0)
        assert_equal(logits(wrapped.merge_and_unload(), IDS), out)


@pytest.mark.parametrize("name", ["t5", "sinusoidal_concat", "learned"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_patching_inside_an_adapter_is_seen(architecture: str, name: str) -> None:
    """A wrapped model may be patched later: outputs are those of the patched base while the adapter starts at zero."""
    wrapped = peft.get_peft_model(ARCHITECTURES[architecture](), peft.LoraConfig(target_modules="all-linear"))
    torch.manual_seed(1)
    hf_posenc.patch(wrapped, EVERY[name])
    torch.manual_seed(1)
    plain = hf_posenc.patch(ARCHITECTURES[architecture](), EVERY[name])
    assert_equal(logits(wrapped.eval(), IDS), logits(plain, IDS), 1e-6)
    hf_posenc.unpatch(wrapped)
    assert_equal(logits(wrapped, IDS), logits(ARCHITECTURES[architecture](), IDS), 0.0)


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_a_longer_table_that_was_loaded_is_adapted_too(architecture: str, tmp_path: Path) -> None:
    """Stock opens that model; its new rows still have to be trained and saved."""
    from test_checkpoint import AUTO

    fresh(architecture, "learned").save_pretrained(tmp_path)
    loaded = AUTO[architecture].from_pretrained(tmp_path)
    names = hf_posenc.position_parameters(loaded)
    assert len(names) == 1 and loaded.get_parameter(names[0]).shape == (64, 32)
    assert set(hf_posenc.position_parameters(adapted(loaded))) <= trained(adapted(loaded))
    assert hf_posenc.position_parameters(adapted(loaded))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", CAUSAL)
def test_norms_and_embeddings_can_train_with_it(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = fresh(architecture, "sinusoidal_concat", tie_word_embeddings=tied)
    wrapped = adapted(model, train_norms=True, train_embeddings=True)
    names = " ".join(trained(wrapped))
    assert ("ln_1" if architecture == "gpt2" else "input_layernorm") in names
    assert ("wte" if architecture == "gpt2" else "embed_tokens") in names and "hf_posenc" in names
    out = logits(wrapped, IDS)
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(
        fresh(architecture, "sinusoidal_concat", tie_word_embeddings=tied), tmp_path
    )
    assert_equal(logits(loaded.eval(), IDS), out, 1e-5)
    assert_equal(logits(loaded.merge_and_unload(), IDS), out)


# ---------------------------------------------------------------------- virtual tokens


@on(*CAUSAL)
def test_virtual_tokens_stand_before_the_text(architecture: str, name: str, backend: str) -> None:
    """Prompt tuning with 4 of them equals the same vectors passed by hand, with and without padding."""
    model = fresh(architecture, name, backend)
    wrapped = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    ids, mask = tokens(12, batch=2), torch.ones(2, 12, dtype=torch.long)
    with torch.no_grad():
        prompt = wrapped.get_prompt(2)
        vectors = torch.cat([prompt, model.get_input_embeddings()(ids)], dim=1)
        ours = wrapped(input_ids=ids, attention_mask=mask).logits
        assert ours.shape[1] == 16
        assert_equal(ours, logits(wrapped.base_model, inputs_embeds=vectors), 1e-5)
        assert_differs(ours[:, 4:], logits(wrapped.base_model, ids))
    mask[0, 8:] = 0  # padding on the right, where virtual tokens and text stay together
    padded = wrapped(input_ids=ids, attention_mask=mask).logits
    short = wrapped(input_ids=ids[:1, :8], attention_mask=mask[:1, :8]).logits
    assert_equal(padded[:1, :12].detach(), short.detach())


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # PEFT's own call
@on(*CAUSAL)
def test_prefixes_in_the_cache_are_counted(architecture: str, name: str, backend: str) -> None:
    """Prefix tuning puts keys into the cache that no pass has made: they train, and padding does not matter."""
    model = fresh(architecture, name, backend)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(model, config).eval()
    ids, mask = tokens(9, batch=2), torch.ones(2, 9, dtype=torch.long)
    out = wrapped(input_ids=ids, attention_mask=mask, labels=ids)
    out.loss.backward()
    gradients = [p.grad for p in wrapped.parameters() if p.requires_grad]
    assert gradients and all(g is not None and bool(g.isfinite().all()) and bool(g.abs().sum() > 0) for g in gradients)
    assert out.logits.shape == (2, 9, 97)
    mask[0, 6:] = 0
    padded = logits(wrapped, ids, attention_mask=mask)
    short = logits(wrapped, ids[:1, :6], attention_mask=mask[:1, :6])
    assert_equal(padded[0, :6], short[0])
    assert_equal(padded[1], out.logits[1].detach())
    prefix = wrapped.get_prompt(batch_size=2)
    given = {"position_ids": torch.arange(4, 13)[None], "use_cache": True, CACHE: prefix}
    with hf_posenc.sequence_length(13):
        by_hand = logits(wrapped.base_model, ids, **given)
    assert_equal(by_hand, out.logits.detach(), what="text at positions 4 and on, keys of the prefix at 0 to 3,")
