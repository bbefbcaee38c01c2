"""The predicted owners and the placements that rows really follow agree, and were written apart."""

import numpy as np
import pytest

from comm.analytic.owners import expert_owner
from comm.placement import PLACEMENTS, build_placement


def test_by_hand():
    assert expert_owner("contiguous", 7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert expert_owner("round_robin", 7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]
    sizes = np.bincount(expert_owner("contiguous", 896, 72))
    assert sizes.tolist() == [13] * 32 + [12] * 40


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("world_size", [1, 2, 7, 8, 12, 30, 31, 72, 224])
@pytest.mark.parametrize("num_experts", [7, 30, 64, 256, 896])
def test_agrees_with_the_placement(name, num_experts, world_size):
    placement = build_placement(name, num_experts, world_size)
    owner = placement.slot_rank[placement.logical_to_physical]
    assert expert_owner(name, num_experts, world_size).tolist() == owner.tolist()


def test_an_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="choose contiguous, round_robin"):
        expert_owner("random", 8, 2)
