"""The page that a run prints, from its run.json dictionary alone: a saved run prints the same.

manifest   what ran
ANSWER     the verdicts and the headline formula, before any table
BY LAYER   every byte by layer and phase, by kind, by place, beside its prediction
HEADLINE   the way from the formula to the count, factor by factor
FULL SIZE  the same routing on the unscaled model
CONVENTIONS  what other programs would call the bytes of this routing
TIME       seconds, bandwidths, balance
RESULTS    the folder
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from comm.report import answer, figures, notes
from comm.report.conventions_page import conventions
from comm.report.layer_table import layer_table
from comm.report.layout import Line, plain_text, title
from comm.report.store import CannotWrite

WIDTH = 100


def page(record: Mapping[str, Any], width: int = WIDTH) -> list[Line]:
    """The page as styled lines of at most `width` columns."""
    return [
        *answer.manifest(record, width),
        *answer.answer(record, width),
        *title("BY LAYER", f"{_directions(record)}; sums over ranks and steps", width),
        *layer_table(record, width),
        *notes.table_notes(record, width),
        *figures.headline(record, width),
        *figures.full_scale(record, width),
        *_conventions(record, width),
        *figures.timing(record, width),
        *answer.results(record, width),
    ]


def _conventions(record: Mapping[str, Any], width: int) -> list[Line]:
    about = record["manifest"]
    shared = "; between ranks with the same shard" if about["config"]["expert_tp"] > 1 else ""
    return conventions(record["conventions"], about["wire"]["dispatch"], width, of=shared)


def _directions(record: Mapping[str, Any]) -> str:
    return "forward and backward" if record["totals"]["backward"] else "forward"


def render(
    record: Mapping[str, Any],
    width: int = WIDTH,
    color: bool | None = None,
    file: TextIO | None = None,
) -> None:
    """Print the page of a record; see `print_lines`."""
    print_lines(page(record, width), width, color, file)


def print_lines(
    lines: Iterable[Line],
    width: int = WIDTH,
    color: bool | None = None,
    file: TextIO | None = None,
) -> None:
    """Print styled lines to `file` (standard output).

    color: None leaves it to the terminal and NO_COLOR; a pipe gets plain text
    A reader that closes the pipe early has seen what it wanted: that is no error.
    """
    from rich.console import Console as RichConsole
    from rich.text import Text

    class Console(RichConsole):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich itself would end the process

    file = sys.stdout if file is None else file
    console = Console(
        file=file,
        width=width,
        highlight=False,
        force_terminal=color,
        no_color=None if color is None else not color,
    )
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        for spans in lines:
            if not console.is_terminal:
                spans = ((plain_text(spans), ""),)
            # A path may hold letters that the terminal's encoding has not.
            parts = [
                (text.encode(encoding, "backslashreplace").decode(encoding), style)
                for text, style in spans
            ]
            console.print(Text.assemble(*parts), soft_wrap=True)
        file.flush()
    except OSError as error:
        # What Python flushes at its end must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        if not isinstance(error, BrokenPipeError):
            raise CannotWrite("standard output", error) from error
