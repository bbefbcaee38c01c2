"""Rows of one token when experts are not equally liked, or are served by more than one rank.

A set of K experts is drawn with probability proportional to the product of its weights, and a pick
of expert e is served by rank r with probability share[e, r], independently of all others. With the
elementary symmetric polynomial e_K:

    rank r not hit     q_r  = e_K(w_1 (1 - share_1r), ..., w_E (1 - share_Er)) / e_K(w)
    expert e chosen    pi_e = w_e e_{K-1}(w without e) / e_K(w)
    copies to rank r   sum_e pi_e share_er

e_16 of 896 ones is 1e34, and weights span any range: everything is computed on chances
p = w s / (1 + w s) instead (`polynomials`), s chosen such that they sum to K. The ratios are the
same for every s, and no number leaves the range of doubles.

Legend: E experts, G ranks, N nodes, K top_k, D = 1 + the most rows of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from comm.analytic.polynomials import (
    Floats,
    all_but_one,
    block_polynomials,
    copies_pmf,
    hits_pmf,
    multiply,
    product,
)

Ints = NDArray[np.integer]
NO_VARIANCE = 1e-11  # of one token; the arithmetic leaves about 1e-14 where the truth is 0
_BATCH = 256  # products worked on at once: bounds the temporaries


def chances(weights: Floats, top_k: int) -> Floats:
    """[E] probabilities of independent tosses that, given K heads, choose sets by `weights`."""
    weights = np.asarray(weights, np.float64)
    positive = weights > 0
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("weights must be [E] finite numbers of at least 0")
    if not 0 <= top_k <= positive.sum():
        raise ValueError(
            f"top_k={top_k} experts cannot be chosen from {positive.sum()} of positive weight"
        )
    log_weights = np.log(weights[positive])
    low, high = -log_weights.max() - 60, -log_weights.min() + 60
    for _ in range(80):  # bisection: the sum of the chances grows with s
        middle = (low + high) / 2
        heads = (1 / (1 + np.exp(-(log_weights + middle)))).sum()
        low, high = (middle, high) if heads < top_k else (low, middle)
    # Where all must be chosen s would be infinite; any s is right, this one is only large.
    chance = np.zeros(len(weights))
    chance[positive] = 1 / (1 + np.exp(-np.minimum(log_weights + low, 30)))
    return chance


def inclusion(weights: Floats, top_k: int) -> Floats:
    """[E] probability pi_e that an expert is chosen; sums to K."""
    chance = chances(weights, top_k)
    tosses = np.zeros((len(chance), 1, top_k + 1))
    tosses[:, 0, 0] = 1 - chance
    if top_k:
        tosses[:, 0, 1] = chance
    chosen = np.zeros((len(chance), top_k + 1))
    chosen[:, 1:2] = chance[:, None]
    counted: Floats = all_but_one(tosses, chosen)[:, 0] / product(tosses)[0, top_k]
    return counted if top_k else np.zeros(len(chance))


def max_over_mean(weights: Floats, share: Floats, top_k: int) -> float:
    """Expected copies of the busiest rank over the average: max_r sum_e pi_e share_er / (K / R)."""
    copies = inclusion(weights, top_k) @ share
    return float(copies.max() / copies.mean())


@dataclass(frozen=True, eq=False)
class Picks:
    """K experts of a token and the ranks that serve them; compared by identity.

    weights: [E] >= 0, at least K of them positive
    share: [E, G] probability that a pick of an expert is served by a rank; rows sum to 1
    node_of: [G] node of each rank, 0 ... N - 1
    """

    weights: Floats
    share: Floats
    node_of: Ints
    top_k: int

    @cached_property
    def _kinds(self) -> tuple[Floats, NDArray[np.int64]]:
        """([n, G] shares that differ, [E] which of them an expert has)."""
        shares, kind_of = np.unique(self.share, axis=0, return_inverse=True)
        return shares, kind_of.ravel()

    @cached_property
    def polynomials(self) -> Floats:
        """[n, K + 1] one for the experts of each kind of share."""
        shares, kind_of = self._kinds
        return block_polynomials(
            chances(self.weights, self.top_k), kind_of, len(shares), self.top_k
        )

    @cached_property
    def _total(self) -> float:
        return float(product(self.polynomials)[self.top_k])

    @cached_property
    def by_rank(self) -> Floats | None:
        """[G, K + 1] one for the experts of each rank; None where experts have several ranks."""
        shares, _ = self._kinds
        if not ((shares == 0) | (shares == 1)).all():
            return None
        ranks = np.zeros((shares.shape[1], self.top_k + 1))
        ranks[:, 0] = 1
        ranks[shares.argmax(axis=1)] = self.polynomials
        return ranks

    @cached_property
    def num_nodes(self) -> int:
        return int(self.node_of.max(initial=0)) + 1

    @cached_property
    def copies(self) -> tuple[Floats, Floats]:
        """(mean [G], covariance [G, G]) of the copies that ranks serve."""
        shares, _ = self._kinds
        k = np.arange(self.top_k + 1)
        polynomials, chosen = self.polynomials, self.polynomials * k
        mean = _left_out(polynomials, chosen) / self._total
        pairs = np.empty((len(shares), len(shares)))
        for i in range(0, len(shares), _BATCH):
            rows = np.arange(i, min(i + _BATCH, len(shares)))
            batch = np.repeat(polynomials[:, None], len(rows), axis=1)
            batch[rows, rows - i] = chosen[rows]
            pairs[rows] = all_but_one(batch, chosen).T
        # A kind with itself: ordered pairs of different experts.
        np.fill_diagonal(pairs, _left_out(polynomials, polynomials * (k * (k - 1))))
        pairs /= self._total
        copies = mean @ shares
        second = shares.T @ pairs @ shares + np.diag(copies)
        return copies, second - np.outer(copies, copies)

    @cached_property
    def misses(self) -> tuple[Floats, Floats]:
        """(probability [G + N], covariance [G + N, G + N]) of a rank, or node, not being hit."""
        joint = self._misses_of_unions() if self.by_rank is None else self._misses_of_blocks()
        missed = joint.diagonal().copy()
        return missed, joint - np.outer(missed, missed)

    def miss(self, blocks: NDArray[np.bool_]) -> Floats:
        """[B] probability that no pick is served by any rank of a block; blocks: [B, G]."""
        shares, _ = self._kinds
        missed = np.empty(len(blocks))
        powers = np.arange(self.top_k + 1)
        for i in range(0, len(blocks), 16 * _BATCH):
            elsewhere = 1 - blocks[i : i + 16 * _BATCH] @ shares.T  # [B, n]
            elsewhere[elsewhere < 1e-12] = 0  # a sum of fractions that make 1
            some = np.zeros((len(elsewhere), self.top_k + 1))
            some[:, 0] = 1
            for kind, polynomial in enumerate(self.polynomials):
                some = multiply(some, polynomial * elsewhere[:, kind, None] ** powers)
            missed[i : i + 16 * _BATCH] = some[:, self.top_k]
        return missed / self._total

    def _misses_of_unions(self) -> Floats:
        """[G + N, G + N] joint misses, union by union."""
        num_ranks = len(self.node_of)
        ranks, nodes = np.eye(num_ranks), np.eye(self.num_nodes)[self.node_of].T
        blocks = np.concatenate([ranks, nodes]) > 0
        one, other = np.triu_indices(len(blocks))
        joint = np.empty((len(blocks), len(blocks)))
        joint[one, other] = joint[other, one] = self.miss(blocks[one] | blocks[other])
        return joint

    def _misses_of_blocks(self) -> Floats:
        """[G + N, G + N] joint misses where each expert has one rank: products of all but two."""
        ranks, num_nodes = self.by_rank, self.num_nodes
        assert ranks is not None
        num_ranks, tails = len(ranks), ranks * np.eye(1, self.top_k + 1)
        mates = [np.flatnonzero(self.node_of == node) for node in range(num_nodes)]
        nodes = np.stack([product(ranks[members]) for members in mates])
        node_tails = nodes * np.eye(1, self.top_k + 1)
        joint = np.empty((num_ranks + num_nodes, num_ranks + num_nodes))
        for i in range(0, num_ranks, _BATCH):
            some = np.arange(i, min(i + _BATCH, num_ranks))
            batch = np.repeat(ranks[:, None], len(some), axis=1)
            batch[some, some - i] = tails[some]
            joint[some, :num_ranks] = all_but_one(batch, tails).T
            batch = np.repeat(nodes[:, None], len(some), axis=1)
            for rank in some:
                node = self.node_of[rank]
                inside = [tails[mate] if mate == rank else ranks[mate] for mate in mates[node]]
                batch[node, rank - i] = product(np.stack(inside))
            joint[some, num_ranks:] = all_but_one(batch, node_tails).T
        batch = np.repeat(nodes[:, None], num_nodes, axis=1)
        batch[np.arange(num_nodes), np.arange(num_nodes)] = node_tails
        joint[num_ranks:, num_ranks:] = all_but_one(batch, node_tails).T
        joint[num_ranks:, :num_ranks] = joint[:num_ranks, num_ranks:].T
        joint /= self._total
        return (joint + joint.T) / 2


def _left_out(polynomials: Floats, instead: Floats) -> Floats:
    return all_but_one(polynomials[:, None], instead)[:, 0]


@dataclass(frozen=True)
class SkewedCopies:
    """Rows of the chosen experts of `picks`; rows: [G] of a copy that the rank serves."""

    picks: Picks
    rows: tuple[int, ...]
    mean: float
    variance: float

    def pmf(self) -> Floats:
        """P(rows = x) for x = 0 ... the most that K choices bring: O(E K) and O(K D^2)."""
        top_k, most = self.picks.top_k, self.picks.top_k * max(self.rows)
        shares, _ = self.picks._kinds
        brings = np.zeros((len(shares), most + 1))
        for rank, rows in enumerate(self.rows):
            brings[:, rows] += shares[:, rank]
        kinds, kind_of = np.unique(brings, axis=0, return_inverse=True)
        blocks = [
            (product(self.picks.polynomials[kind_of.ravel() == i]), kind)
            for i, kind in enumerate(kinds)
        ]
        return copies_pmf(blocks, top_k, most)


@dataclass(frozen=True)
class SkewedHits:
    """Rows of the ranks and nodes that the picks hit.

    rows: [G + N] rows when a rank, and after the ranks a node, is hit
    """

    picks: Picks
    rows: tuple[int, ...]
    mean: float
    variance: float

    @property
    def has_pmf(self) -> bool:
        """Hits on experts of several ranks have no product form: no distribution, only moments."""
        return self.picks.by_rank is not None or np.count_nonzero(self.rows) <= 1

    def pmf(self) -> Floats:
        """P(rows = x) for x = 0 ...; raises ValueError unless `has_pmf`."""
        counted = np.flatnonzero(self.rows)
        ranks = self.picks.by_rank
        if not len(counted):
            return np.ones(1)
        if len(counted) == 1:
            rows = self.rows[counted[0]]
            pmf = np.zeros(rows + 1)
            pmf[rows] = self.mean / rows
            pmf[0] = 1 - pmf[rows]
            return pmf
        if ranks is None:
            raise ValueError("hits on experts of several ranks have no distribution in closed form")
        num_ranks, nodes, most = len(ranks), [], 0
        for node in range(self.picks.num_nodes):
            members = np.flatnonzero(self.picks.node_of == node)
            inside = [(ranks[rank], self.rows[rank]) for rank in members]
            nodes.append((self.rows[num_ranks + node], inside))
            most = max(most, nodes[-1][0] + max(rows for _, rows in inside))
        return hits_pmf(nodes, self.picks.top_k, most * self.picks.top_k)


def skewed_rows(picks: Picks, kind: str, rows: Ints) -> list[SkewedCopies | SkewedHits]:
    """The law of each of several counts of rows; kind: "copies" or "hits"; rows: [n, G + N]."""
    if kind == "copies":
        rows = rows[:, : len(picks.node_of)]
        means, covariance = picks.copies
        make: type[SkewedCopies | SkewedHits] = SkewedCopies
    else:
        missed, covariance = picks.misses
        means, make = 1 - missed, SkewedHits
    mean = rows @ means
    variance = ((rows @ covariance) * rows).sum(axis=1)
    settled = variance < NO_VARIANCE
    mean, variance = np.where(settled, np.rint(mean), mean), np.where(settled, 0.0, variance)
    return [
        make(picks, tuple(row), float(m), float(v))
        for row, m, v in zip(rows.tolist(), mean, variance, strict=True)
    ]


def served_once(homes: Sequence[int] | Ints, num_ranks: int) -> Floats:
    """[E, G] shares where each expert has one rank; homes: [E]."""
    share: Floats = np.eye(num_ranks)[np.asarray(homes, np.int64)]
    return share
