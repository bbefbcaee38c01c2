"""Which rank owns which expert.

A *physical slot* is a place for one expert on one rank. Slots are numbered rank after rank, so
that sorting choices by slot sorts them by destination rank and, inside a rank, by expert:

    E = 7, R = 3      rank 0        rank 1      rank 2
    slot              0  1  2       3  4        5  6
    contiguous        0  1  2       3  4        5  6      <- logical expert
    round_robin       0  3  6       1  4        2  5

With more slots than experts, some experts have several *replicas*, each on a rank of its own:

    E = 4, R = 2      rank 0        rank 1
    slot              0  1  2       3  4  5
                      0  1  2       0  2  3              <- experts 0 and 2 twice

Legend: E logical experts, S slots (S >= E), R ranks among which a dispatcher works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ExpertPlacement:
    """Experts on ranks; a rank may own none, and holds an expert at most once.

    physical_to_logical: int64 [S], the logical expert in each slot, slots in rank-major order
    first_slot: int64 [R + 1], slots first_slot[r] .. first_slot[r + 1] belong to rank r
    Raises ValueError for arrays that do not fit together, an expert without a slot, an expert that
    does not exist, and a rank that holds an expert twice.
    """

    name: str
    num_experts: int
    physical_to_logical: np.ndarray
    first_slot: np.ndarray

    def __post_init__(self) -> None:
        self._check_slots()
        self._check_experts()

    def _check_slots(self) -> None:
        first, num_slots = self.first_slot, len(self.physical_to_logical)
        if len(first) < 2 or first[0] != 0 or first[-1] != num_slots or (np.diff(first) < 0).any():
            raise ValueError(
                f"placement {self.name}: first_slot must rise from 0 to the number of slots"
                f" ({num_slots}); it is {_some(first)}"
            )

    def _check_experts(self) -> None:
        owned = np.unique(self.physical_to_logical)
        every = np.arange(self.num_experts)
        if not np.array_equal(owned, every):
            raise ValueError(
                f"placement {self.name}: the slots must hold every expert 0..{self.num_experts - 1}"
                f" and no other; they hold {len(owned)} distinct experts"
                f" (without a slot: {_some(np.setdiff1d(every, owned))};"
                f" unknown: {_some(np.setdiff1d(owned, every))})"
            )
        key = np.sort(self.slot_rank * self.num_experts + self.physical_to_logical)
        twice = key[1:][key[1:] == key[:-1]]
        if len(twice):
            rank, expert = divmod(int(twice[0]), self.num_experts)
            raise ValueError(
                f"placement {self.name}: rank {rank} holds expert {expert} more than once;"
                " replicas of an expert belong on different ranks"
            )

    @property
    def world_size(self) -> int:
        return len(self.first_slot) - 1

    @property
    def num_slots(self) -> int:
        return len(self.physical_to_logical)

    @property
    def num_redundant_experts(self) -> int:
        """Slots beyond one for each expert: S - E"""
        return self.num_slots - self.num_experts

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
        """int64 [E], the slot of each logical expert's first replica"""
        slots = np.empty(self.num_experts, dtype=np.int64)
        # From the last slot to the first: where an expert has several, the lowest is written last.
        slots[self.physical_to_logical[::-1]] = np.arange(self.num_slots)[::-1]
        return slots

    @cached_property
    def replica_count(self) -> np.ndarray:
        """int64 [E], slots of each logical expert, at least 1 and at most R"""
        return np.bincount(self.physical_to_logical, minlength=self.num_experts)

    @cached_property
    def replicas(self) -> np.ndarray:
        """int64 [E, largest replica_count], slots of each expert, ascending, then -1"""
        by_expert = np.argsort(self.physical_to_logical, kind="stable")
        held = np.arange(self.replica_count.max()) < self.replica_count[:, None]
        slots = np.full(held.shape, -1, dtype=np.int64)
        slots[held] = by_expert
        return slots

    @cached_property
    def slot_on_rank(self) -> np.ndarray:
        """int64 [R, E], the slot of each expert on each rank, -1 where the rank has none"""
        slots = np.full((self.world_size, self.num_experts), -1, dtype=np.int64)
        slots[self.slot_rank, self.physical_to_logical] = np.arange(self.num_slots)
        return slots

    def local_experts(self, rank: int) -> np.ndarray:
        """Logical experts of one rank in slot order: int64 [slots_per_rank[rank]]."""
        return self.physical_to_logical[self.first_slot[rank] : self.first_slot[rank + 1]]


def _some(values: np.ndarray) -> str:
    """The first few of a list, for a message."""
    shown = ", ".join(str(value) for value in values[:8].tolist())
    return (shown or "none") + (f", ... ({len(values)})" if len(values) > 8 else "")


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


def placement_from_slots(
    name: str,
    num_experts: int,
    physical_to_logical: Sequence[int] | np.ndarray,
    first_slot: Sequence[int] | np.ndarray,
) -> ExpertPlacement:
    """A placement given slot by slot, as balancing computes it or a file holds it.

    physical_to_logical: [S] any integer type; first_slot: [R + 1]
    The arrays are copied. Raises ValueError as ExpertPlacement, and for numbers that are not whole.
    """
    return ExpertPlacement(
        name,
        num_experts,
        _whole_numbers(name, "physical_to_logical", physical_to_logical),
        _whole_numbers(name, "first_slot", first_slot),
    )


def _whole_numbers(name: str, what: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    given = np.asarray(values)
    if given.ndim != 1 or given.dtype.kind not in "iu" or not len(given):
        raise ValueError(
            f"placement {name}: {what} must be a list of whole numbers;"
            f" it is {given.dtype} {list(given.shape)}"
        )
    return given.astype(np.int64)
