"""Breaks a rank on purpose, so that tests and readers see what is said then (docs/faults.md).

It hooks in where a phase begins (comm.meter), on the rank that is to fail; elsewhere, and where no
fault is asked for, it is not there at all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np

from comm import transport
from comm.dispatch.shared_round import SharedRound
from comm.meter import Position
from comm.notebook import Notebook
from comm.report.events import EventLog
from moe.settings import FaultConfig

FOR_EVER_S = 86_400.0


class InjectedFault(RuntimeError):
    """What fault.kind=raise raises."""


def announcement(fault: FaultConfig) -> str:
    """Said before the ranks start: nobody should take such a run for a real one."""
    return (
        f"fault.kind={fault.kind}: rank {fault.rank} is broken on purpose in step {fault.step},"
        f" layer {fault.layer}, {fault.phase}"
    )


def listener(
    fault: FaultConfig, rank: int, notebook: Notebook, events: EventLog
) -> Callable[[Position], None]:
    """What a rank does when a phase begins: it takes a note, and breaks if it must."""
    if fault.kind == "none" or fault.rank != rank:
        return notebook.begin
    armed = True

    def begin(position: Position) -> None:
        nonlocal armed
        notebook.begin(position)
        place = (notebook.step, position.layer, position.phase)
        if armed and not notebook.warmup and place == (fault.step, fault.layer, fault.phase):
            armed = False
            _break(fault.kind, events)

    return begin


def _break(kind: str, events: EventLog) -> None:
    if kind == "raise":
        raise InjectedFault("fault.kind=raise")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        time.sleep(FOR_EVER_S)
    if kind == "exit":
        os._exit(3)
    if kind == "disk_full":  # from now on, as the system itself says it
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, events.fileno())
        os.close(full)
    if kind == "split":
        _mean_longer_rows()


def _mean_longer_rows() -> None:
    """From now on this rank announces rows that are a byte longer, and expects the same."""
    header, begin = transport.header, SharedRound.begin

    def longer(position: Position, row_bytes: int, *rest: int) -> np.ndarray:
        return header(position, row_bytes + 1, *rest)

    def begin_longer(round_: SharedRound) -> SharedRound:
        round_.header = header(round_.position, round_.row_bytes + 1, int(round_.header[3]))
        return begin(round_)

    transport.header = longer
    SharedRound.begin = begin_longer  # type: ignore[method-assign]
