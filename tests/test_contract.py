"""How tokens arrive does not matter: every encoding, on every architecture, gives the same logits for the same tokens.

Each test takes one way in which tokens can arrive and compares it with one plain pass over the same tokens.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from encodings_under_test import (
    CACHE,
    CAUSAL,
    EVERY,
    LENGTH,
    assert_differs,
    assert_equal,
    cache_of,
    fresh,
    in_pieces,
    logits,
    on,
    shared,
    whole,
)
from transformers import BertLMHeadModel, DynamicCache, StaticCache
from transformers.utils import logging

import hf_posenc
from models import ARCHITECTURES, tokens

RELATIVE = [name for name, e in EVERY.items() if e.site != "embedding" and e.name != "fire"]
"""Encodings that only see distances. FIRE divides a distance by the query's own position."""


# ---------------------------------------------------------------------- the backends agree, and the encoding is there


@on(both=False)
def test_eager_equals_sdpa(architecture: str, name: str, backend: str) -> None:
    other = "eager" if backend == "sdpa" else "sdpa"
    assert_equal(whole(architecture, name, backend), whole(architecture, name, other))


@on(both=False)
def test_every_encoding_changes_the_model_in_its_own_way(architecture: str, name: str, backend: str) -> None:
    """Nothing here would be worth much if an encoding did nothing at all, or the native one still spoke."""
    ours = whole(architecture, name, backend)
    stock = logits(ARCHITECTURES[architecture](attn_implementation=backend), tokens(LENGTH, batch=2))
    if architecture == "llama" and name == "rope":
        assert_equal(ours, stock, 0.0)
    else:
        assert_differs(ours, stock)
    if name != "nope":
        assert_differs(ours, whole(architecture, "nope", backend))


# ---------------------------------------------------------------------- each site, against a model that stock runs


@on(names=[name for name, e in EVERY.items() if e.site == "score"])
def test_a_score_bias_is_what_stock_attention_adds_to_its_scores(architecture: str, name: str, backend: str) -> None:
    """Stock eager attention adds a 4-D mask to the scaled scores: here the dense bias, in a model without positions."""
    model = fresh(architecture, name, backend)
    counted = torch.arange(LENGTH)[None]
    owner = model.base_model.hf_posenc
    with torch.no_grad():
        bias = EVERY[name].bias(counted, counted, dict(owner.named_parameters()), owner.plan.shape)
    if architecture in CAUSAL:
        bias = bias.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
    silent = ARCHITECTURES[architecture](attn_implementation="eager")
    theirs = logits(without_positions(silent), tokens(LENGTH, batch=2), attention_mask=bias.expand(2, -1, -1, -1))
    assert_equal(logits(model, tokens(LENGTH, batch=2)), theirs)


@on(names=[name for name, e in EVERY.items() if e.site == "embedding"])
def test_a_fusion_is_what_stock_runs_on_fused_vectors(architecture: str, name: str, backend: str) -> None:
    model = fresh(architecture, name, backend)
    ids, positions = tokens(LENGTH, batch=2), torch.arange(LENGTH)[None]
    owner = model.base_model.hf_posenc
    silent = without_positions(ARCHITECTURES[architecture](attn_implementation=backend))
    weights = dict(owner.named_parameters())
    if owner.plan.expressed:
        weights = {"table": model.base_model.get_submodule(owner.plan.architecture.table).weight}
    with torch.no_grad():
        vectors = EVERY[name].embed(silent.get_input_embeddings()(ids), positions, weights, owner.plan.shape)
    assert_equal(logits(model, ids), logits(silent, inputs_embeds=vectors), 1e-5)


def without_positions(model: Any) -> Any:
    """A stock model whose native encoding says nothing, by stock's own means."""
    base = model.base_model
    for name, parameter in model.named_parameters():
        if "wpe" in name or "position_embeddings" in name:
            parameter.data.zero_()
    if hasattr(base, "rotary_emb"):
        base.rotary_emb.inv_freq.zero_()
    return model


