"""What position contributes to a score, against sums by hand on tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encodings_under_test import EVERY, fresh, on
from torch import Tensor

import hf_posenc
from hf_posenc.analysis import (
    PARTS,
    decompose,
    distance_curve,
    plot_decomposition,
    plot_distance_curve,
    score_parts,
)
from hf_posenc.analysis.curves import mean_by_distance
from hf_posenc.analysis.in_force import in_force
from hf_posenc.analysis.watch import watch
from models import ARCHITECTURES, HEADS, HIDDEN, LAYERS, POSITIONS, tokens

WIDTH = HIDDEN // HEADS


def rotations(length: int = 8) -> Tensor:
    """One text, rotated by 0, 1, 2, … tokens: every token stands once at every position."""
    text = tokens(length)[0]
    return torch.stack([text.roll(shift) for shift in range(length)])


def eager_weights(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    """Attention weights as the model itself gives them out."""
    with torch.no_grad():
        return model(ids, output_attentions=True, attention_mask=torch.ones_like(ids)).attentions


# ---------------------------------------------------------------------- what is watched


@on()
def test_watched_weights_are_those_that_the_model_gives_out(architecture: str, name: str, backend: str) -> None:
    ids = tokens(20, batch=2)
    model = fresh(architecture, name, backend)
    layers, _ = watch(in_force(model), input_ids=ids, attention_mask=torch.ones_like(ids))
    theirs = eager_weights(fresh(architecture, name, "eager"), ids)
    assert len(layers) == len(theirs) == LAYERS
    for layer, weights in zip(layers, theirs, strict=True):
        torch.testing.assert_close(layer.weights().float(), weights, rtol=0, atol=2e-5)


def test_watched_weights_know_padding_and_many_queries() -> None:
    """More queries than one block of a dense bias, and a masked row."""
    ids = tokens(300, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    model = fresh("llama", "t5")
    # A mask of four dimensions: what a mask of two says goes to a kernel that cannot be watched.
    seen = mask.bool()[:, None, None, :] & torch.ones(300, 300, dtype=torch.bool).tril()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    layers, _ = watch(in_force(model), input_ids=ids, attention_mask=seen, position_ids=positions)
    assert len(layers[0].kernels) > 1
    with torch.no_grad():
        theirs = fresh("llama", "t5", "eager")(ids, attention_mask=mask, output_attentions=True).attentions
    for layer, weights in zip(layers, theirs, strict=True):
        torch.testing.assert_close(layer.weights()[0].float(), weights[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(layer.weights()[1, :, 40:].float(), weights[1, :, 40:], rtol=0, atol=2e-5)
        assert layer.weights()[1, :, 40:, :40].abs().max() == 0


# ---------------------------------------------------------------------- parts


@on(both=False)
def test_parts_add_up_to_the_score(architecture: str, name: str, backend: str) -> None:
    ids = tokens(12, batch=3)
    model = fresh(architecture, name)
    layers, _ = watch(in_force(model), input_ids=ids, attention_mask=torch.ones_like(ids))
    for index in range(LAYERS):
        scores = layers[index].scores()
        total = score_parts(model, ids, index).total
        difference = (scores - total).masked_fill(~torch.isfinite(scores), 0.0)
        own = difference.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        left = (difference - own).masked_fill(~torch.isfinite(scores), 0.0)  # a constant for each query is free
        assert left.abs().max() < 3e-5


def test_parts_of_a_table_by_hand() -> None:
    """First layer of GPT-2: the four terms from its own weights."""
    model = ARCHITECTURES["gpt2"]()
    ids = rotations(6)
    block = model.transformer.h[0]
    with torch.no_grad():
        x = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(6))
        projected = block.attn.c_attn(block.ln_1(x)).double()
    query = projected[..., :HIDDEN].unflatten(-1, (HEADS, WIDTH))
    key = projected[..., HIDDEN : 2 * HIDDEN].unflatten(-1, (HEADS, WIDTH))
    parts = score_parts(model, ids, 0)
    row, head, i, j = 2, 1, 4, 3

    def split(x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """(content, position part) of one vector, summed by hand."""
        at = sum((x[r, position, head] for r in range(6)), torch.zeros(WIDTH, dtype=torch.float64)) / 6
        everywhere = sum((x[r, p, head] for r in range(6) for p in range(6)), torch.zeros_like(at)) / 36
        return x[row, position, head] - (at - everywhere), at - everywhere

    (qc, qp), (kc, kp) = split(query, i), split(key, j)
    for name, left, right in [
        ("content_content", qc, kc),
        ("content_position", qc, kp),
        ("position_content", qp, kc),
        ("position_position", qp, kp),
    ]:
        expected = float((left * right).sum()) / WIDTH**0.5
        assert float(getattr(parts, name)[row, head, i, j]) == pytest.approx(expected, abs=1e-6), name
    assert parts.rotation.abs().max() == 0 and parts.bias.abs().max() == 0


def test_rotation_part_by_hand() -> None:
    """First layer of LLaMA: what turning changes, pair by pair, with grouped keys."""
    model = ARCHITECTURES["llama"]()
    ids = tokens(6, batch=2)
    layer = model.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(model.model.embed_tokens(ids))
        query = layer.self_attn.q_proj(x).double().unflatten(-1, (HEADS, WIDTH))
        key = layer.self_attn.k_proj(x).double().unflatten(-1, (HEADS // 2, WIDTH))
    part = score_parts(model, ids, 0).rotation
    half = WIDTH // 2
    for head, i, j in [(0, 5, 2), (3, 4, 0), (2, 3, 3)]:
        expected = 0.0
        for pair in range(half):
            a = torch.complex(query[1, i, head, pair], query[1, i, head, pair + half])
            b = torch.complex(key[1, j, head // 2, pair], key[1, j, head // 2, pair + half])
            angle = torch.tensor((i - j) * 10000.0 ** (-pair / half), dtype=torch.float64)
            expected += float((a * b.conj() * (torch.polar(torch.ones_like(angle), angle) - 1)).real)
        assert float(part[1, head, i, j]) == pytest.approx(expected / WIDTH**0.5, abs=1e-6)


@pytest.mark.parametrize("name", ["alibi", "t5", "yarn", "nope"])
def test_relative_encodings_leave_no_position_in_the_first_layer(architecture: str, name: str) -> None:
    spread = decompose(fresh(architecture, name), rotations()).spread[0]
    by_part = dict(zip(PARTS, spread.unbind(-1), strict=True))
    for part in ("content_position", "position_content", "position_position"):
        assert by_part[part].max() < 1e-5, part
    assert by_part["content_content"].min() > 0.01
    assert (by_part["bias"].min() > 0) == (name in ("alibi", "t5"))
    assert (by_part["rotation"].min() > 0) == (name == "yarn")


@pytest.mark.parametrize("name", ["sinusoidal", "learned", "learned_concat"])
def test_absolute_encodings_show_in_the_position_parts(architecture: str, name: str) -> None:
    spread = decompose(fresh(architecture, name), rotations()).spread
    by_part = dict(zip(PARTS, spread.unbind(-1), strict=True))
    assert by_part["content_position"].min() > 1e-3 and by_part["position_position"].min() > 1e-4
    assert by_part["bias"].max() == by_part["rotation"].max() == 0


def test_bias_by_distance_is_the_bias() -> None:
    result = decompose(fresh("gpt2", "alibi"), tokens(10, batch=2))
    bias = result.by_distance[:, :, PARTS.index("bias")]
    assert result.distances == tuple(range(10))
    for head, slope in enumerate([0.25, 0.0625, 0.015625, 0.00390625]):
        expected = [-slope * d for d in range(10)]
        assert bias[0, head].tolist() == bias[1, head].tolist() == pytest.approx(expected)
    # Of the keys 0 … i of a query i, slope times the standard deviation of 0 … i: mean square ((i + 1)**2 - 1) / 12.
    mean = sum((i + 1) * ((i + 1) ** 2 - 1) / 12 for i in range(10)) / sum(i + 1 for i in range(10))
    assert float(result.spread[0, 0, PARTS.index("bias")]) == pytest.approx(0.25 * mean**0.5, rel=1e-6)


def test_encoders_have_distances_of_both_signs() -> None:
    result = decompose(fresh("bert", "alibi"), tokens(5, batch=2))
    assert result.distances == tuple(range(-4, 5))
    bias = result.by_distance[0, 0, PARTS.index("bias")]
    assert bias.tolist() == pytest.approx([-0.25 * abs(d) for d in range(-4, 5)])


# ---------------------------------------------------------------------- curves


def test_mean_by_distance_by_hand() -> None:
    values = torch.tensor([[[[1.0, 9.0, 9.0], [2.0, 3.0, 9.0], [4.0, 6.0, 8.0]]]])
    everything = torch.ones(3, 3, dtype=torch.bool)
    assert mean_by_distance(values, everything, causal=True).tolist() == [[4.0, 4.0, 4.0]]
    assert mean_by_distance(values, everything, causal=False).tolist() == [[9.0, 9.0, 4.0, 4.0, 4.0]]
    visible = everything.clone()
    visible[1, 0] = False
    assert mean_by_distance(values, visible, causal=True).tolist() == [[4.0, 6.0, 4.0]]


@pytest.mark.parametrize("name", ["alibi", "yarn", "nope"])
def test_weights_by_distance_by_hand(architecture: str, name: str) -> None:
    ids = tokens(12, batch=2)
    curve = distance_curve(fresh(architecture, name), ids)
    theirs = torch.stack(eager_weights(fresh(architecture, name, "eager"), ids)).mean(1)  # [layers, heads, 12, 12]
    assert curve.values.shape == (LAYERS, HEADS, len(curve.distances))
    for index, distance in enumerate(curve.distances):
        expected = theirs.diagonal(offset=-distance, dim1=-2, dim2=-1).mean(-1)
        torch.testing.assert_close(curve.values[..., index].float(), expected, rtol=0, atol=1e-5)
    total = (curve.values * torch.tensor(curve.counts)).sum(-1)
    torch.testing.assert_close(total, torch.full_like(total, 2 * 12))  # each query hands out a weight of 1


def test_scores_of_one_repeated_token_are_the_bias() -> None:
    """Where all tokens are the same, content is the same everywhere: what is left is the bias."""
    ids = torch.full((1, 9), 7)
    curve = distance_curve(fresh("llama", "alibi"), ids, of="scores")
    for head, slope in enumerate([0.25, 0.0625, 0.015625, 0.00390625]):
        assert curve.values[:, head].tolist() == [pytest.approx([-slope * d for d in range(9)], abs=1e-4)] * LAYERS


def test_the_model_is_left_as_it_was(model: Any) -> None:
    model.train()
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    state = torch.get_rng_state()
    distance_curve(model, tokens(6, batch=2))
    decompose(model, tokens(6, batch=2))
    assert model.training and all(module.training for module in model.modules())
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert torch.equal(state, torch.get_rng_state())


# ---------------------------------------------------------------------- errors and pictures


@pytest.mark.parametrize("ids", [tokens(6)[0], tokens(6), tokens(1, batch=3), [[1, 2]], tokens(POSITIONS + 1, batch=2)])
def test_refuses_ids_that_cannot_be(ids: Any) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        decompose(ARCHITECTURES["gpt2"](), ids)


@pytest.mark.parametrize("layer", [LAYERS, -LAYERS - 1, 0.0, True])
def test_refuses_a_layer_that_is_not_there(layer: Any) -> None:
    with pytest.raises(ValueError, match=rf"layer={layer}.*layers 0 to 1"):
        score_parts(ARCHITECTURES["gpt2"](), tokens(6, batch=2), layer)


def test_refuses_a_quantity_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="of='weight' is not known; choose one of 'weights', 'scores'"):
        distance_curve(ARCHITECTURES["gpt2"](), tokens(6), of="weight")


@pytest.mark.parametrize("of", ["weights", "scores"])
def test_pictures_show_every_line(of: str) -> None:
    pytest.importorskip("matplotlib")
    curve = distance_curve(fresh("gpt2", "alibi"), tokens(8), of=of)
    figure = plot_distance_curve(curve)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == LAYERS and all(len(axes.lines) == HEADS for axes in panels)
    assert panels[1].lines[2].get_ydata().tolist() == curve.values[1, 2].tolist()
    parts = decompose(fresh("gpt2", "alibi"), tokens(8, batch=2))
    lines = {line.get_label() for line in plot_decomposition(parts).axes[0].lines}
    assert "bias" in lines and "rotation" not in lines and "content and content" in lines


def test_names_are_sorted() -> None:
    from hf_posenc import analysis

    assert analysis.__all__ == sorted(analysis.__all__)
    assert hf_posenc.encodings()["alibi"] is type(EVERY["alibi"])
