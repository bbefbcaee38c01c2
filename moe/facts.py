"""What the predictions are told of a run: plain values worked out again from the configuration.

Who owns which expert comes from `comm.analytic.owners` wherever a placement has a law, never from
the placement that the ranks used, so that an expert in the wrong place shows as wrong cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from comm.analytic.owners import expert_owner, one_slot_each
from comm.analytic.run import RunShape
from comm.placement import ExpertPlacement
from moe.plan import Plan

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of one value of the computation
LAWFUL = ("contiguous", "round_robin")


def run_shape(plan: Plan, placements: Sequence[ExpertPlacement]) -> RunShape:
    """The run as its predictions see it.

    placements: of the measured steps; read only where experts lie as a file or their load said
    """
    config, shape = plan.config, plan.shape
    slots = [_slots(plan, placement) for placement in placements]
    values = 3 * shape.payload_width * shape.intermediate_size
    run = RunShape(
        dispatcher=config.dispatcher.name,
        tokens_per_rank=tuple(plan.tokens_per_rank.tolist()),
        node_of_rank=plan.topology.node_of_rank,
        physical_to_logical=tuple(logical for logical, _ in slots),
        slot_rank=tuple(rank for _, rank in slots),
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        width=shape.payload_width,
        num_steps=config.steps,
        wire_dispatch=config.wire.dispatch,
        wire_combine=config.wire.combine,
        wire_backward=config.wire.backward,
        training=plan.training,
        chunks=config.chunks,
        ep_size=config.group_size,
        expert_tp=config.expert_tp,
        expert_tp_mode=config.expert_tp_mode,
        replica_choice=config.placement.replica_choice,
        deduplicate=config.dispatcher.deduplicate,
        capacity_factor=config.dispatcher.capacity_factor,
        expert_values=values,
        expert_unit=3 * shape.payload_width,
        expert_bytes=values * ITEM_BYTES[config.dtype],
        shared_values=_shared_values(plan),
        rebalances=plan.rebalances,
        moves=_moves(plan, slots),
    )
    assert run.phases == plan.phases and run.directions == plan.directions
    return run


def _slots(plan: Plan, placement: ExpertPlacement) -> tuple[np.ndarray, np.ndarray]:
    """Logical expert and position of each slot, int64 [S] each."""
    name = plan.config.placement.name
    if name not in LAWFUL:
        return placement.physical_to_logical, placement.slot_rank
    owner = expert_owner(name, plan.shape.num_experts, plan.config.num_positions)
    return one_slot_each(owner)


def _shared_values(plan: Plan) -> int:
    """Parameters of one layer that every rank holds: router, latent projections, shared experts."""
    shape = plan.shape
    hidden, latent = shape.hidden_size, shape.latent_size
    values = shape.num_experts * hidden + 3 * hidden * shape.shared_intermediate_size
    return values + (2 * hidden * latent + latent if latent else 0)  # down, up, gains of the norm


def _moves(plan: Plan, slots: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Experts that a rebalance moves, [n, 4] (layer, expert, source rank, destination rank): from
    their only owner under the contiguous placement to each position that did not have them."""
    if not plan.rebalances:
        return np.zeros((0, 4), np.int64)
    owner = expert_owner("contiguous", plan.shape.num_experts, plan.config.num_positions)
    moves = [
        (layer, expert, lane[owner[expert]], lane[position])
        for layer, (logical, positions) in enumerate(slots)
        for expert, position in zip(logical.tolist(), positions.tolist(), strict=True)
        if owner[expert] != position
        for lane in plan.lanes
    ]
    return np.array(moves, dtype=np.int64).reshape(-1, 4)
