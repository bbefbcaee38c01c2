"""The predicted owners and the placements that rows really follow agree, and were written apart."""

import numpy as np
import pytest

from comm.analytic.owners import expert_owner, one_slot_each
from comm.placement import PLACEMENTS, build_placement


def test_by_hand():
    assert expert_owner("contiguous", 7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert expert_owner("round_robin", 7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("num_experts", "num_positions", "sizes"),
    [
        (896, 72, [13] * 32 + [12] * 40),  # the remainder is spread, not left to the last rank
        (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]),
        (128, 6, [22, 22, 21, 21, 21, 21]),
        (3, 5, [1, 1, 1, 0, 0]),
    ],
)
def test_sizes(num_experts, num_positions, sizes):
    for name in PLACEMENTS:
        owner = expert_owner(name, num_experts, num_positions)
        assert np.bincount(owner, minlength=num_positions).tolist() == sizes


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("world_size", [1, 2, 7, 8, 12, 30, 31, 72, 224])
@pytest.mark.parametrize("num_experts", [7, 30, 64, 256, 896])
def test_agrees_with_the_placement(name, num_experts, world_size):
    placement = build_placement(name, num_experts, world_size)
    owner = placement.slot_rank[placement.logical_to_physical]
    predicted = expert_owner(name, num_experts, world_size)
    assert predicted.tolist() == owner.tolist()
    experts, ranks = one_slot_each(predicted)
    assert experts.tolist() == placement.physical_to_logical.tolist()
    assert ranks.tolist() == placement.slot_rank.tolist()


def test_slots_are_numbered_position_by_position():
    experts, ranks = one_slot_each(np.array([1, 0, 1, 0]))
    assert (experts.tolist(), ranks.tolist()) == ([1, 3, 0, 2], [0, 0, 1, 1])


def test_an_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="choose contiguous, round_robin"):
        expert_owner("random", 8, 2)
