"""Which rank must own which expert, from the definition of a placement alone.

Written without `comm.placement`, so that a placement which puts an expert elsewhere than it should
shows as traffic in the wrong cells.

    round_robin   expert e on rank e % R: dealt out like cards
    contiguous    as many experts on each rank as round_robin deals it, neighbours together
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def expert_owner(placement: str, num_experts: int, world_size: int) -> NDArray[np.int64]:
    """Rank of each logical expert, int64 [E]."""
    expert = np.arange(num_experts, dtype=np.int64)
    if placement == "round_robin":
        return expert % world_size
    if placement == "contiguous":
        return np.sort(expert % world_size)
    raise ValueError(f"placement={placement}: no law known; choose contiguous, round_robin")
