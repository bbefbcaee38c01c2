"""Gloo ranks that stay, and run one function after another: each costs milliseconds.

    server = RankServer()                       # first; its ranks know what was imported by then
    pool = RankPool(server, 8)
    outcome = pool.run(function, arguments, deadline_s=60)

What comm.spawn.run_ranks does for one function, with processes of its own. When a function fails on
some rank, or hangs, the pool cannot be used again: the ranks would be out of step.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from comm.notebook import Address, ask_for_stacks
from comm.rank_server import RankServer
from comm.spawn import RankReport, describe_exit, guilt

GRACE_S = 1.0  # after the first failure, how long others may take to say what they saw
START_S = 120.0
WAITING = "StillRunning"  # the kind of a rank that was at work when another had failed
LATE = "TimeoutError"


@dataclass(frozen=True)
class Outcome:
    """How a function ended on all ranks: in rank order, a report each."""

    reports: tuple[RankReport, ...]

    @property
    def failures(self) -> tuple[RankReport, ...]:
        """The root cause first, mere consequences last."""
        return tuple(sorted((one for one in self.reports if one.error), key=guilt))


class RankPool:
    """N ranks of this machine, met and waiting. Raises RuntimeError where they do not come up."""

    def __init__(self, server: RankServer, world_size: int) -> None:
        self._server = server
        self._folder = Path(tempfile.mkdtemp(prefix="wideep-ranks-"))
        started = server.start(self._folder, world_size)
        self._pids = [pid for pid, _ in started]
        self._pipes = [pipe for _, pipe in started]
        self.usable = False
        failures = self._collect(START_S).failures
        if failures:
            said = self.output(failures[0].rank)
            self.close()
            raise RuntimeError(f"{world_size} ranks did not start: {failures[0].error}\n{said}")

    @property
    def world_size(self) -> int:
        return len(self._pids)

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float) -> Outcome:
        """function(world, *args) on every rank; function and arguments are pickled.

        After an outcome with failures the pool is no longer usable.
        """
        assert self.usable, "a pool that failed is used again"
        request = pickle.dumps((function, args))
        self.usable = False  # until all have answered, should the caller be interrupted
        for pipe in self._pipes:
            pipe.send_bytes(request)
        return self._collect(deadline_s)

    def output(self, rank: int) -> str:
        """What a rank printed since the last function began."""
        path = self._folder / f"output.rank{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End the ranks."""
        self.usable = False
        for pipe in self._pipes:
            pipe.close()
        self._server.stop(self._pids, self._folder)

    def _collect(self, deadline_s: float) -> Outcome:
        deadline, failed = time.monotonic() + deadline_s, False
        reports: dict[int, RankReport] = {}
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending.pop(pipe)
                reports[rank] = self._receive(rank, pipe)
                if reports[rank].error and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        if pending:
            reports |= self._unanswered(sorted(pending.values()), failed, deadline_s)
        self.usable = not failed and not pending
        return Outcome(tuple(reports[rank] for rank in range(self.world_size)))

    def _receive(self, rank: int, pipe: Connection) -> RankReport:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            error = describe_exit(self._server.reap(self._pids[rank]))
            return RankReport(rank, time.monotonic(), error=error, kind="Died")

    def _unanswered(
        self, ranks: list[int], failed: bool, deadline_s: float
    ) -> dict[int, RankReport]:
        """Reports of ranks that gave none: after a failure they wait for the one that failed, else
        they hang, and show where."""
        at = time.monotonic()
        if failed:
            error = f"{WAITING}: at work when another rank had failed"
            return {
                rank: RankReport(rank, at, error=error, kind=WAITING, caused_by_others=True)
                for rank in ranks
            }
        addresses = [
            Address("", self._pids[rank], "", str(self._folder / f"stacks.rank{rank}"))
            for rank in ranks
        ]
        error = f"{LATE}: no end within {deadline_s:g} s"
        return {
            rank: RankReport(rank, at, error=error, details=stacks, kind=LATE)
            for rank, stacks in zip(ranks, ask_for_stacks(addresses), strict=True)
        }
