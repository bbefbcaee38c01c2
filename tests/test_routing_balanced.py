"""Balance holds for any run of tokens, few ones too, on any placement."""

from __future__ import annotations

import numpy as np
import pytest
from routing_samples import rows, source

from comm.analytic.law import NoLaw

PLACEMENTS = {
    "equal": (np.arange(24) // 6, 4, 4),
    "round robin": (np.arange(24) % 4, 4, 4),
    "uneven": (np.repeat([0, 1, 2, 3], [2, 9, 6, 7]), 4, 4),
    "ranks without experts": (np.repeat([1, 4], [10, 14]), 6, 4),
    "more ranks than experts": (np.arange(6), 9, 4),
    "more than one pick a rank": (np.arange(24) // 6, 4, 15),
    "72 ranks": (np.arange(896) * 72 // 896, 72, 16),
    "one rank": (np.zeros(8, dtype=int), 1, 8),
}


def run_of(placement: str) -> dict:
    expert_rank, group_size, top_k = PLACEMENTS[placement]
    run = {"num_experts": len(expert_rank), "top_k": top_k, "expert_rank": expert_rank}
    return run | {"group_size": group_size, "tokens": (30, 1, 0, 9)}


def spans(num_tokens: int):
    for first in range(num_tokens):
        for end in range(first + 1, min(num_tokens, first + 12) + 1):
            yield slice(first, end)
    yield slice(0, num_tokens)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("step, layer", [(0, 0), (1, 2), (7, 1)])
def test_any_run_of_tokens_is_balanced_by_rank(placement: str, step: int, layer: int) -> None:
    expert_rank, _, _ = PLACEMENTS[placement]
    ids = rows("balanced", step=step, layer=layer, **run_of(placement))
    holders = np.unique(expert_rank)
    for span in spans(len(ids)):
        picks = ids[span].ravel()
        by_rank = np.bincount(expert_rank[picks], minlength=holders.max() + 1)[holders]
        assert np.ptp(by_rank) <= 1
        by_expert = np.bincount(picks, minlength=len(expert_rank))
        for rank in holders:
            assert np.ptp(by_expert[expert_rank == rank]) <= 1


@pytest.mark.parametrize(
    "sizes, top_k", [([1, 7, 8], 4), ([2, 2, 20], 7), ([3, 3], 6), ([1, 5], 3)]
)
def test_a_rank_with_too_few_experts_makes_it_balance_by_expert(
    sizes: list[int], top_k: int
) -> None:
    expert_rank = np.repeat(np.arange(len(sizes)), sizes)
    run = {"num_experts": sum(sizes), "top_k": top_k, "expert_rank": expert_rank}
    one = source("balanced", **run, group_size=len(sizes), tokens=(40,))
    too_few = min(sizes) < -(-top_k // len(sizes))
    assert one.by_rank == (not too_few,) * 3
    assert ("every expert" in one.law.reason) is too_few
    ids = one.choose(0, 1, 0, 40).topk_ids
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
    for span in spans(40):
        assert np.ptp(np.bincount(ids[span].ravel(), minlength=sum(sizes))) <= 1 or not too_few


def test_by_expert_takes_the_ranks_in_turn() -> None:
    expert_rank = np.repeat([0, 1, 2], [1, 4, 4])
    ids = rows(
        "balanced", num_experts=9, top_k=9, expert_rank=expert_rank, group_size=3, tokens=(1,)
    )
    assert expert_rank[ids[0]].tolist() == [0, 1, 2, 1, 2, 1, 2, 1, 2]


def test_the_example_of_the_file() -> None:
    run = {"num_experts": 6, "top_k": 2, "expert_rank": np.arange(6) // 2, "group_size": 3}
    ids = rows("balanced", tokens=(4,), **run)
    assert ids.tolist() == [[0, 2], [4, 1], [3, 5], [0, 2]]


def test_remainders_even_out_over_layers_and_steps() -> None:
    run = {"num_experts": 28, "top_k": 3, "expert_rank": np.arange(28) // 4, "group_size": 7}
    one = source("balanced", tokens=(1, 1, 1), layers=5, steps=4, **run)
    total = np.zeros(7, dtype=int)
    for step, layer in np.ndindex(4, 5):
        total += np.bincount(one.choose(step, layer, 0, 3).topk_ids.ravel() // 4, minlength=7)
    assert total.sum() == 180 and np.ptp(total) <= 1


def test_nothing_is_left_to_chance() -> None:
    law = source("balanced").law
    assert isinstance(law, NoLaw) and "nothing is left to chance: every rank" in law.reason
    assert np.array_equal(rows("balanced"), rows("balanced", seed=99))
    placement = np.array([[0] * 12 + [1] * 12, [0] * 23 + [1], [0] * 12 + [1] * 12])
    mixed = source("balanced", expert_rank=placement, group_size=2)
    assert mixed.by_rank == (True, False, True) and "every expert" in mixed.law.reason
