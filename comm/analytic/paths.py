"""Who may send to whom: lanes, nodes and the proxies of a first hop, from a run's plain values.

The worked example, also a test: ranks 0 2 4 on node A, 1 3 on node B, one lane. Rank 4 is the third
of its node, node B has two ranks, so its proxy there is 2 % 2 = the first of them, rank 1. On its
own node every rank is its own proxy.

Legend: R ranks, G positions of a lane, N nodes, numbered 0..N-1 in the order of their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from comm.analytic.rows import check_dispatcher
from comm.analytic.run import RunShape

Number = TypeVar("Number", np.int64, np.float64)

EXPERT_TP_MODES = ("gather", "all")
TWO_HOPS = ("two_hop", "hierarchical_allgather")


@dataclass(frozen=True)
class Paths:
    """lane, position, node: [R] of each rank
    rank_at: [lanes, G] global rank at each position of each lane
    proxy: [R, N] rank that takes a token of the row's rank into a node; -1 where the lane has none
    """

    lane: NDArray[np.int64]
    position: NDArray[np.int64]
    node: NDArray[np.int64]
    rank_at: NDArray[np.int64]
    proxy: NDArray[np.int64]

    @classmethod
    def of(cls, run: RunShape) -> Paths:
        """The paths of a run. Raises ValueError for a run that contradicts itself."""
        check_run(run)
        return cls.from_lanes(run.node_of_rank, run.lanes)

    @classmethod
    def from_lanes(cls, node_of_rank: Sequence[int], lanes: Sequence[Sequence[int]]) -> Paths:
        """node_of_rank: [R] any numbering; lanes: equally many ranks each, every rank in one."""
        node = np.unique(np.asarray(node_of_rank), return_inverse=True)[1].astype(np.int64).ravel()
        rank_at = np.array(lanes, np.int64)
        lane, position = np.empty_like(node), np.empty_like(node)
        lane[rank_at] = np.arange(len(rank_at))[:, None]
        position[rank_at] = np.arange(rank_at.shape[1])
        proxy = np.full((len(node), int(node.max()) + 1), -1, np.int64)
        for ranks in np.sort(rank_at, axis=1):
            nodes, node_index, sizes = np.unique(
                node[ranks], return_inverse=True, return_counts=True
            )
            by_node = np.argsort(node_index.ravel(), kind="stable")
            first = np.cumsum(sizes) - sizes
            local = np.empty(len(ranks), np.int64)  # place among the lane's ranks of its node
            local[by_node] = np.arange(len(ranks)) - np.repeat(first, sizes)
            mate = first + local[:, None] % sizes
            proxy[ranks[:, None], nodes] = ranks[by_node][mate]
        proxy[np.arange(len(node)), node] = np.arange(len(node))
        return cls(lane, position, node, rank_at, proxy)

    @property
    def world_size(self) -> int:
        return len(self.lane)

    @property
    def num_nodes(self) -> int:
        return int(self.proxy.shape[1])

    @property
    def same_lane(self) -> NDArray[np.bool_]:
        """[R, R] whether two ranks are in one lane; every rank is in its own."""
        same: NDArray[np.bool_] = self.lane[:, None] == self.lane
        return same

    @property
    def same_node(self) -> NDArray[np.bool_]:
        """[R, R] whether two ranks are on one node."""
        same: NDArray[np.bool_] = self.node[:, None] == self.node
        return same

    def hops(self, node_hits: NDArray[Number], pairs: NDArray[Number]) -> NDArray[Number]:
        """Rows [src, dst] of both hops: to the proxy of a node, from there to the ranks.

        node_hits: [R, N] of each source; pairs: [R, R] (token, rank) pairs of each source
        """
        rows = np.zeros_like(pairs)
        for source in range(self.world_size):
            there = self.proxy[source] >= 0
            np.add.at(rows[source], self.proxy[source, there], node_hits[source, there])
            last = self.proxy[source, self.node]  # [dst] who sends to it
            reached = np.flatnonzero(last >= 0)
            rows[last[reached], reached] += pairs[source, reached]
        return rows


def answered_pairs(run: RunShape) -> NDArray[np.bool_]:
    """[src, dst] pairs whose dispatched rows are answered: those inside a lane.

    With expert_tp_mode=all the other shards get rows too, and hand their part to `tp_reduce`.
    """
    return Paths.of(run).same_lane


def shard_mates(run: RunShape) -> NDArray[np.bool_]:
    """[src, dst] ranks that share their experts with each other, oneself not included."""
    group = np.arange(run.world_size) // run.expert_tp
    mates: NDArray[np.bool_] = group[:, None] == group
    np.fill_diagonal(mates, False)
    return mates


def shifted(run: RunShape, cells: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
    """[src, dst] cells of the own lane, sent `shift` shards further instead."""
    rank = np.arange(run.world_size)
    shard = rank % run.expert_tp
    moved = np.empty_like(cells)
    moved[:, rank - shard + (shard + shift) % run.expert_tp] = cells
    return moved


def slots_on_rank(run: RunShape, paths: Paths, layer: int) -> NDArray[np.int64]:
    """[R] physical experts of each rank in one layer."""
    held = np.bincount(run.slot_rank[layer], minlength=paths.rank_at.shape[1]).astype(np.int64)
    return held[paths.position]


def check_run(run: RunShape) -> None:
    """Raises ValueError, with the name, the value and the rule, where a run contradicts itself."""
    check_dispatcher(run.dispatcher)
    size = run.world_size
    if run.group_size < 1 or size % run.group_size:
        raise ValueError(f"ep_size={run.ep_size} must divide the {size} ranks")
    if run.expert_tp < 1 or run.group_size % run.expert_tp:
        raise ValueError(f"expert_tp={run.expert_tp} must divide ep_size={run.group_size}")
    if run.expert_tp_mode not in EXPERT_TP_MODES:
        raise ValueError(
            f"expert_tp_mode={run.expert_tp_mode!r} is not a mode; choose one of {EXPERT_TP_MODES}"
        )
    if run.shifts > 1 and run.dispatcher in TWO_HOPS:
        # The first hop stays on the own node for free only where the own lane is addressed.
        raise ValueError(
            f"expert_tp_mode=all has no law for dispatcher={run.dispatcher}: a source is no member"
            " of the other lanes and has no proxies there"
        )
    if run.chunks < 1:
        raise ValueError(f"chunks={run.chunks} must be at least 1")
    if len(run.node_of_rank) != size:
        raise ValueError(f"node_of_rank names {len(run.node_of_rank)} ranks, there are {size}")
    if len(run.physical_to_logical) != run.num_layers:
        raise ValueError(
            f"physical_to_logical describes {len(run.physical_to_logical)} layers, slot_rank"
            f" {run.num_layers}"
        )
    for layer, (experts, ranks) in enumerate(
        zip(run.physical_to_logical, run.slot_rank, strict=True)
    ):
        _check_layer(run, layer, np.asarray(experts), np.asarray(ranks))


def _check_layer(
    run: RunShape, layer: int, experts: NDArray[np.integer], ranks: NDArray[np.integer]
) -> None:
    num_positions = run.group_size // run.expert_tp
    if experts.shape != ranks.shape:
        raise ValueError(
            f"layer {layer}: physical_to_logical has shape {experts.shape}, slot_rank {ranks.shape}"
        )
    for name, values, lowest, end in (
        ("physical_to_logical", experts, -1, run.num_experts),
        ("slot_rank", ranks, 0, num_positions),
    ):
        if values.size and not lowest <= values.min() <= values.max() < end:
            raise ValueError(
                f"layer {layer}: {name} holds {values.min()}..{values.max()}, valid are"
                f" {lowest}..{end - 1}"
            )
