"""Counted bytes held against what the kernel says was acknowledged, pair by pair.

    acked(i -> j) = payload(i -> j) + a x messages(i -> j) + b x messages(j -> i)

gloo puts a header and a note of its own beside each message (a), and a note to whoever it wants a
message from (b). Both constants are measured at the start of each run, on messages of known sizes,
and must fit every pair. An all-to-all sends one message along each ordered pair, empty ones too.

Pure: plain arrays in. Of the meter it reads the counted bytes, of the predictions nothing.

Legend: R ranks of the world, n of a group; matrices are [src, dst] by place in the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comm.verdict import State, Verdict, not_available

Matrix = NDArray[np.int64]

CHAIN_BYTES = 997


@dataclass(frozen=True)
class Exchange:
    """Bytes and messages along each pair: int64 [n, n] each, 0 on the diagonal."""

    payload: Matrix
    messages: Matrix


@dataclass(frozen=True)
class Law:
    """a and b, bytes."""

    per_message: int
    per_answer: int

    def acked(self, sent: Exchange) -> Matrix:
        return sent.payload + self.per_message * sent.messages + self.per_answer * sent.messages.T


def calibration_sizes(size: int) -> Matrix:
    """Bytes from each place to each other, [n, n]: no two alike, but every third is nothing."""
    number = 1 + np.arange(size * size).reshape(size, size)
    return np.where(number % 3, 31 * number, 0) * (1 - np.eye(size, dtype=np.int64))


def calibration(size: int) -> Exchange:
    """Known messages: an all-to-all, and beside it a chain of messages from each place to the next,
    one way only, or a and b could not be told apart."""
    chain = np.eye(size, k=1, dtype=np.int64)
    everyone = 1 - np.eye(size, dtype=np.int64)
    return Exchange(calibration_sizes(size) + CHAIN_BYTES * chain, everyone + chain)


@dataclass(frozen=True)
class GroupLog:
    """What one rank saw of its connections in one group.

    number: of the group's partition, comm.world.RankGroup.number; ranks: [n], global
    calibration: int64 [n] bytes that each place acknowledged of the exchange `calibration`
    acked: int64 [n], in the measured part of the run
    """

    number: int
    ranks: tuple[int, ...]
    calibration: Matrix
    acked: Matrix


@dataclass(frozen=True)
class KernelLog:
    """What one rank saw. reason: why it saw nothing, else ""; seconds: what it cost"""

    groups: tuple[GroupLog, ...] = ()
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Reconciliation:
    """verdict; summary: for run.json, None where nothing was read; acked: int64 [R, R] of all
    groups, likewise"""

    verdict: Verdict
    summary: dict[str, Any] | None = None
    acked: Matrix | None = None


@dataclass
class _Group:
    """All ranks' rows of one group put together."""

    ranks: tuple[int, ...]
    calibration: Matrix  # [n, n]
    acked: Matrix  # [n, n]
    sent: Exchange
    predicted: Matrix = field(init=False)

    @property
    def words(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if self.ranks == tuple(range(first, last + 1)):
            return f"the connections of ranks {first} to {last}"
        return f"the connections of ranks {', '.join(map(str, self.ranks))}"


def reconcile(
    logs: Sequence[KernelLog], carried: Sequence[Mapping[int, Matrix]], counted: Matrix
) -> Reconciliation:
    """The verdict `kernel`.

    logs, carried: one a rank; carried: comm.meter.TrafficMeter.carried
    counted: int64 [R, R], bytes that the run reports from each rank to each other
    """
    reason = next((log.reason for log in logs if log.reason), "")
    if reason:
        return Reconciliation(not_available("kernel", reason))
    groups = list(_groups(logs, carried))
    law, misfit = _calibrated(groups)
    if law is None:
        return Reconciliation(misfit)
    for group in groups:
        group.predicted = law.acked(group.sent)
    world = len(logs)
    booked, acked = np.zeros((world, world), np.int64), np.zeros((world, world), np.int64)
    for group in groups:
        pairs = np.ix_(group.ranks, group.ranks)
        booked[pairs] += group.sent.payload
        acked[pairs] += group.acked
    verdict = misfit or _unbooked(counted, booked) or _verdict(groups, law)
    return Reconciliation(verdict, _summary(groups, law, logs), acked)


def _groups(logs: Sequence[KernelLog], carried: Sequence[Mapping[int, Matrix]]) -> Any:
    """Each group once, with its ranks' rows."""
    for rank, log in enumerate(logs):
        for group in log.groups:
            if group.ranks[0] != rank:
                continue
            ranks, number, size = group.ranks, group.number, len(group.ranks)
            rows = [_of(logs[member], number) for member in ranks]
            sent = np.zeros((2, size, size), np.int64)
            for place, member in enumerate(ranks):
                if number in carried[member]:
                    sent[:, place] = carried[member][number][:, list(ranks)]
            sent *= 1 - np.eye(size, dtype=np.int64)  # what stays on its rank needs no socket
            yield _Group(
                ranks,
                np.stack([row.calibration for row in rows]),
                np.stack([row.acked for row in rows]),
                Exchange(*sent),
            )


def _of(log: KernelLog, number: int) -> GroupLog:
    return next(group for group in log.groups if group.number == number)


def _calibrated(groups: Sequence[_Group]) -> tuple[Law | None, Verdict | None]:
    """The constants from the first pair; and, where they do not fit every pair, what to say.

    No law where the kernel leaves its counters at 0, as gVisor's does.
    """
    if not any(group.calibration.any() for group in groups):
        return None, not_available("kernel", "this kernel leaves tcpi_bytes_acked at 0")
    first = groups[0].calibration - calibration(len(groups[0].ranks)).payload
    there, back = int(first[0, 1]), int(first[1, 0])  # 2 a + b and a + 2 b
    law = Law((2 * there - back) // 3, (2 * back - there) // 3)
    for group in groups:
        predicted = law.acked(calibration(len(group.ranks)))
        wrong = np.argwhere(group.calibration != predicted)
        if len(wrong):
            src, dst = wrong[0].tolist()
            return law, Verdict(
                "kernel",
                State.OUTSIDE,
                int(group.calibration[src, dst]),
                int(predicted[src, dst]),
                0,
                f"calibration: {law.per_message} B a message and {law.per_answer} B an answer,"
                f" found between rank {groups[0].ranks[0]} and rank {groups[0].ranks[1]}, do not fit"
                f" rank {group.ranks[src]} -> rank {group.ranks[dst]}:"
                f" {_numbers(group.calibration, predicted, (src, dst))}",
            )
    return law, None


def _unbooked(counted: Matrix, booked: Matrix) -> Verdict | None:
    """What the run reports must be what its groups carried."""
    away = 1 - np.eye(len(counted), dtype=np.int64)
    if np.array_equal(counted * away, booked):
        return None
    src, dst = np.argwhere(counted * away != booked)[0].tolist()
    left, right = int(counted[src, dst]), int(booked[src, dst])
    return Verdict(
        "kernel",
        State.OUTSIDE,
        left,
        right,
        0,
        f"rank {src} -> rank {dst}: the run reports {left:,} B, its connections carried"
        f" {right:,} B",
    )


def _verdict(groups: Sequence[_Group], law: Law) -> Verdict:
    """EXACT when every pair of every group agrees, else OUTSIDE with the worst pair in words."""
    total = sum(int(group.acked.sum()) for group in groups)
    pairs = sum(len(group.ranks) * (len(group.ranks) - 1) for group in groups)
    wrong = sum(int((group.acked != group.predicted).sum()) for group in groups)
    if not wrong:
        payload = sum(int(group.sent.payload.sum()) for group in groups)
        messages = sum(int(group.sent.messages.sum()) for group in groups)
        return Verdict(
            "kernel",
            State.EXACT,
            total,
            total,
            0,
            f"all {pairs:,} pairs equal, {total:,} B acknowledged = {payload:,} B counted +"
            f" {messages:,} messages x ({law.per_message} + {law.per_answer}) B of gloo's own",
        )
    worst = max(groups, key=lambda group: int(np.abs(group.acked - group.predicted).max()))
    apart = np.abs(worst.acked - worst.predicted)
    src, dst = map(int, np.unravel_index(int(apart.argmax()), apart.shape))
    return Verdict(
        "kernel",
        State.OUTSIDE,
        int(worst.acked[src, dst]),
        int(worst.predicted[src, dst]),
        0,
        f"rank {worst.ranks[src]} -> rank {worst.ranks[dst]}, {worst.words}:"
        f" {_numbers(worst.acked, worst.predicted, (src, dst))}; {wrong:,} of {pairs:,} pairs"
        " differ",
    )


def _numbers(acked: Matrix, predicted: Matrix, pair: tuple[int, int]) -> str:
    left, right = int(acked[pair]), int(predicted[pair])
    return f"acknowledged {left:,} B, counted with headers {right:,} B"


def _summary(groups: Sequence[_Group], law: Law, logs: Sequence[KernelLog]) -> dict[str, Any]:
    return {
        "message_bytes": law.per_message,
        "answer_bytes": law.per_answer,
        "seconds": max(log.seconds for log in logs),
        "groups": [
            {
                "ranks": group.ranks,
                "payload_bytes": group.sent.payload.sum(),
                "messages": group.sent.messages.sum(),
                "acked_bytes": group.acked.sum(),
            }
            for group in groups
        ],
    }
