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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

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
    of: positions [n] -> rows [scope, n, G + N blocks] of the tokens that these sources hold
    num_ranks: G
    """

    kind: str
    of: Callable[[NDArray[np.int64]], NDArray[np.int16]]
    num_ranks: int

    @cached_property
    def rows(self) -> NDArray[np.int16]:
        """[scope, G, G + N] of all sources: large where there are many ranks."""
        return self.of(np.arange(self.num_ranks))


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

    def straight(sources: NDArray[np.int64]) -> NDArray[np.int16]:
        tiers = _none(lane, sources)
        for shift in range(shifts):
            shard = lane.ranks % run.expert_tp
            there = lane.ranks - shard + (shard + shift) % run.expert_tp
            tier = _tier(paths, lane.ranks[sources, None], there[None])
            _add(tiers, tier, slice(0, len(there)))
        return _scopes(tiers)

    of = partial(_two_hops, paths, lane) if run.dispatcher in TWO_HOPS else straight
    return Pattern(dispatch_kind(run), of, len(lane.ranks))


def dispatch_kind(run: RunShape) -> str:
    """What brings a row: see `Pattern`."""
    if run.dispatcher in ("allgather", "hierarchical_allgather"):
        return "every"
    return "hits" if whole_tokens(run.dispatcher, run.deduplicate) else "copies"


def gathered(run: RunShape, paths: Paths, lane: Lane) -> Pattern:
    """Rows between the ranks that share an expert: each of its copies goes to all but one."""

    def of(sources: NDArray[np.int64]) -> NDArray[np.int16]:
        tiers = _none(lane, sources)
        mates = shard_mates(run)[lane.ranks]  # [G, R]
        for tier in LinkTier:
            of_tier = _tier(paths, lane.ranks[:, None], np.arange(run.world_size)[None]) == tier
            tiers[tier, :, : len(lane.ranks)] = (mates & of_tier).sum(axis=1)  # of any source
        return _scopes(tiers)

    return Pattern("copies", of, len(lane.ranks))


def sources_alike(
    paths: Paths, lane: Lane, sizes: NDArray[np.int64], hops: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(a source of each kind [C], the kind of every source [G]) where ranks differ in size alone.

    sizes: [G] experts of each rank. Sources are alike that own as many experts, on nodes whose
    ranks do, and whose proxies in the nodes of a kind do.
    """
    names: dict[tuple[int, ...], int] = {}
    node_kind = np.array(
        [
            names.setdefault(tuple(sorted(sizes[lane.node_of == node].tolist())), len(names))
            for node in range(len(lane.nodes))
        ]
    )
    seen = np.stack([node_kind[lane.node_of], sizes], axis=1)
    if hops:
        at_rank = np.zeros(paths.world_size, np.int64)
        at_rank[lane.ranks] = sizes
        proxies = at_rank[paths.proxy[lane.ranks][:, lane.nodes]]  # [G, N]
        both = node_kind * (int(sizes.max(initial=0)) + 1) + proxies
        seen = np.concatenate([seen, np.sort(both, axis=1)], axis=1)
    kinds: dict[bytes, int] = {}
    of = np.array([kinds.setdefault(row.tobytes(), len(kinds)) for row in seen], np.int64)
    return np.unique(of, return_index=True)[1], of


def _two_hops(paths: Paths, lane: Lane, sources: NDArray[np.int64]) -> NDArray[np.int16]:
    tiers, ranks = _none(lane, sources), lane.ranks[sources, None]
    proxy = paths.proxy[lane.ranks[sources]][:, lane.nodes]  # [n, N]
    _add(tiers, _tier(paths, ranks, proxy), slice(len(lane.ranks), None))
    last = proxy[:, lane.node_of]  # [n, G] who sends to a rank in the end
    _add(tiers, _tier(paths, last, lane.ranks[None]), slice(0, len(lane.ranks)))
    return _scopes(tiers)


def _none(lane: Lane, sources: NDArray[np.int64]) -> NDArray[np.int16]:
    """No rows: [tier, n, G + N]."""
    return np.zeros((len(LinkTier), len(sources), len(lane.ranks) + len(lane.nodes)), np.int16)


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


def sums_by_receiver(
    paths: Paths, part: NDArray[np.int64], sent: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[scope, dst] what a rank gets where each sends to all of its own part.

    part: [R] number of each rank's part, less than R; sent: [R] to each of them, oneself included
    """

    def total(of: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.zeros(int(of.max()) + 1, np.int64)
        np.add.at(sums, of, sent)
        return sums[of]

    near = total(part * paths.num_nodes + paths.node)
    by_tier = {
        LinkTier.SELF: sent,
        LinkTier.SCALE_UP: near - sent,
        LinkTier.SCALE_OUT: total(part) - near,
    }
    return np.stack([sum(by_tier[tier] for tier in scope) for scope in SCOPES.values()])
