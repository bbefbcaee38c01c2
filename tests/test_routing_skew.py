"""The imbalance that was asked for is the one that comes out."""

from __future__ import annotations

import numpy as np
import pytest
from routing_samples import source

from moe.routing import skew
from moe.routing.weighted import inclusion


def max_over_mean(one: skew.Skew, layer: int) -> float:
    run = one.context
    pi = inclusion(one.weights(0, layer), run.top_k)
    if run.options.by == "expert":
        return pi.max() / (run.top_k / run.num_experts)
    picks = np.bincount(run.expert_rank[layer], pi, minlength=run.group_size)
    return picks.max() / (run.top_k / run.group_size)


UNEVEN = np.repeat([0, 1, 2, 5], [100, 50, 25, 81])  # 6 ranks, two without experts


@pytest.mark.parametrize("by", ["rank", "expert"])
@pytest.mark.parametrize("wanted", [2.5, 3.0, 3.7])
@pytest.mark.parametrize("order", ["seeded", "id"])
@pytest.mark.parametrize(
    "run",
    [
        {"num_experts": 896, "top_k": 16, "tokens": (4,) * 8},
        {"num_experts": 256, "top_k": 8, "expert_rank": UNEVEN, "group_size": 6},
    ],
    ids=["equal", "uneven"],
)
def test_max_over_mean_is_the_wanted_one(by: str, wanted: float, order: str, run: dict) -> None:
    one = source("skew", max_over_mean=wanted, by=by, order=order, **run)
    for layer in range(3):
        assert max_over_mean(one, layer) == pytest.approx(wanted, abs=1e-4)
        assert one.weights(0, layer).min() > 0
    if order == "id" and by == "expert":
        assert (np.diff(one.weights(0, 0)) <= 0).all()
    if order == "seeded":
        assert not np.array_equal(one.weights(0, 0), one.weights(0, 1))
    assert np.array_equal(one.weights(0, 1), one.weights(9, 1))


def test_drawn_tokens_are_that_skewed() -> None:
    one = source("skew", max_over_mean=2.0, num_experts=896, top_k=16, tokens=(2500,) * 8)
    ids = one.choose(0, 0, 0, 20_000).topk_ids
    busiest = np.bincount(one.context.expert_rank[0][ids.ravel()]).max()
    # 20,000 tokens of mean 4 and a variance below that of independent picks: 4 sd
    assert abs(busiest / 20_000 - 4) < 4 * (4 / 20_000) ** 0.5


def test_experts_of_a_rank_weigh_the_same_and_log_weights_are_normal_quantiles() -> None:
    one = source("skew", max_over_mean=2.0, order="id", num_experts=32, tokens=(5,) * 8)
    by_rank = one.weights(0, 0).reshape(8, 4)
    assert (by_rank == by_rank[:, :1]).all()
    logs = np.log(by_rank[:, 0])
    # quantiles 15/16, 13/16, ... of the normal distribution, from a table
    assert logs / logs[0] * 1.53412 == pytest.approx(
        [1.53412, 0.88715, 0.48878, 0.15731, -0.15731, -0.48878, -0.88715, -1.53412], abs=2e-5
    )


def test_one_means_none() -> None:
    for by in ("rank", "expert"):
        one = source("skew", max_over_mean=1, by=by)
        assert one.weights(0, 0).tolist() == [1.0] * 24


@pytest.mark.parametrize(
    "run, nearest",
    [
        ({"max_over_mean": 1.0, "expert_rank": np.repeat([0, 1, 2, 3], [9, 5, 5, 5])}, 1.5),
        ({"max_over_mean": 1.5, "tokens": (8,)}, 1.0),
        ({"max_over_mean": 5.0, "tokens": (8, 8)}, None),
        ({"max_over_mean": 7.0, "by": "expert"}, None),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(run: dict, nearest: float | None) -> None:
    with pytest.raises(
        ValueError, match=r"router.max_over_mean=.* can be had .*nearest: "
    ) as error:
        source("skew", **run)
    advised = float(str(error.value).rsplit(" ", 1)[1])
    assert advised > 1.4 or run["tokens"] == (8,)  # of too much, the most
    assert nearest is None or advised == nearest
    one = source("skew", **run | {"max_over_mean": advised})  # the advice is good
    assert max_over_mean(one, 0) == pytest.approx(advised, abs=1e-4)


def test_layers_that_are_alike_are_bisected_once() -> None:
    skew._sigma.cache_clear()
    source("skew", layers=50, num_experts=896, top_k=16, tokens=(1,) * 8)
    assert skew._sigma.cache_info().misses == 1
