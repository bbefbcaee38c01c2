"""The table by layer and phase.

Bytes share one unit, the finest that fits the page, so that columns compare and add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comm.report.layout import Line, align, column_widths, line
from comm.report.table_rows import (
    KIND_COLUMNS,
    TIER_COLUMNS,
    Row,
    body_rows,
    shown_tiers,
    total_rows,
)
from comm.report.units import BYTE_UNITS, COUNT_UNITS, format_bytes, format_fixed

MAX_DIFFERENCE = 9  # a longer one is rounded and carries its unit
LEFT = 2  # columns aligned to the left: layer and phase
GAPS = ((2, 3), (1, 3), (1, 2))  # blanks between columns: inside a group, between groups
# Common units to try, finest first: (power of 1000, decimals).
Unit = tuple[int, int]
UNITS: tuple[Unit, ...] = ((0, 0), *itertools.product(range(1, 7), (2, 1, 0)))


@dataclass(frozen=True)
class Column:
    """One column: the group above it, a header of two lines, and its cell of a row and a unit."""

    group: str
    header: tuple[str, str]
    cell: Callable[[Row, Unit], str]


def layer_table(record: Mapping[str, Any], width: int) -> list[Line]:
    """The table in at most `width` columns."""
    body, totals = body_rows(record), total_rows(record)
    columns = _columns(record, [*body, *totals])
    for unit, (inner, outer) in itertools.product(UNITS, GAPS):
        grid = [[column.cell(row, unit) for column in columns] for row in (*body, *totals)]
        header = _header(columns, BYTE_UNITS[unit[0]])
        widths = column_widths([*header, *grid])
        gaps = [
            inner if before.group == column.group else outer
            for before, column in itertools.pairwise((columns[0], *columns))
        ]
        if sum(widths) + sum(gaps) <= width:
            groups = _groups(columns, widths, gaps, BYTE_UNITS[unit[0]])
            head = [groups, *(align(cells, widths, gaps, LEFT) for cells in header)]
            lines = [align(cells, widths, gaps, LEFT) for cells in grid]
            return _draw(head, lines, [*body, *totals], len(totals), gaps[0])
    raise ValueError(f"width={width} is too narrow for the table; it needs about 100")


def _columns(record: Mapping[str, Any], rows: Sequence[Row]) -> list[Column]:
    """The columns that this run needs: no tier without pairs, no padding without padding."""
    most = max(row.rows for row in rows)
    count = next(u for u in range(len(COUNT_UNITS)) if most < 10 ** (3 * u + 6))
    columns = [
        Column("", ("", "layer"), lambda row, _: row.layer),
        Column("", ("", "phase"), lambda row, _: row.phase),
        Column("", (COUNT_UNITS[count], "rows"), lambda row, _: f"{row.rows / 1000**count:,.0f}"),
    ]
    for name in KIND_COLUMNS:
        if name != "padding" or any(row.kinds[name] for row in rows):
            columns.append(Column("{unit}, by kind", _two_lines(name), _kind_cell(name)))
    for name, tier in TIER_COLUMNS.items():
        if tier in shown_tiers(record):
            columns.append(Column("{unit}, by place", _two_lines(name), _tier_cell(tier)))
    return columns + [
        Column("prediction", ("exact,", "{unit}"), lambda row, unit: _optional(row.exact, unit)),
        Column("prediction", ("diff.,", "B"), lambda row, _: _difference(row)),
        Column("prediction", ("", "z"), lambda row, _: row.z),
    ]


def _kind_cell(name: str) -> Callable[[Row, Unit], str]:
    return lambda row, unit: format_fixed(row.kinds[name], *unit)


def _tier_cell(tier: str) -> Callable[[Row, Unit], str]:
    return lambda row, unit: format_fixed(row.tiers[tier], *unit)


def _two_lines(name: str) -> tuple[str, str]:
    top, _, bottom = name.rpartition(" ")
    return top, bottom


def _optional(num_bytes: int | None, unit: Unit) -> str:
    return "?" if num_bytes is None else format_fixed(num_bytes, *unit)


def _difference(row: Row) -> str:
    """Counted - exact; where errors of single pairs cancel in it, the sum of their sizes as +-."""
    if row.exact is None or row.differing is None:
        return "?"
    difference = sum(row.tiers.values()) - row.exact
    sign, size = ("+" if difference > 0 else "-"), abs(difference)
    if size < row.differing:
        sign, size = "+-", row.differing
    text = f"{sign}{size:,}" if size else "0"
    return text if len(text) <= MAX_DIFFERENCE else f"{sign}{format_bytes(size, 3)}"


def _header(columns: Sequence[Column], unit: str) -> list[list[str]]:
    """The two lines of column names."""
    return [[column.header[i].format(unit=unit) for column in columns] for i in (0, 1)]


def _groups(
    columns: Sequence[Column], widths: Sequence[int], gaps: Sequence[int], unit: str
) -> str:
    """The line above the column names: each group's name over its columns."""
    text = ""
    for group, members in itertools.groupby(range(len(columns)), lambda i: columns[i].group):
        first, *more = members
        span = widths[first] + sum(gaps[i] + widths[i] for i in more)
        name = f" {group.format(unit=unit)} ".center(span, "-") if group else ""
        while len(name) > span:  # a group of one narrow column keeps the last words of its name
            name = name.strip().partition(" ")[2]
        text += " " * gaps[first] + name.rjust(span)
    return text


def _draw(
    head: list[str], lines: list[str], rows: Sequence[Row], num_totals: int, indent: int
) -> list[Line]:
    """Header, rule, layers, rule, totals; what differs is red."""
    rule = line(" " * indent + "-" * (len(lines[0]) - indent), "dim")
    styles = ["bold red" if row.differing else "" for row in rows]
    totals = len(rows) - num_totals
    styles[totals:] = [style or "bold" for style in styles[totals:]]
    drawn = [line(text, style) for text, style in zip(lines, styles, strict=True)]
    return [
        line(head[0], "dim"),
        *(line(text, "bold") for text in head[1:]),
        rule,
        *drawn[:totals],
        rule,
        *drawn[totals:],
    ]
