"""What the ranks of a test say of its end, as one text: causes first, equal texts once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comm.spawn import RankReport

LINE = "-" * 20
WAITING, LATE = "StillRunning", "TimeoutError"  # kinds of comm.ranks
BODY_OVER = (
    "The body has ended here, and waits for the others to end: have all ranks made the same"
    " collectives?"
)


def describe(failures: Sequence[RankReport], world_size: int) -> str:
    """What every rank says, the root cause first; ranks that say the same are named together.

    failures: comm.ranks.Outcome.failures
    """
    first = [one for one in failures if not one.caused_by_others] or list(failures)
    others = [one for one in failures if one not in first]
    head = f"{named([one.rank for one in first])} of {world_size} failed"
    told: dict[str, list[RankReport]] = {}
    for report in first:
        told.setdefault(_comparable(_told(report)), []).append(report)
    blocks = [f"{head}: {_first_line(first[0])}"]
    for reports in told.values():
        title = named([one.rank for one in reports])
        blocks.append(f"{LINE} {title} {LINE}\n{_told(reports[0])}")
    waiting = [one.rank for one in others if one.kind == WAITING]
    closed = [one.rank for one in others if one.kind != WAITING]
    if waiting:
        blocks.append(f"{named(waiting)}: still at work when the others had failed")
    if closed:
        blocks.append(f"{named(closed)}: only lost the connection to others")
    return "\n".join(blocks)


def _told(report: RankReport) -> str:
    """What a rank has to say: pytest's text of its error, or where it hangs."""
    if report.kind == LATE:
        return f"{report.error}\n{_stacks(report.details)}"
    return re.sub(r"^rank = \d+(, |\n+)", "", report.details.strip("\n")) or str(report.error)


def _comparable(text: str) -> str:
    """Addresses and the rank's number are others on each rank, and do not matter."""
    return re.sub(r"\brank = \d+|0x[0-9a-f]+", "", text)


def _first_line(report: RankReport) -> str:
    return str(report.error).partition("\n")[0]


def _stacks(details: str) -> str:
    """The user's part of what faulthandler wrote."""
    lines = re.sub(r"^(Current thread|Thread) 0x\w+", r"\1", details, flags=re.M).splitlines()
    end = next((at for at, line in enumerate(lines) if "in on_rank" in line), None)
    if end is not None:
        return "\n".join(lines[:end])
    over = any("in _put_back" in line for line in lines)
    return BODY_OVER if over else details


def named(ranks: Sequence[int] | Mapping[int, Any]) -> str:
    """'rank 3', 'ranks 0, 2-5'."""
    runs = []
    for _, group in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(runs)}"
