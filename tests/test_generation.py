"""Generation: with a cache or without, alone or in a padded batch, greedy, beams or assisted, the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encodings_under_test import CACHE, CAUSAL, EVERY, LENGTH, assert_equal, cache_of, fresh, logits, on, shared
from transformers import DynamicCache, GenerationConfig

import hf_posenc
from models import ARCHITECTURES, VOCABULARY, tokens

NEW = 10
PROMPTS = [tokens(3, seed=1)[0], tokens(7, seed=2)[0], tokens(12, seed=3)[0]]
"""The longest crosses the original length of the scalings while it is continued; the others do not reach it."""
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts with padding on the left: ids and mask, [3, 12]."""
    ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        ids[row, 12 - len(prompt) :] = prompt
        mask[row, 12 - len(prompt) :] = 1
    return ids, mask


def continued(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """The new tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": NEW, **GREEDY, **options})[:, ids.shape[1] :]


@on(*CAUSAL)
def test_a_left_padded_batch_continues_as_each_prompt_alone(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids, mask = batch()
    alone = torch.cat([continued(model, prompt[None]) for prompt in PROMPTS])
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(continued(model, ids, mask, **options), alone), options


@on(*CAUSAL, both=False)
def test_each_token_is_the_best_of_one_plain_pass(architecture: str, name: str, backend: str) -> None:
    """Against no cache, no padding and no generate: the argmax of one whole pass that is planned for all of it."""
    model = shared(architecture, name, backend)
    prompt = PROMPTS[2][None]
    made = continued(model, prompt)
    with hf_posenc.sequence_length(prompt.shape[1] + NEW):
        scores = logits(model, torch.cat([prompt, made], dim=1))
    assert torch.equal(scores[:, prompt.shape[1] - 1 : -1].argmax(-1), made)


@on(*CAUSAL, both=False)
def test_beams_are_the_same_with_a_cache_and_without(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids, mask = batch()
    made = [continued(model, ids[1:], mask[1:], num_beams=3, use_cache=use) for use in (True, False)]
    assert torch.equal(made[0], made[1])
    alone = [continued(model, prompt[None], num_beams=3) for prompt in PROMPTS[1:]]
    assert torch.equal(made[0], torch.cat(alone))


@on(*CAUSAL, both=False)
def test_assisted_decoding_changes_no_token(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    prompt = torch.cat([PROMPTS[2], PROMPTS[2][:6]])[None]  # repeats itself, so that look-up finds something
    plain = continued(model, prompt)
    never = {"eos_token_id": VOCABULARY}  # transformers 5.0 does not assist without an end
    looked_up = continued(model, prompt, prompt_lookup_num_tokens=3, **never)
    assert torch.equal(looked_up[:, :NEW], plain)  # 5.0 may accept one guess more than it was asked for
    assistant = fresh(architecture, name, backend)  # of the same mind, but for some noise
    with torch.no_grad():
        assistant.get_input_embeddings().weight.add_(torch.randn_like(assistant.get_input_embeddings().weight) * 0.1)
    assert torch.equal(continued(model, prompt, assistant_model=assistant, **never), plain)


@on(*CAUSAL, both=False)
def test_a_cache_is_continued_by_a_second_call(architecture: str, name: str, backend: str) -> None:
    """As in a chat: the first answer's cache serves the second question."""
    model = shared(architecture, name, backend)
    total = 24
    with hf_posenc.sequence_length(total):
        prompt = PROMPTS[1][None]
        first = model.generate(prompt, max_new_tokens=6, return_dict_in_generate=True, **GREEDY)
        question = torch.cat([first.sequences, tokens(5, seed=8)], dim=1)
        second = model.generate(question, max_new_tokens=6, **{CACHE: cache_of(first)}, **GREEDY)
        fresh_start = model.generate(question, max_new_tokens=6, **GREEDY)
    assert torch.equal(second, fresh_start)


@on(*CAUSAL, both=False)
def test_prompts_can_be_vectors(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids, mask = batch()
    vectors = model.get_input_embeddings()(ids)
    made = model.generate(inputs_embeds=vectors, attention_mask=mask, max_new_tokens=NEW, **GREEDY)
    assert torch.equal(made, continued(model, ids, mask))


@on(*CAUSAL, names=["alibi", "t5", "longrope", "dynamic_ntk", "rope", "learned"], both=False)
def test_several_samples_of_a_prompt_share_its_positions(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids, mask = batch()
    made = []
    for use in (True, False):
        torch.manual_seed(0)
        options = {"do_sample": True, "num_return_sequences": 3, "use_cache": use, "top_k": 5}
        made.append(continued(model, ids, mask, **options))
    assert torch.equal(made[0], made[1])


@on(*CAUSAL, names=["alibi", "fire", "longrope", "rope", "sinusoidal"], both=False)
def test_a_prompt_taken_in_chunks_changes_no_token(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    prompt = tokens(20, seed=4)
    cache = DynamicCache(config=model.config)  # transformers 5.0 makes none for chunks
    chunked = continued(model, prompt, prefill_chunk_size=7, **{CACHE: cache})
    assert torch.equal(chunked, continued(model, prompt))


# ---------------------------------------------------------------------- encodings that depend on the length

DYNAMIC = [name for name, e in EVERY.items() if e.length_dependent]


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("architecture", CAUSAL)
def test_every_way_to_ask_for_a_length_plans_it(architecture: str, name: str) -> None:
    """max_new_tokens or max_length, as an argument, in a config given, or in the model's own."""
    model = fresh(architecture, name)
    model.generation_config.eos_token_id = None  # transformers 5.0 puts it into a config that has none
    prompt = PROMPTS[2][None]
    with hf_posenc.sequence_length(12 + NEW):
        out = logits(model, prompt)
    ways: list[dict[str, Any]] = [
        {"max_new_tokens": NEW},
        {"max_length": 12 + NEW},
        {"generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)},
        {"generation_config": GenerationConfig(max_length=12 + NEW, do_sample=False, pad_token_id=0)},
    ]
    for way in ways:
        options = {**GREEDY, **way, "output_logits": True, "return_dict_in_generate": True}
        if "generation_config" in way:
            options = {k: v for k, v in options.items() if k not in GREEDY}
        made = model.generate(prompt, **options)
        assert made.sequences.shape == (1, 12 + NEW), way
        assert_equal(made.logits[0], out[:, -1], what=str(way))
    model.generation_config.max_new_tokens = NEW
    made = model.generate(prompt, output_logits=True, return_dict_in_generate=True, **GREEDY)
    assert_equal(made.logits[0], out[:, -1], what="the model's own config")
    # Nothing of it is left: a plain pass is planned for its own length.
    assert_equal(logits(model, prompt), logits(fresh(architecture, name), prompt), 0.0)


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_short_row_is_planned_for_its_own_length(name: str) -> None:
    """The row of 3 tokens ends at 13 and never crosses 16; its long batch mates do."""
    model = shared("llama", name)
    ids, mask = batch()
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": NEW, **GREEDY}
    together = model.generate(ids, attention_mask=mask, **options).logits
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(prompt[None], attention_mask=torch.ones(1, len(prompt)), **options).logits
        for step, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
            assert_equal(ours[row : row + 1], theirs, what=f"row {row}, step {step}")


def test_generation_of_stock_models_is_not_touched() -> None:
    model = ARCHITECTURES["llama"]()
    stock = type(model)
    hf_posenc.patch(model, EVERY["longrope"])
    assert isinstance(model, stock) and type(model).__name__ == stock.__name__ and type(model) is not stock
    other = ARCHITECTURES["llama"]()
    assert type(other) is stock and other.generate.__func__ is stock.generate
    hf_posenc.unpatch(model)
    assert type(model) is stock
    prompt = tokens(LENGTH)
    assert torch.equal(model.generate(prompt, **GREEDY), other.generate(prompt, **GREEDY))
