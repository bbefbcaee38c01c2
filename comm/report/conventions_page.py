"""The field's numerators side by side: one routing, and every number that is divided by a time to
print a "bandwidth"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comm.report.answer import labelled_facts
from comm.report.layout import Line, table, title, wrap
from comm.report.units import format_bytes

REMARK = "what other programs would call the bytes of one dispatch of this routing"
REMOTE = "without what stays on the token's own rank; of nodes, on its own node"
PRINTED_BY_WIDTH = 36


def conventions(
    entries: Sequence[Mapping[str, Any]], wire: str, width: int, remark: str = REMARK, of: str = ""
) -> list[Line]:
    """The table of a run's conventions; nothing where there are none.

    entries: name, rows_per_token, num_bytes and printed_by of each
    wire: format of the rows, for the legend; of: what else it says of them
    """
    if not entries:
        return []
    rows = []
    for entry in entries:
        first, *more = wrap(entry["printed_by"] or "-", PRINTED_BY_WIDTH)
        figures = (f"{entry['rows_per_token']:.4f}", format_bytes(round(entry["num_bytes"])))
        rows.append((entry["name"], *figures, first))
        rows += [("", "", "", part) for part in more]
    words = max(len(row[3]) for row in rows)
    rows = [(*row[:3], row[3].ljust(words)) for row in rows]
    header = ("numerator", "rows a token", "a rank", "printed by".ljust(words))
    lines = title("CONVENTIONS", remark, width) + table(header, rows)
    legend = f"payload of {wire} rows in one layer and step, one way, of the mean rank{of}"
    return lines + labelled_facts({"a rank": legend, "remote": REMOTE}, width)
