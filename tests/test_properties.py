"""What must hold for any shape, length, padding and dtype, on examples drawn by hypothesis."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from encodings_under_test import (
    CAUSAL,
    EVERY,
    assert_differs,
    assert_equal,
    distance,
    fresh,
    in_pieces,
    logits,
    shared,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hf_posenc
from models import ARCHITECTURES, tokens

RELATIVE = [name for name, e in EVERY.items() if e.site != "embedding"]
ABSOLUTE = [name for name, e in EVERY.items() if e.site == "embedding"]

architectures = st.sampled_from(sorted(ARCHITECTURES))
causal = st.sampled_from(CAUSAL)
names = st.sampled_from(list(EVERY))
backends = st.sampled_from(["sdpa", "eager"])
seeds = st.integers(0, 10**6)

check = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@functools.cache
def in_dtype(architecture: str, name: str, backend: str, dtype: torch.dtype) -> Any:
    """A patched model of which only the dtype is another."""
    return copy.deepcopy(shared(architecture, name, backend)).to(dtype)


def takes(architecture: str, name: str, backend: str, length: int) -> bool:
    """False for GPT-2's own eager attention in early transformers 5, which has a mask no longer than the table."""
    if architecture != "gpt2" or backend != "eager" or EVERY[name].site == "score":
        return True
    mask = getattr(shared(architecture, name, backend).transformer.h[0].attn, "bias", None)
    return mask is None or length <= mask.shape[-1]


@check
@given(
    architectures,
    st.sampled_from(RELATIVE),
    backends,
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 90),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seeds,
)
def test_relative_encodings_are_shift_invariant(
    architecture: str, name: str, backend: str, length: int, batch: int, shift: int, dtype: torch.dtype, seed: int
) -> None:
    """Also FIRE, as long as queries stand before its threshold."""
    assume(takes(architecture, name, backend, length))
    ids, positions = tokens(length, batch=batch, seed=seed), torch.arange(length)[None]
    model = in_dtype(architecture, name, backend, dtype)
    plain, shifted = (logits(model, ids, position_ids=p) for p in (positions, positions + shift))
    if dtype in (torch.float32, torch.float64):
        assert_equal(shifted, plain, 1e-3)
    else:  # cos and sin round differently elsewhere: no worse than the dtype itself
        exact = logits(copy.deepcopy(model).float(), ids, position_ids=positions)
        assert distance(shifted, exact) <= 4 * distance(plain, exact) + 0.05


@check
@given(architectures, st.sampled_from(ABSOLUTE), backends, st.integers(2, 20), st.integers(1, 40), seeds)
def test_absolute_encodings_are_not(
    architecture: str, name: str, backend: str, length: int, shift: int, seed: int
) -> None:
    ids, positions = tokens(length, seed=seed), torch.arange(length)[None]
    model = shared(architecture, name, backend)
    assert_differs(logits(model, ids, position_ids=positions + shift), logits(model, ids, position_ids=positions))


def test_fire_measures_distances_by_where_the_query_stands() -> None:
    """Beyond its threshold of hundreds of tokens it is no longer shift-invariant: that is its idea."""
    for architecture in sorted(ARCHITECTURES):
        model, positions = shared(architecture, "fire"), torch.arange(20)[None]
        near, far = (logits(model, tokens(20), position_ids=positions + shift) for shift in (0, 20_000))
        assert_differs(far, near)


@check
@given(st.integers(2, 40), backends, seeds)
def test_an_encoder_without_positions_is_permutation_equivariant(length: int, backend: str, seed: int) -> None:
    ids = tokens(length, batch=2, seed=seed)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    model = shared("bert", "nope", backend)
    assert_equal(logits(model, ids[:, order]), logits(model, ids)[:, order])


@check
@given(architectures, names, backends, st.integers(6, 30), seeds)
def test_order_matters_everywhere_else(architecture: str, name: str, backend: str, length: int, seed: int) -> None:
    """Two tokens change places: the last token of a decoder, or some other token of an encoder, notices."""
    ids = tokens(length, seed=seed)
    ids[0, :4] = torch.tensor([5, 11, 23, 47])
    swapped = ids.clone()
    swapped[0, [0, 3]] = ids[0, [3, 0]]
    model = shared(architecture, name, backend)
    rest = slice(4, None)
    if architecture == "bert" and name == "nope":
        assert_equal(logits(model, swapped)[:, rest], logits(model, ids)[:, rest])
    else:
        assert_differs(logits(model, swapped)[:, rest], logits(model, ids)[:, rest], 1e-3)


