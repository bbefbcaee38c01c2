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
    """The table of a run's conventions, those that count no row left out; nothing without any.

    entries: name, rows_per_token, num_bytes and printed_by of each
    wire: format of the rows, for the legend; of: what else it says of them
    """
    shown = [entry for entry in entries if entry["rows_per_token"]]
    if not shown:
        return []
    rows = []
    for entry in shown:
        first, *more = wrap(entry["printed_by"] or "-", PRINTED_BY_WIDTH)
        figures = (f"{entry['rows_per_token']:.4f}", format_bytes(round(entry["num_bytes"])))
        rows.append((entry["name"], *figures, first))
        rows += [("", "", "", part) for part in more]
    words = max(len(row[3]) for row in rows)
    rows = [(*row[:3], row[3].ljust(words)) for row in rows]
    header = ("numerator", "rows a token", "a rank", "printed by".ljust(words))
    lines = title("CONVENTIONS", remark, width) + table(header, rows)
    legend = f"payload of {wire} rows in one layer and step, one way, of the mean rank{of}"
    notes = {"a rank": legend, "remote": REMOTE}
    if len(shown) < len(entries):
        notes["left out"] = "numerators that count no row here"
    return lines + labelled_facts(notes, width)
