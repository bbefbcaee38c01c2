"""The third witness: what the kernel says went over the sockets of this rank's metered groups.

made    which socket leads to which rank; messages of known sizes, for the constants of the law
begin   a reading before the measured part
end     and one after it; comm.reconcile holds the difference against the counted bytes

A reading follows a barrier of the default group, whose connections are others, and waits until
nothing is unsent or unacknowledged on any socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from comm import tcp
from comm.reconcile import GroupLog, KernelLog, calibration
from comm.world import RankGroup, World

SETTLE_S = 5.0  # for a reading; a lost segment is sent again after 0.2 s, then 0.4 s, ...
POLL_S = 0.0002

# of a rank: number of a group -> its ranks, and both addresses of each of the rank's sockets in it
Ends = dict[int, tuple[tuple[int, ...], frozenset[tuple[tcp.Address, tcp.Address]]]]


class KernelWitness:
    """One rank's reading of its connections; to make one, and each method, is a collective.

    groups: metered groups of this rank; of the same partitions of the world on every rank
    reason: why nothing is to be read, the same on every rank; "" to read
    """

    def __init__(self, world: World, groups: Sequence[RankGroup], reason: str = "") -> None:
        started = time.perf_counter()
        self._rank, self._reason = world.rank, reason
        # A reading that failed on one rank: the others must not wait for it, and go on.
        self._unread = ""
        self._groups = list({group.number: group for group in groups if group.size > 1}.values())
        if not self._reason:
            ends = _exchange_ends(world, self._groups)
            self._reason = next((reason for reason, _ in ends if reason), "")
        if not self._reason:
            by_rank = [end for _, end in ends]
            self._reason = _unconnected(by_rank)
        if not self._reason:
            self._sockets = [_by_place(group, by_rank) for group in self._groups]
            self._calibration = self._calibrated()
        self._seconds = time.perf_counter() - started

    def begin(self) -> None:
        """What follows is counted."""
        if not self._reason:
            started = time.perf_counter()
            self._before = self._read()
            self._seconds += time.perf_counter() - started

    def end(self) -> KernelLog:
        """What the kernel saw since `begin`."""
        if self._reason:
            return KernelLog(reason=self._reason)
        started = time.perf_counter()
        seen = zip(self._groups, self._calibration, self._before, self._read(), strict=True)
        logs = [
            GroupLog(group.number, group.ranks, known, after - before)
            for group, known, before, after in seen
        ]
        self._seconds += time.perf_counter() - started
        return KernelLog(tuple(logs), self._unread, self._seconds)

    def _calibrated(self) -> list[np.ndarray]:
        """Bytes acknowledged in either exchange of comm.reconcile.calibration: [group][2, n]."""
        readings = [self._read()]
        for send in (_send_one_way, _send_both_ways):
            for group in self._groups:
                send(group)
            readings.append(self._read())
        return [np.diff(np.stack(rows), axis=0) for rows in zip(*readings, strict=True)]

    def _read(self) -> list[np.ndarray]:
        """Bytes that each place has acknowledged since it was connected: [group] int64 [n]."""
        dist.barrier()
        try:
            acked = read_settled(fd for group in self._sockets for fds in group for fd in fds)
        except (OSError, ValueError, TimeoutError) as error:
            self._unread = self._unread or f"rank {self._rank}: {error}"
            acked = {}
        return [
            np.array([sum(acked.get(fd, 0) for fd in fds) for fds in group], np.int64)
            for group in self._sockets
        ]


def read_settled(sockets: Iterable[int], within_s: float = SETTLE_S) -> dict[int, int]:
    """Bytes acknowledged on each socket, once all that was written to it is.

    Raises TimeoutError where that takes longer, else as comm.tcp.read_info.
    """
    sockets = list(sockets)
    deadline = time.monotonic() + within_s
    for fd in sockets:  # what this rank holds back, its peers wait for
        tcp.acknowledge_now(fd)
    acked = {}
    for fd in sockets:
        while not (info := tcp.read_info(fd)).settled:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{info.unsent} B unsent and {info.unacked} segments unacknowledged after"
                    f" {within_s:g} s, to {tcp.addresses(fd)}"
                )
            time.sleep(POLL_S)
        acked[fd] = info.acked
    return acked


def _exchange_ends(world: World, groups: Sequence[RankGroup]) -> list[tuple[str, Ends]]:
    """Of every rank: why it cannot read, "" if it can, and where its sockets lead."""
    mine: Ends = {}
    for group in groups:
        found = (tcp.addresses(fd) for fd in group.sockets)
        mine[group.number] = group.ranks, frozenset(ends for ends in found if ends)
    every: list = [None] * world.world_size
    dist.all_gather_object(every, (_no_reading(), mine))
    return every


def _no_reading() -> str:
    transport = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP")
    if transport == "TCP_TLS":  # records of its own, whose sizes follow no law
        return f"GLOO_DEVICE_TRANSPORT={transport}: encrypted bytes are not those that were counted"
    return tcp.why_unsupported()


def _unconnected(by_rank: Sequence[Ends]) -> str:
    """The first pair without a connection that both ends see, in words; "" where there is none."""
    for rank, own in enumerate(by_rank):
        for number, (ranks, ends) in own.items():
            for other in ranks:
                if other != rank and not ends & _turned(by_rank[other][number][1]):
                    return f"no socket of rank {rank} was found to lead to rank {other}"
    return ""


def _turned(
    ends: Iterable[tuple[tcp.Address, tcp.Address]],
) -> set[tuple[tcp.Address, tcp.Address]]:
    return {(there, here) for here, there in ends}


def _by_place(group: RankGroup, by_rank: Sequence[Ends]) -> list[list[int]]:
    """The sockets that lead to each place of the group: a rank's two addresses of a connection are
    those of the other end, exchanged."""
    leads_to = {
        ends: place
        for place, rank in enumerate(group.ranks)
        for ends in _turned(by_rank[rank][group.number][1])
    }
    sockets: list[list[int]] = [[] for _ in group.ranks]
    for fd in group.sockets:
        place = leads_to.get(tcp.addresses(fd))
        if place is not None:
            sockets[place].append(fd)
    return sockets


def _send_one_way(group: RankGroup) -> None:
    """The first exchange of the calibration: from each place to every later one."""
    sizes = calibration(group.size)[0].payload
    works = []
    for place, rank in enumerate(group.ranks):
        if place > group.rank:
            message = torch.zeros(int(sizes[group.rank, place]), dtype=torch.uint8)
            works.append((dist.isend(message, rank, group.process_group), message))
        elif place < group.rank:
            message = torch.empty(int(sizes[place, group.rank]), dtype=torch.uint8)
            works.append((dist.irecv(message, rank, group.process_group), message))
    for work, _ in works:
        work.wait()


def _send_both_ways(group: RankGroup) -> None:
    """The second: an all-to-all of known sizes, and one of nothing."""
    sizes = calibration(group.size)[1].payload
    for rows_to, rows_from in (
        (sizes[group.rank].tolist(), sizes[:, group.rank].tolist()),
        ([0] * group.size, [0] * group.size),
    ):
        message = torch.zeros(sum(rows_to), dtype=torch.uint8)
        received = torch.empty(sum(rows_from), dtype=torch.uint8)
        dist.all_to_all_single(received, message, rows_from, rows_to, group.process_group)
