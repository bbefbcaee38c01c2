"""The processes behind comm.ranks: a server forked from the caller, and ranks forked from it.

The server is a copy of the caller as it was: whatever the caller had imported by then, its ranks
have, too. It runs none of the caller's work, so that ranks can be forked from it at any time.

    caller  -- start, reap, stop -->  server      a socket, one request and one answer at a time
    caller  <-- function, report -->  each rank   a pipe of its own
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from comm.notebook import Notebook
from comm.spawn import PRELOAD, RankReport, die_with_parent, is_consequence, use_loopback

MOST_RANKS = 250  # as many file descriptors go in one message
ROOM_BYTES = 1 << 16
NEVER_S = 7 * 24 * 3600.0  # the caller watches the time


class RankServer:
    """The caller's side of the server; Linux."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads that stay behind: none is needed there
            self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _in_child(lambda: _serve(theirs))
        theirs.close()

    def start(self, folder: Path, world_size: int) -> list[tuple[int, Connection]]:
        """Fork ranks that meet in `folder`; the process and the pipe of each."""
        pairs = [socket.socketpair() for _ in range(world_size)]
        with contextlib.ExitStack() as stack:
            theirs = [stack.enter_context(far).fileno() for _, far in pairs]
            pids = self._ask(("start", str(folder), world_size), theirs)
            return list(zip(pids, [Connection(near.detach()) for near, _ in pairs], strict=True))

    def reap(self, pid: int) -> int | None:
        """The exit code of a rank that has closed its pipe, negative for a signal."""
        return self._ask(("reap", pid))

    def stop(self, pids: list[int], folder: Path) -> None:
        """End ranks, whatever they do, and remove their folder."""
        with contextlib.suppress(OSError, EOFError):  # the server is gone, and they with it
            self._ask(("stop", pids, str(folder)))

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _ask(self, request: tuple, fds: list[int] = []) -> Any:  # noqa: B006  never changed
        socket.send_fds(self._socket, [pickle.dumps(request)], fds)
        answer = self._socket.recv(ROOM_BYTES)
        if not answer:
            raise EOFError("the server of the ranks has ended")
        return pickle.loads(answer)


def _in_child(work: Any) -> NoReturn:
    """Never back into the caller's code, whose clean-up is the caller's own."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller hears Ctrl-C and stops the ranks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os._exit(0)


def _serve(requests: socket.socket) -> None:
    """Until the caller closes its end or dies."""
    for name in PRELOAD:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # pages that no rank's collector writes to stay shared
    ranks: dict[int, str] = {}
    while True:
        data, fds, *_ = socket.recv_fds(requests, ROOM_BYTES, MOST_RANKS)
        if not data:
            _stop(list(ranks), set(ranks.values()))
            return
        what, *arguments = pickle.loads(data)
        if what == "start":
            folder, world_size = arguments
            answer: Any = [
                _fork_rank(rank, world_size, folder, fds, requests) for rank in range(world_size)
            ]
            ranks |= dict.fromkeys(answer, folder)
            for fd in fds:
                os.close(fd)
        elif what == "reap":
            answer = _reap(*arguments)
            ranks.pop(arguments[0], None)
        else:
            pids, folder = arguments
            answer = _stop([pid for pid in pids if pid in ranks], {folder})
            ranks = {pid: one for pid, one in ranks.items() if pid not in pids}
        requests.send(pickle.dumps(answer))


def _fork_rank(
    rank: int, world_size: int, folder: str, fds: list[int], requests: socket.socket
) -> int:
    pid = os.fork()
    if pid == 0:
        requests.close()
        for fd in fds:
            if fd != fds[rank]:
                os.close(fd)
        _in_child(lambda: _be_rank(rank, world_size, Path(folder), Connection(fds[rank])))
    return pid


def _reap(pid: int) -> int | None:
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _stop(pids: list[int], folders: set[str]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


# -- a rank ----------------------------------------------------------------------------------------


def _be_rank(rank: int, world_size: int, folder: Path, pipe: Connection) -> None:
    from comm import world as worlds

    die_with_parent()
    use_loopback()
    _write_to(folder / f"output.rank{rank}")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    world = worlds.join(
        rank,
        world_size,
        init_method=f"file://{folder / 'store'}",
        local_rank=rank,
        local_world_size=world_size,
        timeout_s=NEVER_S,
        notebook=Notebook(rank, folder),
    )
    pipe.send_bytes(pickle.dumps(RankReport(rank, time.monotonic())))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        os.ftruncate(1, 0)
        report = _run(world, request)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(report)


def _write_to(output: Path) -> None:
    """What the rank prints, and what C prints, goes into a file that the caller can read."""
    fd = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  as long as the process lives
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run(world: Any, request: bytes) -> bytes:
    """The pickled report of one function. An error may bring its own `details`."""
    try:
        function, args = pickle.loads(request)
        value = function(world, *args)
        _put_back(world)
        return pickle.dumps(RankReport(world.rank, time.monotonic(), value=value))
    except BaseException as error:
        report = RankReport(
            world.rank,
            time.monotonic(),
            error=f"{type(error).__name__}: {_said(error)}",
            details=getattr(error, "details", "") or traceback.format_exc(),
            caused_by_others=is_consequence(error),
            kind=type(error).__name__,
        )
        return pickle.dumps(report)


def _said(error: BaseException) -> str:
    """Its text, also where that fails."""
    try:
        return str(error)
    except Exception as another:
        return f"(its text raises {type(another).__name__})"


def _put_back(world: Any) -> None:
    """Groups that the function made end with it, and all ranks end it together: ranks that made
    different collectives meet here in vain, and not in the next function."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("the default process group was destroyed: the ranks cannot go on")
    kept = {dist.group.WORLD, world.metered_group}
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)
    dist.barrier()
