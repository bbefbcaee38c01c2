"""The least time of a prediction's layer: in words, and phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from comm.report.answer import labelled_facts
from comm.report.crossover_page import MANY_US
from comm.report.layout import Line, table, title
from comm.report.units import format_bytes, format_seconds, format_significant

Figures = Mapping[str, Any]

TIERS = {"scale_up": "scale-up", "scale_out": "scale-out"}


def rate(GBps: float | None) -> str:
    return "not known" if GBps is None else f"{format_significant(GBps, 3)} GB/s"


def name_of(one: Figures) -> str:
    return one["phase"] if one["direction"] == "forward" else f"{one['phase']} bwd"


def time_in_words(figures: Figures) -> str:
    """What binds a layer, and how far the other is behind."""
    if figures["unknown_rates"]:
        return " and ".join(
            f"{figures['hardware']} has no rate for {TIERS[tier]}: set hardware.{tier}_GBps"
            for tier in figures["unknown_rates"]
        )
    times = figures["times"]
    if figures["bound"] == "nothing":
        return "nothing leaves a rank, so nothing takes time"
    text = f"a layer takes at least {_sum([figures['layer_us']])} on {figures['hardware']}"
    floors, bound = [one["latency_us"] for one in times], figures["bound"]
    bytes_take = f"{_sum(one['bytes_us'] for one in times)} {_where(figures)}"
    if None in floors and bound == "bandwidth":
        machine = "some phases" if any(floors) else "this machine"
        return f"{text}: the bytes bind, {bytes_take}; no latency floor is known for {machine}"
    floor = " + ".join("?" if one is None else f"{one:g}" for one in floors)
    if bound == "both":
        binds = ", ".join(f"{name_of(one)} by {one['bound']}" for one in times)
        return f"{text}: {binds}. The bytes take {bytes_take}, the latency floor is {floor} us"
    said = {
        "latency": ("latency binds, not bandwidth", "less"),
        "bandwidth": ("bandwidth binds, not latency", "more"),
    }
    what, compared = said[bound]
    than = f"{compared} than the latency floor of {floor} us"
    return f"{text}: {what}. The bytes take {bytes_take}, {than}"


def _where(figures: Figures) -> str:
    """On which links, and at which rates."""
    times = figures["times"]
    tiers = {one["tier"] for one in times if one["tier"]}
    if len(tiers) > 1:
        return "on the slower links of each phase"
    (tier,) = tiers
    reached = [one["measured_us"].get(tier) for one in times]
    reach = "" if None in reached else f", {_sum(reached)} at the rates measured"
    return f"at the nominal {rate(figures[f'{tier}_GBps'])} of {TIERS[tier]}{reach}"


def _sum(times_us: Iterable[float]) -> str:
    """7.4 + 14.4 us; each with its unit where they are long."""
    values = list(times_us)
    if max(values) >= MANY_US:
        return " + ".join(format_seconds(one / 1e6) for one in values)
    return " + ".join(f"{one:,.1f}" for one in values) + " us"


def time(figures: Figures, width: int) -> list[Line]:
    """The least time of each phase of the slowest layer, tier by tier."""
    if not figures["times"]:
        return []
    rows = []
    for one in figures["times"]:
        for tier in TIERS:
            if tier not in one["nominal_us"]:
                continue
            wins = one["bound"] == "bandwidth" and one["tier"] == tier
            from_tokens = one["tokens_at_bandwidth"] if one["tier"] == tier else None
            rows.append(
                (
                    name_of(one),
                    TIERS[tier],
                    format_bytes(one["bytes"][tier]),
                    format_seconds(one["nominal_us"][tier] / 1e6),
                    format_seconds(one["measured_us"][tier] / 1e6)
                    if tier in one["measured_us"]
                    else "-",
                    "-" if one["latency_us"] is None else f"{one['latency_us']:g} us",
                    "bytes" if wins else "latency" if one["bound"] == "latency" else "-",
                    "-" if from_tokens is None else f"{from_tokens:,.0f}",
                )
            )
    if not rows:
        return []
    header = ("phase", "links", "busiest rank", "nominal", "measured", "floor", "binds")
    remark = (
        "least time of one layer: payload of its busiest rank, or the latency of a single token"
    )
    notes = {"bytes from": "tokens a rank from which the bytes take longer than the floor"}
    if figures["measured_ranks"]:
        notes["measured"] = (
            f"rates and floors of {figures['measured_ranks']} ranks inside a scale-up domain"
        )
    lines = title("TIME", remark, width) + table((*header, "bytes from"), rows, left=2)
    return lines + labelled_facts(notes, width)