@pytest.mark.parametrize("scaling", [{}, {"theta": 77.0}])
def test_interleaved_pairs_equal_halves_with_permuted_weights(scaling: dict[str, float]) -> None:
    """The two layouts of rotary weights: rows of q and k reordered within each head, v and o left alone."""
    ids = tokens(LENGTH, batch=2)
    halves = hf_posenc.patch(ARCHITECTURES["llama"](), hf_posenc.RoPE(**scaling))
    model = ARCHITECTURES["llama"]()
    order = torch.arange(8).reshape(2, 4).t().flatten()  # 0, 4, 1, 5, …
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):  # 4 query heads, 2 key heads
            projection.weight.data = projection.weight.unflatten(0, (-1, 8))[:, order].flatten(0, 1).clone()
    hf_posenc.patch(model, hf_posenc.RoPE(interleaved=True, **scaling))
    assert_equal(logits(model, ids), logits(halves, ids), 1e-5)
    hf_posenc.patch(model, hf_posenc.RoPE(**scaling))
    assert_differs(logits(model, ids), logits(halves, ids), what="the permuted weights under the other layout")


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_bias_from_the_key_alone_equals_alibi_where_attention_is_causal(backend: str) -> None:
    """slope * key differs from -slope * (query - key) by a constant of the row; in an encoder it is another model."""
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]).reshape(1, 4, 1, 1)
    key_only = (slopes * torch.arange(LENGTH)).expand(2, -1, LENGTH, -1)
    for architecture in ("gpt2", "bert"):
        silent = without_positions(ARCHITECTURES[architecture](attn_implementation="eager"))
        mask = key_only
        if architecture == "gpt2":
            mask = key_only.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
        theirs = logits(silent, tokens(LENGTH, batch=2), attention_mask=mask)
        ours = whole(architecture, "alibi", backend)
        (assert_equal if architecture == "gpt2" else assert_differs)(ours, theirs)


def attention_rows(architecture: str, encoding: Any) -> torch.Tensor:
    """Attention weights [heads, queries, keys] of the first layer with queries of zero: what the bias alone says."""
    model = fresh(architecture, encoding, "eager")
    kinds = ("GPT2Attention", "LlamaAttention", "BertSelfAttention")
    first: Any = next(module for module in model.modules() if type(module).__name__ in kinds)
    with torch.no_grad():
        if architecture == "gpt2":
            first.c_attn.weight[:, :32] = 0
            first.c_attn.bias[:32] = 0
        else:
            projection = first.q_proj if architecture == "llama" else first.query
            projection.weight.zero_()
            if projection.bias is not None:
                projection.bias.zero_()
        return model(tokens(LENGTH), output_attentions=True).attentions[0][0]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("name", [name for name, e in EVERY.items() if e.site == "score"])
def test_without_content_attention_is_the_softmax_of_the_bias(architecture: str, name: str) -> None:
    """The bias comes after the scaling of scores: a factor of sqrt(head_dim) would show."""
    rows = attention_rows(architecture, EVERY[name])
    owner = fresh(architecture, name, "eager").base_model.hf_posenc
    counted = torch.arange(LENGTH)[None]
    with torch.no_grad():
        bias = EVERY[name].bias(counted, counted, dict(owner.named_parameters()), owner.plan.shape)[0]
    if architecture in CAUSAL:
        bias = bias.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
    assert_equal(rows, bias.softmax(-1), 1e-6)


