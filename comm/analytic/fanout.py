"""Rows of one token under uniform routing: K distinct experts, every K-subset of E equally likely.

A *set* is any group of ranks (the others, those of my node, all). Its ranks own disjoint blocks of
experts, so only the block sizes matter, not which experts they hold. For one token:

    Copies    one row for each chosen expert in the set         hypergeometric
    Distinct  one row for each rank of the set that is hit       q_r, q_rs, inclusion-exclusion
    Constant  a row for every rank of the set                    all-gather

All of them count K-subsets in exact integers and divide last: no overflow, no cancellation, and a
variance that is zero is exactly 0. Equal blocks are grouped, so 4096 ranks cost as much as two.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import comb

import numpy as np
from numpy.typing import NDArray


def miss_probability(num_experts: int, top_k: int, *sizes: int) -> Fraction:
    """Probability that none of the given disjoint blocks is chosen: q_r, q_rs, ..."""
    check_subset(num_experts, top_k, sum(sizes))
    return Fraction(comb(num_experts - sum(sizes), top_k), comb(num_experts, top_k))


@dataclass(frozen=True)
class Constant:
    """The same number of rows for every token."""

    rows: int

    @property
    def mean(self) -> float:
        """Expected rows of a token."""
        return float(self.rows)

    @property
    def variance(self) -> float:
        """Variance of the rows of a token."""
        return 0.0

    def pmf(self) -> NDArray[np.float64]:
        """P(rows = x) for x = 0, 1, ..."""
        return np.array([0.0] * self.rows + [1.0])


@dataclass(frozen=True)
class Copies:
    """Chosen experts among the `size` experts that a set of ranks owns."""

    size: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        check_subset(self.num_experts, self.top_k, self.size)

    @property
    def mean(self) -> float:
        """Expected rows of a token."""
        return self.top_k * self.size / self.num_experts

    @property
    def variance(self) -> float:
        """Variance of the rows of a token; the other ranks get K minus these rows."""
        others = self.num_experts - self.size
        return abs(copies_covariance(self.size, others, self.num_experts, self.top_k))

    def pmf(self) -> NDArray[np.float64]:
        """P(rows = x) for x = 0 ... K."""
        rest, total = self.num_experts - self.size, comb(self.num_experts, self.top_k)
        ways = [comb(self.size, x) * comb(rest, self.top_k - x) for x in range(self.top_k + 1)]
        return np.array([way / total for way in ways])


def copies_covariance(size_a: int, size_b: int, num_experts: int, top_k: int) -> float:
    """Covariance of the copies to two disjoint sets of ranks."""
    check_subset(num_experts, top_k, size_a + size_b)
    if num_experts == 1:
        return 0.0
    spread = -top_k * size_a * size_b * (num_experts - top_k)
    return spread / (num_experts**2 * (num_experts - 1))


@dataclass(frozen=True)
class Distinct:
    """Ranks of a set that own at least one chosen expert.

    blocks: (experts of a rank, ranks of the set with that many), each size once
    """

    blocks: tuple[tuple[int, int], ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        check_subset(self.num_experts, self.top_k, self._size)

    @classmethod
    def of(cls, sizes: Iterable[int], num_experts: int, top_k: int) -> "Distinct":
        """The law for ranks that own `sizes` experts each."""
        return cls(tuple(sorted(Counter(sizes).items())), num_experts, top_k)

    @property
    def _size(self) -> int:
        return sum(size * count for size, count in self.blocks)

    def _miss(self, *sizes: int) -> Fraction:
        return miss_probability(self.num_experts, self.top_k, *sizes)

    def _mean_missed(self) -> Fraction:
        return sum((count * self._miss(size) for size, count in self.blocks), Fraction(0))

    @property
    def mean(self) -> float:
        """Expected rows of a token: sum of 1 - q_r."""
        return float(sum(count for _, count in self.blocks) - self._mean_missed())

    @property
    def variance(self) -> float:
        """Variance of the rows of a token, that of the ranks missed: E[M(M-1)] + E[M] - E[M]^2."""
        missed, missed_pairs = self._mean_missed(), Fraction(0)
        for size, count in self.blocks:
            if count > 1:
                missed_pairs += count * (count - 1) * self._miss(size, size)
            for other, other_count in self.blocks:
                if other != size:
                    missed_pairs += count * other_count * self._miss(size, other)
        return float(missed_pairs + missed - missed**2)

    def pmf(self) -> NDArray[np.float64]:
        """P(rows = d) for d = 0 ... min(K, ranks that own an expert)."""
        owners = [(size, count) for size, count in self.blocks if size]
        num_owners = sum(count for _, count in owners)
        most = min(self.top_k, num_owners)
        # unions[m, e]: ways to choose m ranks of the set that own e experts together
        unions = Counter({(0, 0): 1})
        for size, count in owners:
            grown: Counter[tuple[int, int]] = Counter()
            for (m, experts), ways in unions.items():
                for more in range(min(count, most - m) + 1):
                    grown[m + more, experts + more * size] += ways * comb(count, more)
            unions = grown
        # inside[m]: K-subsets that hit no rank of the set but m chosen ones, over all choices
        outside, inside = self.num_experts - self._size, [0] * (most + 1)
        for (m, experts), ways in unions.items():
            inside[m] += ways * comb(outside + experts, self.top_k)
        total = comb(self.num_experts, self.top_k)
        return np.array([_exactly(d, inside, num_owners) / total for d in range(most + 1)])


def _exactly(d: int, inside: Sequence[int], num_blocks: int) -> int:
    """Inclusion-exclusion: subsets that hit exactly d of the blocks."""
    return sum((-1) ** (d - m) * comb(num_blocks - m, d - m) * inside[m] for m in range(d + 1))


def distinct_covariance(one: Distinct, other: Distinct) -> float:
    """Covariance of the distinct ranks hit in two disjoint sets of one placement."""
    miss = partial(miss_probability, one.num_experts, one.top_k)
    total = Fraction(0)
    for size_a, count_a in one.blocks:
        for size_b, count_b in other.blocks:
            total += count_a * count_b * (miss(size_a, size_b) - miss(size_a) * miss(size_b))
    return float(total)


def group_limited_pmf(
    num_experts: int, top_k: int, num_expert_groups: int, num_limited_groups: int
) -> NDArray[np.float64]:
    """P(distinct groups hit = d), groups being ranked by their best expert.

    The best `num_limited_groups` of equal groups are kept and the K best experts chosen inside
    them: exactly min(M, D) groups are hit, D the count without the limit.
    """
    group_size, remainder = divmod(num_experts, num_expert_groups)
    if remainder:
        raise ValueError(
            f"num_experts={num_experts} is not a multiple of num_expert_groups={num_expert_groups}"
        )
    if not top_k <= num_limited_groups * group_size:
        raise ValueError(
            f"top_k={top_k} experts do not fit in num_limited_groups={num_limited_groups} groups "
            f"of {group_size}"
        )
    free = Distinct.of([group_size] * num_expert_groups, num_experts, top_k).pmf()
    limited = free[: num_limited_groups + 1].copy()
    limited[-1] += free[num_limited_groups + 1 :].sum()
    return limited


@dataclass(frozen=True)
class TierRows:
    """Expected rows of a token over each kind of link, rows that stay on their rank left out."""

    scale_out: float
    scale_up: float


def two_tier_table(sizes: Sequence[int], num_nodes: int, top_k: int) -> dict[str, TierRows]:
    """Expected rows for each strategy, averaged over the ranks that may hold the token.

    sizes: [R] experts of each rank, equally many ranks a node, those of a node side by side
    """
    num_experts, world_size = sum(sizes), len(sizes)
    if world_size % num_nodes:
        raise ValueError(f"num_nodes={num_nodes} does not divide the {world_size} ranks")
    per_node = world_size // num_nodes
    nodes = [sum(sizes[first : first + per_node]) for first in range(0, world_size, per_node)]
    ranks_hit = Distinct.of(sizes, num_experts, top_k).mean
    nodes_hit = Distinct.of(nodes, num_experts, top_k).mean
    other_nodes, node_mates = 1 - 1 / num_nodes, 1 / num_nodes - 1 / world_size
    return {
        "per_copy": TierRows(top_k * other_nodes, top_k * node_mates),
        "rank_dedup": TierRows(ranks_hit * other_nodes, ranks_hit * node_mates),
        # A first hop lands on the sender's own local index: 1 rank a node needs no second one.
        "two_hop": TierRows(nodes_hit * other_nodes, ranks_hit * (1 - num_nodes / world_size)),
        "allgather": TierRows(float(world_size - per_node), float(per_node - 1)),
    }


def check_subset(num_experts: int, top_k: int, size: int) -> None:
    """The conditions under which a K-subset of E exists and a block lies inside it."""
    if not 0 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must lie between 0 and num_experts={num_experts}")
    if not 0 <= size <= num_experts:
        raise ValueError(f"blocks hold {size} experts, num_experts={num_experts} bounds them")
