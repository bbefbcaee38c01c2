"""Rows of one token for each strategy and tier, under uniform routing, at any number of ranks.

Experts lie contiguous, as evenly as can be; nodes are blocks of ranks, the last may be smaller.
Rows are means over the ranks that may hold the token; what stays on its own rank is no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from comm.analytic.by_rank import (
    RankRows,
    Shares,
    every,
    straight,
    two_hops,
    uniform_copies,
    uniform_hits,
)
from comm.analytic.paths import Paths
from comm.analytic.patterns import Lane
from comm.topology import LinkTier

STRATEGIES = ("all_to_all", "rank_dedup", "two_hop", "allgather")


@dataclass(frozen=True)
class Rows:
    """Rows of a token in one layer, one way, that cross each tier."""

    scale_up: float
    scale_out: float

    @property
    def remote(self) -> float:
        return self.scale_up + self.scale_out

    def ns_per_byte(self, GBps: Mapping[str, float | None]) -> float | None:
        """Time of these rows, each of one byte, on the slower tier; None: its rate is not known.

        GBps: tier -> rate of a rank
        """
        times = []
        for tier in ("scale_up", "scale_out"):
            rows, rate = getattr(self, tier), GBps[tier]
            if rows and rate is None:
                return None
            times.append(rows / rate if rate else 0.0)
        return max(times)


@dataclass(frozen=True)
class Machine:
    """So many ranks, nodes of at most so many, and what they own of E experts."""

    ep_size: int
    ranks_per_node: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.ep_size < 1:
            raise ValueError(
                f"ep_size={self.ep_size} and ranks_per_node={self.ranks_per_node} must be at"
                " least 1"
            )

    @cached_property
    def paths(self) -> Paths:
        node = np.arange(self.ep_size) // self.ranks_per_node
        return Paths.from_lanes(node.tolist(), [list(range(self.ep_size))])

    @cached_property
    def lane(self) -> Lane:
        return Lane.of(self.paths, 0)

    @cached_property
    def held(self) -> NDArray[np.int64]:
        """[R] experts of each rank, the first own one more where there is a remainder."""
        some, more = divmod(self.num_experts, self.ep_size)
        return some + (np.arange(self.ep_size) < more).astype(np.int64)

    @cached_property
    def hits(self) -> Shares:
        return uniform_hits(self.held, self.lane.node_of, self.num_experts, self.top_k)

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """Strategy -> rows of a token."""
        copies = uniform_copies(self.held, self.num_experts, self.top_k)
        everyone = every(self.ep_size, len(self.lane.nodes))
        return {
            "all_to_all": self._rows(copies),
            "rank_dedup": self._rows(self.hits),
            "two_hop": self._rows(self.hits, hops=True),
            "allgather": self._rows(everyone),
        }

    def _rows(self, shares: Shares, hops: bool = False) -> Rows:
        rows, one = RankRows.none(self.ep_size), np.ones(self.ep_size)  # a token on every rank
        if hops:
            two_hops(rows, self.paths, self.lane, one, shares)
        else:
            straight(rows, self.paths, self.lane.ranks, self.lane.ranks, one, shares)
        mean = rows.sent.sum(axis=1) / self.ep_size
        return Rows(float(mean[LinkTier.SCALE_UP]), float(mean[LinkTier.SCALE_OUT]))
