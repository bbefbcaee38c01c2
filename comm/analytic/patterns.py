"""Rows that one hit, or one copy, brings in each scope: the geometry of a strategy, without chance.

A token of a source rank makes  sum_b rows[scope, source, b] x (is block b hit, or: copies to b)
rows. Blocks are the G positions of the source's lane and, after them, the N nodes of the lane,
which only a second hop needs. A scope that joins two tiers is the sum of their rows: one law with
one variance.

    strategy                        counted   rows
    all_to_all, one_sided           copies    1 for the rank, in the tier of (source, rank)
    rank_dedup, one_sided dedup     hits      the same
    two_hop                         hits      1 for the node, in the tier of (source, proxy), and
                                              1 for the rank, in the tier of (proxy, rank)
    allgather, hierarchical         every     as rank_dedup, two_hop: all blocks count as hit
    rows inside sharded experts     copies    one for each other rank that holds a shard

Legend: G lane positions, N nodes of the lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from comm.analytic.paths import TWO_HOPS, Paths, shard_mates
from comm.analytic.rows import whole_tokens
from comm.analytic.run import RunShape
from comm.topology import LinkTier

SCOPES = {
    "self": (LinkTier.SELF,),
    "scale_up": (LinkTier.SCALE_UP,),
    "scale_out": (LinkTier.SCALE_OUT,),
    "remote": (LinkTier.SCALE_UP, LinkTier.SCALE_OUT),
}


@dataclass(frozen=True)
class Pattern:
    """Rows of the tokens of one lane.

    kind: "copies", "hits" or "every" (a row whatever is chosen, for each token that chose at all)
    rows: [scope, G sources, G + N blocks]
    """

    kind: str
    rows: NDArray[np.int16]


@dataclass(frozen=True)
class Lane:
    """The ranks [G] of a lane and its nodes, numbered 0 ... N - 1 among themselves: [G]."""

    ranks: NDArray[np.int64]
    node_of: NDArray[np.int64]
    nodes: NDArray[np.int64]  # [N] as `Paths` numbers them

    @classmethod
    def of(cls, paths: Paths, index: int) -> Lane:
        """The lane with that number."""
        ranks = paths.rank_at[index]
        nodes, node_of = np.unique(paths.node[ranks], return_inverse=True)
        return cls(ranks, node_of.ravel().astype(np.int64), nodes)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """[G + N, G] 1 where a position belongs to a block."""
        nodes = self.node_of == np.arange(len(self.nodes))[:, None]
        return np.concatenate([np.eye(len(self.ranks), dtype=np.int64), nodes.astype(np.int64)])


def dispatched(run: RunShape, paths: Paths, lane: Lane, shifts: int) -> Pattern:
    """Rows of a dispatch to `shifts` lanes, the own one first; of a combine with one of them."""
    if run.dispatcher in TWO_HOPS:
        return Pattern(dispatch_kind(run), _scopes(_two_hops(paths, lane)))
    tiers = np.zeros((len(LinkTier), *_shape(lane)), np.int16)
    for shift in range(shifts):
        shard = lane.ranks % run.expert_tp
        there = lane.ranks - shard + (shard + shift) % run.expert_tp
        _add(tiers, _tier(paths, lane.ranks[:, None], there[None]), slice(0, len(there)))
    return Pattern(dispatch_kind(run), _scopes(tiers))


def dispatch_kind(run: RunShape) -> str:
    """What brings a row: see `Pattern`."""
    if run.dispatcher in ("allgather", "hierarchical_allgather"):
        return "every"
    return "hits" if whole_tokens(run.dispatcher, run.deduplicate) else "copies"


def gathered(run: RunShape, paths: Paths, lane: Lane) -> Pattern:
    """Rows between the ranks that share an expert: each of its copies goes to all but one."""
    tiers = np.zeros((len(LinkTier), *_shape(lane)), np.int16)
    mates = shard_mates(run)[lane.ranks]  # [G, R]
    for tier in LinkTier:
        of_tier = _tier(paths, lane.ranks[:, None], np.arange(run.world_size)[None]) == tier
        tiers[tier, :, : len(lane.ranks)] = (mates & of_tier).sum(axis=1)
    return Pattern("copies", _scopes(tiers))


def _two_hops(paths: Paths, lane: Lane) -> NDArray[np.int16]:
    tiers = np.zeros((len(LinkTier), *_shape(lane)), np.int16)
    proxy = paths.proxy[lane.ranks][:, lane.nodes]  # [G, N]
    _add(tiers, _tier(paths, lane.ranks[:, None], proxy), slice(len(lane.ranks), None))
    last = proxy[:, lane.node_of]  # [G, G] who sends to a rank in the end
    _add(tiers, _tier(paths, last, lane.ranks[None]), slice(0, len(lane.ranks)))
    return tiers


def _shape(lane: Lane) -> tuple[int, int]:
    return len(lane.ranks), len(lane.ranks) + len(lane.nodes)


def _tier(paths: Paths, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.int8]:
    """LinkTier of each pair of two arrays of ranks that broadcast; small numbers: many pairs."""
    node = paths.node.astype(np.int32)
    tier = np.full(np.broadcast_shapes(src.shape, dst.shape), LinkTier.SCALE_OUT, np.int8)
    tier[node[src] == node[dst]] = LinkTier.SCALE_UP
    tier[src.astype(np.int32) == dst.astype(np.int32)] = LinkTier.SELF
    return tier


def _add(tiers: NDArray[np.int16], tier: NDArray[np.int8], blocks: slice) -> None:
    for one in LinkTier:
        tiers[one, :, blocks] += tier == one


def _scopes(tiers: NDArray[np.int16]) -> NDArray[np.int16]:
    return np.stack([sum(tiers[tier] for tier in scope) for scope in SCOPES.values()])


def sums_by_receiver(paths: Paths, cells: NDArray[np.integer]) -> NDArray[np.int64]:
    """[scope, dst] sums over sources of cells [src, dst]."""
    ranks = np.arange(paths.world_size)
    tier = _tier(paths, ranks[:, None], ranks[None])
    by_tier = [(cells * (tier == one)).sum(axis=0, dtype=np.int64) for one in LinkTier]
    return np.stack([sum(by_tier[tier] for tier in scope) for scope in SCOPES.values()])
