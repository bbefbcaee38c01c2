"""Which node each rank lives on, and so which tier of link joins two ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class LinkTier(IntEnum):
    """What a byte crosses between its source and its destination rank."""

    SELF = 0  # never leaves the rank
    SCALE_UP = 1  # inside a node, or inside a rack-wide domain such as NVL72
    SCALE_OUT = 2  # between nodes


TIER_NAMES: tuple[str, ...] = tuple(tier.name.lower() for tier in LinkTier)


@dataclass(frozen=True)
class Topology:
    """The node of every rank, as the ranks themselves reported it.

    node_of_rank: one node index a rank, in rank order. Any numbering: ranks may be laid out in
        blocks, cyclically or raggedly, so a node is never computed from a rank.
    """

    node_of_rank: tuple[int, ...]

    @classmethod
    def blocks(cls, world_size: int, ranks_per_node: int) -> Topology:
        """Consecutive ranks share a node. Raises ValueError when the blocks do not fill up."""
        if not 1 <= ranks_per_node <= world_size or world_size % ranks_per_node:
            raise ValueError(divisibility_message(world_size, ranks_per_node))
        return cls(tuple(rank // ranks_per_node for rank in range(world_size)))

    @property
    def world_size(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of_rank))

    def tiers(self) -> np.ndarray:
        """LinkTier of every (source, destination): int8 [R, R]."""
        node = np.asarray(self.node_of_rank)
        tiers = np.where(node[:, None] == node[None, :], LinkTier.SCALE_UP, LinkTier.SCALE_OUT)
        np.fill_diagonal(tiers, LinkTier.SELF)
        return tiers.astype(np.int8)

    def __str__(self) -> str:
        sizes = sorted({self.node_of_rank.count(node) for node in set(self.node_of_rank)})
        per_node = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        nodes = f"{self.num_nodes} node" + ("s" if self.num_nodes > 1 else "")
        return f"{nodes} x {per_node} ranks"


def divisibility_message(world_size: int, ranks_per_node: int) -> str:
    """Why `ranks_per_node` does not fit, and the nearest values that do."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    below = [n for n in divisors if n <= ranks_per_node][-1:]
    above = [n for n in divisors if n > ranks_per_node][:1]
    nearest = " or ".join(str(n) for n in below + above)
    return (
        f"topology.ranks_per_node={ranks_per_node} must be a positive divisor of the number of"
        f" ranks ({world_size}); nearest: {nearest}"
    )
