"""What a sweep prints, and its sweep.csv, from the sweep.json dictionary alone.

SWEEP      what was swept; a line for each run: of one token, at the model's full size
LEFT OUT   combinations that cannot be run, or whose run failed, with the reason
RESULTS    the folder
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from comm.report.answer import LABEL, first_line, labelled_facts
from comm.report.layout import Line, labelled, line, paragraph, plain_text, table, title
from comm.report.units import format_bytes, format_count, format_seconds, format_significant

Record = Mapping[str, Any]
Columns = Sequence[tuple[str, str]]

DONE, REFUSED, FAILED, UNREACHED = "done", "refused", "failed", "not reached"
FIGURES = (  # of sweep.csv
    *("rows_per_token", "scale_up_bytes", "scale_out_bytes", "network_bytes"),
    *("expected_bytes", "expected_std", "step_us"),
)
# Columns that are dropped, in this order, where a table is too wide.
OPTIONAL = ("sd", "rows/token", "expected", "inside node", "between nodes")


def sweep_page(record: Record, width: int) -> list[Line]:
    """The page as lines of at most `width` columns where the axes' names allow it."""
    done = [run for run in record["runs"] if run["state"] == DONE]
    facts = {
        "swept": "; ".join(f"{name} = {', '.join(v)}" for name, v in record["axes"].items())
        or "nothing: one combination",
        "for all": " ".join(record["settings"]) or "the defaults",
    }
    what = f"{format_count(len(record['runs']), 'combination')} of job={record['job']}"
    lines = first_line({"commit": None, **record}, " sweep", width) + labelled_facts(facts, width)
    lines += title("SWEEP", f"{what}; one token of the full model, a forward pass", width)
    if done:
        lines += _table(record, done, width)
        lines += labelled("  bytes", _legend(record), width, LABEL)
    lines += _left_out(record, width)
    return lines + _results(record, width)


def _table(record: Record, done: Sequence[Record], width: int) -> list[Line]:
    """As many columns as fit; never without the axes, the total and the verdict."""
    rows = [_cells(record["axes"], run) for run in done]
    unused = {name for name in rows[0] if not any(row[name].strip("-") for row in rows)}
    if not any(run["figures"].get("scale_out_bytes") for run in done):
        unused |= {"inside node", "between nodes"}  # the same as the total, and nothing
    if record["job"] == "predict":
        unused.add("expected")  # all of it is
    for dropped in range(len(OPTIONAL) + 1):
        names = [one for one in rows[0] if one not in unused | set(OPTIONAL[:dropped])]
        left = len(record["axes"])
        lines = table(names, [[row[name] for name in names] for row in rows], max(1, left))
        if max(len(plain_text(one)) for one in lines) <= width:
            break
    return lines


def _cells(axes: Mapping[str, Any], run: Record) -> dict[str, str]:
    """Column -> cell. A key is shown by its last part where no other ends in the same."""
    figures = run["figures"]
    lasts = [name.rsplit(".", 1)[-1] for name in axes]
    shown = [
        last if lasts.count(last) == 1 else name for name, last in zip(axes, lasts, strict=True)
    ]
    cells = dict(zip(shown, run["values"].values(), strict=True))
    rows = figures.get("rows_per_token")
    return cells | {
        "rows/token": "-" if rows is None else format_significant(rows),
        "inside node": _bytes(figures, "scale_up_bytes"),
        "between nodes": _bytes(figures, "scale_out_bytes"),
        "network": _bytes(figures, "network_bytes"),
        "expected": _bytes(figures, "expected_bytes"),
        "sd": _bytes(figures, "expected_std"),
        "least time": "-" if (us := figures.get("step_us")) is None else format_seconds(us / 1e6),
        "verdict": _verdict(run),
    }


def _bytes(figures: Record, name: str) -> str:
    value = figures.get(name)
    return "-" if value is None else format_bytes(value)


def _verdict(run: Record) -> str:
    """What failed, or that nothing did; a prediction has none."""
    verdicts = run["figures"].get("verdicts")
    if verdicts is None:
        return "-"
    failed = [name for name, state in verdicts.items() if state == "OUTSIDE"]
    return f"{', '.join(failed)} OUTSIDE" if failed else "agrees"


def _legend(record: Record) -> str:
    text = "network: what leaves its rank, metadata included; rows/token: dispatched in one layer"
    if record["job"] == "emulate":
        return text + "; expected, sd: by the law of the router, for as many tokens as the run had"
    return text + "; least time: of a step's communication on the machine that hardware names"


def _left_out(record: Record, width: int) -> list[Line]:
    """Every combination without a figure, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for run in record["runs"]:
        if run["state"] != DONE:
            words = " ".join(f"{name}={value}" for name, value in run["values"].items())
            reasons.setdefault(f"{run['state']}: {run['reason']}", []).append(words or "the run")
    if not reasons:
        return []
    number = sum(map(len, reasons.values()))
    lines = title("LEFT OUT", format_count(number, "combination"), width)
    for reason, words in reasons.items():
        lines += paragraph(reason, width)
        lines += [part for one in words for part in paragraph(one, width, indent=6, style="dim")]
    return lines


def _results(record: Record, width: int) -> list[Line]:
    files = "sweep.json: every figure; sweep.csv: the table" + (
        "; sweep.html: curves" if record["page"] else f"; no page: {record['no_page']}"
    )
    what = "a folder for each run" if record["job"] == "emulate" else "no run was made"
    return [
        line(),
        *labelled("RESULTS", record["result_dir"], width, LABEL, "bold"),
        *labelled("", f"{files}; {what}", width, LABEL),
        *labelled(f"  status {record['status']}", record["outcome"], width, LABEL, "bold"),
    ]


def sweep_csv(record: Record) -> str:
    """A line for each combination, whether it was run or not."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*record["axes"], "state", "status", *FIGURES, "seconds", "reason"])
    for run in record["runs"]:
        figures = [run["figures"].get(name) for name in FIGURES]
        values = run["values"].values()
        writer.writerow(
            [*values, run["state"], run["status"], *figures, run["seconds"], run["reason"]]
        )
    return text.getvalue()
