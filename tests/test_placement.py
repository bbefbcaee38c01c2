"""Who owns which expert, remainders first."""

import numpy as np
import pytest

from comm.placement import PLACEMENTS, ExpertPlacement, build_placement


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
