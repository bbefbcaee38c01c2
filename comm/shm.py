"""A window: memory that the ranks of a group on one machine share, to put rows in and take them.

    begin     the next round; its copy of the memory is free
    put       rows into this rank's region (or another's, where it expects them)
    publish   ... they are there
    meet      everybody's are
    table     all regions as one table of rows: row `stride * place + i` is the i-th of that rank

There are two copies of everything, used in turn, and one barrier a round. That is enough: a rank
puts rows of round n + 2 where those of round n were, after it met the others in round n + 1. They
had published then, and a rank publishes round n + 1 only after it has finished round n, that is,
taken all it wants. So nobody writes where somebody still reads. `begin` insists that the round
before is over, and whoever takes rows copies them out, or is done with them, before it begins
another round.

After `meet` of round n everybody has published n, hence finished round n - 1: its copy is free from
then on, not only from `begin` of round n + 1. `lend` hands this rank's rows of it out ahead, to be
filled in place. That is safe where nobody else writes them: an area is either written by each rank
in its own region only (answers), or handed back into by the others (rows), and only the first kind
is lent.

The memory is a memfd: it has no name in any folder, its size is not bound by that of /dev/shm, and
it ends with the last process that has it, however that ended. A region is sparse: it spans more
than any rank should ever need, and only what is used exists. Pages stay once they are there, so
that no later round faults them in again.

Legend: R ranks of the group, b bytes of a row.
"""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from comm.barrier import Barrier, Peer, refusal
from comm.memory import free_bytes
from comm.wire import Parts
from comm.world import RankGroup

SPAN_BYTES = 1 << 40  # addresses, not memory: a process has 128 TiB, a transport takes one
AREAS = {"words": 1, "ids": 4, "rows": 30, "answers": 29}  # what a copy is divided into, in 64ths
TAG_WORDS = 4  # what each rank says about a round: it must mean the same as the others
_WORDS = {4: np.int32, 8: np.int64}  # numbers by their bytes
STEP_BYTES = 64 << 20  # memory is asked for in steps, each after a look at what is left
MIB = 1 << 20


class WindowError(RuntimeError):
    """Ranks cannot share memory as they should; the message is one line."""


Made = TypeVar("Made")


@dataclass(frozen=True)
class _Area:
    """Where one kind of thing lies in one copy. region: bytes of each rank"""

    start: int
    region: int


