"""Where a rank is, in a small file that others can read, also after the rank was killed.

    rank      overwrites its note whenever it begins a phase
    others    read the notes of ranks that do not answer, and have them write their stacks

A note is written by one system call into bytes that the file has from the start: it costs a
microsecond, and a full disk does not matter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from comm.meter import ALL_PHASES, DIRECTIONS, Position

_NOTE = struct.Struct("<6i")  # phases begun, warm-up?, step, layer, direction, phase
STACKS_S = 0.5  # how long a rank may take to write its stacks; it needs milliseconds
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Note:
    """begun: phases that the rank has begun so far; none yet: position is None"""

    begun: int
    warmup: bool = False
    step: int = 0
    position: Position | None = None

    def __str__(self) -> str:
        if self.position is None:
            return ""
        return f"{'warm-up ' * self.warmup}step {self.step}, {self.position}"


@dataclass(frozen=True)
class Address:
    """Where to find a rank and what it writes. host: its name and its name space of processes"""

    host: str
    pid: int
    note: str
    stacks: str


class Notebook:
    """One rank's note and the file for its stacks.

    folder: of whoever started the ranks; without one the files have no name, and end with the rank
    results: where stacks are kept in the end; None: nowhere
    """

    def __init__(self, rank: int, folder: Path | None = None) -> None:
        self.warmup, self.step = False, 0
        self.results: Path | None = None
        self._begun, self._folder = 0, folder
        self._note, note = _open(folder, f"note.rank{rank}")
        self._stacks, stacks = _open(folder, f"stacks.rank{rank}")
        self.rest()
        self.address = Address(_host(), os.getpid(), note, stacks)

    def close(self) -> None:
        self._note.close()
        self._stacks.close()

    def answer_signals(self) -> None:
        """Write the stacks of all threads when asked to; works wherever the rank hangs."""
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)

    def keep_in(self, results: Path) -> None:
        """Stacks are kept there; whoever started the ranks can say so, as the file `results`."""
        self.results = results
        if self._folder is not None:
            (self._folder / "results").write_text(str(results), encoding="utf-8")

    def rest(self) -> None:
        """This rank is in no phase: not yet, or no more."""
        os.pwrite(self._note.fileno(), bytes(_NOTE.size), 0)

    def begin(self, position: Position) -> None:
        """A phase begins."""
        self._begun += 1
        direction, phase = DIRECTIONS.index(position.direction), ALL_PHASES.index(position.phase)
        words = (self._begun, self.warmup, self.step, position.layer, direction, phase)
        os.pwrite(self._note.fileno(), _NOTE.pack(*words), 0)


def _open(folder: Path | None, name: str) -> tuple[IO[bytes], str]:
    """An empty file and the path by which other processes find it."""
    if folder is not None:
        return (folder / name).open("w+b", buffering=0), str(folder / name)
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  open as long as the rank lives
    return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _host() -> str:
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def read_note(path: str | Path) -> Note:
    """The note of a rank, which may be dead; one that left none never began anything."""
    try:
        begun, warmup, step, layer, direction, phase = _NOTE.unpack(Path(path).read_bytes())
    except (OSError, struct.error):
        return Note(0)
    if not begun:
        return Note(0)
    return Note(
        begun, bool(warmup), step, Position(layer, ALL_PHASES[phase], DIRECTIONS[direction])
    )


def ask_for_stacks(addresses: list[Address]) -> list[str]:
    """The stacks of ranks of this host, of each an empty text where it does not answer."""
    for address in addresses:
        with contextlib.suppress(OSError):
            os.kill(address.pid, STACKS_SIGNAL)
            os.kill(address.pid, signal.SIGCONT)  # were it stopped, no signal would reach it
    if addresses:
        time.sleep(STACKS_S)
    return [_text(address.stacks) for address in addresses]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
