"""What was counted: bytes from each rank to each, by collective and group of ranks.

Needed and moved are kept apart. Needed is what a rank must get from another, straight from where it
lies; a reduction is taken as if each member added up an equal share. Moved is what gloo puts on
its connections instead: around rings and down trees.

Matrices are int64 [R, R], [src, dst] by global rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from comm.counting.gloo import NEEDED, Call, Matrix, moved, needed
from comm.topology import TIER_NAMES, Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from comm.verdict import Verdict

NETWORK, SELF = "network", TIER_NAMES[0]
TIERS = (*TIER_NAMES, NETWORK)


@dataclass
class Cell:
    """One kind of collective in one group. lawful: what gloo moves for all of them is known"""

    needed: Matrix
    moved: Matrix
    messages: Matrix
    calls: int = 0
    lawful: bool = True

    @classmethod
    def empty(cls, world_size: int) -> Cell:
        return cls(*np.zeros((3, world_size, world_size), np.int64))

    def add(self, other: Cell) -> None:
        """Another rank's: of a collective all members make the same number."""
        self.needed += other.needed
        self.moved += other.moved
        self.messages += other.messages
        self.calls = max(self.calls, other.calls)
        self.lawful &= other.lawful


@dataclass
class Traffic:
    """The ledger of one rank, or of all after `gather`.

    rank: whose; None: of all
    topology: None where the nodes are not known yet
    unknown: calls of operators that are not understood here, by name
    kernel: what the kernel says to it, after a block with kernel=True
    """

    world_size: int
    rank: int | None
    topology: Topology | None = None
    cells: dict[tuple[str, tuple[int, ...]], Cell] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    kernel: Verdict | None = None
    open: bool = False

    def record(self, call: Call, ranks: tuple[int, ...], gloo: bool) -> None:
        """Enter a collective of this rank. ranks: of its group, by place"""
        cell = self.cells.setdefault((call.op, ranks), Cell.empty(self.world_size))
        own, members = ranks[call.place], list(ranks)
        cell.calls += 1
        cell.needed[own, members] += needed(call)
        law = moved(call) if gloo else None
        if law is None:
            cell.lawful = False
            return
        cell.moved[own, members] += law[0]
        cell.messages[own, members] += law[1]

    def matrix(
        self,
        *,
        op: str | None = None,
        group: ProcessGroup | Sequence[int] | None = None,
        tier: str | None = None,
        moved: bool = False,
    ) -> Matrix:
        """Bytes from each rank to each, int64 [R, R]; before `gather` this rank's row of it.

        op: one kind of collective (comm.counting.gloo.NEEDED has the names); group: one group's
        tier: self, scale_up, scale_out, or network for the last two; other pairs are 0
        moved: by gloo, not needed. Raises ValueError where that or the nodes are not known.
        """
        total = np.zeros((self.world_size, self.world_size), np.int64)
        for (name, ranks), cell in self._chosen(op, group):
            if moved and not cell.lawful:
                raise ValueError(f"what is moved for {name} of ranks {ranks} is not known here")
            total += cell.moved if moved else cell.needed
        if tier is None:
            return total
        return np.where(self._tiers(tier), total, 0)

    def bytes(
        self,
        *,
        op: str | None = None,
        group: ProcessGroup | Sequence[int] | None = None,
        tier: str | None = None,
        moved: bool = False,
    ) -> int:
        """The sum of `matrix` with the same choices; what stays on its rank is in it but for
        tier="network"."""
        return int(self.matrix(op=op, group=group, tier=tier, moved=moved).sum())

    def calls(
        self, *, op: str | None = None, group: ProcessGroup | Sequence[int] | None = None
    ) -> int:
        """How many collectives a rank made."""
        return sum(cell.calls for _, cell in self._chosen(op, group))

    @property
    def messages(self) -> Matrix:
        """Messages that gloo makes of it, int64 [R, R]."""
        return sum(
            (cell.messages for cell in self.cells.values()), Cell.empty(self.world_size).moved
        )

    @property
    def lawless(self) -> tuple[str, ...]:
        """The collectives of which it is not known what is moved."""
        return tuple(op for (op, _), cell in self.cells.items() if not cell.lawful)

    def gather(self) -> Traffic:
        """The traffic of all ranks, on every rank; a collective of the world, after the block."""
        import torch.distributed as dist

        if self.open:
            raise RuntimeError("gather() belongs after the block: its own traffic would be counted")
        node = os.environ.get("GROUP_RANK") or socket.gethostname()
        every: list = [None] * self.world_size
        dist.all_gather_object(every, (node, self))
        names = {name: number for number, name in enumerate(dict.fromkeys(one for one, _ in every))}
        nodes = Topology(tuple(names[name] for name, _ in every))
        whole = replace(self, rank=None, topology=self.topology or nodes, cells={}, unknown={})
        for _, ledger in every:
            for key, cell in ledger.cells.items():
                whole.cells.setdefault(key, Cell.empty(self.world_size)).add(cell)
            for name, calls in ledger.unknown.items():
                whole.unknown[name] = max(calls, whole.unknown.get(name, 0))
        return whole

    def _chosen(
        self, op: str | None, group: ProcessGroup | Sequence[int] | None
    ) -> Iterator[tuple[tuple[str, tuple[int, ...]], Cell]]:
        if op is not None and op not in NEEDED:
            raise ValueError(f"op={op!r} is none of {', '.join(NEEDED)}")
        if op is None and self.unknown:
            raise ValueError(f"operators that are not known here were called: {self.unknown}")
        ranks = None if group is None else _ranks(group)
        for key, cell in self.cells.items():
            if op in (None, key[0]) and ranks in (None, key[1]):
                yield key, cell

    def _tiers(self, tier: str) -> np.ndarray:
        own = np.eye(self.world_size, dtype=bool)
        if tier not in TIERS:
            raise ValueError(f"tier={tier!r} is none of {', '.join(TIERS)}")
        if tier in (SELF, NETWORK):
            return own if tier == SELF else ~own
        if self.topology is None:
            raise ValueError(
                "which rank is on which node is known after gather(), or by"
                " count_traffic(ranks_per_node=...)"
            )
        return self.topology.tiers() == TIER_NAMES.index(tier)


def _ranks(group: ProcessGroup | Sequence[int]) -> tuple[int, ...]:
    if isinstance(group, Sequence):
        return tuple(group)
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))