class Rows:
    """One area of one copy as rows of b bytes; what there is to know of it is found once.

    table: all regions, uint8 [R * stride, b]; array: the same for numpy
    words: where rows are single numbers, all regions as such: int32 or int64 [R, stride]
    stride: rows from one rank's first row to the next one's: a power of two, so that it is quick to
        tell whose a row is, and so few that 32 bits number all rows of the table
    """

    def __init__(
        self, fd: int, memory: Tensor, area: _Area, size: int, place: int, row_bytes: int
    ) -> None:
        most = min(area.region // row_bytes, (1 << 31) // size)
        self.stride = stride = 1 << (most.bit_length() - 1)
        with torch.inference_mode(False):
            span = memory[area.start : area.start + size * stride * row_bytes]
            self.table = span.view(size * stride, row_bytes)
        self.array = self.table.numpy()
        self._own = self.array[place * stride : (place + 1) * stride]
        if row_bytes in _WORDS:
            self.words = self.array.view(_WORDS[row_bytes]).reshape(size, stride)
            self._own_words = self.words[place]
        self._fd, self._start, self._size = fd, area.start, size
        self._place, self._row_bytes = place, row_bytes
        self._held = [0] * size
        self._typed: dict[torch.dtype, Tensor] = {}

    def as_type(self, dtype: torch.dtype) -> Tensor:
        """The table as values: [R * stride, b / itemsize]."""
        table = self._typed.get(dtype)
        if table is None:
            with torch.inference_mode(False):
                table = self._typed[dtype] = self.table.view(dtype)
        return table

    def room(
        self, num_rows: int, place: int, start: int = 0, dtype: torch.dtype = torch.uint8
    ) -> Tensor:
        """As Window.room."""
        self._hold(start + num_rows, place)
        first = place * self.stride + start
        return self.as_type(dtype)[first : first + num_rows]

    def own_room(self, num_rows: int) -> np.ndarray:
        """The same of this rank's region, from its first row on, for numpy."""
        self._hold(num_rows, self._place)
        return self._own[:num_rows]

    def own_words(self, num_words: int) -> np.ndarray:
        """The same as numbers."""
        self._hold(num_words, self._place)
        return self._own_words[:num_words]

    def _hold(self, num_rows: int, place: int) -> None:
        """Have the pages before they are touched: a touch that fails would kill the process."""
        held, row_bytes = self._held[place], self._row_bytes
        if num_rows <= held:
            return
        if num_rows > self.stride:
            raise WindowError(
                f"shared memory: {num_rows} rows of {row_bytes} B do not fit into the {self.stride}"
                f" that a rank may have in a window of {self._size} ranks; use more ranks or fewer"
                " tokens"
            )
        # A quarter more than asked, so that ragged steps do not grow it again and again.
        wanted = min(self.stride, num_rows + num_rows // 4)
        first = self._start + (place * self.stride + held) * row_bytes
        last = first + (wanted - held) * row_bytes
        for start in range(first, last, STEP_BYTES):
            _allocate(self._fd, start, min(STEP_BYTES, last - start))
        self._held[place] = wanted


class Window:
    """One rank's side of a window; `open_window` makes it.

    place: of this rank in the group
    """

    def __init__(
        self, fd: int, span: int, place: int, peers: Sequence[Peer], timeout_s: float
    ) -> None:
        memory = mmap.mmap(fd, span)
        self._span = span
        self.place, self.size = place, len(peers)
        self._fd, self._closed = fd, weakref.finalize(self, os.close, fd)
        with torch.inference_mode(False):  # opened in one mode, it is used in the other
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._barrier = Barrier(memory, 0, place, peers, timeout_s)
        tags_at = Barrier.num_bytes(self.size)
        self._tags = np.frombuffer(memory, np.int64, 2 * self.size * TAG_WORDS, tags_at).reshape(
            2, self.size, TAG_WORDS
        )
        self._areas = _divide(span, self.size, tags_at + self._tags.nbytes)
        self._rows: tuple[dict[tuple[str, int], Rows], ...] = ({}, {})  # of each copy
        self._round, self._open = 0, False
        self._lent = self._lent_bytes = 0  # where it begins, and how much

    def begin(self) -> int:
        """Start the next round, when this rank is done with what it took in the last: its copy."""
        assert not self._open, "a round begins before the last one is over"
        self._round += 1
        self._open = True
        return self._round % 2

    def room(self, area: str, num_rows: int, row_bytes: int, place: int, start: int = 0) -> Tensor:
        """uint8 [num_rows, b]: rows start, start + 1, ... of a rank's region, to be written.

        place: whose region; by agreement, each row has one writer in a round
        Raises WindowError where there is no memory for them.
        """
        return self.rows(area, row_bytes).room(num_rows, place, start)

    def lend(
        self, area: str, num_rows: int, row_bytes: int, dtype: torch.dtype
    ) -> tuple[np.ndarray, Tensor, int]:
        """What `room` will give this rank in the next round, to be filled before it begins: uint8
        [num_rows, b], the same as values, and a number that `is_lent` wants to hear.

        Between `meet` and `begin` only. Any round but the next one uses the memory for its own.
        """
        assert not self._open, "memory of the next round is lent out before this one is over"
        free = self.rows_of((self._round + 1) % 2, area, row_bytes)
        values = free.room(num_rows, self.place, dtype=dtype)
        self._lent, self._lent_bytes = values.data_ptr(), num_rows * row_bytes
        return free.own_room(num_rows), values, self._round + 1

    def is_lent(self, values: Tensor, lent: int) -> bool:
        """Are these the rows that were lent out for the next round under this number, where they
        lay? Raises RuntimeError for values in memory of the window that another round has for its
        own."""
        address, num_bytes = values.data_ptr(), values.nbytes
        if not num_bytes or not 0 <= address - self._address < self._span:
            return False
        behind = address - self._lent
        if lent != self._round + 1 or not 0 <= behind < self._lent_bytes:
            raise RuntimeError(
                "expert_output lies in memory that was lent to an earlier dispatch and is in use"
                " again: combine before the next dispatch, or clone what is kept longer"
            )
        return behind == 0 and num_bytes == self._lent_bytes and values.is_contiguous()

    def put(self, area: str, parts: Parts) -> Tensor:
        """Lay parts side by side in this rank's region: uint8 [N, b] there."""
        num_rows = len(parts[0][1])
        row_bytes = sum(part.shape[1] for _, part in parts)
        rows = self.room(area, num_rows, row_bytes, self.place)
        if len(parts) == 1:
            rows.copy_(parts[0][1])
        else:
            torch.cat([part for _, part in parts], dim=1, out=rows)
        return rows

    def publish(self, tag: Sequence[int]) -> None:
        """What this rank puts is there; tag: int64 [4], what it takes the round to be."""
        self._tags[self._round % 2, self.place] = tag
        self._barrier.arrive()

    def meet(self) -> np.ndarray:
        """Wait until all have published: their tags, int64 [R, 4]. Raises RankLost."""
        self._barrier.wait()
        self._open = False
        return self._tags[self._round % 2]

    def stride(self, area: str, row_bytes: int) -> int:
        """Rows from one rank's first row to the next one's."""
        return self.rows_of(0, area, row_bytes).stride

    def table(self, area: str, row_bytes: int) -> Tensor:
        """All regions: uint8 [R * stride, b]. What nobody put reads as zeros or stale rows."""
        return self.rows(area, row_bytes).table

    def rows(self, area: str, row_bytes: int) -> Rows:
        """The same, and what else there is of this area in this round."""
        return self.rows_of(self._round % 2, area, row_bytes)

    def rows_of(self, copy: int, area: str, row_bytes: int) -> Rows:
        key = (area, row_bytes)
        rows = self._rows[copy].get(key)
        if rows is None:
            where = self._areas[copy][area]
            rows = Rows(self._fd, self._bytes, where, self.size, self.place, row_bytes)
            self._rows[copy][key] = rows
        return rows


def open_window(group: RankGroup, timeout_s: float) -> Window:
    """Share memory with all ranks of a group; a collective among them.

    Raises ValueError where the system cannot or the ranks are on several machines, WindowError
    where one of them gets no memory: on every rank, with the same words.
    """
    if (reason := refusal()) is not None:
        raise ValueError(reason)
    rank, span = group.ranks[group.rank], _span()
    made = _try(lambda: _new_memory(span)) if group.rank == 0 else -1
    mine = (_machine(), Peer.myself(rank), made, span)
    every = _gather(group, mine)
    _check_machines(group.ranks, [machine for machine, *_ in every])
    peers = [peer for _, peer, *_ in every]
    _, leader, theirs, span = every[0]

    def join() -> Window:
        if isinstance(theirs, str):
            raise WindowError(theirs)
        path = f"/proc/{leader.pid}/fd/{theirs}"
        fd = made if group.rank == 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return Window(fd, span, group.rank, peers, timeout_s)

    window = _try(join)
    outcomes = _gather(group, window if isinstance(window, str) else None)
    for peer, outcome in zip(peers, outcomes, strict=True):
        if outcome is not None:
            raise WindowError(f"shared memory: rank {peer.rank}: {outcome}")
    return window


def _span() -> int:
    """Addresses for one window: an eighth of what a process may have, where that is limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return SPAN_BYTES
    return min(SPAN_BYTES, limit // 8 // mmap.PAGESIZE * mmap.PAGESIZE)


def _new_memory(span: int) -> int:
    fd = os.memfd_create("wideep-window", os.MFD_CLOEXEC)
    os.ftruncate(fd, span)
    return fd


def _try(make: Callable[[], Made]) -> Made | str:
    """What `make` returns, or in words why it could not: the others must hear of it."""
    try:
        return make()
    except (OSError, ValueError, WindowError) as error:
        return str(error)


def _gather(group: RankGroup, value: object) -> list:
    every: list = [None] * group.size
    dist.all_gather_object(every, value, group=group.process_group)
    return every


def _machine() -> tuple[str, str]:
    """Two processes with the same value can see each other in /proc and share memory.

    Those in different network namespaces could, but stand for nodes that cannot (moe.netns).
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return boot, os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/net")


def _check_machines(ranks: Sequence[int], machines: Sequence[tuple[str, str]]) -> None:
    for rank, machine in zip(ranks, machines, strict=True):
        if machine != machines[0]:
            where = "machine" if machine[0] != machines[0][0] else "node or container (namespace)"
            raise ValueError(
                f"dispatcher=one_sided needs all ranks of a group on one machine, and rank {rank}"
                f" is on another {where} than rank {ranks[0]}; use another dispatcher or a smaller"
                " ep_size"
            )


def _divide(span: int, size: int, used: int) -> list[dict[str, _Area]]:
    """The areas of both copies, from `used` on; each region begins on a page."""
    page = mmap.PAGESIZE
    start = -(-used // page) * page
    share = (span - start) // (2 * sum(AREAS.values()))
    areas = []
    for _ in range(2):
        copy = {}
        for name, parts in AREAS.items():
            region = share * parts // size // page * page
            copy[name] = _Area(start, region)
            start += region * size
        areas.append(copy)
    return areas


def _allocate(fd: int, start: int, num_bytes: int) -> None:
    free = free_bytes()
    if num_bytes > free:
        raise WindowError(
            f"out of memory: rows in shared memory need {num_bytes / MIB:,.0f} MiB more here, and"
            f" {free / MIB:,.0f} MiB are free; use fewer tokens or a smaller width"
        )
    try:
        os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        raise WindowError(
            f"out of memory: {num_bytes / MIB:,.1f} MiB for rows in shared memory: {error.strerror}"
        ) from error
