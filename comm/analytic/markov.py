"""Tokens that resemble the one before: sums of rows along a chain.

Every token's set is uniform, so means and the variance of one token are those of `fanout`; tokens
of a chain are correlated, so the variance of a sum is not the sum of variances. For a block of
experts, the number X of chosen experts in it is itself a Markov chain on 0 ... K: each stays with
probability `reuse`, and those that leave are replaced by a uniform draw from outside the set.

    copies   E[X'|X] is linear in X with slope  reuse - K (1 - reuse) / (E - K),
             so Cov(t, t + l) = slope^l Cov(t, t)
    hits     A missed by t and B missed by t + l have the covariance
             P(X_A(t) = 0) (P(X_B(t + l) = 0 | X_A(t) = 0) - q_B):
             X_B(t) given X_A(t) = 0 is hypergeometric, then come l steps of the chain of X_B

Legend: E experts, K top_k, l lag in tokens; A and B blocks of any overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import comb, inf

import numpy as np
from numpy.typing import NDArray

from comm.analytic.fanout import copies_covariance, miss_probability

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]
FORGOTTEN = 40  # a covariance that decayed by exp(-40) is nothing


@dataclass(frozen=True)
class Chain:
    """The chain of a token's set. Raises ValueError where the set cannot be replaced (2 K > E)."""

    reuse: float
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        if not 0 <= self.reuse <= 1:
            raise ValueError(f"reuse={self.reuse} must lie between 0 and 1")
        if 2 * self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} experts cannot all be replaced from outside their set,"
                f" num_experts={self.num_experts}"
            )

    @property
    def slope(self) -> float:
        """How much of an excess of copies is expected in the next token."""
        if self.num_experts == self.top_k:
            return self.reuse
        lost = self.top_k * (1 - self.reuse) / (self.num_experts - self.top_k)
        return self.reuse - lost

    def memory(self, decays: float) -> float:
        """Tokens after which what is left of a covariance is exp(-decays); inf: nothing is lost."""
        lost = 1 - max(self.reuse, abs(self.slope))
        return decays / lost if lost else inf

    def transition(self, size: int) -> Floats:
        """[K + 1, K + 1] P(X' = column | X = row) for a block of `size` experts."""
        moves, top_k = np.zeros((self.top_k + 1, self.top_k + 1)), self.top_k
        free = self.num_experts - top_k
        stay = [_binomial(n, self.reuse) for n in range(top_k + 1)]
        for x in range(max(0, size - free), min(size, top_k) + 1):
            for inside, p_in in enumerate(stay[x]):
                for outside, p_out in enumerate(stay[top_k - x]):
                    drawn = top_k - inside - outside
                    new = _hypergeometric(free, size - x, drawn)
                    moves[x, inside : inside + len(new)] += p_in * p_out * new
        return moves

    def copies_decay(self, lags: int) -> Floats:
        """[lags + 1] covariance at lag l over that at lag 0."""
        decay: Floats = self.slope ** np.arange(lags + 1)
        return decay

    def miss_covariance(self, size_a: int, size_b: int, overlap: int, lags: int) -> Floats:
        """[lags + 1] covariance of "A is missed" and, l tokens later, "B is missed"."""
        q_a, q_b = (
            float(miss_probability(self.num_experts, self.top_k, size)) for size in (size_a, size_b)
        )
        covariances = np.zeros(lags + 1)
        if not q_a:
            return covariances
        left = self.num_experts - size_a
        state = np.zeros(self.top_k + 1)
        start = _hypergeometric(left, size_b - overlap, self.top_k)
        state[: len(start)] = start
        moves = self.transition(size_b)
        for lag in range(lags + 1):
            covariances[lag] = q_a * (state[0] - q_b)
            state = state @ moves
        return covariances


def _binomial(n: int, p: float) -> list[float]:
    return [comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]


def _hypergeometric(population: int, marked: int, drawn: int) -> Floats:
    """P(x of the drawn are marked), x = 0 ... drawn."""
    ways = [comb(marked, x) * comb(population - marked, drawn - x) for x in range(drawn + 1)]
    total = comb(population, drawn)
    return np.array([way / total for way in ways])