@check
@given(causal, names, backends, st.integers(2, 40), st.data(), st.sampled_from([torch.float32, torch.bfloat16]), seeds)
def test_causal_models_never_see_the_future(
    architecture: str, name: str, backend: str, length: int, data: st.DataObject, dtype: torch.dtype, seed: int
) -> None:
    assume(takes(architecture, name, backend, length))
    at = data.draw(st.integers(1, length - 1))
    pads = data.draw(st.integers(0, at))
    ids, other = tokens(length, batch=2, seed=seed), tokens(length, batch=2, seed=seed + 1)
    changed = torch.cat([ids[:, :at], other[:, at:]], dim=1)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :pads] = 0
    model = in_dtype(architecture, name, backend, dtype)
    for extra in ({}, {"attention_mask": mask}):
        before, after = (logits(model, some, **extra)[:, :at] for some in (ids, changed))
        real = mask[:, :at] == 1
        assert_equal(after[real], before[real], 1e-4 if dtype == torch.float32 else 0.1)


@check
@given(architectures, names, backends, st.lists(st.integers(1, 30), min_size=1, max_size=4), st.booleans(), seeds)
def test_rows_of_any_length_share_a_batch(
    architecture: str, name: str, backend: str, lengths: list[int], left: bool, seed: int
) -> None:
    widest = max(lengths) + seed % 3
    ids, mask = tokens(widest, batch=len(lengths), seed=seed), torch.zeros(len(lengths), widest, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, widest - length :] = 1
    mask = mask if left else mask.flip(1)
    model = shared(architecture, name, backend)
    together = logits(model, ids, attention_mask=mask)
    for row in range(len(lengths)):
        real = mask[row] == 1
        assert_equal(together[row][real], logits(model, ids[row][real][None])[0], what=f"row {row}")


@check
@given(causal, names, backends, st.lists(st.integers(1, 12), min_size=2, max_size=4), st.integers(0, 6), seeds)
def test_pieces_of_any_size_equal_one_pass(
    architecture: str, name: str, backend: str, sizes: list[int], pads: int, seed: int
) -> None:
    length = sum(sizes)
    assume(takes(architecture, name, backend, length))
    pads = min(pads, length - 1)
    ids, mask = tokens(length, batch=2, seed=seed), torch.ones(2, length, dtype=torch.long)
    mask[0, :pads] = 0
    model = shared(architecture, name, backend)
    whole = logits(model, ids, attention_mask=mask)
    real = mask == 1
    assert_equal(in_pieces(model, ids, sizes, attention_mask=mask)[real], whole[real])


@check
@given(architectures, names, backends, st.lists(st.integers(1, 20), min_size=1, max_size=5), seeds)
def test_documents_of_any_length_are_packed(
    architecture: str, name: str, backend: str, lengths: list[int], seed: int
) -> None:
    assume(takes(architecture, name, backend, sum(lengths)))
    ids = tokens(sum(lengths), seed=seed)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model = shared(architecture, name, backend)
    separate = torch.cat([logits(model, part) for part in ids.split(lengths, dim=1)], dim=1)
    assert_equal(logits(model, ids, position_ids=positions), separate)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    architectures,
    names,
    st.sampled_from([(1, 1, 8), (2, 1, 8), (3, 3, 4), (6, 2, 6), (8, 8, 2)]),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_any_number_and_width_of_heads(
    architecture: str, name: str, shape: tuple[int, int, int], layers: int, length: int
) -> None:
    """Heads that are no power of two, grouped keys, two dimensions: eager agrees with sdpa, and it can be undone."""
    heads, key_heads, width = shape
    hidden = heads * width
    fields: dict[str, Any] = {
        "gpt2": {"n_embd": hidden, "n_head": heads, "n_layer": layers},
        "bert": {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers},
        "llama": {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "num_hidden_layers": layers,
        },
    }[architecture]
    encoding, ids = EVERY[name], tokens(length, batch=2)
    made = []
    for backend in ("sdpa", "eager"):
        try:
            model = fresh(architecture, encoding, backend, **fields)
        except hf_posenc.EncodingError as error:  # too few pairs, or lists made for another width
            assert encoding.site == "rotary" and ("rotary_fraction=" in str(error) or "_factor" in str(error))
            return
        made.append(logits(model, ids))
        plain = ARCHITECTURES[architecture](attn_implementation=backend, **fields)
        assert torch.equal(logits(hf_posenc.unpatch(model), ids), logits(plain, ids))
    assert_equal(made[0], made[1])
