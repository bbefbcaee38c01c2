"""The third witness: what the kernel says went over the sockets of this rank's metered groups.

made    which socket leads to which rank
begin   a reading, messages of known sizes for the constants of the law, and another reading
end     a third, after the measured part; comm.reconcile holds what grew against the counted bytes

A reading follows a barrier of the default group, whose connections are others, and waits until
nothing is unsent or unacknowledged on any socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from comm import tcp
from comm.reconcile import CHAIN_BYTES, GroupLog, KernelLog, calibration_sizes
from comm.world import RankGroup

SETTLE_S = 5.0  # for a reading; a lost segment is sent again after 0.2 s, then 0.4 s, ...
POLL_S = 0.0002

# Of a rank: number of a group -> its ranks, and both addresses of each of the rank's sockets in it.
Ends = dict[int, tuple[tuple[int, ...], list[tuple[str, str]]]]


class Member(Protocol):
    """Who reads, of how many."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class KernelWitness:
    """One rank's reading of its connections; to make one, and each method, is a collective.

    groups: metered groups of this rank; of the same partitions of the world on every rank
    reason: why nothing is to be read, the same on every rank; "" to read
    control: of all ranks, for barriers and addresses, not one of `groups`; None: the default group
    """

    def __init__(
        self,
        world: Member,
        groups: Sequence[RankGroup],
        reason: str = "",
        control: dist.ProcessGroup | None = None,
    ) -> None:
        started, self._control = time.perf_counter(), control
        self._rank, self._reason = world.rank, reason
        # A reading that failed on one rank: the others must not wait for it, and go on.
        self._unread = ""
        self._groups = list({group.number: group for group in groups if group.size > 1}.values())
        if not self._reason:
            self._find_sockets(world)
        self._seconds = time.perf_counter() - started

    def begin(self) -> None:
        """What follows is counted."""
        if self._reason:
            return
        started = time.perf_counter()
        connected = self._read()
        for group in self._groups:
            _send_known(group)
        self._before = self._read()
        self._known = _grown(connected, self._before)
        self._seconds += time.perf_counter() - started

    def end(self) -> KernelLog:
        """What the kernel saw since `begin`."""
        if self._reason:
            return KernelLog(reason=self._reason)
        started = time.perf_counter()
        seen = zip(self._groups, self._known, _grown(self._before, self._read()), strict=True)
        logs = [GroupLog(group.number, group.ranks, *acked) for group, *acked in seen]
        self._seconds += time.perf_counter() - started
        return KernelLog(tuple(logs), self._unread, self._seconds)

    def _find_sockets(self, world: Member) -> None:
        """By place in each group, or the reason why not. All ranks learn all addresses, and so come
        to the same end."""
        every: list = [None] * world.world_size
        mine = _no_reading(), _ends(self._groups)
        dist.all_gather_object(every, mine, group=self._control)
        self._reason = next((reason for reason, _ in every if reason), "")
        if not self._reason:
            by_rank = [ends for _, ends in every]
            self._reason = _unconnected(by_rank)
            self._sockets = [_by_place(group, by_rank) for group in self._groups]

    def _read(self) -> list[np.ndarray]:
        """Bytes that each place has acknowledged since it was connected: [group] int64 [n]."""
        dist.barrier(self._control)
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
    deadline = time.monotonic() + within_s
    # First all of them: what this rank holds back, its peers wait for.
    seen = {fd: tcp.read_info(fd, acknowledge=True) for fd in sockets}
    for fd in seen:
        while not seen[fd].settled:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{seen[fd].unsent} B unsent and {seen[fd].unacked} segments unacknowledged"
                    f" after {within_s:g} s, between {tcp.addresses(fd)}"
                )
            time.sleep(POLL_S)
            seen[fd] = tcp.read_info(fd)
    return {fd: info.acked for fd, info in seen.items()}


def _grown(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [late - early for early, late in zip(before, after, strict=True)]


def _no_reading() -> str:
    """Why this rank cannot read; "" if it can."""
    transport = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP")
    if transport == "TCP_TLS":  # records of its own, whose sizes follow no law
        return f"GLOO_DEVICE_TRANSPORT={transport}: encrypted bytes are not those that were counted"
    return tcp.why_unsupported()


def _ends(groups: Sequence[RankGroup]) -> Ends:
    """Where this rank's sockets lead."""
    return {
        group.number: (
            group.ranks,
            [ends for fd in group.sockets if (ends := tcp.addresses(fd)) is not None],
        )
        for group in groups
    }


def _owners(
    by_rank: Sequence[Ends], number: int, ranks: Iterable[int]
) -> dict[tuple[str, str], int]:
    """The rank at the other end of a socket with these two addresses, own and other: the rank that
    has a socket with the same two, exchanged."""
    return {(there, here): rank for rank in ranks for here, there in by_rank[rank][number][1]}


def _unconnected(by_rank: Sequence[Ends]) -> str:
    """The first pair without a connection that both ends see, in words; "" where there is none."""
    for rank, own in enumerate(by_rank):
        for number, (ranks, _) in own.items():
            if ranks[0] != rank:  # each group once
                continue
            owner = _owners(by_rank, number, ranks)
            for member in ranks:
                met = {owner.get(ends) for ends in by_rank[member][number][1]}
                if missing := set(ranks) - met - {member}:
                    other = min(missing)
                    return f"no socket of rank {member} was found to lead to rank {other}"
    return ""


def _by_place(group: RankGroup, by_rank: Sequence[Ends]) -> list[list[int]]:
    """The sockets that lead to each place of the group."""
    owner = _owners(by_rank, group.number, group.ranks)
    sockets: list[list[int]] = [[] for _ in group.ranks]
    for fd in group.sockets:
        ends = tcp.addresses(fd)
        if ends in owner:
            sockets[group.ranks.index(owner[ends])].append(fd)
    return sockets


def _send_known(group: RankGroup) -> None:
    """The exchange of comm.reconcile.calibration."""
    place, sizes = group.rank, calibration_sizes(group.size)
    work = None
    if place + 1 < group.size:
        link = torch.zeros(CHAIN_BYTES, dtype=torch.uint8)
        work = dist.isend(link, group.ranks[place + 1], group.process_group)
    if place > 0:
        dist.recv(
            torch.empty(CHAIN_BYTES, dtype=torch.uint8),
            group.ranks[place - 1],
            group.process_group,
        )
    if work is not None:
        work.wait()
    rows_to, rows_from = sizes[place].tolist(), sizes[:, place].tolist()
    message = torch.zeros(sum(rows_to), dtype=torch.uint8)
    received = torch.empty(sum(rows_from), dtype=torch.uint8)
    dist.all_to_all_single(received, message, rows_from, rows_to, group.process_group)