def test_alibi_prefers_near_keys_and_is_symmetric_in_an_encoder() -> None:
    for architecture in CAUSAL:
        rows = attention_rows(architecture, hf_posenc.ALiBi())
        for row in range(1, LENGTH):
            assert bool((rows[:, row, : row + 1].diff(dim=-1) > 0).all()), (
                f"{architecture}: older keys must get strictly less"
            )
    rows = attention_rows("bert", hf_posenc.ALiBi())
    for row in range(LENGTH):
        reach = min(row, LENGTH - 1 - row)
        window = rows[:, row, row - reach : row + reach + 1]
        assert_equal(window, window.flip(-1), 1e-6)
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])
    assert_equal(rows[:, 5, 4].log() - rows[:, 5, 5].log(), -slopes, 1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_decoders_use_buckets_of_the_past_and_encoders_both_halves(backend: str) -> None:
    """Which rows of the table get a gradient: the direction flag, told by what is really looked up."""
    past, future = torch.arange(40), -torch.arange(1, 40)
    encoding = hf_posenc.T5Bias()
    for architecture, causal, reached in (
        ("gpt2", True, past),
        ("llama", True, past),
        ("bert", False, torch.cat([past, future])),
    ):
        model = fresh(architecture, encoding, backend)
        model(tokens(40), labels=tokens(40)).loss.backward()
        used = model.base_model.hf_posenc.buckets.grad.abs().sum(1).nonzero().flatten().tolist()
        assert used == sorted(set(encoding.bucket(reached, causal).tolist())), architecture
    assert encoding.bucket(past[:17], True).tolist() == list(range(17)) and used[-1] >= 16


# ---------------------------------------------------------------------- with a cache


@on(*CAUSAL)
def test_token_by_token_equals_one_pass(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    assert_equal(in_pieces(model, tokens(LENGTH, batch=2), [1] * LENGTH), whole(architecture, name, backend))


@on(*CAUSAL)
def test_chunks_on_a_warm_cache_equal_one_pass(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    for sizes in ([7, 1, 16], [2, 11, 11]):
        assert_equal(
            in_pieces(model, tokens(LENGTH, batch=2), sizes), whole(architecture, name, backend), what=str(sizes)
        )


@on(*CAUSAL)
def test_a_static_cache_equals_one_pass(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 9)
    for _ in range(2):  # the second time on a cache that was used and reset
        out = in_pieces(model, tokens(LENGTH, batch=2), [9, 1, 1, 13], cache)
        assert_equal(out, whole(architecture, name, backend))
        cache.reset()


@on(*CAUSAL)
def test_a_cache_is_continued_after_a_crop(architecture: str, name: str, backend: str) -> None:
    """As assisted decoding does: candidates are taken back, others follow."""
    model = shared(architecture, name, backend)
    cache = DynamicCache(config=model.config)
    with hf_posenc.sequence_length(LENGTH):
        logits(model, tokens(LENGTH, batch=2)[:, :18], use_cache=True, **{CACHE: cache})
        logits(model, tokens(5, batch=2, seed=9), use_cache=True, **{CACHE: cache})
        cache.crop(-7)
    assert cache.get_seq_length() == 16
    rest = in_pieces(model, tokens(LENGTH, batch=2), [3, 5], cache)
    assert_equal(rest, whole(architecture, name, backend)[:, 16:])


@on(*CAUSAL)
def test_a_cache_is_continued_in_a_second_call_with_padding(architecture: str, name: str, backend: str) -> None:
    """A left-padded batch, a mask that grows, no position_ids: positions of cached keys are the padded ones."""
    model = shared(architecture, name, backend)
    ids, mask = left_padded([LENGTH - 7, LENGTH])
    alone = [whole_row(architecture, name, backend, length) for length in (LENGTH - 7, LENGTH)]
    for sizes in ([10, 14], [10] + [1] * 14):
        out = in_pieces(model, ids, sizes, attention_mask=mask)
        assert_equal(out[0, 7:], alone[0], what=f"padded row, pieces {sizes}")
        assert_equal(out[1], alone[1], what=f"full row, pieces {sizes}")


@on(*CAUSAL)
def test_rows_of_a_cache_can_be_reordered(architecture: str, name: str, backend: str) -> None:
    """What a cache knows beside its keys has to move with them: rows with other padding change places."""
    model = shared(architecture, name, backend)
    ids, mask = left_padded([LENGTH - 7, LENGTH])
    order = torch.tensor([1, 0, 1])
    for own_positions in (False, True):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        pieces: list[dict[str, Any]] = []
        for part in (slice(0, 12), slice(12, LENGTH)):
            piece = {"attention_mask": mask[:, : part.stop], "use_cache": True, CACHE: cache}
            pieces.append({**piece, **({"position_ids": positions[:, part]} if own_positions else {})})
        with hf_posenc.sequence_length(mask.sum(-1)):
            logits(model, ids[:, :12], **pieces[0])
        cache.batch_select_indices(order)
        chosen = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in pieces[1].items()}
        out = logits(model, ids[order][:, 12:], **chosen)
        for row, origin in enumerate(order.tolist()):
            alone = whole_row(architecture, name, backend, (LENGTH - 7, LENGTH)[origin])
            assert_equal(out[row], alone[-12:], what=f"row {row}, own_positions={own_positions}")


@pytest.mark.parametrize("name", ["alibi", "longrope"])
def test_a_cache_can_be_copied_and_pickled(name: str) -> None:
    """What it knows beside its keys goes with it, and the copy is independent."""
    model = shared("llama", name)
    ids, mask = left_padded([LENGTH - 7, LENGTH])
    cache = DynamicCache(config=model.config)
    with hf_posenc.sequence_length(mask.sum(-1)):
        logits(model, ids[:, :12], attention_mask=mask[:, :12], use_cache=True, **{CACHE: cache})
    assert isinstance(cache, DynamicCache)
    rest = {"attention_mask": mask, "use_cache": True}
    expected = logits(model, ids[:, 12:], **rest, **{CACHE: copy.deepcopy(cache)})
    assert cache.get_seq_length() == 12
    assert torch.equal(logits(model, ids[:, 12:], **rest, **{CACHE: pickle.loads(pickle.dumps(cache))}), expected)
    assert_equal(expected[1], whole_row("llama", name, "sdpa", LENGTH)[12:])


@on(*CAUSAL)
def test_rows_of_a_cache_can_be_repeated(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids, mask = left_padded([LENGTH - 7, LENGTH])
    cache = DynamicCache(config=model.config)
    with hf_posenc.sequence_length(mask.sum(-1)):
        logits(model, ids[:, :12], attention_mask=mask[:, :12], use_cache=True, **{CACHE: cache})
    cache.batch_repeat_interleave(2)
    ids, mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    out = logits(model, ids[:, 12:], attention_mask=mask, use_cache=True, **{CACHE: cache})
    for row in range(4):
        alone = whole_row(architecture, name, backend, (LENGTH - 7, LENGTH)[row // 2])
        assert_equal(out[row], alone[-12:], what=f"row {row}")


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@on(*CAUSAL, both=False)
def test_both_names_of_the_cache_argument_work(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids = tokens(LENGTH)
    for argument in dict.fromkeys(("past_key_values", CACHE)):
        cache = DynamicCache(config=model.config)
        with hf_posenc.sequence_length(LENGTH):
            first = model(ids[:, :20], use_cache=True, **{argument: cache})
            assert cache_of(first) is cache and cache.get_seq_length() == 20
            second = logits(model, ids[:, 20:], use_cache=True, **{argument: cache})
        assert cache.get_seq_length() == LENGTH
        assert_equal(second, logits(model, ids)[:, 20:], what=argument)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [name for name, e in EVERY.items() if e.site == "score"])
def test_a_cache_that_drops_keys_is_refused_by_a_score_bias(name: str, backend: str) -> None:
    model = shared("llama", name, backend)
    from transformers.cache_utils import DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicSlidingWindowLayer(sliding_window=8) for _ in cache.layers]
    with pytest.raises(ValueError, match="cached keys, but this cache drops old ones"):
        logits(model, tokens(12), use_cache=True, **{CACHE: cache})


# ---------------------------------------------------------------------- padding and batch mates


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `tokens(length)` with other tokens, not the padding token, in front: ids and mask."""
    widest = max(lengths)
    ids, mask = tokens(widest, batch=len(lengths), seed=77), torch.zeros(len(lengths), widest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, widest - length :] = tokens(length, seed=seed)[0]
        mask[row, widest - length :] = 1
    return ids, mask


def right_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the padding behind."""
    widest = max(lengths)
    ids, mask = tokens(widest, batch=len(lengths), seed=78), torch.zeros(len(lengths), widest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = tokens(length, seed=seed)[0]
        mask[row, :length] = 1
    return ids, mask


def whole_row(architecture: str, name: str, backend: str, length: int) -> torch.Tensor:
    """[length, vocabulary]: one row alone, without a mask."""
    return whole(architecture, name, backend, length, 1)[0]


@on()
def test_a_row_is_the_same_alone_and_in_a_padded_batch(architecture: str, name: str, backend: str) -> None:
    """Short, middle and long rows on both sides of the original length: neither padding nor batch mates count."""
    model = shared(architecture, name, backend)
    lengths = [5, 17, LENGTH]
    for side, make in (("left", left_padded), ("right", right_padded)):
        ids, mask = make(lengths)
        given = (mask.cumsum(-1) - 1).clamp(min=0)
        for what, extra in (("mask", {}), ("mask and position_ids", {"position_ids": given})):
            out = logits(model, ids, attention_mask=mask, **extra)
            for row, length in enumerate(lengths):
                alone = whole_row(architecture, name, backend, length)
                assert_equal(out[row][mask[row] == 1], alone, what=f"{side} padding, {what}, row of {length}")


@on()
def test_what_stands_in_the_padding_does_not_matter(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    for make in (left_padded, right_padded):
        ids, mask = make([9, LENGTH])
        other = torch.where(mask == 1, ids, tokens(LENGTH, batch=2, seed=3))
        assert not torch.equal(ids, other)
        real = mask == 1
        out = [logits(model, some, attention_mask=mask)[real] for some in (ids, other)]
        assert_equal(out[0], out[1], 1e-5)


@on(names=RELATIVE)
def test_relative_encodings_need_no_positions_for_padding(architecture: str, name: str, backend: str) -> None:
    """Positions counted from the padded start are as good."""
    model = shared(architecture, name, backend)
    plain = torch.arange(LENGTH).expand(2, -1)
    for length in (12, LENGTH - 7):  # on both sides of the original length
        for make in (left_padded, right_padded):
            ids, mask = make([length, LENGTH])
            out = logits(model, ids, attention_mask=mask, position_ids=plain)
            alone = whole_row(architecture, name, backend, length)
            assert_equal(out[0][mask[0] == 1], alone, what=f"{make.__name__}, {length} tokens")


@on()
def test_a_row_without_any_token_neither_breaks_nor_spreads(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids, mask = tokens(LENGTH, batch=2), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1] = 0
    out = logits(model, ids, attention_mask=mask)
    assert bool(out.isfinite().all())
    assert_equal(out[0], whole(architecture, name, backend)[0])


@on()
def test_one_call_leaves_nothing_for_the_next(architecture: str, name: str, backend: str) -> None:
    """Long, short, long; a call that fails; a cache left half way: a later call never notices."""
    model = shared(architecture, name, backend)
    short, long = tokens(8), tokens(30)
    first = logits(model, short), logits(model, long)
    if architecture in CAUSAL:
        model(tokens(11), use_cache=True)
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 10**6))
    assert torch.equal(logits(model, short), first[0])
    assert torch.equal(logits(model, long), first[1])


# ---------------------------------------------------------------------- masks and positions given by hand


@on()
def test_a_mask_of_ones_and_counted_positions_change_nothing(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids, expected = tokens(LENGTH, batch=2), whole(architecture, name, backend)
    counted = torch.arange(LENGTH)
    for extra in (
        {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
        {"attention_mask": torch.ones(2, LENGTH, dtype=torch.bool)},
        {"position_ids": counted[None]},
        {"position_ids": counted.expand(2, -1)},
        {"position_ids": counted[None], "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
        {"use_cache": False} if architecture in CAUSAL else {},
    ):
        assert_equal(logits(model, ids, **extra), expected, 1e-5, what=str(list(extra)))


@on()
def test_packed_documents_equal_separate_runs(architecture: str, name: str, backend: str) -> None:
    """Told apart by position_ids alone, one-token documents included, one of them past the original length."""
    model = shared(architecture, name, backend)
    lengths = [5, 1, 18]
    ids = tokens(sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    separate = torch.cat([logits(model, part) for part in ids.split(lengths, dim=1)], dim=1)
    for extra in ({}, {"use_cache": False}) if architecture in CAUSAL else ({},):
        assert_equal(logits(model, ids, position_ids=positions, **extra), separate, what=str(extra))


@on(both=False)
def test_rows_packed_differently_share_a_batch(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    rows = [[5, 1, 18], [12, 12]]
    ids = tokens(LENGTH, batch=2)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    out = logits(model, ids, position_ids=positions)
    for row, lengths in enumerate(rows):
        parts = ids[row : row + 1].split(lengths, dim=1)
        assert_equal(out[row : row + 1], torch.cat([logits(model, part) for part in parts], dim=1), what=f"row {row}")


@on(*CAUSAL)
def test_skipped_positions_are_one_document(architecture: str, name: str, backend: str) -> None:
    """Positions that jump forward (PoSE) leave tokens out; the second chunk still sees the first."""
    model = shared(architecture, name, backend)
    ids = tokens(12)
    positions = torch.cat([torch.arange(6), torch.arange(6) + 12])[None]
    out = logits(model, ids, position_ids=positions)
    explicit = logits(model, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert_equal(out, explicit, 1e-5)
    other = ids.clone()
    other[:, 2] = ids[:, 2] % 90 + 4
    changed = logits(model, other, position_ids=positions)
    assert_equal(changed[:, :2], out[:, :2], 1e-5)
    assert_differs(changed[:, 6:], out[:, 6:], what="the second chunk, when the first changes,")


@on(*CAUSAL)
def test_cached_keys_keep_the_positions_they_were_given(architecture: str, name: str, backend: str) -> None:
    """Skipped positions, and rows with holes, on a warm cache: where a key stands cannot be counted back."""
    model = shared(architecture, name, backend)
    ids = tokens(LENGTH, batch=2)
    skipped = torch.cat([torch.arange(5), torch.arange(9, 17), torch.arange(20, 31)])[None]
    mask = torch.ones_like(ids)
    expected = logits(model, ids, attention_mask=mask, position_ids=skipped)
    for sizes in ([10, 1, 13], [3] + [1] * 21):
        with hf_posenc.sequence_length(31):
            whole_pass = logits(model, ids, attention_mask=mask, position_ids=skipped)
        assert_equal(whole_pass, expected)
        out = in_pieces(model, ids, sizes, attention_mask=mask, position_ids=skipped, planned=31)
        assert_equal(out, expected, what=f"skipped, pieces {sizes}")

    mask[0, 4:9] = 0
    without = torch.cat([ids[:1, :4], ids[:1, 9:]], dim=1)
    alone = logits(model, without)[0]
    for out in (logits(model, ids, attention_mask=mask), in_pieces(model, ids, [11, 1, 12], attention_mask=mask)):
        assert_equal(out[0][mask[0] == 1], alone, what="a row with a hole")


@on()
def test_sequences_go_beyond_the_trained_length(architecture: str, name: str, backend: str) -> None:
    """48 tokens where the model was made for 32: nothing ends there, with a cache or without."""
    model = shared(architecture, name, backend)
    ids, mask = tokens(48, batch=2), torch.ones(2, 48, dtype=torch.long)
    mask[0, :5] = 0
    expected = logits(model, ids, attention_mask=mask)
    assert_equal(expected[0, 5:], logits(model, ids[:1, 5:])[0])
    assert_equal(logits(model, ids)[1], expected[1])
    if architecture in CAUSAL:
        assert_equal(in_pieces(model, ids, [30, 1, 1, 1, 15], attention_mask=mask)[mask == 1], expected[mask == 1])


@on()
def test_a_mask_in_four_dimensions_is_taken_as_it_is(architecture: str, name: str, backend: str) -> None:
    """[batch, 1, queries, keys], boolean or additive, as a prefix language model or a custom packing would pass."""
    model = shared(architecture, name, backend)
    ids, mask = tokens(LENGTH, batch=2), torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if architecture in CAUSAL:
        mask = mask.tril()
    mask = mask.expand(2, 1, -1, -1)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    counted = torch.arange(LENGTH)[None]
    forms = [additive] if backend == "eager" else [additive, mask]  # stock eager adds masks
    for form in forms:
        assert_equal(logits(model, ids, attention_mask=form), whole(architecture, name, backend))
        assert_equal(logits(model, ids, attention_mask=form, position_ids=counted), whole(architecture, name, backend))


@on()
def test_vectors_instead_of_token_ids(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids = tokens(LENGTH, batch=2)
    vectors = model.get_input_embeddings()(ids)
    before = vectors.clone()
    assert_equal(logits(model, inputs_embeds=vectors), whole(architecture, name, backend), 1e-5)
    assert torch.equal(vectors, before)
    ids, mask = left_padded([LENGTH - 7, LENGTH])
    out = logits(model, inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
    assert_equal(out[0, 7:], whole_row(architecture, name, backend, LENGTH - 7))


@on("bert", both=False)
def test_token_types_are_still_added(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, backend)
    ids = tokens(LENGTH, batch=2)
    none = torch.zeros_like(ids)
    assert_equal(logits(model, ids, token_type_ids=none), whole(architecture, name, backend), 1e-6)
    assert_differs(logits(model, ids, token_type_ids=none + 1), whole(architecture, name, backend))


@on(both=False)
def test_arguments_may_be_given_by_place(architecture: str, name: str, backend: str) -> None:
    """The base model's signature is stock's."""
    base = shared(architecture, name, backend).base_model
    ids, mask = left_padded([9, LENGTH])
    given = {"input_ids": ids, "attention_mask": mask}
    names = list(inspect.signature(type(base).forward).parameters)[1:]
    places = [given.get(name) for name in names[: names.index("attention_mask") + 1]]
    with torch.no_grad():
        named, placed = base(input_ids=ids, attention_mask=mask), base(*places)
    assert torch.equal(named.last_hidden_state, placed.last_hidden_state)


@on(both=False)
def test_outputs_asked_for_are_given(architecture: str, name: str, backend: str) -> None:
    model = shared(architecture, name, "eager")
    with torch.no_grad():
        out = model(tokens(LENGTH), output_attentions=True, output_hidden_states=True)
    assert len(out.hidden_states) == 3 and len(out.attentions) == 2
    assert out.attentions[0].shape == (1, 4, LENGTH, LENGTH)
    assert_equal(out.attentions[0].sum(-1), torch.ones(1, 4, LENGTH), 1e-5)
    as_tuple = model(tokens(LENGTH), return_dict=False)
    assert torch.equal(as_tuple[0], out.logits)


# ---------------------------------------------------------------------- decoders and encoders of the same family


def bert_decoder(name: str, backend: str, **fields: Any) -> Any:
    config = ARCHITECTURES["bert"](is_decoder=True, **fields).config
    config._attn_implementation = backend
    torch.manual_seed(0)
    return hf_posenc.patch(BertLMHeadModel(config).eval(), EVERY[name])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", EVERY)
def test_a_bert_that_decodes_is_causal_and_cached(name: str, backend: str) -> None:
    model = bert_decoder(name, backend)
    ids = tokens(LENGTH, batch=2)
    expected = logits(model, ids)
    with hf_posenc.sequence_length(LENGTH):
        assert_equal(logits(model, ids[:, :10]), expected[:, :10])
    assert_equal(in_pieces(model, ids, [9, 1, 14]), expected)
    padded, mask = left_padded([LENGTH - 7, LENGTH])
    alone = logits(model, tokens(LENGTH - 7))
    assert_equal(logits(model, padded, attention_mask=mask)[0, 7:], alone[0])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_cross_attention_gets_no_position(architecture: str, name: str, backend: str) -> None:
    """Positions of one side say nothing about the other: reordering encoder states with their mask changes nothing."""
    if architecture == "gpt2":
        model = fresh("gpt2", name, backend, add_cross_attention=True)
    else:
        model = bert_decoder(name, backend, add_cross_attention=True)
    ids = tokens(LENGTH, batch=2)
    states = torch.randn(2, 13, 32)
    seen = torch.ones(2, 13, dtype=torch.long)
    seen[0, 4] = 0
    order = torch.randperm(13)
    plain = logits(model, ids, encoder_hidden_states=states, encoder_attention_mask=seen)
    mixed = logits(model, ids, encoder_hidden_states=states[:, order], encoder_attention_mask=seen[:, order])
    assert_equal(mixed, plain)
    assert_differs(logits(model, ids), plain)
    steps = []
    cache = None
    with hf_posenc.sequence_length(LENGTH):
        for piece in ids.split([15, 1, 8], dim=1):
            out = model(
                piece, encoder_hidden_states=states, encoder_attention_mask=seen, use_cache=True, **{CACHE: cache}
            )
            cache = cache_of(out)
            steps.append(out.logits)
    assert_equal(torch.cat(steps, dim=1), plain)


# ---------------------------------------------------------------------- encodings that depend on the length

DYNAMIC = [name for name, e in EVERY.items() if e.length_dependent]


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("architecture", CAUSAL)
def test_the_table_is_chosen_by_the_length_and_then_kept(architecture: str, name: str) -> None:
    model = shared(architecture, name)
    ids = tokens(LENGTH)
    planned = logits(model, ids)
    assert_differs(in_pieces_unplanned(model, ids, [12, 12]), planned, what="a start on the short table")
    with hf_posenc.sequence_length(LENGTH):
        assert_equal(logits(model, ids[:, :12]), planned[:, :12])
    assert_differs(logits(model, ids[:, :12]), planned[:, :12])
    # What was chosen at the start is kept: each later token sees the keys as they were turned.
    kept = in_pieces_unplanned(model, ids, [12, 12])
    assert_equal(in_pieces_unplanned(model, ids, [12] + [1] * 12), kept)


def in_pieces_unplanned(model: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    parts = ids.split(sizes, dim=1)
    return torch.cat([logits(model, part, use_cache=True, **{CACHE: cache}) for part in parts], dim=1)


@pytest.mark.parametrize("name", DYNAMIC)
def test_outgrowing_the_chosen_length_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = fresh("llama", name)
    logging.get_logger("hf_posenc").warning_once.cache_clear()
    with caplog.at_level("WARNING"):
        in_pieces_unplanned(model, tokens(16), [8, 8])
        assert not [r for r in caplog.records if "outgrown" in r.getMessage()]
        in_pieces_unplanned(model, tokens(28), [12, 8, 8])
        in_pieces_unplanned(model, tokens(28), [12, 8, 8])
    said = [r.getMessage() for r in caplog.records if "outgrown" in r.getMessage()]
    assert len(said) == 1 and EVERY[name].name in said[0] and "12 tokens" in said[0]


@pytest.mark.parametrize("length", [0, -3, 2.5, [[4, 4]]])
def test_a_planned_length_that_cannot_be_is_refused(length: Any) -> None:
    with pytest.raises(ValueError, match=r"length=.* is not allowed"), hf_posenc.sequence_length(length):
        pass
