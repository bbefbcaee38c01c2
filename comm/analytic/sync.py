"""Traffic that no token causes: experts moved by a rebalance, gradients summed after a step.

    rebalance   an expert's weights, from a rank that held it to each that newly holds it
    grad_sync   what all ranks hold (router, latent projections, shared experts): every rank sums
                one part of it and hands the sum round
                an expert that several ranks hold: each sends its gradient to each other

Legend: R ranks, L layers, E experts. src and dst are global ranks; gradients are fp32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comm.analytic.paths import Paths
from comm.analytic.run import RunShape

GRADIENT_BYTES = 4  # fp32


def moved_experts(run: RunShape) -> NDArray[np.int64]:
    """[L, src, dst] experts moved, once in the whole run; each weighs `expert_bytes / expert_tp`.

    With expert_tp every shard rank moves its own part, and stands in `run.moves` for itself.
    """
    moved = np.zeros((run.num_layers, run.world_size, run.world_size), np.int64)
    moves = np.asarray(run.moves, np.int64).reshape(-1, 4)
    for name, column, end in (
        ("layer", 0, run.num_layers),
        ("expert", 1, run.num_experts),
        ("source rank", 2, run.world_size),
        ("destination rank", 3, run.world_size),
    ):
        values = moves[:, column]
        if values.size and not 0 <= values.min() <= values.max() < end:
            raise ValueError(
                f"moves holds {name} {values.min()}..{values.max()}, valid are 0..{end - 1}"
            )
    np.add.at(moved, (moves[:, 0], moves[:, 2], moves[:, 3]), 1)
    return moved


def shared_gradients(run: RunShape) -> NDArray[np.int64]:
    """[src, dst] bytes of one layer and step for the parameters that every rank holds.

    Rank j sums part j of R nearly equal ones: it is sent that part by each, and sends it to each.
    """
    size = run.world_size
    part = np.full(size, run.shared_values // size, np.int64)
    part[: run.shared_values % size] += 1
    return GRADIENT_BYTES * (part[None, :] + part[:, None])


def expert_gradients(run: RunShape, paths: Paths, layer: int) -> NDArray[np.int64]:
    """[src, dst] bytes of one step for the experts that several ranks hold."""
    held = np.zeros((run.world_size, run.num_experts), np.int64)
    experts = np.asarray(run.physical_to_logical[layer], np.int64)
    used = experts >= 0
    positions = np.asarray(run.slot_rank[layer], np.int64)[used]
    for ranks in paths.rank_at:
        held[ranks[positions], experts[used]] = 1  # two slots on one rank are one holder
    shard = np.arange(run.world_size) % run.expert_tp
    together = np.where(shard[:, None] == shard, held @ held.T, 0)  # experts in common
    np.fill_diagonal(together, 0)
    return together * (GRADIENT_BYTES * _shard_values(run)[shard][:, None])


def _shard_values(run: RunShape) -> NDArray[np.int64]:
    """[shard] parameters of an expert: nearly equal numbers of whole units, the first ones more."""
    units, left = divmod(run.expert_values // run.expert_unit, run.expert_tp)
    return run.expert_unit * (units + (np.arange(run.expert_tp) < left))
