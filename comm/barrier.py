"""A barrier of processes in memory that they share, by futex; Linux only.

    arrive   flag[me] = n; arrivals += 1; the last one sets generation = n and wakes all
    wait     until generation is n

Arriving and waiting are apart, so that a rank can work between the two. Nobody arrives at n + 1
before it has waited for n, hence `generation` is n - 1 or n for whoever waits for n, and whoever
finds all arrivals there may set it: a rank that is killed just before it would is helped.

Memory ordering. Flags and generation have one value to write at a time and are plain aligned words.
The counter is raised by the kernel (FUTEX_WAKE_OP), whose atomic operations on user memory are full
barriers: what a rank wrote before `arrive` is visible to whoever sees the counter raised. `wait`
ends with one more of these (it adds nothing), so that no later load runs ahead of the generation's.
On x86 loads keep their order by themselves, and it is left out.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221}
FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAKE_OP = 0, 1, 5
LINE_BYTES = 64  # arrivals, generation and the flags: each on cache lines of their own
LOOK_S = 0.1  # how long a sleeper sleeps before it looks whether somebody died
STRONG_ORDER = platform.machine() == "x86_64"
SPIN_S = 50e-6


class RankLost(ConnectionError):
    """Another rank ended, or did not come in time. ended: the former, and the message names it"""

    def __init__(self, message: str, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


def refusal() -> str | None:
    """Why ranks cannot meet in shared memory on this machine; None where they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"shared memory of ranks needs Linux (memfd, futex); this is {sys.platform}"
    if platform.machine() not in SYS_FUTEX:
        return f"shared memory of ranks: no futex call known for {platform.machine()}"
    return None


@dataclass(frozen=True)
class Peer:
    """A rank as a process. rank: global; pid, started: name it for good, pids are used again"""

    rank: int
    pid: int
    started: str

    @classmethod
    def myself(cls, rank: int) -> Peer:
        return cls(rank, os.getpid(), _stat(os.getpid())[19])

    def ended(self) -> bool:
        """Has the process gone, or is it a corpse that nobody has buried?"""
        stat = _stat(self.pid)
        return not stat or stat[0] in "ZX" or stat[19] != self.started


def _stat(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on (proc_pid_stat(5), field 3); empty: no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


class Barrier:
    """One rank's side of it.

    memory: shared by all, zeros at first; offset: of the barrier in it; place: of this rank among
    `peers`
    """

    def __init__(
        self,
        memory: mmap.mmap,
        offset: int,
        place: int,
        peers: Sequence[Peer],
        timeout_s: float,
    ) -> None:
        word = ctypes.c_uint32.from_buffer
        self._arrivals = word(memory, offset)
        self._generation = word(memory, offset + LINE_BYTES)
        self._flags = (ctypes.c_uint32 * len(peers)).from_buffer(memory, offset + 2 * LINE_BYTES)
        self._place, self._peers, self._timeout_s = place, tuple(peers), timeout_s
        self._futex = _Futex()
        self._arrived_at = self._waited_for = 0
        crowded = len(peers) > (os.cpu_count() or 1)
        self._spin_s = 0.0 if crowded else SPIN_S  # spinning would keep the others from arriving

    @staticmethod
    def num_bytes(num_peers: int) -> int:
        """Bytes of shared memory that a barrier of so many ranks takes."""
        return 2 * LINE_BYTES + -(-4 * num_peers // LINE_BYTES) * LINE_BYTES

    def arrive(self) -> None:
        """Say that this rank is there; what it wrote before is visible to whoever passes."""
        assert self._arrived_at == self._waited_for, "arrived twice without waiting"
        self._arrived_at += 1
        self._flags[self._place] = self._arrived_at & 0xFFFFFFFF
        self._futex.add(self._arrivals, 1)
        self._publish_if_complete()

    def wait(self) -> None:
        """Until all are there. Raises RankLost with the ranks that ended or did not come."""
        assert self._arrived_at == self._waited_for + 1, "waited without arriving"
        wanted = self._arrived_at & 0xFFFFFFFF
        if self._generation.value != wanted:
            self._wait_for(wanted)
        if not STRONG_ORDER:
            self._futex.add(self._generation, 0)
        self._waited_for = self._arrived_at

    def _wait_for(self, wanted: int) -> None:
        started = time.monotonic()
        if self._spin_s:
            while self._generation.value != wanted and time.monotonic() < started + self._spin_s:
                pass
        while self._generation.value != wanted:
            if not self._futex.wait(self._generation, (wanted - 1) & 0xFFFFFFFF, LOOK):
                self._look_around(started + self._timeout_s)

    def _publish_if_complete(self) -> bool:
        wanted = self._arrived_at & 0xFFFFFFFF
        if self._arrivals.value != (len(self._peers) * self._arrived_at) & 0xFFFFFFFF:
            return False
        self._generation.value = wanted
        self._futex.wake_all(self._generation)
        return True

    def _look_around(self, deadline: float) -> None:
        if self._publish_if_complete():
            return
        wanted = self._arrived_at & 0xFFFFFFFF
        flags = list(self._flags)
        missing = [
            peer for peer, flag in zip(self._peers, flags, strict=True) if flag != wanted
        ] or list(self._peers)  # all have said so, but one ended before it was counted
        ended = [peer for peer in missing if peer.ended()]
        if ended:
            raise RankLost(f"{named(ended)} ended while rank {self._me} waited", ended=True)
        if time.monotonic() > deadline:
            raise RankLost(
                f"timed out waiting: {named(missing)} did not come within {self._timeout_s:g} s"
                f" where rank {self._me} waited"
            )

    @property
    def _me(self) -> int:
        return self._peers[self._place].rank


def named(peers: Sequence[Peer]) -> str:
    """'rank 3' or 'ranks 3, 5'."""
    ranks = ", ".join(str(peer.rank) for peer in peers)
    return f"rank{'s' if len(peers) > 1 else ''} {ranks}"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


LOOK = _Timespec(0, int(LOOK_S * 1e9))


class _Futex:
    """The three futex operations (futex(2)), on words of memory that processes share."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        number, word = ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32)
        limit = ctypes.POINTER(_Timespec)
        self._syscall.argtypes = [ctypes.c_long, word, ctypes.c_int, number, limit, word, number]
        self._syscall.restype = ctypes.c_long
        self._number = SYS_FUTEX[platform.machine()]

    def add(self, word: ctypes.c_uint32, value: int) -> None:
        """Atomically, with a full barrier. value: 0..2047"""
        operation = 1 << 28 | value << 12  # FUTEX_OP_ADD
        self._call(word, FUTEX_WAKE_OP, 0, None, word, operation)

    def wait(self, word: ctypes.c_uint32, expected: int, limit: _Timespec) -> bool:
        """Sleep while the word is `expected`, at most so long; False: the time was up."""
        return self._call(word, FUTEX_WAIT, expected, limit, None, 0) != errno.ETIMEDOUT

    def wake_all(self, word: ctypes.c_uint32) -> None:
        self._call(word, FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

    def _call(
        self,
        word: ctypes.c_uint32,
        operation: int,
        value: int,
        limit: _Timespec | None,
        other: ctypes.c_uint32 | None,
        last: int,
    ) -> int:
        if self._syscall(self._number, word, operation, value, limit, other, last) >= 0:
            return 0
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, f"futex: {os.strerror(code)}")
        return code
