"""The only road between ranks: every collective of a layer passes the meter and the split guard.

gloo reports success and leaves stale memory behind when a receiver expects more rows than were
sent, and aborts the process when it expects fewer. So no payload moves before both sides have
agreed on the splits: `announce` carries a header beside the counts (comm.header), and its `wait`
checks it. The length of the counts follows from the placement alone, which the ranks have compared
when they made it (moe.assemble); should it differ after all, the header says how many were meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from comm.exchange import Messages, receive_first
from comm.header import HEADER_WORDS, SplitMismatch, check_headers, counting, header
from comm.meter import EVERY_RANK, Position, TrafficMeter
from comm.staging import StagedWork, staged_all_to_all
from comm.wire import Parts
from comm.world import RankGroup, World

if TYPE_CHECKING:
    from comm.shm import Window

__all__ = ["PendingCounts", "PendingRows", "SplitMismatch", "Transport"]


class Transport:
    """A metered group of ranks and its staging memory.

    group: the ranks that take part, all of the world where none is given; splits and counts are
        by place in the group
    The staging memory is reused by every message: a result must be copied out of it before the
    next message of the same name, and nothing that a caller keeps may live in it.
    """

    def __init__(self, world: World, meter: TrafficMeter, group: RankGroup | None = None) -> None:
        self.world = world
        self.meter = meter
        self.group = world.everyone if group is None else group
        whole = self.group.size == world.world_size
        self._ranks = EVERY_RANK if whole else np.array(self.group.ranks)
        self._arena: dict[str, Tensor] = {}

    @cached_property
    def window(self) -> Window:
        """Shared memory of the group's ranks, kept as long as the transport; a collective of theirs
        the first time. Raises as comm.shm.open_window."""
        from comm.shm import open_window

        return open_window(self.group, self.world.timeout.total_seconds())

    def staging(self, name: str, num_rows: int, row_bytes: int) -> Tensor:
        """uint8 [num_rows, row_bytes] of reused memory, contents undefined."""
        wanted = num_rows * row_bytes
        held = self._arena.get(name)
        if held is None or held.numel() < wanted:
            # A quarter more than asked, so that ragged steps do not grow it again and again.
            held = torch.empty(wanted + wanted // 4, dtype=torch.uint8, device=self.world.device)
            self._arena[name] = held
        return held[:wanted].view(num_rows, row_bytes)

    def announce(
        self,
        position: Position,
        counts: Sequence[np.ndarray],
        num_expected: int,
        row_bytes: int,
        wire_code: int,
    ) -> PendingCounts:
        """Tell each rank how many rows it is about to get; learn the same from each by `wait`.

        counts: for each destination, int64 [n_dst]; n_dst may differ between destinations
        num_expected: n of this rank
        Between the two calls there is time to get the rows ready.
        """
        lengths = [len(count) for count in counts]
        headers = header(position, row_bytes, wire_code) + counting(np.array(lengths))
        pairs = zip(headers, counts, strict=True)
        words = np.concatenate([part for pair in pairs for part in pair])
        message = torch.from_numpy(words).to(self.world.device).view(-1, 1).view(torch.uint8)
        input_splits = [HEADER_WORDS + length for length in lengths]
        output_splits = [HEADER_WORDS + num_expected] * self.group.size
        received = torch.empty(
            (sum(output_splits), message.shape[1]), dtype=torch.uint8, device=self.world.device
        )
        parts = [("counts", message)]
        work = self._start(position, message, parts, input_splits, output_splits, received)
        expected = header(position, row_bytes, wire_code, num_expected)
        return PendingCounts(
            position, self._sources(position), self.world.rank, expected, received, work
        )

    def start_all_to_all(
        self,
        position: Position,
        message: Tensor,
        parts: Parts,
        input_splits: list[int],
        output_splits: list[int],
        empty_rows: Sequence[int] | None = None,
    ) -> PendingRows:
        """Begin to exchange rows: uint8 [sum(input_splits), b], which must stay as it is meanwhile.

        parts: (kind, uint8 [*, b_kind]), what a row of `message` is made of
        empty_rows: how many of the rows to each rank are padding
        """
        received = self.staging("received", sum(output_splits), message.shape[1])
        work = self._start(
            position, message, parts, input_splits, output_splits, received, empty_rows
        )
        return PendingRows(received, work)

    def all_to_all(
        self,
        position: Position,
        message: Tensor,
        parts: Parts,
        input_splits: list[int],
        output_splits: list[int],
        empty_rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Exchange rows: uint8 [sum(input_splits), b] -> uint8 [sum(output_splits), b], staged."""
        return self.start_all_to_all(
            position, message, parts, input_splits, output_splits, empty_rows
        ).wait()

    def _start(
        self,
        position: Position,
        message: Tensor,
        parts: Parts,
        input_splits: list[int],
        output_splits: list[int],
        received: Tensor,
        empty_rows: Sequence[int] | None = None,
    ) -> dist.Work | StagedWork | Messages:
        """Count a message and put it in flight; a view of a group finds its ranks here."""
        self.meter.record(
            *(position, message, parts, input_splits, output_splits),
            *(self._ranks, empty_rows, self.group.number),
        )
        if self.world.staged:
            return staged_all_to_all(
                received, message, output_splits, input_splits, self.group.process_group
            )
        if self.world.linked:
            return receive_first(
                *(received, message, output_splits, input_splits, self.group.process_group),
                self.world.timeout,
            )
        return dist.all_to_all_single(
            received, message, output_splits, input_splits, self.group.process_group, async_op=True
        )

    def _sources(self, position: Position) -> tuple[int, ...]:
        """The global ranks that a message comes from, in the order of its splits."""
        return self.group.ranks


@dataclass(frozen=True)
class PendingRows:
    """Rows on their way. received: uint8 [N, b], staged, valid once `work` is done"""

    received: Tensor
    work: dist.Work | StagedWork | Messages

    def wait(self) -> Tensor:
        self.work.wait()
        return self.received


@dataclass(frozen=True)
class PendingCounts:
    """An announcement on its way.

    sources: global ranks that it comes from; rank: this rank's global number
    header: int64 [4] as this rank means it
    received: uint8 [R * (4 + num_expected), 8], valid once `work` is done
    """

    position: Position
    sources: tuple[int, ...]
    rank: int
    header: np.ndarray
    received: Tensor
    work: dist.Work | StagedWork | Messages

    def wait(self) -> np.ndarray:
        """Counts from each rank of the group: int64 [R, num_expected]. Raises SplitMismatch."""
        self.work.wait()
        table = self.received.cpu().view(torch.int64).view(len(self.sources), -1).numpy()
        theirs, counts = table[:, : len(self.header)], table[:, len(self.header) :]
        check_headers(self.position, self.sources, self.rank, theirs, self.header)
        return counts
