"""Moves experts when their placement changes, and says beforehand what moves.

    before      rank 0: 0 1     rank 1: 2 3
    after       rank 0: 0 2     rank 1: 1 2 3

    moves       expert 2 from rank 1 to rank 0, expert 1 from rank 0 to rank 1

An expert comes from the rank of its first replica in the old placement. A rank that held it before
keeps its copy, wherever its slot has gone. Both sides know both placements, so nothing is announced
and the splits cannot disagree.

Legend: E logical experts, R ranks of the transport's group, B bytes of one expert's weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from comm.meter import Position
from comm.placement import ExpertPlacement
from comm.transport import Transport


def moves(before: ExpertPlacement, after: ExpertPlacement) -> np.ndarray:
    """Each transfer that turns one placement into the other.

    returns: int64 [n, 3] (expert, source rank, destination rank), in order of the new slots, hence
        by destination; a source and its destination always differ
    Raises ValueError for placements of different experts or ranks.
    """
    sizes = [(placement.num_experts, placement.world_size) for placement in (before, after)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"placement {before.name} has {sizes[0][0]} experts on {sizes[0][1]} ranks,"
            f" {after.name} {sizes[1][0]} on {sizes[1][1]}; experts cannot move between them"
        )
    expert, rank = after.physical_to_logical, after.slot_rank
    source = before.slot_rank[before.logical_to_physical[expert]]
    new = before.slot_on_rank[rank, expert] < 0
    return np.stack([expert, source, rank], axis=1)[new]


def move_experts(
    transport: Transport,
    layer: int,
    before: ExpertPlacement,
    after: ExpertPlacement,
    weights: Tensor,
) -> Tensor:
    """Bring this rank's experts from the old placement to the new one.

    weights: uint8 [slots of this rank before, B], one row an expert; B is the same on every rank
    returns: uint8 [slots of this rank after, B], memory of its own
    Every rank of the group must call it, those without experts too. Raises ValueError for weights
    that do not fit `before`.
    """
    rank, size = transport.group.rank, transport.group.size
    wanted = int(before.slots_per_rank[rank])
    if weights.dtype != torch.uint8 or weights.dim() != 2 or len(weights) != wanted:
        raise ValueError(
            f"weights of rank {rank} are {weights.dtype} {tuple(weights.shape)}, must be"
            f" torch.uint8 ({wanted}, bytes of an expert)"
        )
    expert, source, destination = moves(before, after).T
    sent, arriving = source == rank, destination == rank
    if not len(expert):
        return _arranged(before, after, rank, weights, weights[:0], expert)
    message = weights[_rows(before, rank, expert[sent], weights)]
    received = transport.all_to_all(
        Position(layer, "rebalance"),
        message,
        [("expert_weights", message)],
        np.bincount(destination[sent], minlength=size).tolist(),
        np.bincount(source[arriving], minlength=size).tolist(),
    )
    # Rows arrive by source, and from each source in the order of the new slots.
    by_source = np.argsort(source[arriving], kind="stable")
    return _arranged(before, after, rank, weights, received, expert[arriving][by_source])


def _arranged(
    before: ExpertPlacement,
    after: ExpertPlacement,
    rank: int,
    weights: Tensor,
    received: Tensor,
    received_experts: np.ndarray,
) -> Tensor:
    """What stays here and what has come, in the order of the new slots."""
    result = weights.new_empty((int(after.slots_per_rank[rank]), weights.shape[1]))
    local = after.local_experts(rank)
    stays = local[before.slot_on_rank[rank, local] >= 0]
    kept = weights[_rows(before, rank, stays, weights)]
    result[_rows(after, rank, stays, weights)] = kept
    result[_rows(after, rank, received_experts, weights)] = received
    return result


def _rows(placement: ExpertPlacement, rank: int, experts: np.ndarray, weights: Tensor) -> Tensor:
    """Place of each expert among the rank's own slots: int64, on the device of the weights."""
    rows = placement.slot_on_rank[rank, experts] - placement.first_slot[rank]
    return torch.from_numpy(rows).to(weights.device)
