"""What a placement of replicas or of balanced experts did for the load, beside the contiguous one.

Both are judged on the same choices, those of the measured steps. *By rank*: choices served by each
position of a lane. *By expert*: choices served by each slot, which before were each expert's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from comm.analytic.owners import expert_owner
from comm.analytic.run import RunShape
from moe.routings import Routing


def placement_report(run: RunShape, routing: Routing) -> dict[str, Any]:
    """Largest over mean load of the worst layer, before and after, and what the change cost.

    moved_bytes: weights sent between ranks, all layers and lanes
    """
    positions = len(run.lanes[0])
    owner = expert_owner("contiguous", run.num_experts, positions)
    before, after = [], []
    slots = routing.all_slots
    for layer, slot_rank in enumerate(run.slot_rank):
        ids, served = routing.topk_ids[:, layer], slots[:, layer]
        expert_load = np.bincount(ids[ids >= 0], minlength=run.num_experts)
        slot_load = np.bincount(served[served >= 0], minlength=len(slot_rank))
        before.append((np.bincount(owner, expert_load, positions), expert_load))
        after.append((np.bincount(slot_rank, slot_load, positions), slot_load))
    return {
        "num_redundant_experts": [len(slots) - run.num_experts for slots in run.slot_rank],
        "contiguous": _worst(before),
        "placed": _worst(after),
        "moved_experts": len(run.moves),
        "moved_bytes": len(run.moves) * run.expert_bytes // run.expert_tp,
    }


def _worst(loads: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float | None]:
    """max / mean by rank and by expert, of the layer where it is worst."""

    def ratio(load: np.ndarray) -> float:
        return float(load.max() / load.mean()) if load.sum() else 0.0

    ranks, experts = zip(*loads, strict=True)
    return {
        "by_rank_max_over_mean": max(map(ratio, ranks)) or None,
        "by_expert_max_over_mean": max(map(ratio, experts)) or None,
    }
