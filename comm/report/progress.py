"""A progress bar on rank 0's terminal, for runs that take long enough to wonder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

PATIENCE_SECONDS = 2.0


class Progress:
    """Counts finished pieces of work; draws nothing before `PATIENCE_SECONDS` have gone by."""

    def __init__(
        self, total: int, label: str, stream: TextIO | None, clock: Callable[[], float]
    ) -> None:
        """stream: None never draws."""
        self._total, self._label, self._stream, self._clock = total, label, stream, clock
        self._started = clock()
        self._done = 0
        self._bar: Any = None  # rich.progress.Progress, once it is drawn

    def advance(self, pieces: int = 1) -> None:
        """Some pieces are finished."""
        self._done += pieces
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._stream is not None and self._clock() - self._started > PATIENCE_SECONDS:
            self._draw()

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(file=self._stream), transient=True)
        self._task = self._bar.add_task(self._label, total=self._total, completed=self._done)
        self._bar.start()


@contextmanager
def progress(
    total: int,
    label: str,
    rank: int = 0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    shown: bool = True,
) -> Iterator[Progress]:
    """Progress over `total` pieces; silent on other ranks than 0 and away from a terminal.

    stream: where the bar goes, standard error by default
    """
    stream = sys.stderr if stream is None else stream
    shown = shown and rank == 0 and stream is not None and stream.isatty()
    state = Progress(total, label, stream if shown else None, clock)
    try:
        yield state
    finally:
        state.close()
