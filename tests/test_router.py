"""The router against one token at a time in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from model_presets import PRESETS, small

from moe.model import ModelShape
from moe.router import Router

NUM_TOKENS = 23


def route_one(
    shape: ModelShape, logits: list[float], bias: list[float]
) -> tuple[set[int], dict[int, float]]:
    """The published rules, in double precision: (chosen experts, weight of each)."""
    largest = max(logits)
    scores = {
        "sigmoid": lambda: [1 / (1 + math.exp(-value)) for value in logits],
        "sqrt_softplus": lambda: [math.sqrt(math.log1p(math.exp(value))) for value in logits],
        "softmax": lambda: [
            math.exp(value - largest) / sum(math.exp(other - largest) for other in logits)
            for value in logits
        ],
        "softmax_topk": lambda: logits,
    }[shape.score_func]()
    selection = [score + extra for score, extra in zip(scores, bias, strict=True)]

    size = shape.num_experts // shape.num_expert_groups
    groups = [range(start, start + size) for start in range(0, shape.num_experts, size)]
    counted = 1 if shape.group_score == "max" else 2

    def group_score(group: range) -> float:
        return sum(sorted(selection[expert] for expert in group)[-counted:])

    best_groups = sorted(groups, key=group_score)[-shape.num_limited_groups :]
    candidates = [expert for group in best_groups for expert in group]
    chosen = sorted(candidates, key=lambda expert: selection[expert])[-shape.top_k :]

    if shape.score_func == "softmax_topk":
        parts = {expert: math.exp(scores[expert] - largest) for expert in chosen}
    else:
        parts = {expert: scores[expert] for expert in chosen}
    total = sum(parts.values())
    divide = shape.norm_topk or shape.score_func == "softmax_topk"
    weights = {
        expert: part / (total if divide else 1) * shape.route_scale
        for expert, part in parts.items()
    }
    return set(chosen), weights


def assert_routes_as_published(shape: ModelShape, bias_shift: float = 0.0) -> None:
    router = Router(shape, seed=3, layer=1)
    router.expert_bias += bias_shift
    x = torch.randn(NUM_TOKENS, shape.hidden_size, generator=torch.Generator().manual_seed(0))
    topk_ids, topk_weights = router(x)
    assert topk_ids.dtype == torch.int64 and topk_weights.dtype == torch.float32
    assert topk_ids.shape == topk_weights.shape == (NUM_TOKENS, shape.top_k)
    logits = (x.double() @ router.weight.double().T).tolist()
    for token in range(NUM_TOKENS):
        chosen, weights = route_one(shape, logits[token], router.expert_bias.tolist())
        assert set(topk_ids[token].tolist()) == chosen
        wanted = [weights[expert] for expert in topk_ids[token].tolist()]
        assert topk_weights[token].tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    assert_routes_as_published(small(name))


@pytest.mark.parametrize("score_func", ["sigmoid", "softmax", "softmax_topk", "sqrt_softplus"])
@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize("norm_topk", [True, False])
def test_every_combination_in_groups(score_func: str, group_score: str, norm_topk: bool) -> None:
    assert_routes_as_published(
        small("deepseek_v3", score_func=score_func, group_score=group_score, norm_topk=norm_topk)
    )


def test_a_negative_biased_score_beats_a_dropped_group() -> None:
    """With all selections negative, a dropped group marked by 0 would win every choice."""
    assert_routes_as_published(small("deepseek_v3"), bias_shift=-5.0)


def test_bias_chooses_and_does_not_weigh() -> None:
    shape = small("kimi_k3")
    router = Router(shape, seed=0, layer=0)
    x = torch.randn(64, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    ids, weights = router(x)
    assert torch.equal(weights, router.weights_for(x, ids))
    assert torch.allclose(weights.sum(1), torch.ones(64))
    router.expert_bias.zero_()
    assert not torch.equal(router(x)[0].sort(1).values, ids.sort(1).values)
    assert torch.equal(router.weights_for(x, ids), weights)
    router.expert_bias[7] = 9.0
    assert (router(x)[0] == 7).any(1).all()


@pytest.mark.parametrize("name", PRESETS)
def test_masked_ids_get_no_weight(name: str) -> None:
    """The other weights of the row are those of the remaining experts; a row of -1 gives zeros."""
    shape = small(name)
    router = Router(shape, seed=0, layer=0)
    x = torch.randn(3, shape.hidden_size, generator=torch.Generator().manual_seed(2))
    ids, whole = router(x)
    ids[0], ids[1, 0] = -1, -1
    weights = router.weights_for(x, ids)
    assert weights[0].tolist() == [0.0] * shape.top_k and weights[1, 0] == 0
    assert torch.equal(weights[2], whole[2])
    rest = weights[1, 1:]
    if shape.norm_topk:
        assert rest.sum().item() == pytest.approx(shape.route_scale, rel=1e-6)
    assert torch.allclose(rest / rest.sum(), whole[1, 1:] / whole[1, 1:].sum())


def test_scores_are_fp32_whatever_the_activations_are() -> None:
    shape = small("kimi_k3")
    router = Router(shape, seed=0, layer=0)
    x = torch.randn(32, shape.hidden_size).bfloat16()
    ids, weights = router(x)
    ids32, weights32 = router(x.float())
    assert torch.equal(ids, ids32) and torch.equal(weights, weights32)


def test_all_experts_one_expert_no_tokens() -> None:
    everyone = small("mixtral_8x7b", top_k=8)
    ids, weights = Router(everyone, seed=0, layer=0)(torch.randn(5, 32))
    assert ids.sort(1).values.tolist() == [list(range(8))] * 5
    assert torch.allclose(weights.sum(1), torch.ones(5))
    ids, weights = Router(replace(everyone, top_k=1), seed=0, layer=0)(torch.randn(0, 32))
    assert ids.shape == weights.shape == (0, 1)


def test_layers_and_seeds_route_differently() -> None:
    shape = small("kimi_k3")
    first, *others = (
        Router(shape, seed=seed, layer=layer).weight for seed, layer in [(0, 0), (1, 0), (0, 1)]
    )
    assert all(not torch.equal(first, other) for other in others)


def test_gradients_reach_the_router() -> None:
    shape = small("deepseek_v3")
    router = Router(shape, seed=0, layer=0)
    x = torch.randn(8, shape.hidden_size, requires_grad=True)
    ids, weights = router(x)
    (weights * torch.randn_like(weights)).sum().backward()
    touched = router.weight.grad.abs().sum(1) > 0
    assert set(touched.nonzero().flatten().tolist()) == set(ids.flatten().tolist())
    assert x.grad.isfinite().all()