@dataclass(frozen=True)
class Sequences:
    """Who holds the tokens of each chain: a chain starts where global token % sequence == 0.

    tokens_per_rank: [R], tokens numbered rank after rank
    """

    tokens_per_rank: tuple[int, ...]
    sequence: int

    @cached_property
    def _segments(self) -> tuple[Ints, Ints, Ints]:
        """(first token, one past the last, rank) of the longest runs in one chain on one rank."""
        ends = np.cumsum(self.tokens_per_rank)
        total = int(ends[-1]) if len(ends) else 0
        starts = np.unique(np.concatenate([[0], ends, np.arange(0, total, self.sequence)]))
        starts = starts[starts < total]
        rank = np.searchsorted(ends, starts, side="right")
        return starts, np.append(starts[1:], total)[: len(starts)], rank

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest chain."""
        return min(self.sequence, sum(self.tokens_per_rank))

    def pairs(self, lags: int) -> tuple[Ints, Ints, Floats]:
        """(rank of the earlier token [n], rank of the later [n], how many [n, lags + 1])."""
        first, end, rank = self._segments
        chain, lag = first // self.sequence, np.arange(lags + 1)
        found: dict[tuple[int, int], Floats] = {}
        for ahead in range(len(first)):
            i = np.arange(len(first) - ahead)
            j = i + ahead
            near = (chain[i] == chain[j]) & (first[j] - end[i] < lags)
            if not near.any():
                break
            for earlier, later in zip(i[near].tolist(), j[near].tolist(), strict=True):
                low = np.maximum(first[earlier] + lag, first[later])
                high = np.minimum(end[earlier] + lag, end[later])
                key = (int(rank[earlier]), int(rank[later]))
                found[key] = found.get(key, 0) + np.maximum(0, high - low).astype(float)
        ranks = np.array(list(found), np.int64).reshape(-1, 2)
        return ranks[:, 0], ranks[:, 1], np.array(list(found.values())).reshape(-1, lags + 1)


def bilinear(
    chain: Chain, kind: str, one: tuple[Ints, Ints], other: tuple[Ints, Ints],
    sizes: Ints, lags: int,
) -> Floats:  # fmt: skip
    """[n, lags + 1] Cov(rows of a token, rows of the token l later), for n pairs of counts.

    one, other: (rows [n, blocks] of each block, bool [blocks, G] the ranks of each block)
    sizes: [G] experts of each rank
    """
    (rows, blocks), (other_rows, other_blocks) = one, other
    size_a, size_b = blocks @ sizes, other_blocks @ sizes
    overlap = (blocks * sizes) @ other_blocks.T
    triple = np.stack([
        np.broadcast_to(size_a[:, None], overlap.shape),
        np.broadcast_to(size_b[None], overlap.shape),
        overlap,
    ]).reshape(3, -1)  # fmt: skip
    types, type_of = np.unique(triple, axis=1, return_inverse=True)
    type_of = type_of.reshape(overlap.shape)
    covariance = np.zeros((len(rows), lags + 1))
    for i, (a, b, shared) in enumerate(types.T.tolist()):
        weight = ((rows @ (type_of == i).astype(np.float64)) * other_rows).sum(axis=1)
        if not weight.any():
            continue
        if kind == "hits":
            course = chain.miss_covariance(a, b, shared, lags)
        else:
            at_once = _copies_covariance(a, b, shared, chain)
            course = at_once * chain.copies_decay(lags)
        covariance += weight[:, None] * course
    return covariance


def _copies_covariance(size_a: int, size_b: int, overlap: int, chain: Chain) -> float:
    """Covariance of the copies to two blocks: the same block, or two without a common expert."""
    num_experts, top_k = chain.num_experts, chain.top_k
    if overlap:
        assert size_a == size_b == overlap
        return -copies_covariance(size_a, num_experts - size_a, num_experts, top_k)
    return copies_covariance(size_a, size_b, num_experts, top_k)
