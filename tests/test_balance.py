"""Spreading a load: the worked example, the optimum of tiny cases, and what must hold for any."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.balance import balance, max_over_mean, minimum_redundant, rank_load, replicate
from comm.placement import build_placement, experts_per_rank, placement_from_slots


def balanced(load, num_ranks, num_slots, node_of_rank=None):
    """Building it checks it: every expert has a slot, no rank holds one twice."""
    return placement_from_slots(
        "balanced", len(load), *balance(load, num_ranks, num_slots, node_of_rank)
    )


def test_the_worked_example():
    """The picture at the top of comm/balance.py."""
    load = [60, 9, 6, 12, 3]
    assert replicate(np.array(load, dtype=float), 7, 3).tolist() == [3, 1, 1, 1, 1]
    placement = balanced(load, 3, 7)
    assert placement.physical_to_logical.tolist() == [0, 3, 4, 0, 1, 0, 2]
    assert placement.first_slot.tolist() == [0, 3, 5, 7]
    assert rank_load(load, placement).tolist() == [35, 29, 26]
    contiguous = build_placement("contiguous", 5, 3)
    assert rank_load(load, contiguous).tolist() == [69, 18, 3]
    assert f"{max_over_mean(rank_load(load, placement)):.2f}" == "1.17"
    assert f"{max_over_mean(rank_load(load, contiguous)):.2f}" == "2.30"


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "least"),
    [(896, 72, 40), (896, 64, 0), (30, 8, 2), (128, 6, 4), (3, 5, 2), (256, 9, 5)],
)
def test_smallest_number_of_redundant_experts(num_experts, num_ranks, least):
    """Field case 11."""
    assert minimum_redundant(num_experts, num_ranks) == least
    assert (num_experts + least) % num_ranks == 0


def test_896_experts_on_72_ranks():
    """A long-tailed load: even slots, and next to nothing left of a nineteenfold hot spot."""
    load = 1 / np.arange(1, 897) ** 0.8
    placement = balanced(load, 72, 896 + minimum_redundant(896, 72))
    assert placement.slots_per_rank.tolist() == [13] * 72
    assert max_over_mean(rank_load(load, build_placement("contiguous", 896, 72))) > 19
    assert max_over_mean(rank_load(load, placement)) < 1.01


def test_hot_experts_that_share_a_rank_are_separated():
    """Field case 20: all the load on rank 0's eight experts."""
    load = np.where(np.arange(64) < 8, 100, 0)
    before = rank_load(load, build_placement("contiguous", 64, 8))
    assert before.tolist() == [800] + [0] * 7
    assert rank_load(load, balanced(load, 8, 64)).tolist() == [100] * 8


def test_equal_loads_are_settled_by_number():
    assert balance([1, 1, 1, 1], 2, 6)[0].tolist() == [0, 1, 2, 0, 1, 3]
    assert balance([0, 0, 0, 0], 2, 6)[0].tolist() == [0, 1, 2, 0, 1, 3]


def test_next_replica_goes_to_the_largest_load_per_replica():
    assert replicate(np.array([10.0, 6.0, 1.0]), 5, 4).tolist() == [2, 2, 1]  # 5 5 6 -> 5 5 3 3
    assert replicate(np.array([10.0, 6.0, 1.0]), 6, 4).tolist() == [3, 2, 1]
    assert replicate(np.array([90.0, 6.0, 1.0]), 6, 2).tolist() == [2, 2, 2]  # never over R


def optimum(load, num_ranks, num_slots):
    """Smallest largest rank load of all placements with these slots, tried one by one."""
    experts = range(len(load))
    sizes = experts_per_rank(num_slots, num_ranks)
    best = math.inf
    for held in itertools.product(*(itertools.combinations(experts, size) for size in sizes)):
        count = [sum(expert in one for one in held) for expert in experts]
        if all(count):
            loads = [sum(load[expert] / count[expert] for expert in one) for one in held]
            best = min(best, max(loads))
    return best


def test_close_to_the_optimum_of_tiny_cases():
    """All loads of 0, 1, 2, 5 or 12 on three or four experts; worst ratio and average."""
    ratios = []
    for num_experts, num_ranks, num_slots in [
        (3, 2, 4),
        (3, 3, 4),
        (3, 4, 6),
        (4, 2, 5),
        (4, 3, 4),
    ]:
        for load in itertools.combinations_with_replacement((0, 1, 2, 5, 12), num_experts):
            if any(load):
                reached = rank_load(load, balanced(load, num_ranks, num_slots)).max()
                ratios.append(reached / optimum(load, num_ranks, num_slots))
    assert len(ratios) > 200
    assert min(ratios) >= 1 - 1e-12  # nothing beats trying them all
    assert max(ratios) < 1.7
    assert np.mean(ratios) < 1.15


@st.composite
def sizes_and_loads(draw):
    num_experts, num_ranks = draw(st.integers(1, 24)), draw(st.integers(1, 12))
    num_slots = draw(st.integers(num_experts, num_experts * num_ranks))
    # Few distinct values, so that ties and zeros are common; and now and then one takes all.
    values = draw(st.sampled_from([(0,), (1,), (0, 1), (0, 1, 7, 1000), (0.1, 0.2, 3.3)]))
    load = draw(st.lists(st.sampled_from(values), min_size=num_experts, max_size=num_experts))
    if draw(st.booleans()):
        load[draw(st.integers(0, num_experts - 1))] = 10_000
    return load, num_ranks, num_slots


