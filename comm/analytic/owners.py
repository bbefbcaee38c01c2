"""Which rank must own which expert, from the definition of a placement alone.

Written without `comm.placement`, so that a placement which puts an expert elsewhere than it should
shows as traffic in the wrong cells.

    round_robin   expert e on rank e % G: dealt out like cards
    contiguous    as many experts on each rank as round_robin deals it, neighbours together

The G "ranks" are the positions of a lane: the ranks of an expert-parallel group, or its groups of
ranks that share their experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def expert_owner(placement: str, num_experts: int, num_positions: int) -> NDArray[np.int64]:
    """Lane position of each logical expert, int64 [E]."""
    expert = np.arange(num_experts, dtype=np.int64)
    if placement == "round_robin":
        return expert % num_positions
    if placement == "contiguous":
        return np.sort(expert % num_positions)
    raise ValueError(f"placement={placement}: no law known; choose contiguous, round_robin")


def one_slot_each(owner: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(physical_to_logical [E], slot_rank [E]) of a placement without replicas.

    owner: [E] lane position of each expert; slots are numbered position by position, the experts
    of one in ascending order
    """
    experts = np.argsort(owner, kind="stable")
    return experts, np.asarray(owner, np.int64)[experts]
