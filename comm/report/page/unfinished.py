"""What a run that was killed had counted until then: its event logs, a line for each phase."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm.report.page.charts import SERIES, bytes_axis, chart, legend, whole_axis
from comm.report.page.html import Markup, element, figure, join, paragraph, table
from comm.report.table_rows import TIER_WORDS, phase_label
from comm.report.units import format_bytes, format_seconds

LOG = re.compile(r"events\.rank(\d+)\.jsonl")
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Left:
    """events: of each rank that wrote any, in the order of the ranks"""

    folder: Path
    events: Mapping[int, Sequence[Event]]

    @classmethod
    def read(cls, folder: Path) -> Left:
        """Raises ValueError where there is no log, or one that is not of this program."""
        logs = {
            int(match[1]): path
            for path in folder.glob("events.rank*.jsonl")
            if (match := LOG.fullmatch(path.name))
        }
        if not logs:
            raise ValueError(f"result={folder}: has neither a run.json nor events.rank<r>.jsonl")
        return cls(folder, {rank: _events(logs[rank]) for rank in sorted(logs)})

    def parts(self) -> dict[str, tuple[str, Markup]]:
        """The sections of the page, for `document`."""
        return {
            "phases": ("By phase", _by_phase(self)),
            "layers": ("By layer", _stacked(self, "layer", lambda rank, event: event["layer"])),
            "ranks": ("By rank", _stacked(self, "rank", lambda rank, event: rank) + _last(self)),
        }


def _events(path: Path) -> list[Event]:
    """The whole lines of a log; the machine may have stopped in the middle of the last one."""
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        events = [json.loads(line) for line in lines]
        for event in events:
            sums = (sum(tiers.values()) for tiers in event["bytes"].values())
            assert {*event} >= {"step", "layer", "direction", "phase", "rows", "seconds"}
            sum(sums)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise ValueError(f"{path}: line is not an event of this program") from error
    return events


def heading(left: Left) -> Markup:
    """That nothing was checked, and how far the ranks came."""
    count = sum(map(len, left.events.values()))
    said = (
        f"This run did not finish: it has no run.json. Nothing below was checked against a"
        f" prediction; it is what {len(left.events)} ranks had counted until then, in {count:,}"
        " phases that ended."
    )
    steps = {event["step"] for events in left.events.values() for event in events}
    about = f"Measured steps begun: {len(steps)}." if steps else "No measured phase had ended."
    return join(
        [
            element("h1", f"Unfinished run {left.folder.name}"),
            element("p", said, class_="answer bad"),
            paragraph(about),
            paragraph("Ranks that ended fewer phases than others may be those that failed: see"
                      " the last table."),
        ]
    )  # fmt: skip


def sent(event: Event) -> Counter[str]:
    """Bytes of an event by tier."""
    total: Counter[str] = Counter()
    for tiers in event["bytes"].values():
        total.update(tiers)
    return total


def _by_phase(left: Left) -> Markup:
    """Bytes of all ranks by phase and tier, and the time of the slowest."""
    bytes_, rows, ended = {}, Counter(), Counter()
    seconds: dict[str, Counter[int]] = {}
    for rank, events in left.events.items():
        for event in events:
            name = phase_label(event["direction"], event["phase"])
            bytes_.setdefault(name, Counter()).update(sent(event))
            rows[name] += sum(event["rows"].values())
            ended[name] += 1
            seconds.setdefault(name, Counter())[rank] += event["seconds"]
    lines = [
        (
            name,
            f"{ended[name]:,}",
            f"{rows[name]:,}",
            *(format_bytes(tiers[tier]) for tier in TIER_WORDS),
            format_seconds(max(seconds[name].values())),
        )
        for name, tiers in bytes_.items()
    ]
    header = ("phase", "ended", "rows", *TIER_WORDS.values(), "slowest rank")
    return table(header, lines)


def _stacked(left: Left, what: str, key: Callable[[int, Event], int]) -> Markup:
    """Network bytes of each phase over layers or ranks."""
    totals: dict[str, Counter[int]] = {}
    for rank, events in left.events.items():
        for event in events:
            name = phase_label(event["direction"], event["phase"])
            tiers = sent(event)
            away = tiers["scale_up"] + tiers["scale_out"]
            totals.setdefault(name, Counter())[key(rank, event)] += away
    places = sorted({place for of in totals.values() for place in of})
    if not places:
        return paragraph("Nothing was counted.")

    def paint(axes: Any) -> None:
        bottom = [0] * len(places)
        for (name, of), color in zip(totals.items(), SERIES * 2, strict=False):
            values = [of[place] for place in places]
            axes.bar(places, values, bottom=bottom, color=color, width=0.8, label=name)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.set_xlabel(what)
        bytes_axis(axes.yaxis)
        whole_axis(axes.xaxis)
        legend(axes)

    in_all = sum(sum(of.values()) for of in totals.values())
    alt = f"Stacked bars of the network bytes of each {what}: {format_bytes(in_all)} in all."
    rows = [(place, *(f"{of[place]:,}" for of in totals.values())) for place in places]
    numbers = table((what, *(f"{name}, bytes" for name in totals)), rows)
    caption = f"Bytes that left their rank, by {what}, as the senders counted them."
    return figure(chart(f"{what}s", alt, 2.6, paint), caption, numbers)


def _last(left: Left) -> Markup:
    """How far each rank came."""
    rows = []
    for rank, events in left.events.items():
        if not events:
            rows.append((rank, "no measured phase", "0", "0 B"))
            continue
        last = events[-1]
        place = f"step {last['step']}, layer {last['layer']}, {last['direction']} {last['phase']}"
        total = sum((sent(event) for event in events), Counter())
        rows.append((rank, place, f"{len(events):,}", format_bytes(sum(total.values()))))
    header = ("rank", "last phase that it ended", "phases ended", "bytes, self included")
    return paragraph("How far each rank came:") + table(header, rows, words=2)
