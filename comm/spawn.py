"""Runs a function on N gloo ranks of this machine, without torchrun.

A fork server imports torch once; every rank is forked from it, so that 64 ranks come up in the time
and memory of a few. When ranks fail, the one that failed of itself is named first: the others only
report that their connection to it closed.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ("torch", "torch.distributed", "numpy", "comm.world", "comm.transport")
GRACE_S = 2.0  # after the first failure, how long the others may take to say what they saw


@dataclass(frozen=True)
class RankReport:
    """How one rank ended.

    at: time.monotonic() of the end, comparable between the processes of one machine
    error: "Type: message", or None for success
    details: its traceback, empty where it left none
    """

    rank: int
    at: float
    value: Any = None
    error: str | None = None
    details: str = ""
    caused_by_others: bool = False


class RankFailure(RuntimeError):
    """Some ranks failed. `guilty` is the one to look at; `reports` has every failed rank."""

    def __init__(self, guilty: RankReport, reports: Sequence[RankReport]) -> None:
        self.guilty = guilty
        self.reports = tuple(reports)
        others = len(reports) - 1
        tail = f" ({others} other ranks failed in consequence)" if others else ""
        super().__init__(f"rank {guilty.rank}: {guilty.error}{tail}")


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    preload: Sequence[str] = (),
    deadline_s: float | None = None,
    **joining: Any,
) -> list[Any]:
    """Call function(world, *args) on every rank; return what each returned, in rank order.

    preload: modules that the fork server imports besides torch, so that no rank has to
    deadline_s: for the whole call; None waits for ever
    joining: device, backend, timeout_s (of one collective) as for comm.world.join
    Raises RankFailure; leaves no process behind, whatever happens.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    forkserver.ensure_running()  # here, or it would inherit the signals that are held below
    with tempfile.TemporaryDirectory(prefix="wideep-") as folder:
        rendezvous = f"file://{Path(folder) / 'store'}"
        ranks = _Ranks()
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(function, rank, world_size, rendezvous, joining, theirs, args),
                    daemon=True,
                    name=f"rank-{rank}",
                )
                with signals_held():  # a rank is either not started or known to `stop`
                    process.start()
                    theirs.close()
                    ranks.add(rank, process, ours)
            return ranks.collect(deadline_s)
        finally:
            ranks.stop()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the block is over."""
    held = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Ranks:
    """The parent's view of its ranks."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: dict[Connection, int] = {}
        self._reports: dict[int, RankReport] = {}

    def add(self, rank: int, process: Any, pipe: Connection) -> None:
        self._processes.append(process)
        self._pipes[pipe] = rank

    def collect(self, deadline_s: float | None) -> list[Any]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while self._pipes:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(self._pipes), remaining)
            if not ready:
                self._give_up(deadline_s)
                break
            for pipe in ready:
                report = self._receive(pipe)
                if report.error is not None:
                    grace = time.monotonic() + GRACE_S
                    deadline = grace if deadline is None else min(deadline, grace)
        failed = [report for report in self._reports.values() if report.error is not None]
        if failed:
            raise RankFailure(min(failed, key=_guilt), sorted(failed, key=_guilt))
        return [self._reports[rank].value for rank in range(len(self._processes))]

    def _receive(self, pipe: Connection) -> RankReport:
        rank = self._pipes.pop(pipe)
        try:
            report = pickle.loads(pipe.recv_bytes())
        except EOFError:
            report = self._died(rank)
        pipe.close()
        self._reports[rank] = report
        return report

    def _died(self, rank: int) -> RankReport:
        process = self._processes[rank]
        process.join(timeout=GRACE_S)
        return RankReport(rank, time.monotonic(), error=describe_exit(process.exitcode))

    def _give_up(self, deadline_s: float | None) -> None:
        """The time is up: after a failure that is the end of the grace, else everybody hangs."""
        if any(report.error for report in self._reports.values()):
            return
        for rank in self._pipes.values():
            error = f"TimeoutError: no answer within {deadline_s:g} s"
            self._reports[rank] = RankReport(rank, time.monotonic(), error=error)

    def stop(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def describe_exit(exitcode: int | None) -> str:
    """How a rank that left no word ended, in words."""
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = ", perhaps out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"ended without a word, exit status {exitcode}"


def _guilt(report: RankReport) -> tuple[bool, float]:
    """Sorts the root cause first: not a closed connection, then the earliest."""
    return report.caused_by_others, report.at


CONSEQUENCES = ("connection closed", "connection reset", "broken pipe", "timed out waiting")


def is_consequence(error: BaseException) -> bool:
    """Does this error only say that another rank went away?"""
    from torch.distributed import DistBackendError, DistNetworkError

    if isinstance(error, DistBackendError | DistNetworkError | ConnectionError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in CONSEQUENCES)


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    rendezvous: str,
    joining: dict[str, Any],
    pipe: Connection,
    args: tuple,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and stops the ranks
    _die_with_parent(pipe)
    _use_loopback()
    # Pickled by hand: a Connection would share the memory of tensors with a process that has gone.
    pipe.send_bytes(pickle.dumps(_run(function, rank, world_size, rendezvous, joining, args)))
    pipe.close()


def _run(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    rendezvous: str,
    joining: dict[str, Any],
    args: tuple,
) -> RankReport:
    import torch

    from comm import world as worlds

    torch.set_num_threads(1)
    try:
        world = worlds.join(
            rank,
            world_size,
            init_method=rendezvous,
            local_rank=rank,
            local_world_size=world_size,
            **joining,
        )
        value = function(world, *args)
    except BaseException as error:  # whatever ended the rank is what the parent must hear
        message = f"{type(error).__name__}: {error}"
        report = RankReport(
            rank,
            time.monotonic(),
            error=message,
            details=traceback.format_exc(),
            caused_by_others=is_consequence(error),
        )
    else:
        report = RankReport(rank, time.monotonic(), value=value)
    with contextlib.suppress(Exception):
        worlds.leave()
    return report


def _die_with_parent(pipe: Connection) -> None:
    """End this rank when nobody is left to read its report, were the caller killed outright."""

    def watch() -> None:
        poll = select.poll()
        poll.register(pipe.fileno(), 0)  # errors are always reported: the reading end is gone
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _use_loopback() -> None:
    """All ranks are here, so a host name that does not resolve must not matter."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
