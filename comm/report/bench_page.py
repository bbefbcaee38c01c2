"""The record of a benchmark ("wideep.bench/1") and the page printed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from comm.report.layout import Line, line, paragraph, title
from comm.report.load import bandwidths
from comm.report.ratios import CONFIDENCE, paired_ratio
from comm.report.units import format_bytes, format_seconds

SCHEMA = "wideep.bench/1"
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
    manifest: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], metered: str, unmetered: str
) -> dict[str, Any]:
    """All cases, and over them the geometric mean of every dispatcher and the cost of metering."""
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
    """Every case, then the figures to quote."""
    manifest = record["manifest"]
    lines = [
        line(
            f"wideep {manifest['version']} bench   torch {manifest['torch']},"
            f" {manifest['backend']}, {manifest['world_size']} ranks,"
            f" {manifest['num_experts']} experts, top-{manifest['top_k']}, identity experts"
        )
    ]
    lines += title("CASES", "dispatch + combine, slowest rank, median of iterations", width)
    head = f"  {'':<24}{'time':>10}{'x raw K copies':>22}{'x raw dedup':>13}"
    head += f"{'algbw':>9}{'busbw':>8}{'wirebw':>8}"
    for case in record["cases"]:
        per_rank = case["methods"][0]["sent_bytes"] / manifest["world_size"]
        lines.append(line())
        lines.append(
            line(
                f"  {case['tokens']} tokens x {case['width']} x {case['dtype']}:"
                f" {format_bytes(per_rank)} a rank in K copies, out and back; GB/s",
                "bold",
            )
        )
        lines.append(line(head))
        lines += [line(_method(method)) for method in case["methods"]]
    lines += title("GEOMETRIC MEAN", f"over {len(record['cases'])} cases", width)
    for name, ratios in record["geometric_mean"].items():
        copies, dedup = ratios["over_raw_copies"], ratios["over_raw_dedup"]
        lines.append(
            line(
                f"  {name:<24}{_interval(copies):>32} x raw K copies"
                f"{dedup['value']:>10.2f} x raw dedup"
            )
        )
    lines += _metering_lines(record["metering"], width)
    lines += paragraph(
        f"Square brackets: {CONFIDENCE:.0%} interval. algbw: bytes a rank sends, its own included,"
        " over the time; busbw: that x (R-1)/R; wirebw: bytes off the diagonal of the busiest"
        " rank over the time.",
        width,
    )
    return lines


def _method(method: Mapping[str, Any]) -> str:
    bandwidth = "".join(
        f"{method[key]:>{space}.2f}"
        for key, space in (("algbw_GBps", 9), ("busbw_GBps", 8), ("wirebw_GBps", 8))
    )
    return (
        f"  {method['name']:<24}{format_seconds(method['median_seconds']):>10}"
        f"{_interval(method['over_raw_copies']):>22}"
        f"{method['over_raw_dedup']['value']:>13.2f}{bandwidth}"
    )


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _metering_lines(metering: Mapping[str, Any] | None, width: int) -> list[Line]:
    if metering is None:
        return paragraph("Cost of metering: no case moves 8 MiB a rank, too little to tell.", width)
    ratio = metering["over_unmetered"]
    cost, low, high = (100 * (ratio[key] - 1) for key in ("value", "low", "high"))
    return paragraph(
        f"Cost of metering {metering['dispatcher']}: {cost:+.1f} % [{low:+.1f}, {high:+.1f}] over"
        f" {metering['cases']} cases of at least 8 MiB a rank.",
        width,
    )
