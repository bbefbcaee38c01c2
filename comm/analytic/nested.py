"""Rows of one token under uniform routing where rows are more than copies or ranks.

    WeightedCopies  a choice brings as many rows as its rank says       rows inside sharded experts
    NestedHits      ranks, and the nodes around them, that are hit      two hops
    GroupHits       expert groups that are hit, few of them allowed     group-limited routing

Moments count K-subsets in exact integers and divide last, as in `fanout`; distributions multiply
polynomials without a negative coefficient (`polynomials`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import comb

import numpy as np
from numpy.typing import NDArray

from comm.analytic.fanout import check_subset, group_limited_pmf
from comm.analytic.polynomials import copies_pmf, equal_block, hits_pmf, product


@dataclass(frozen=True)
class WeightedCopies:
    """Rows of the chosen experts, where a choice may bring several.

    values: (rows of a choice, experts that bring so many), all experts of the layer
    """

    values: tuple[tuple[int, int], ...]
    top_k: int

    def __post_init__(self) -> None:
        check_subset(self._num_experts, self.top_k, 0)

    @property
    def _num_experts(self) -> int:
        return sum(size for _, size in self.values)

    def _average(self, power: int) -> Fraction:
        total = sum(rows**power * size for rows, size in self.values)
        return Fraction(total, self._num_experts)

    @property
    def mean(self) -> float:
        """Expected rows of a token."""
        return float(self.top_k * self._average(1))

    @property
    def variance(self) -> float:
        """Variance of the rows of a token: that of a sample without replacement."""
        spread = self._average(2) - self._average(1) ** 2
        left = Fraction(self._num_experts - self.top_k, max(1, self._num_experts - 1))
        return float(self.top_k * left * spread)

    def pmf(self) -> NDArray[np.float64]:
        """P(rows = x) for x = 0 ... the most that K choices bring."""
        most = self.top_k * max(rows for rows, _ in self.values)
        chance = _chance(self._num_experts, self.top_k)
        blocks = [
            (equal_block(size, chance, self.top_k), np.eye(most + 1)[rows])
            for rows, size in self.values
        ]
        return copies_pmf(blocks, self.top_k, most)


@dataclass(frozen=True)
class NestedHits:
    """Rows of the ranks that are hit and of the nodes that are hit, each with its number of rows.

    nodes: (rows when any rank of the node is hit, ranks of the node, nodes like this), the ranks as
        (experts of a rank, rows when it is hit, ranks like this); all experts of the layer
    """

    nodes: tuple[tuple[int, tuple[tuple[int, int, int], ...], int], ...]
    top_k: int

    def __post_init__(self) -> None:
        check_subset(self._num_experts, self.top_k, 0)

    @property
    def _num_experts(self) -> int:
        return sum(count * _experts(ranks) for _, ranks, count in self.nodes)

    def _ways(self, size: int) -> int:
        """K-subsets that miss a block of `size` experts."""
        return comb(max(0, self._num_experts - size), self.top_k)

    def _blocks(self) -> Counter[tuple[int, int]]:
        """How many blocks, ranks and nodes, have so many (experts, rows)."""
        blocks: Counter[tuple[int, int]] = Counter()
        for node_rows, ranks, count in self.nodes:
            blocks[_experts(ranks), node_rows] += count
            for size, rows, num_ranks in ranks:
                blocks[size, rows] += count * num_ranks
        return Counter({block: n for block, n in blocks.items() if block[1]})

    @property
    def mean(self) -> float:
        """Expected rows of a token."""
        total = self._ways(0)
        hit = sum(
            n * rows * (total - self._ways(size)) for (size, rows), n in self._blocks().items()
        )
        return float(Fraction(hit, total))

    @property
    def variance(self) -> float:
        """Variance of the rows of a token, that of the rows missed.

        Two disjoint blocks are missed together with probability q(a + b). A block with itself, and
        a rank with its own node, are unions of fewer experts and are put right afterwards.
        """
        blocks, q = self._blocks(), self._ways
        missed = sum(n * rows * q(size) for (size, rows), n in blocks.items())
        pairs = 0
        for (size, rows), n in blocks.items():
            for (other, other_rows), m in blocks.items():
                pairs += n * m * rows * other_rows * q(size + other)
            pairs += n * rows**2 * (q(size) - q(2 * size))
        for node_rows, ranks, count in self.nodes:
            around = _experts(ranks)
            for size, rows, num_ranks in ranks:
                nested = count * num_ranks * rows * node_rows
                pairs += 2 * nested * (q(around) - q(around + size))
        total = q(0)
        return float(Fraction(pairs, total) - Fraction(missed, total) ** 2)

    def pmf(self) -> NDArray[np.float64]:
        """P(rows = x) for x = 0 ... a number that no token can exceed."""
        chance, nodes, most = _chance(self._num_experts, self.top_k), [], 0
        for node_rows, ranks, count in self.nodes:
            # Ranks without rows of their own only fill the node.
            fill = [
                equal_block(num_ranks * size, chance, self.top_k)
                for size, rows, num_ranks in ranks
                if not rows
            ]
            inside = [(product(np.array(fill)), 0)] if fill else []
            for size, rows, num_ranks in ranks:
                if rows:
                    inside += [(equal_block(size, chance, self.top_k), rows)] * num_ranks
            nodes += [(node_rows, inside)] * count
            most = max(most, node_rows + max((rows for size, rows, _ in ranks if size), default=0))
        return hits_pmf(nodes, self.top_k, most * self.top_k)


def _experts(ranks: Iterable[tuple[int, int, int]]) -> int:
    return sum(size * num_ranks for size, _, num_ranks in ranks)


def _chance(num_experts: int, top_k: int) -> float:
    """A coin that shows about K heads in E tosses; any coin gives the same law."""
    return min(0.5, top_k / num_experts)


@dataclass(frozen=True)
class GroupHits:
    """Rows of the expert groups that are hit, groups being ranked by their best expert.

    values: (rows of a group when it is hit, groups like this), all groups
    """

    values: tuple[tuple[int, int], ...]
    num_experts: int
    top_k: int
    num_limited_groups: int

    def pmf(self) -> NDArray[np.float64]:
        """P(rows = x): given how many are hit, every choice of so many groups is equally likely."""
        groups = sum(count for _, count in self.values)
        hit = group_limited_pmf(self.num_experts, self.top_k, groups, self.num_limited_groups)
        pmf = np.zeros(max(rows for rows, _ in self.values) * (len(hit) - 1) + 1)
        for d, probability in enumerate(hit):
            some = WeightedCopies(self.values, d).pmf() if probability else np.zeros(0)
            pmf[: len(some)] += probability * some
        return pmf

    @property
    def mean(self) -> float:
        """Expected rows of a token."""
        pmf = self.pmf()
        return float(pmf @ np.arange(len(pmf)))

    @property
    def variance(self) -> float:
        """Variance of the rows of a token."""
        pmf = self.pmf()
        spread = float(pmf @ (np.arange(len(pmf)) - self.mean) ** 2)
        return spread if spread > 1e-12 else 0.0  # one rank: always hit
