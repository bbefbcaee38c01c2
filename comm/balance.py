"""Spreads a known load: replicates the hottest experts and packs all replicas on the ranks.

Two greedy steps, each as even as it can be, for any number of experts, slots and ranks:

1. *Replicate.* Each expert has one slot; each further slot goes to the expert with the largest
   load per replica (then the fewest replicas, then the lowest id) that is not yet on every rank.
2. *Pack.* Replicas, largest load first, go to the least loaded rank that has a free slot and does
   not hold the expert (ties: the lowest rank). Where none is left, one exchange makes room.

    load           60  9  6 12  3      5 experts, 3 ranks, 7 slots
    replicas        3  1  1  1  1      60 -> 30 30 -> 20 20 20
    load of one    20  9  6 12  3
    packed         rank 0: 0 3 4       rank 1: 0 1     rank 2: 0 2
    load of a rank         35                  29              26      max/mean 1.17
    without        rank 0: 0 1         rank 1: 2 3     rank 2: 4
    (contiguous)           69                  18               3      max/mean 2.30

The slots of the ranks differ by at most one, the first S % R ranks have one more. A load says how
often each expert was chosen; it is assumed to divide evenly over the replicas of an expert.

Legend: E logical experts, S slots, R ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from comm.placement import ExpertPlacement, experts_per_rank


def balance(
    load: Sequence[float] | np.ndarray,
    num_ranks: int,
    num_slots: int,
    node_of_rank: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Place experts by their load; the same answer whenever and wherever it is computed.

    load: [E] assignments of each expert, or any other measure that is not negative
    num_slots: S, at least E and at most E x R
    node_of_rank: [R] spreads the experts over the nodes first, so that all replicas of an expert
        stay on one node, then over the ranks of each node
    returns: physical_to_logical int64 [S], ascending on each rank, and first_slot int64 [R + 1]
    Raises ValueError for a load or sizes that cannot be placed.
    """
    weight = _checked_load(load)
    _check_sizes(len(weight), num_ranks, num_slots)
    sizes = experts_per_rank(num_slots, num_ranks)
    if node_of_rank is None:
        held = _spread(weight, np.arange(len(weight)), sizes)
    else:
        held = _spread_over_nodes(weight, sizes, np.asarray(node_of_rank))
    physical_to_logical = np.concatenate([np.sort(experts) for experts in held])
    return physical_to_logical.astype(np.int64), np.concatenate([[0], np.cumsum(sizes)])


def minimum_redundant(num_experts: int, num_ranks: int) -> int:
    """Fewest redundant experts with which every rank has equally many slots: 896 on 72 -> 40."""
    if num_experts < 1 or num_ranks < 1:
        raise ValueError(
            f"num_experts={num_experts} and num_ranks={num_ranks} must both be at least 1"
        )
    return -num_experts % num_ranks


def rank_load(load: Sequence[float] | np.ndarray, placement: ExpertPlacement) -> np.ndarray:
    """Load of each rank, float64 [R], where the replicas of an expert share its load [E] evenly."""
    weight = _checked_load(load)
    if len(weight) != placement.num_experts:
        raise ValueError(
            f"load has {len(weight)} experts, placement {placement.name} {placement.num_experts}"
        )
    share = weight / placement.replica_count
    return np.bincount(
        placement.slot_rank,
        weights=share[placement.physical_to_logical],
        minlength=placement.world_size,
    )


def max_over_mean(loads: Sequence[float] | np.ndarray) -> float:
    """How far the busiest is above the average: 1 is even, and so is no load at all."""
    loads = np.asarray(loads, dtype=np.float64)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def replicate(load: np.ndarray, num_slots: int, num_ranks: int) -> np.ndarray:
    """Replicas of each expert: int64 [E], 1 .. num_ranks each, num_slots in all."""
    count = np.ones(len(load), dtype=np.int64)
    hottest = [(-weight, 1, expert) for expert, weight in enumerate(load.tolist())]
    heapq.heapify(hottest)
    for _ in range(num_slots - len(load)):
        _, replicas, expert = heapq.heappop(hottest)
        count[expert] = replicas = replicas + 1
        if replicas < num_ranks:
            heapq.heappush(hottest, (-load[expert] / replicas, replicas, expert))
    return count


def _spread(load: np.ndarray, experts: np.ndarray, sizes: np.ndarray) -> list[list[int]]:
    """The experts of each rank, sizes[r] of them, distinct on each rank.

    load: float64 [E]; experts: those to be placed, ascending
    """
    count = replicate(load[experts], int(sizes.sum()), len(sizes))
    share = load[experts] / count
    largest_first = np.argsort(-share, kind="stable")
    bins = _Bins(sizes, dict(zip(experts.tolist(), share.tolist(), strict=True)))
    for index in largest_first.tolist():
        for _ in range(count[index]):
            bins.add(int(experts[index]))
    return bins.held


