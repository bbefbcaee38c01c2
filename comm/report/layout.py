"""Lines of styled text, tables and wrapping. Plain ASCII, so that any terminal and pipe shows it.

A line is a tuple of spans, a span is (text, style); styles are rich's words ("bold red").
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=([kMGTPE]?B|[mu]?s)\b)")
JOINER = "\0"  # stands for a blank at which no line ends

Span = tuple[str, str]
Line = tuple[Span, ...]


def line(text: str = "", style: str = "") -> Line:
    return ((text, style),)


def plain_text(spans: Line) -> str:
    """A line without its styles and without blanks at its end."""
    return "".join(text for text, _ in spans).rstrip()


def title(name: str, remark: str, width: int) -> list[Line]:
    """An empty line and a section's title, with what the section counts beside it."""
    first, *rest = wrap(remark, width - len(name) - 2) or [""]
    more = [line(" " * (len(name) + 2) + text) for text in rest]
    return [line(), ((name, "bold"), ("  " + first, "")), *more]


def wrap(text: str, width: int) -> list[str]:
    """Text in lines of at most `width`; a number keeps its unit, only long words are cut."""
    joined = NUMBER_AND_UNIT.sub(JOINER, text)
    lines = textwrap.wrap(joined, width, break_on_hyphens=False)
    return [part.replace(JOINER, " ") for part in lines]


def paragraph(text: str, width: int, indent: int = 2, style: str = "") -> list[Line]:
    """Wrapped text, indented."""
    return [line(" " * indent + part, style) for part in wrap(text, width - indent)]


def labelled(label: str, text: str, width: int, column: int, style: str = "") -> list[Line]:
    """A label in a column of its own and wrapped text beside it."""
    parts = wrap(text, width - column) or [""]
    first = ((f"{label:<{column}}", style), (parts[0], ""))
    return [first, *(line(" " * column + part) for part in parts[1:])]


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The widest cell of each column."""
    return [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]


def align(cells: Sequence[str], widths: Sequence[int], gaps: Sequence[int], left: int = 1) -> str:
    """One row of a table: `left` columns to the left, the rest to the right.

    gaps: blanks before each column
    """
    parts = [
        " " * gap + (cell.ljust(size) if i < left else cell.rjust(size))
        for i, (cell, size, gap) in enumerate(zip(cells, widths, gaps, strict=True))
    ]
    return "".join(parts)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, bold_last: bool = False
) -> list[Line]:
    """A header, a rule of dashes and rows, columns two blanks apart, all indented by two."""
    widths = column_widths([header, *rows])
    gaps = [2] * len(widths)
    lines = [line(align(header, widths, gaps, left), "bold")]
    lines.append(line("  " + "-" * (sum(widths) + 2 * len(widths) - 2), "dim"))
    lines += [line(align(row, widths, gaps, left)) for row in rows]
    if bold_last:
        lines[-1] = line(plain_text(lines[-1]), "bold")
    return lines