@settings(max_examples=300, deadline=None)
@given(sizes_and_loads())
def test_any_sizes_and_loads_give_a_placement(case):
    load, num_ranks, num_slots = case
    placement = balanced(load, num_ranks, num_slots)
    assert placement.num_slots == num_slots
    assert placement.slots_per_rank.tolist() == experts_per_rank(num_slots, num_ranks).tolist()
    for rank in range(num_ranks):
        assert (np.diff(placement.local_experts(rank)) > 0).all()
    assert rank_load(load, placement).sum() == pytest.approx(sum(load))
    again = balance(np.array(load), num_ranks, num_slots)
    assert again[0].tolist() == placement.physical_to_logical.tolist()


@settings(max_examples=200, deadline=None)
@given(sizes_and_loads())
def test_replicas_follow_the_load(case):
    """Moving a replica between two experts cannot lower the larger of their loads per replica."""
    load, num_ranks, num_slots = case
    load = np.array(load, dtype=float)
    count = replicate(load, num_slots, num_ranks)
    assert count.sum() == num_slots and count.min() >= 1 and count.max() <= num_ranks
    for giver, taker in itertools.permutations(range(len(load)), 2):
        if count[giver] > 1 and count[taker] < num_ranks:
            without = load[giver] / (count[giver] - 1)
            assert without >= load[taker] / count[taker] * (1 - 1e-12)


def test_a_packing_that_gets_stuck_is_repaired():
    """Only rank 0 has a free slot for expert 0, and holds it already; the lighter of 1, 2 moves.

    rank 0: 3 0 _   rank 1: 1 2   ->   rank 0: 3 0 2   rank 1: 1 0
    """
    assert balance([8, 6, 5, 8], 2, 5)[0].tolist() == [0, 2, 3, 0, 1]


def test_every_small_packing_succeeds():
    for num_experts, num_ranks in [(3, 3), (4, 2), (4, 3)]:
        for num_slots in range(num_experts, num_experts * num_ranks + 1):
            for load in itertools.product((0, 5, 8), repeat=num_experts):
                balanced(load, num_ranks, num_slots)


NODES = [0, 1, 0, 1, 0, 1, 1, 0]  # cyclic, four ranks each


def test_nodes_first_keeps_all_replicas_of_an_expert_on_one_node():
    load = 1 / np.arange(1, 65) ** 0.5
    placement = balanced(load, 8, 72, NODES)
    node = np.array(NODES)[placement.slot_rank]
    for slots in placement.replicas:
        assert len(set(node[slots[slots >= 0]])) == 1
    of_node = np.bincount(NODES, weights=rank_load(load, placement))
    assert max_over_mean(of_node) < 1.05
    assert max_over_mean(rank_load(load, placement)) < 1.1
    assert placement.slots_per_rank.tolist() == [9] * 8


def test_nodes_of_different_size_are_loaded_by_the_rank():
    load = [8, 8, 8, 8, 1, 1, 1, 1]
    assert rank_load(load, balanced(load, 4, 8, [0, 0, 0, 1])).tolist() == [9, 9, 9, 9]


@settings(max_examples=150, deadline=None)
@given(sizes_and_loads(), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_nodes_first_is_valid_or_refused(case, nodes):
    """Ragged nodes in any numbering; it can be refused only where nodes are too many for E."""
    load, num_ranks, num_slots = case
    nodes = np.array(nodes[:num_ranks])
    sizes = experts_per_rank(num_slots, num_ranks)
    needed = sum(int(sizes[nodes == node].max()) for node in set(nodes.tolist()))
    if needed > len(load):
        with pytest.raises(ValueError, match="too many to keep every one"):
            balance(load, num_ranks, num_slots, nodes)
        return
    placement = balanced(load, num_ranks, num_slots, nodes)
    assert placement.slots_per_rank.tolist() == sizes.tolist()
    for slots in placement.replicas:
        assert len(set(nodes[placement.slot_rank[slots[slots >= 0]]])) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], 2, 2), r"num_slots=2 .*3 \(no redundant.*num_redundant_experts is -1"),
        (([1, 2, 3], 2, 7), r"num_slots=7 .* 3 experts on 2 ranks .*\.\. 6"),
        (([1, 2, 3], 0, 3), "num_ranks=0"),
        (([1, -2, 3], 2, 4), r"load of expert 1 is -2\.0"),
        (([1, 2, math.nan], 2, 4), "load of expert 2 is nan"),
        (([1, 2, math.inf], 2, 4), "load of expert 2 is inf"),
        (([[1, 2]], 2, 4), r"load is \[1, 2\], must be \[E\]"),
        (([1, 2, 3], 2, 4, [0]), r"node_of_rank has 1 entries, .*\(2\)"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        balance(*arguments)


def test_wrong_sizes_elsewhere_are_refused():
    with pytest.raises(ValueError, match="num_ranks=0"):
        minimum_redundant(8, 0)
    with pytest.raises(ValueError, match="load has 3 experts, placement contiguous 4"):
        rank_load([1, 2, 3], build_placement("contiguous", 4, 2))


def test_no_load_is_even():
    assert max_over_mean(rank_load([0, 0], build_placement("contiguous", 2, 3))) == 1.0
