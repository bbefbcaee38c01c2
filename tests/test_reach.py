"""How many ranks a token reaches: against loops over tokens, and the closed form against those."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import comb

import numpy as np
import pytest

from comm.analytic.law import GroupLimited, Markov, NoLaw, Uniform
from comm.analytic.owners import expert_owner, one_slot_each
from comm.analytic.reach import expected_reach, reached
from comm.analytic.run import RunShape


def run_of(ranks=4, num_experts=6, top_k=2, tokens=(3, 0, 2, 1), layers=2, **options):
    positions = (options.get("ep_size") or ranks) // options.get("expert_tp", 1)
    owner = expert_owner("contiguous", num_experts, positions)
    logical, slot_rank = one_slot_each(owner)
    return RunShape(
        dispatcher="all_to_all",
        tokens_per_rank=tuple(tokens),
        node_of_rank=(0,) * ranks,
        physical_to_logical=(logical,) * layers,
        slot_rank=(slot_rank,) * layers,
        num_experts=num_experts,
        top_k=top_k,
        width=8,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"ep_size": 2}, {"expert_tp": 2}, {"num_steps": 3}])
def test_counted_by_loops(options):
    run = run_of(**options)
    rng = np.random.default_rng(1)
    shape = (run.num_steps, run.num_layers, sum(run.tokens_per_rank), run.num_experts)
    ids = np.argsort(rng.random(shape), axis=-1)[..., : run.top_k]
    ids[0, 0, 0] = -1
    ids[0, 1, 1, 1] = -1
    positions = (options.get("ep_size") or 4) // options.get("expert_tp", 1)
    owner = expert_owner("contiguous", run.num_experts, positions)
    counted = [0] * 5
    for token in ids.reshape(-1, run.top_k).tolist():
        counted[len({owner[expert] for expert in token if expert >= 0})] += 1
    assert reached(run, ids).tolist() == counted


def test_the_closed_form_counts_subsets():
    run = run_of(num_experts=6, top_k=3)
    owner = expert_owner("contiguous", 6, 4).tolist()
    ways = [0] * 5
    for subset in itertools.combinations(range(6), 3):
        ways[len({owner[expert] for expert in subset})] += 1
    tokens = 6 * 2
    want = [tokens * way / comb(6, 3) for way in ways]
    assert expected_reach(run, Uniform()) == pytest.approx(want)
    assert expected_reach(run, Markov(0.5, 8)) == pytest.approx(want)
    idle = np.zeros((1, 2, 4), np.int64)  # nobody chose anything
    assert expected_reach(run, Uniform(), idle).tolist() == [12, 0, 0, 0, 0]


def test_tokens_that_choose_in_one_step_only():
    """Of 6 tokens a step 6 and 1 choose in the first layer, 2 and 3 in the second."""
    run = run_of(num_steps=2)
    active = np.array([[[3, 0, 2, 1], [1, 0, 1, 0]], [[0, 0, 1, 0], [2, 0, 0, 1]]])
    expected = expected_reach(run, Uniform(), active)
    assert expected[0] == 24 - 12 and expected.sum() == pytest.approx(24)
    assert expected[1] == pytest.approx(12 * 2 / comb(6, 2))  # two ranks own two experts each


def test_no_closed_form_has_a_reason():
    run = run_of()
    assert expected_reach(run, NoLaw("learned")).reason == "learned"
    assert "uniformly" in expected_reach(run, GroupLimited(2, 1, "max")).reason
    twice = np.append(run.physical_to_logical[0], 0)
    holders = np.append(run.slot_rank[0], 3)
    run = replace(run, physical_to_logical=(twice,) * 2, slot_rank=(holders,) * 2)
    assert "replicas" in expected_reach(run, Uniform()).reason
