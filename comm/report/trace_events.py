"""Phases by rank over time in the Trace Event Format, which Perfetto and chrome://tracing read.

A node is a process and a rank a thread of it, numbered from 1: 0 is the idle process of a trace. A
span begins as long before its end as the rank spent inside the phase. With chunks that time came
in pieces, while other phases ran as well: a span is cut where the one before it ends, for spans of
a thread must nest; args.seconds has all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


def read_events(folder: Path) -> dict[int, list[Event]]:
    """By rank, in order. The last line of a rank that was killed may be half a line.

    Raises ValueError where there are none, or none with times.
    """
    found: dict[int, list[Event]] = {}
    for path in folder.glob("events.rank*.jsonl"):
        named = re.fullmatch(r"events\.rank(\d+)\.jsonl", path.name)
        if named is None:  # a copy, say
            continue
        lines = path.read_bytes().splitlines(keepends=True)
        found[int(named[1])] = [
            _event(line, path, number)
            for number, line in enumerate(lines, 1)
            if line.endswith(b"\n")
        ]
    events = [event for rank in found.values() for event in rank]
    if not events:
        raise ValueError(f"result={folder}: has no events.rank*.jsonl with an event")
    if any("ended_seconds" not in event for event in events):
        raise ValueError(f"result={folder}: its events have no times; an older version wrote them")
    return dict(sorted(found.items()))


def _event(line: bytes, path: Path, number: int) -> Event:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number}: is no JSON") from error
    if not isinstance(event, dict):
        raise ValueError(f"{path}: line {number}: is no event")
    times = {name: event[name] for name in ("ended_seconds", "seconds") if name in event}
    if "seconds" not in times or not all(isinstance(one, int | float) for one in times.values()):
        raise ValueError(f"{path}: line {number}: is no event: it needs seconds")
    return event


def trace(
    events: Mapping[int, Sequence[Event]], node_of_rank: Sequence[int] | None, name: str
) -> dict[str, Any]:
    """The JSON object of a trace; times in microseconds from the first span on.

    events: by rank; node_of_rank: None where nobody knows
    """
    nodes = node_of_rank or [0] * (1 + max(events))
    spans = {rank: _spans(of_rank) for rank, of_rank in events.items()}
    first = min(begin for of_rank in spans.values() for begin, _ in of_rank)
    entries = [_about("process_name", node, 0, name=f"node {node}") for node in sorted(set(nodes))]
    for rank, of_rank in spans.items():
        entries.append(_about("thread_name", nodes[rank], rank, name=f"rank {rank}"))
        entries.append(_about("thread_sort_index", nodes[rank], rank, sort_index=rank))
        entries += [
            {
                "name": event["phase"],
                "cat": event["direction"],
                "ph": "X",
                "ts": (begin - first) * 1e6,
                "dur": (event["ended_seconds"] - begin) * 1e6,
                **_place(nodes[rank], rank),
                "args": {key: event[key] for key in ("step", "layer", "rows", "bytes", "seconds")},
            }
            for begin, event in of_rank
        ]
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"result": name}}


def _spans(events: Sequence[Event]) -> list[tuple[float, Event]]:
    """Each event of a rank with the time at which its span begins, in seconds."""
    spans, before = [], 0.0
    for event in events:
        end = event["ended_seconds"]
        spans.append((min(end, max(before, end - event["seconds"])), event))
        before = end
    return spans


def _place(node: int, rank: int) -> dict[str, int]:
    return {"pid": node + 1, "tid": rank + 1}


def _about(what: str, node: int, rank: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", **_place(node, rank), "args": args}
