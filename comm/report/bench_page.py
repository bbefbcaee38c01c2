"""The record of a benchmark ("wideep.bench/1") and the page printed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from comm.report.answer import LABEL, first_line, labelled_facts
from comm.report.layout import Line, labelled, line, paragraph, title
from comm.report.load import bandwidths
from comm.report.ratios import CONFIDENCE, paired_ratio
from comm.report.units import format_bytes, format_count, format_seconds

SCHEMA = "wideep.bench/1"
HEADER = (  # above the rows of a case
    f"  {'':<24}{'':>10}{'':>22}{'':>13}   {' GB/s '.center(22, '-')}",
    f"  {'':<24}{'time':>10}{'x raw K copies':>22}{'x raw dedup':>13}"
    f"{'algbw':>9}{'busbw':>8}{'wirebw':>8}",
)
NOTES = {
    "brackets": f"{CONFIDENCE:.0%} interval; 1 alone is a contender over itself",
    "bandwidth": "algbw: bytes a rank sends, its own included, over the time; busbw: that x"
    " (R-1)/R; wirebw: network bytes of the busiest rank, in or out, over the time",
}
METERING_MIN_BYTES = 8 << 20  # payload a rank and way; below, no paired median resolves a percent


def case_record(
    case: Mapping[str, Any],
    names: Sequence[str],
    pair_bytes: np.ndarray,
    seconds: np.ndarray,
) -> dict[str, Any]:
    """One case in plain values.

    names: of the contenders, the raw K-copy collective first, the raw deduplicated one second
    pair_bytes: int64 [contender, src, dst], both ways together
    seconds: float64 [contender, iteration] of the slowest rank
    """
    raw_copies, raw_dedup = seconds[0:1], seconds[1:2]
    methods = [
        {
            "name": name,
            "sent_bytes": int(pair_bytes[index].sum()),
            "median_seconds": float(np.median(seconds[index])),
            "over_raw_copies": asdict(paired_ratio(seconds[index : index + 1], raw_copies)),
            "over_raw_dedup": asdict(paired_ratio(seconds[index : index + 1], raw_dedup)),
            **bandwidths(pair_bytes[index], float(np.median(seconds[index]))),
        }
        for index, name in enumerate(names)
    ]
    return {**case, "methods": methods, "seconds": seconds.tolist()}


def bench_record(
    manifest: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    metered: str,
    unmetered: str,
    chunked: tuple[int, str] = (1, ""),
) -> dict[str, Any]:
    """All cases, and over them the geometric mean of every dispatcher, the cost of metering and
    that of chunks.

    metered, unmetered: names of the contenders; chunked: a number of chunks and a name
    """
    names = [method["name"] for method in cases[0]["methods"]]
    seconds = np.array([case["seconds"] for case in cases])  # [case, contender, iteration]
    overall = {
        name: {
            "over_raw_copies": asdict(paired_ratio(seconds[:, index], seconds[:, 0])),
            "over_raw_dedup": asdict(paired_ratio(seconds[:, index], seconds[:, 1])),
        }
        for index, name in enumerate(names)
    }
    return {
        "schema": SCHEMA,
        "manifest": dict(manifest),
        "cases": list(cases),
        "geometric_mean": overall,
        "metering": _metering(cases, seconds, names, metered, unmetered),
        "chunks": _chunks(seconds, names, metered, *chunked),
    }


def _chunks(
    seconds: np.ndarray, names: Sequence[str], whole: str, chunks: int, chunked: str
) -> dict[str, Any] | None:
    """What it costs to send the same tokens in parts, with nothing to hide them behind."""
    if chunks < 2:
        return None
    parts, one = seconds[:, names.index(chunked)], seconds[:, names.index(whole)]
    return {
        "dispatcher": whole,
        "chunks": chunks,
        "over_whole": asdict(paired_ratio(parts, one)),
        "seconds_per_chunk": float(np.median((parts - one) / (chunks - 1))),
    }


def _metering(
    cases: Sequence[Mapping[str, Any]],
    seconds: np.ndarray,
    names: Sequence[str],
    metered: str,
    unmetered: str,
) -> dict[str, Any] | None:
    """Metered over unmetered time, where a rank moves enough for a percent to show."""
    world_size = cases[0]["world_size"]
    large = [
        index
        for index, case in enumerate(cases)
        if case["methods"][0]["sent_bytes"] / (2 * world_size) >= METERING_MIN_BYTES
    ]
    if not large:
        return None
    ratio = paired_ratio(
        seconds[large, names.index(metered)], seconds[large, names.index(unmetered)]
    )
    return {"dispatcher": metered, "cases": len(large), "over_unmetered": asdict(ratio)}


def bench_page(record: Mapping[str, Any], width: int) -> list[Line]:
    """What ran, every case, the figures to quote, and where the record is."""
    about, cases = record["manifest"], record["cases"]
    remark = f"dispatch + combine, slowest rank, median of {about['iterations']} iterations"
    return [
        *first_line(about, " bench", width),
        *labelled_facts(_facts(about), width),
        *title("CASES", remark, width),
        *(part for case in cases for part in _case_lines(case)),
        *title("GEOMETRIC MEAN", f"over {format_count(len(cases), 'case')}", width),
        *(_mean_line(name, ratios) for name, ratios in record["geometric_mean"].items()),
        *paragraph(_metering_words(record["metering"]), width),
        *paragraph(_chunk_words(record["chunks"]), width),
        *labelled_facts(NOTES, width),
        line(),
        *labelled("RESULTS", record["result_dir"], width, LABEL, "bold"),
        *labelled("", "bench.json: every time of every contender", width, LABEL),
    ]


def _facts(about: Mapping[str, Any]) -> dict[str, str]:
    return {
        "experts": f"{about['num_experts']} of {about['model']}, top-{about['top_k']};"
        " they return what they get",
        "ranks": f"EP {about['world_size']}; seed {about['seed']}",
        "raw": "bare all-to-all; K copies: a row a (token, expert), deduplicated: a (token, rank)",
        "software": f"torch {about['torch']}, backend {about['backend']} on {about['device']}",
    }


def _case_lines(case: Mapping[str, Any]) -> list[Line]:
    """An empty line, what is sent, the header, and a row for each contender."""
    per_rank = format_bytes(case["methods"][0]["sent_bytes"] / case["world_size"])
    what = f"{case['tokens']} tokens x {case['width']} x {case['dtype']}"
    return [
        line(),
        line(f"  {what}: {per_rank} a rank in K copies, out and back", "bold"),
        *(line(text) for text in HEADER),
        *(line(_method(method)) for method in case["methods"]),
    ]


def _method(method: Mapping[str, Any]) -> str:
    bandwidth = "".join(
        f"{method[key]:>{space}.2f}"
        for key, space in (("algbw_GBps", 9), ("busbw_GBps", 8), ("wirebw_GBps", 8))
    )
    return (
        f"  {method['name']:<24}{format_seconds(method['median_seconds']):>10}"
        f"{_interval(method['over_raw_copies']):>22}{_value(method['over_raw_dedup']):>13}{bandwidth}"
    )


def _mean_line(name: str, ratios: Mapping[str, Mapping[str, float]]) -> Line:
    copies, dedup = _interval(ratios["over_raw_copies"]), _value(ratios["over_raw_dedup"])
    return line(f"  {name:<24}{copies:>32} x raw K copies{dedup:>10} x raw dedup")


def _value(ratio: Mapping[str, float]) -> str:
    """The ratio; "1" for a contender over itself, which is no measurement."""
    return "1" if ratio["low"] == ratio["high"] == 1 else f"{ratio['value']:.2f}"


def _interval(ratio: Mapping[str, float]) -> str:
    """The ratio and its interval; "1" alone for a contender over itself."""
    value = _value(ratio)
    return value if value == "1" else f"{value} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _metering_words(metering: Mapping[str, Any] | None) -> str:
    if metering is None:
        return "Cost of metering: no case moves 8 MiB a rank, too little to tell"
    ratio = metering["over_unmetered"]
    cost, low, high = (100 * (ratio[key] - 1) for key in ("value", "low", "high"))
    return (
        f"Cost of metering {metering['dispatcher']}: {cost:+.1f} % [{low:+.1f}, {high:+.1f}] over"
        f" {format_count(metering['cases'], 'case')} of at least 8 MiB a rank"
    )


def _chunk_words(chunks: Mapping[str, Any] | None) -> str:
    if chunks is None:
        return "Cost of chunks: not measured"
    ratio = chunks["over_whole"]
    more = format_seconds(abs(chunks["seconds_per_chunk"]))
    sign = "-" if chunks["seconds_per_chunk"] < 0 else ""
    return (
        f"Cost of {chunks['chunks']} chunks of {chunks['dispatcher']}, with no experts to hide"
        f" behind: {_interval(ratio)} times the whole, {sign}{more} for each further chunk"
    )
