"""Rows that each rank is expected to send and to receive, by tier: time is set by the busiest one.

A token of source s brings a block b (a rank, or with two hops a node) on average m_b rows. All
pairs of a lane at once are tokens [G] times m [G], so that sums by tier need only sums by node:

    sent inside the node   tokens_s (sum of m over the node - m_s)
    received               m_d (sum of tokens over the node - tokens_d)      and so on

Nothing here is as large as [R, R]. The sums over all ranks are those of `traffic`, which adds up
tokens instead; a test holds one against the other.

Legend: L layers, R ranks, G positions of a lane, N nodes of a lane, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from comm.analytic.choices import capacity
from comm.analytic.fanout import miss_probability
from comm.analytic.law import GroupLimited, Law, Markov
from comm.analytic.nested import GroupHits
from comm.analytic.paths import TWO_HOPS, Paths, shard_mates, slots_on_rank
from comm.analytic.patterns import Lane, dispatch_kind
from comm.analytic.populations import Served, Tokens
from comm.analytic.run import IntArray, RunShape
from comm.analytic.skew import inclusion
from comm.topology import LinkTier

Floats = NDArray[np.float64]
SELF, UP, OUT = LinkTier.SELF, LinkTier.SCALE_UP, LinkTier.SCALE_OUT


@dataclass
class RankRows:
    """Rows of one layer in one phase, all measured steps.

    sent, received: [tier, R]; variance: [tier, R] of the rows that a rank receives for its experts,
        or sends back for them, an upper bound where experts are weighted or shared and a choice is
        a row; nan where none is known
    """

    sent: Floats
    received: Floats
    variance: Floats

    @classmethod
    def none(cls, num_ranks: int) -> RankRows:
        return cls(*(np.zeros((len(LinkTier), num_ranks)) for _ in range(3)))

    @property
    def turned(self) -> RankRows:
        """The same rows on their way back."""
        return RankRows(self.received, self.sent, self.variance)


@dataclass(frozen=True)
class Shares:
    """Rows that one token is expected to bring each rank, and each node on a first hop.

    mean, variance: [G]; node_mean, node_variance: [N]
    """

    mean: Floats
    variance: Floats
    node_mean: Floats
    node_variance: Floats


def uniform_hits(
    sizes: NDArray[np.int64], node_of: NDArray[np.int64], num_experts: int, top_k: int
) -> Shares:
    """Hits of ranks [G] that own `sizes` experts each, and of their nodes: uniform routing."""
    held = np.bincount(node_of, sizes).astype(np.int64)
    values, of = np.unique(np.concatenate([sizes, held]), return_inverse=True)
    chance = [1 - float(miss_probability(num_experts, top_k, size)) for size in values.tolist()]
    hit = np.array(chance)[of.ravel()]
    return _shares_of_hits(hit, len(sizes))


def _shares_of_hits(hit: Floats, num_ranks: int) -> Shares:
    spread = hit * (1 - hit)
    return Shares(hit[:num_ranks], spread[:num_ranks], hit[num_ranks:], spread[num_ranks:])


def uniform_copies(sizes: NDArray[np.int64], num_experts: int, top_k: int) -> Shares:
    """Copies to ranks [G] that own `sizes` experts each: uniform routing."""
    share = sizes / num_experts
    spread = top_k * share * (1 - share) * (num_experts - top_k) / max(1, num_experts - 1)
    return Shares(top_k * share, spread, np.zeros(0), np.zeros(0))


def every(num_ranks: int, num_nodes: int) -> Shares:
    """A row for each rank and node, whatever was chosen."""
    ones, none = np.ones, np.zeros
    return Shares(ones(num_ranks), none(num_ranks), ones(num_nodes), none(num_nodes))


def rank_rows(run: RunShape, law: Law, active: IntArray) -> list[dict[str, RankRows]]:
    """For each layer: phase -> rows of every rank, forward; layers alike are the same object.

    law, active: as for `expected_traffic`, which must have found the run to have a law. Choices
    that a capacity drops are still counted in the phases of shards: their rows are an upper bound.
    """
    paths = Paths.of(run)
    tokens = Tokens(run, paths, law, active)
    found: dict[tuple[bytes, ...], dict[str, RankRows]] = {}
    layers = []
    for layer in range(run.num_layers):
        key = tokens.key(layer)
        if key not in found:
            found[key] = _layer(run, paths, tokens, layer)
        layers.append(found[key])
    return layers


def _layer(run: RunShape, paths: Paths, tokens: Tokens, layer: int) -> dict[str, RankRows]:
    dispatch, answered = (RankRows.none(run.world_size) for _ in range(2))
    copies = np.zeros(run.world_size)  # choices that each rank computes
    kind = dispatch_kind(run)
    for lane in tokens.lanes:
        for count, shares in _served(run, paths, tokens, layer, lane, kind):
            if run.dispatcher in TWO_HOPS:
                two_hops(dispatch, paths, lane, count, shares)
            for shift in range(run.shifts if run.dispatcher not in TWO_HOPS else 0):
                there = _shifted(run, lane.ranks, shift)
                straight(dispatch, paths, lane.ranks, there, count, shares)
                if not shift:
                    straight(answered, paths, lane.ranks, there, count, shares)
        if run.expert_tp > 1:
            for served, variant, count in tokens.alike(layer, lane):
                shares = _shares(run, tokens, layer, lane, served, variant, "copies")
                copies[lane.ranks] += count.sum() * shares.mean
    phases = {"dispatch": dispatch, "combine": (answered if run.shifts > 1 else dispatch).turned}
    if run.expert_tp > 1:
        gathered = _among_mates(run, paths, copies)
        phases |= {"tp_gather": gathered, "tp_reduce": gathered.turned}
    return {phase: rows for phase, rows in phases.items() if phase in run.phases}


def _served(
    run: RunShape, paths: Paths, tokens: Tokens, layer: int, lane: Lane, kind: str
) -> Iterator[tuple[Floats, Shares]]:
    """(tokens [G] of each source, what each of them brings) of a lane."""
    ranks, nodes = len(lane.ranks), len(lane.nodes)
    if run.dispatcher == "padded":  # a buffer for every slot, full or not
        room = run.num_steps * capacity(run).sum(axis=0)[lane.ranks]
        slots = slots_on_rank(run, paths, layer)[lane.ranks]
        yield room * 1.0, Shares(slots * 1.0, np.zeros(ranks), np.zeros(0), np.zeros(0))
    elif kind == "every":
        active = tokens.active[:, layer, lane.ranks].sum(axis=0)
        yield active * 1.0, every(ranks, nodes)
    else:
        for served, variant, count in tokens.alike(layer, lane):
            yield count * 1.0, _shares(run, tokens, layer, lane, served, variant, kind)


def _shares(
    run: RunShape, tokens: Tokens, layer: int, lane: Lane, served: Served, variant: int, kind: str
) -> Shares:
    """What a token brings the ranks and nodes of its lane; kind: "copies" or "hits"."""
    place, experts, top_k = tokens.layers[layer], run.num_experts, run.top_k
    plain, law = tokens.is_plain(served), tokens.law
    if plain and kind == "copies":
        shares = uniform_copies(place.sizes(served.slot_share), experts, top_k)
    elif plain:
        shares = uniform_hits(place.sizes(served.slot_share), lane.node_of, experts, top_k)
    elif isinstance(law, GroupLimited):  # every block that counts is one of the groups
        whole = GroupHits(((1, law.num_expert_groups),), experts, top_k, law.num_limited_groups)
        blocks = len(lane.ranks) + len(lane.nodes)
        shares = _shares_of_hits(
            np.full(blocks, whole.mean / law.num_expert_groups), len(lane.ranks)
        )
    else:
        picks = tokens.picks_of(layer, lane, served, variant)
        if kind == "hits":
            return _shares_of_hits(1 - picks.miss(lane.blocks > 0), len(lane.ranks))
        of_pick = inclusion(picks.weights, top_k)[:, None] * picks.share
        spread = (of_pick * (1 - of_pick)).sum(axis=0)
        shares = Shares(of_pick.sum(axis=0), spread, np.zeros(0), np.zeros(0))
    if isinstance(law, Markov):  # neighbours resemble one another: no sum over tokens
        unknown = np.full_like(shares.variance, np.nan)
        return replace(shares, variance=unknown, node_variance=shares.node_variance * np.nan)
    return shares


def straight(
    rows: RankRows, paths: Paths, src: IntArray, dst: IntArray, tokens: Floats, shares: Shares
) -> None:
    """Add tokens [src] times shares [dst]: each row from its source to where it is computed."""
    at_node = _by_node(paths, dst, shares.mean)
    own = np.where(src == dst, tokens * shares.mean, 0.0)
    inside = tokens * at_node[paths.node[src]]
    rows.sent[SELF, src] += own
    rows.sent[UP, src] += inside - own
    rows.sent[OUT, src] += tokens * at_node.sum() - inside
    from_node = _by_node(paths, src, tokens)  # summed alike, so that differences of equals are 0
    near = from_node[paths.node[dst]]
    self_tokens = np.where(src == dst, tokens, 0.0)
    far = from_node.sum() - near
    for tier, coming in ((SELF, self_tokens), (UP, near - self_tokens), (OUT, far)):
        rows.received[tier, dst] += coming * shares.mean
        rows.variance[tier, dst] += coming * shares.variance


def two_hops(rows: RankRows, paths: Paths, lane: Lane, tokens: Floats, shares: Shares) -> None:
    """Add a row to the proxy in each node, and one from there to each rank."""
    ranks = lane.ranks
    proxy = paths.proxy[ranks][:, lane.nodes]  # [G, N], each source its own on its own node
    tier = np.where(lane.node_of[:, None] == np.arange(len(lane.nodes)), SELF, OUT)
    first = tokens[:, None] * shares.node_mean
    spread = tokens[:, None] * shares.node_variance
    carried = np.zeros(paths.world_size)
    np.add.at(carried, proxy, np.broadcast_to(tokens[:, None], proxy.shape))
    for one in (SELF, OUT):
        rows.sent[one, ranks] += (first * (tier == one)).sum(axis=1)
        np.add.at(rows.received[one], proxy, first * (tier == one))
        np.add.at(rows.variance[one], proxy, spread * (tier == one))
    last = RankRows.none(paths.world_size)
    straight(last, paths, ranks, ranks, carried[ranks], shares)
    for one in (SELF, UP):  # a proxy forwards inside its node alone
        rows.sent[one] += last.sent[one]
        rows.received[one] += last.received[one]
        rows.variance[one] += last.variance[one]


def _among_mates(run: RunShape, paths: Paths, copies: Floats) -> RankRows:
    """Each choice goes on to the other ranks that hold a shard of its expert."""
    rows = RankRows.none(run.world_size)
    mates = shard_mates(run)
    for one, tier in ((UP, paths.same_node & mates), (OUT, ~paths.same_node & mates)):
        rows.sent[one] = copies * tier.sum(axis=1)
        rows.received[one] = copies @ tier
    rows.variance[:] = np.nan
    return rows


def _shifted(run: RunShape, ranks: IntArray, shift: int) -> IntArray:
    """The ranks of the lane that lies so many shards further."""
    shard = ranks % run.expert_tp
    return ranks - shard + (shard + shift) % run.expert_tp


def _by_node(paths: Paths, ranks: IntArray, values: Floats) -> Floats:
    return np.bincount(paths.node[ranks], values, paths.num_nodes)
