"""Who owns which expert, remainders first, then replicas."""

import numpy as np
import pytest

from comm.placement import (
    PLACEMENTS,
    ExpertPlacement,
    build_placement,
    placement_from_slots,
)


def test_the_worked_example():
    """The picture at the top of comm/placement.py."""
    contiguous = build_placement("contiguous", 7, 3)
    round_robin = build_placement("round_robin", 7, 3)
    assert contiguous.first_slot.tolist() == round_robin.first_slot.tolist() == [0, 3, 5, 7]
    assert contiguous.physical_to_logical.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert round_robin.physical_to_logical.tolist() == [0, 3, 6, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("num_experts", "world_size", "sizes"),
    [
        (30, 8, [4] * 6 + [3] * 2),  # field case 9
        (128, 6, [22, 22, 21, 21, 21, 21]),  # field case 10
        (896, 72, [13] * 32 + [12] * 40),
        (896, 8, [112] * 8),
        (3, 5, [1, 1, 1, 0, 0]),  # more ranks than experts
    ],
)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_sizes_differ_by_at_most_one_and_the_first_ranks_own_the_remainder(
    name, num_experts, world_size, sizes
):
    assert build_placement(name, num_experts, world_size).slots_per_rank.tolist() == sizes


def test_owners_of_896_on_72_ranks():
    """`id // (E // R)` would send expert 895 to rank 74."""
    contiguous = build_placement("contiguous", 896, 72)
    owner = contiguous.slot_rank[contiguous.logical_to_physical]
    assert owner[[0, 12, 13, 415, 416, 427, 428, 895]].tolist() == [0, 0, 1, 31, 32, 32, 33, 71]
    round_robin = build_placement("round_robin", 896, 72)
    owner = round_robin.slot_rank[round_robin.logical_to_physical]
    assert owner.tolist() == [expert % 72 for expert in range(896)]


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize(("num_experts", "world_size"), [(7, 3), (896, 72), (3, 5), (1, 1)])
def test_slots_and_experts_are_inverse_and_rank_major(name, num_experts, world_size):
    placement = build_placement(name, num_experts, world_size)
    slots = placement.logical_to_physical
    assert placement.physical_to_logical[slots].tolist() == list(range(num_experts))
    assert (np.diff(placement.slot_rank) >= 0).all()
    local = [placement.local_experts(rank).tolist() for rank in range(world_size)]
    assert sorted(sum(local, [])) == list(range(num_experts))
    for rank, experts in enumerate(local):
        assert (placement.slot_rank[slots[experts]] == rank).all()


def test_a_missing_expert_is_refused():
    with pytest.raises(ValueError, match="must hold every expert 0..2"):
        ExpertPlacement("broken", 3, np.array([0, 1, 1]), np.array([0, 3]))


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="num_experts=0"):
        build_placement("contiguous", 0, 2)


REPLICATED = placement_from_slots("by hand", 4, [0, 1, 2, 0, 2, 3], [0, 3, 6])


def test_the_worked_example_with_replicas():
    """The second picture at the top of comm/placement.py."""
    assert REPLICATED.num_slots == 6
    assert REPLICATED.num_redundant_experts == 2
    assert REPLICATED.replica_count.tolist() == [2, 1, 2, 1]
    assert REPLICATED.replicas.tolist() == [[0, 3], [1, -1], [2, 4], [5, -1]]
    assert REPLICATED.logical_to_physical.tolist() == [0, 1, 2, 5]
    assert REPLICATED.slot_on_rank.tolist() == [[0, 1, 2, -1], [3, -1, 4, 5]]
    assert REPLICATED.slot_rank.tolist() == [0, 0, 0, 1, 1, 1]
    assert REPLICATED.local_experts(1).tolist() == [0, 2, 3]


def test_replicas_are_ascending_whatever_the_order_on_a_rank():
    placement = placement_from_slots("any order", 3, [2, 0, 1, 2, 2, 0], [0, 2, 4, 6])
    assert placement.replicas.tolist() == [[1, 5, -1], [2, -1, -1], [0, 3, 4]]
    assert placement.logical_to_physical.tolist() == [1, 2, 0]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_without_redundant_experts_each_has_one_replica(name):
    placement = build_placement(name, 30, 8)
    assert placement.num_redundant_experts == 0
    assert placement.replicas.tolist() == placement.logical_to_physical[:, None].tolist()


def test_a_layer_whose_ranks_hold_8_or_9():
    """Field case 14: redundancy differs by layer, and even by rank; both load."""
    for slots_of_rank in ([8] * 32, [9] * 32, [9] * 10 + [8] * 22):
        starts = np.cumsum([0, *slots_of_rank])
        experts = [
            (8 * rank + place) % 256
            for rank, slots in enumerate(slots_of_rank)
            for place in range(slots)
        ]
        placement = placement_from_slots("file", 256, np.array(experts, dtype=np.int32), starts)
        assert placement.slots_per_rank.tolist() == slots_of_rank
        assert placement.physical_to_logical.dtype == np.int64
        assert placement.num_redundant_experts == sum(slots_of_rank) - 256


def test_a_rank_may_own_nothing():
    placement = placement_from_slots("empty", 2, [0, 1, 0], [0, 0, 2, 2, 3])
    assert placement.slots_per_rank.tolist() == [0, 2, 0, 1]
    assert placement.replicas.tolist() == [[0, 2], [1, -1]]


def test_the_given_arrays_are_copied():
    slots = np.array([0, 1])
    placement = placement_from_slots("copied", 2, slots, [0, 1, 2])
    slots[:] = 7
    assert placement.local_experts(1).tolist() == [1]


@pytest.mark.parametrize(
    ("experts", "first_slot", "message"),
    [
        ([0, 1, 2, 1], [0, 2, 4], r"placement file: .*0\.\.3 .*without a slot: 3; unknown: none"),
        ([0, 1, 2, 7], [0, 2, 4], r"without a slot: 3; unknown: 7"),
        ([0, 1, 2, -1], [0, 2, 4], r"without a slot: 3; unknown: -1"),
        ([0, 1, 2, 3, 2], [0, 2, 5], r"placement file: rank 1 holds expert 2 more than once"),
        ([0, 1, 2, 3], [0, 2, 5], r"first_slot must rise from 0 .* \(4\); it is 0, 2, 5"),
        ([0, 1, 2, 3], [1, 2, 4], r"it is 1, 2, 4"),
        ([0, 1, 2, 3], [0, 3, 2, 4], r"it is 0, 3, 2, 4"),
        ([0, 1, 2, 3], [0], r"first_slot must rise"),
        ([0.0, 1, 2, 3], [0, 2, 4], r"physical_to_logical must be .*whole.* float64 \[4\]"),
        ([[0, 1, 2, 3]], [0, 2, 4], r"physical_to_logical must be a list"),
        ([0, 1, 2, 3], [0, 2.5, 4], r"first_slot must be .*whole"),
    ],
)
def test_what_is_no_placement_is_refused_by_name(experts, first_slot, message):
    with pytest.raises(ValueError, match=message):
        placement_from_slots("file", 4, experts, first_slot)
