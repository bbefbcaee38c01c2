"""The table by layer and phase.

Bytes share one unit, so that columns compare and add up. What a layer moves decides it, so that
two runs of alike size have it in common.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comm.report.layout import Line, align, column_widths, line
from comm.report.table_rows import (
    INSTEAD,
    KIND_COLUMNS,
    OPTIONAL_KINDS,
    TIER_WORDS,
    Row,
    body_rows,
    shown_tiers,
    total_rows,
)
from comm.report.units import BYTE_UNITS, COUNT_UNITS, format_bytes, format_fixed

MAX_DIFFERENCE = 9  # a longer one is rounded and carries its unit
LEFT = 2  # columns aligned to the left: layer and phase
GAPS = ((2, 3), (1, 3), (1, 2), (1, 1))  # blanks between columns: inside a group, between groups
NARROWEST = 90  # below this the reader chose the width; the table does not fit it
UNIT_LIMIT = 10_000  # a layer moves fewer of the table's unit than this
BY_KIND = "{unit}, by kind"  # group of columns
Unit = tuple[int, int]  # power of 1000, decimals


@dataclass(frozen=True)
class Column:
    """One column: the group above it, a header of two lines, and its cell of a row and a unit.

    kind: its name in KIND_COLUMNS, where it is one of them
    """

    group: str
    header: tuple[str, str]
    cell: Callable[[Row, Unit], str]
    kind: str = ""


def layer_table(record: Mapping[str, Any], width: int) -> list[Line]:
    """The table in at most `width` columns."""
    body, totals = body_rows(record), total_rows(record)
    choices = _choices(_columns(record, [*body, *totals]), totals)
    for units, columns in itertools.product(_units(record), choices):
        for unit, (inner, outer) in itertools.product(units, GAPS):
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
    if width < NARROWEST:
        raise ValueError(f"width={width} is too narrow for the table; it needs about {NARROWEST}")
    return layer_table(record, width + 10)  # rather too wide than no page for a run that went wrong


def _units(record: Mapping[str, Any]) -> list[list[Unit]]:
    """Common units to try: that which suits a layer, then coarser ones; each with ever fewer
    decimals.

    Bytes only where every figure is below UNIT_LIMIT of them.
    """
    layers: Counter[int] = Counter()
    for entry in record["layers"]:
        layers[entry["layer"]] += sum(cell["measured_bytes"] for cell in entry["cells"])
    most, coarsest = max(layers.values()), len(BYTE_UNITS) - 1
    first = next((u for u in range(1, coarsest) if most < UNIT_LIMIT * 1000**u), coarsest)
    units = [[(power, decimals) for decimals in (2, 1, 0)] for power in range(first, coarsest + 1)]
    whole = sum(cell["measured_bytes"] for cell in record["totals"]["cells"])
    return [[(0, 0)], *units] if whole < UNIT_LIMIT else units


def _choices(columns: Sequence[Column], totals: Sequence[Row]) -> list[list[Column]]:
    """Columns to try, ever fewer: all, those of kinds that were sent, some of them as one."""
    choices = [[column for column in columns if column.kind not in INSTEAD]]
    sent = [column for column in columns if not _unsent(column, totals)]
    for merged in range(len(INSTEAD) + 1):
        names, others = list(INSTEAD)[:merged], list(INSTEAD)[merged:]
        gone = {*others, *(part for name in names for part in INSTEAD[name])}
        choices.append([column for column in sent if column.kind not in gone])
    return choices


def _unsent(column: Column, totals: Sequence[Row]) -> bool:
    """Whether it is the column of a kind of which nothing was sent."""
    return column.group == BY_KIND and all(column.cell(row, (0, 0)) == "-" for row in totals)


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
        if name not in OPTIONAL_KINDS or any(row.kinds[name] for row in rows):
            columns.append(Column(BY_KIND, _two_lines(name), _kind_cell(name), name))
    for tier, name in TIER_WORDS.items():
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