class _Bins:
    """Ranks being filled.

    sizes: int64 [R] slots of each rank; share: load of one replica, by expert
    """

    def __init__(self, sizes: np.ndarray, share: dict[int, float]) -> None:
        self.free = sizes.copy()
        self.share = share
        self.loads = np.zeros(len(sizes))
        self.held: list[list[int]] = [[] for _ in sizes]

    def add(self, expert: int) -> None:
        """One more replica, on the least loaded rank that can take it."""
        room = self.free > 0
        can = room & [expert not in experts for experts in self.held]
        if can.any():
            rank = int(np.argmin(np.where(can, self.loads, np.inf)))
        else:
            rank = self._make_room(expert, np.flatnonzero(room).tolist())
        self._put(expert, rank)

    def _make_room(self, expert: int, roomy: list[int]) -> int:
        """Free a slot on a rank without the expert: a rank that has room takes one of its others.

        Such an exchange exists whenever one is needed. A rank `full` without the expert has as many
        experts as slots, a rank with room at least two fewer others than slots, and sizes differ by
        one at most: so `full` holds an expert that the other does not.
        """
        exchanges = [
            (full, to, moved)
            for full, experts in enumerate(self.held)
            if expert not in experts
            for to in roomy
            for moved in experts
            if moved not in self.held[to]
        ]

        def larger_load(exchange: tuple[int, int, int]) -> float:
            full, to, moved = exchange
            grown = self.loads[full] - self.share[moved] + self.share[expert]
            return max(grown, self.loads[to] + self.share[moved])

        full, to, moved = min(exchanges, key=lambda one: (larger_load(one), one))
        self.held[full].remove(moved)
        self.loads[full] -= self.share[moved]
        self.free[full] += 1
        self._put(moved, to)
        return full

    def _put(self, expert: int, rank: int) -> None:
        self.held[rank].append(expert)
        self.loads[rank] += self.share[expert]
        self.free[rank] -= 1


def _spread_over_nodes(
    load: np.ndarray, sizes: np.ndarray, node_of_rank: np.ndarray
) -> list[list[int]]:
    """As `_spread` of all experts, in two steps: experts on nodes, then each node by itself."""
    if node_of_rank.shape != sizes.shape:
        raise ValueError(
            f"node_of_rank has {node_of_rank.size} entries, one a rank is needed ({len(sizes)})"
        )
    members = [np.flatnonzero(node_of_rank == node) for node in np.unique(node_of_rank)]
    places = _experts_per_node(len(load), [sizes[ranks] for ranks in members])
    of_node: list[list[int]] = [[] for _ in members]
    of_node_load = np.zeros(len(members))
    for expert in np.argsort(-load, kind="stable").tolist():
        has_room = np.array([len(e) < n for e, n in zip(of_node, places, strict=True)])
        per_rank = of_node_load / [len(ranks) for ranks in members]
        node = int(np.argmin(np.where(has_room, per_rank, np.inf)))
        of_node[node].append(expert)
        of_node_load[node] += load[expert]
    held: list[list[int]] = [[] for _ in sizes]
    for ranks, experts in zip(members, of_node, strict=True):
        spread = _spread(load, np.array(sorted(experts), dtype=np.int64), sizes[ranks])
        for rank, local in zip(ranks.tolist(), spread, strict=True):
            held[rank] = local
    return held


def _experts_per_node(num_experts: int, sizes: list[np.ndarray]) -> list[int]:
    """How many distinct experts each node takes, in proportion to its slots.

    sizes: for each node, the slots of its ranks. A rank holds an expert once, so a node needs at
    least as many experts as its largest rank has slots.
    """
    places = [int(slots.sum()) for slots in sizes]
    while sum(places) > num_experts:
        above = [
            (places[node] / slots.sum(), -node)
            for node, slots in enumerate(sizes)
            if places[node] > slots.max()
        ]
        if not above:
            raise ValueError(
                f"num_slots={sum(int(slots.sum()) for slots in sizes)} are too many to keep every"
                f" one of {num_experts} experts on one of {len(sizes)} nodes: a rank holds an"
                " expert at most once; use fewer slots, or no node_of_rank"
            )
        places[-max(above)[1]] -= 1
    return places


def _checked_load(load: Sequence[float] | np.ndarray) -> np.ndarray:
    weight = np.asarray(load, dtype=np.float64)
    if weight.ndim != 1 or not len(weight):
        raise ValueError(f"load is {list(weight.shape)}, must be [E], one number an expert")
    wrong = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))
    if len(wrong):
        raise ValueError(f"load of expert {wrong[0]} is {weight[wrong[0]]}; a load is 0 or more")
    return weight


def _check_sizes(num_experts: int, num_ranks: int, num_slots: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be at least 1")
    if not num_experts <= num_slots <= num_experts * num_ranks:
        raise ValueError(
            f"num_slots={num_slots} for {num_experts} experts on {num_ranks} ranks must be"
            f" {num_experts} (no redundant experts) .. {num_experts * num_ranks} (every expert on"
            f" every rank); num_redundant_experts is {num_slots - num_experts}"
        )
