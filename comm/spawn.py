"""Runs a function on N gloo ranks of this machine, without torchrun.

A fork server imports torch once; every rank is forked from it, so that 64 ranks come up in the time
and memory of a few. When ranks fail, the one that failed of itself is named first, and where it
was: the others only report that their connection to it closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from comm.notebook import Notebook, read_note

PRELOAD = ("torch", "torch.distributed", "numpy", "comm.world", "comm.transport")
SILENT = "RankSilent"  # the kind of comm.post_mortem's verdict, which speaks for all others
GRACE_S = 3.0  # after the first failure, how long the others may take to say what they saw


@dataclass(frozen=True)
class RankReport:
    """How one rank ended.

    at: time.monotonic() of the end, comparable between the processes of one machine
    error: "Type: message", or None for success
    details: its traceback, empty where it left none
    kind: the type of the error; where: the last phase that the rank began
    """

    rank: int
    at: float
    value: Any = None
    error: str | None = None
    details: str = ""
    caused_by_others: bool = False
    kind: str = ""
    where: str = ""


class RankFailure(RuntimeError):
    """Some ranks failed. `guilty` is the one to look at; `reports` has every failed rank."""

    def __init__(self, guilty: RankReport, reports: Sequence[RankReport]) -> None:
        self.guilty = guilty
        self.reports = tuple(reports)
        others = 0 if guilty.kind == SILENT else len(reports) - 1
        failed = f"{others} other rank{'s' * (others > 1)} failed in consequence"
        where = f", {guilty.where}" if guilty.where else ""
        super().__init__(
            f"rank {guilty.rank}{where}: {guilty.error}{f' ({failed})' * (others > 0)}"
        )


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    preload: Sequence[str] = (),
    deadline_s: float | None = None,
    needs_main: bool = True,
    **joining: Any,
) -> list[Any]:
    """Call function(world, *args) on every rank; return what each returned, in rank order.

    preload: modules that the fork server imports besides torch, so that no rank has to
    deadline_s: for the whole call; None waits for ever
    needs_main: function or args come from the program's main file, which every rank then runs;
        without, a script that starts ranks needs no `if __name__ == "__main__"`
    joining: device, backend, timeout_s (of one collective) as for comm.world.join
    Raises RankFailure; leaves no process behind, whatever happens.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    resource_tracker.ensure_running()  # which lets signals through again
    with signals_held(signal.SIGINT):  # for good in the server: it would die of Ctrl-C, and say so
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory(prefix="wideep-") as folder:
        ranks = _Ranks(Path(folder))
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(function, rank, world_size, folder, joining, theirs, args),
                    daemon=True,
                    name=f"rank-{rank}",
                )
                main = contextlib.nullcontext() if needs_main else _main_hidden()
                with signals_held(), main:  # a rank is either not started or known to `stop`
                    process.start()
                    theirs.close()
                    ranks.add(rank, process, ours)
            return ranks.collect(deadline_s)
        finally:
            ranks.stop()


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Let multiprocessing find no main file that a child would have to run."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def signals_held(*held: signal.Signals) -> Iterator[None]:
    """Let signals wait until the block is over: Ctrl-C and SIGTERM where none is named."""
    held = held or (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Ranks:
    """The parent's view of its ranks, which leave their notes in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
            raise RankFailure(min(failed, key=guilt), sorted(failed, key=guilt))
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
        error = describe_exit(process.exitcode)
        return RankReport(rank, time.monotonic(), error=error, where=self._where(rank))

    def _where(self, rank: int) -> str:
        return str(read_note(self._folder / f"note.rank{rank}"))

    def _give_up(self, deadline_s: float | None) -> None:
        """The time is up: after a failure that is the end of the grace, else everybody hangs."""
        if any(report.error for report in self._reports.values()):
            return
        for rank in self._pipes.values():
            error = f"TimeoutError: no answer within {deadline_s:g} s"
            where = self._where(rank)
            self._reports[rank] = RankReport(rank, time.monotonic(), error=error, where=where)

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


def guilt(report: RankReport) -> tuple[bool, bool, float]:
    """Sorts the root cause first: not a closed connection, not what others say, the earliest."""
    return report.caused_by_others, report.kind == SILENT, report.at


CONSEQUENCES = ("connection closed", "connection reset", "broken pipe", "timed out waiting")


def is_consequence(error: BaseException) -> bool:
    """Does this error only say that another rank went away?"""
    from torch.distributed import DistBackendError, DistNetworkError

    if isinstance(error, DistBackendError | DistNetworkError | ConnectionError):
        return True
    if not isinstance(error, RuntimeError):
        return False  # its text is none of ours, and may fail
    text = str(error).lower()
    return any(phrase in text for phrase in CONSEQUENCES)


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    joining: dict[str, Any],
    pipe: Connection,
    args: tuple,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and stops the ranks
    die_with_parent()  # the fork server, which ends with the caller
    _die_with_caller(folder)
    use_loopback()
    # Pickled by hand: a Connection would share the memory of tensors with a process that has gone.
    pipe.send_bytes(pickle.dumps(_run(function, rank, world_size, Path(folder), joining, args)))
    pipe.close()


def _run(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    joining: dict[str, Any],
    args: tuple,
) -> RankReport:
    import torch

    from comm import world as worlds

    torch.set_num_threads(1)
    notebook = None
    try:
        notebook = Notebook(rank, folder)
        world = worlds.join(
            rank,
            world_size,
            init_method=f"file://{folder / 'store'}",
            local_rank=rank,
            local_world_size=world_size,
            notebook=notebook,
            **joining,
        )
        value = function(world, *args)
    except BaseException as error:  # whatever ended the rank is what the parent must hear
        waited_s = joining.get("timeout_s", worlds.TIMEOUT_S)
        report = _failure(rank, world_size, notebook, error, waited_s)
    else:
        report = RankReport(rank, time.monotonic(), value=value)
    with contextlib.suppress(Exception):
        worlds.leave()
    return report


def _failure(
    rank: int, world_size: int, notebook: Notebook | None, error: BaseException, waited_s: float
) -> RankReport:
    """What the parent hears of an error that is being handled."""
    from comm.barrier import RankLost
    from comm.post_mortem import find_silent, leave_word

    at, consequence = time.monotonic(), is_consequence(error)
    # Of who has ended the caller hears at once, and nobody need be looked for.
    sought = consequence and not (isinstance(error, RankLost) and error.ended)
    silent = sought and notebook and find_silent(rank, world_size, notebook, waited_s)
    if silent:
        return RankReport(silent.rank, at, error=str(silent), kind=SILENT, where=silent.where)
    leave_word(rank, told=not consequence)
    return RankReport(
        rank,
        at,
        error=f"{type(error).__name__}: {error}",
        details=traceback.format_exc(),
        caused_by_others=consequence,
        kind=type(error).__name__,
        where=str(read_note(notebook.address.note)) if notebook else "",
    )


def die_with_parent(folder: str | None = None) -> None:
    """End this process when its parent does, however that ends; Linux only.

    folder: of the parent, to be removed with it
    """
    if sys.platform != "linux":
        return
    parent, pr_set_pdeathsig = os.getppid(), 1
    if folder is not None:
        threading.Thread(target=_watch_process, args=(parent, folder), daemon=True).start()
        return
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_process(pid: int, folder: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    _end_without(folder)


def _die_with_caller(folder: str) -> None:
    """End this rank when the caller is gone, were it killed outright; and remove what it can no
    longer remove: its folder, and that of the fork server's socket."""
    caller, server = mp.parent_process(), forkserver._forkserver._forkserver_address
    assert caller is not None
    folders = [folder, *([os.path.dirname(server)] if server else [])]

    def watch() -> None:
        caller.join()  # of the process that asked for this one, not of the fork server
        _end_without(*folders)

    threading.Thread(target=watch, daemon=True).start()


def _end_without(*folders: str) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def use_loopback() -> None:
    """All ranks are here, so a host name that does not resolve must not matter."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
