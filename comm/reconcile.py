"""Counted bytes held against what the kernel says was acknowledged, pair by pair.

    acked(i -> j) = payload(i -> j) + a x messages(i -> j) + b x messages(j -> i)

gloo puts a header and a note of its own beside each message (a), and a note to whoever it wants a
message from (b). Both constants are measured at the start of each run, on messages of known sizes,
and must fit every pair. An all-to-all sends one message along each ordered pair, empty ones too.

Pure: plain arrays in. Of the meter it reads the counted bytes, of the predictions nothing.

Legend: R ranks of the world, n of a group; matrices are [src, dst] by place in the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    groups, likewise; expected: what must have been acknowledged, by the counted bytes"""

    verdict: Verdict
    summary: dict[str, Any] | None = None
    acked: Matrix | None = None
    expected: Matrix | None = None


@dataclass(frozen=True)
class _Group:
    """All ranks' rows of one group put together. calibration, acked: [n, n]"""

    ranks: tuple[int, ...]
    calibration: Matrix
    acked: Matrix
    sent: Exchange

    @property
    def num_pairs(self) -> int:
        return len(self.ranks) * (len(self.ranks) - 1)

    @property
    def known(self) -> Exchange:
        return calibration(len(self.ranks))

    def pair(self, src: int, dst: int) -> str:
        return f"rank {self.ranks[src]} -> rank {self.ranks[dst]}"

    def __str__(self) -> str:
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
    if not any(group.calibration.any() for group in groups):  # as in gVisor
        reason = "this kernel leaves tcpi_bytes_acked at 0"
        return Reconciliation(not_available("kernel", reason))
    law = _law(groups[0])
    world = len(logs)
    booked, acked, expected = (np.zeros((world, world), np.int64) for _ in range(3))
    for group in groups:
        pairs = np.ix_(group.ranks, group.ranks)
        booked[pairs] += group.sent.payload
        acked[pairs] += group.acked
        expected[pairs] += law.acked(group.sent)
    verdict = _misfit(groups, law) or _unbooked(counted, booked) or _verdict(groups, law)
    return Reconciliation(verdict, _summary(groups, law, logs), acked, expected)


def _groups(logs: Sequence[KernelLog], carried: Sequence[Mapping[int, Matrix]]) -> Iterator[_Group]:
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


def _law(group: _Group) -> Law:
    """The constants as the first pair has them."""
    overhead = group.calibration - group.known.payload
    there, back = int(overhead[0, 1]), int(overhead[1, 0])  # 2 a + b and a + 2 b
    return Law((2 * there - back) // 3, (2 * back - there) // 3)


def _misfit(groups: Sequence[_Group], law: Law) -> Verdict | None:
    """The constants must fit every pair."""
    for group in groups:
        predicted = law.acked(group.known)
        for src, dst in np.argwhere(group.calibration != predicted).tolist():
            left, right = int(group.calibration[src, dst]), int(predicted[src, dst])
            return _outside(
                left,
                right,
                f"calibration: {law.per_message} B a message and {law.per_answer} B an answer, as"
                f" {groups[0].pair(0, 1)} has them, do not fit {group.pair(src, dst)}, {group}:"
                f" acknowledged {left:,} B, sent with headers {right:,} B",
            )
    return None


def _unbooked(counted: Matrix, booked: Matrix) -> Verdict | None:
    """What the run reports must be what its groups carried."""
    away = counted * (1 - np.eye(len(counted), dtype=np.int64))
    for src, dst in np.argwhere(away != booked).tolist():
        left, right = int(counted[src, dst]), int(booked[src, dst])
        return _outside(
            left,
            right,
            f"rank {src} -> rank {dst}: the run reports {left:,} B, its connections carried"
            f" {right:,} B",
        )
    return None


def _verdict(groups: Sequence[_Group], law: Law) -> Verdict:
    """EXACT when every pair of every group agrees, else OUTSIDE with the worst pair in words."""
    apart = [np.abs(group.acked - law.acked(group.sent)) for group in groups]
    pairs, wrong = sum(group.num_pairs for group in groups), sum(map(np.count_nonzero, apart))
    if not wrong:
        total, payload, messages = (
            sum(int(matrix.sum()) for matrix in matrices)
            for matrices in zip(
                *((one.acked, one.sent.payload, one.sent.messages) for one in groups), strict=True
            )
        )
        reason = (
            f"all {pairs:,} pairs equal, {total:,} B acknowledged = {payload:,} B counted +"
            f" {messages:,} messages x ({law.per_message} + {law.per_answer}) B of gloo's own"
        )
        return Verdict("kernel", State.EXACT, total, total, 0, reason)
    worst = max(range(len(groups)), key=lambda one: int(apart[one].max()))
    group = groups[worst]
    src, dst = divmod(int(apart[worst].argmax()), len(group.ranks))
    left, right = int(group.acked[src, dst]), int(law.acked(group.sent)[src, dst])
    return _outside(
        left,
        right,
        f"{group.pair(src, dst)}, {group}: acknowledged {left:,} B, counted with headers"
        f" {right:,} B; {wrong:,} of {pairs:,} pairs differ",
    )


def _outside(measured: int, predicted: int, reason: str) -> Verdict:
    return Verdict("kernel", State.OUTSIDE, measured, predicted, 0, reason)


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
