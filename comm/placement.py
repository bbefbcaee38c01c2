"""Which rank owns which expert.

A *physical slot* is a place for one expert on one rank. Slots are numbered rank after rank, so
that sorting choices by slot sorts them by destination rank and, inside a rank, by expert:

    E = 7, R = 3      rank 0        rank 1      rank 2
    slot              0  1  2       3  4        5  6
    contiguous        0  1  2       3  4        5  6      <- logical expert
    round_robin       0  3  6       1  4        2  5
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ExpertPlacement:
    """Experts on ranks; a rank may own none.

    physical_to_logical: int64 [S], the logical expert in each slot, slots in rank-major order
    first_slot: int64 [R + 1], slots first_slot[r] .. first_slot[r + 1] belong to rank r
    """

    name: str
    num_experts: int
    physical_to_logical: np.ndarray
    first_slot: np.ndarray

    def __post_init__(self) -> None:
        owned = np.unique(self.physical_to_logical)
        if not np.array_equal(owned, np.arange(self.num_experts)):
            raise ValueError(
                f"placement {self.name}: the slots must hold every expert 0..{self.num_experts - 1}"
                f" and no other; they hold {len(owned)} distinct experts"
            )

    @property
    def world_size(self) -> int:
        return len(self.first_slot) - 1

    @property
    def num_slots(self) -> int:
        return len(self.physical_to_logical)

    @cached_property
    def slots_per_rank(self) -> np.ndarray:
        """int64 [R]"""
        return np.diff(self.first_slot)

    @cached_property
    def slot_rank(self) -> np.ndarray:
        """int64 [S], the rank of each slot"""
        return np.repeat(np.arange(self.world_size), self.slots_per_rank)

    @cached_property
    def logical_to_physical(self) -> np.ndarray:
        """int64 [E], the slot of each logical expert"""
        slots = np.empty(self.num_experts, dtype=np.int64)
        slots[self.physical_to_logical] = np.arange(self.num_slots)
        return slots

    def local_experts(self, rank: int) -> np.ndarray:
        """Logical experts of one rank in slot order: int64 [slots_per_rank[rank]]."""
        return self.physical_to_logical[self.first_slot[rank] : self.first_slot[rank + 1]]


def experts_per_rank(num_experts: int, world_size: int) -> np.ndarray:
    """Sizes as even as they can be, the first `num_experts % world_size` ranks own one more.

    30 experts on 8 ranks: 4 4 4 4 4 4 3 3, never a remainder heaped on the last rank.
    """
    base, remainder = divmod(num_experts, world_size)
    return base + (np.arange(world_size) < remainder).astype(np.int64)


def contiguous(num_experts: int, world_size: int) -> np.ndarray:
    """Logical expert of each slot, int64 [E]: neighbours in number are neighbours in place."""
    return np.arange(num_experts)


def round_robin(num_experts: int, world_size: int) -> np.ndarray:
    """Logical expert of each slot, int64 [E]: expert e lives on rank e % R."""
    return np.concatenate([np.arange(r, num_experts, world_size) for r in range(world_size)])


PLACEMENTS: dict[str, Callable[[int, int], np.ndarray]] = {
    "contiguous": contiguous,
    "round_robin": round_robin,
}


def build_placement(name: str, num_experts: int, world_size: int) -> ExpertPlacement:
    """One of PLACEMENTS. Raises ValueError for sizes below one."""
    if num_experts < 1 or world_size < 1:
        raise ValueError(
            f"placement {name}: num_experts={num_experts} and world_size={world_size}"
            " must both be at least 1"
        )
    first_slot = np.concatenate([[0], np.cumsum(experts_per_rank(num_experts, world_size))])
    return ExpertPlacement(name, num_experts, PLACEMENTS[name](num_experts, world_size), first_slot)
