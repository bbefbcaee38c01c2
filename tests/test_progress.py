"""The progress bar: on rank 0's terminal, after two seconds, and nowhere else."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from comm.report.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def terminal_that_moves_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def run(stream: io.StringIO, seconds: float, rank: int = 0, pieces: int = 4) -> str:
    """What `pieces` of work that took `seconds` together leave on the stream."""
    clock = Clock()
    with progress(pieces, "layers", rank=rank, stream=stream, clock=clock) as bar:
        for _ in range(pieces):
            clock.now += seconds / pieces
            bar.advance()
    return stream.getvalue()


def test_a_long_run_on_a_terminal_draws() -> None:
    text = run(Terminal(), 10.0)
    assert "layers" in text and "100%" in text


def test_nothing_is_drawn_within_two_seconds() -> None:
    assert run(Terminal(), 2.0) == ""
    assert run(Terminal(), 2.1) != ""


def test_a_late_bar_starts_where_the_work_is() -> None:
    stream, clock = Terminal(), Clock()
    with progress(4, "layers", stream=stream, clock=clock) as bar:
        bar.advance(2)
        assert stream.getvalue() == ""
        clock.now = 3.0
        bar.advance()
    assert "75%" in stream.getvalue()


def test_other_ranks_and_pipes_stay_silent() -> None:
    assert run(Terminal(), 10.0, rank=1) == ""
    assert run(io.StringIO(), 10.0) == ""


def test_the_bar_goes_when_the_work_fails() -> None:
    stream, clock = Terminal(), Clock()
    with pytest.raises(RuntimeError), progress(4, "x", stream=stream, clock=clock) as bar:
        clock.now = 3.0
        bar.advance()
        raise RuntimeError
    assert stream.getvalue().rstrip().endswith("\x1b[2K")  # the last thing erases the line


def test_a_run_that_draws_nothing_does_not_import_rich() -> None:
    code = (
        "import sys; from comm.report.progress import progress\n"
        "import comm.report.console, comm.report.store\n"
        "with progress(1, 'x') as bar: bar.advance()\n"
        "assert not any(name in sys.modules for name in ('rich', 'torch', 'hydra'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
