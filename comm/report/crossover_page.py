"""The crossovers of a prediction: which way of moving tokens costs least, and from where on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comm.report.answer import labelled_facts
from comm.report.layout import Line, table, title
from comm.report.units import format_bytes, format_significant

Figures = Mapping[str, Any]
STRATEGIES = {  # dispatcher -> the head of its column
    "all_to_all": "per copy",
    "rank_dedup": "dedup",
    "two_hop": "two hops",
    "allgather": "all-gather",
}
BETWEEN = ("rank_dedup", "two_hop")  # of which the rows between nodes are shown


def crossovers(figures: Figures, width: int) -> list[Line]:
    """The strategies over numbers of ranks, and in words where their order changes."""
    found = figures["crossovers"]
    per_node, tokens = found["ranks_per_node"], figures["tokens_per_rank"]
    remark = (
        f"rows of a token and layer that leave its rank, one way, uniform routing, {per_node} ranks"
        " a node; us: there and back"
    )
    rows = []
    for one in found["table"]:
        times = one["us"] or {}
        least = min(times, key=lambda name: times[name]) if times else None
        outside = [one["rows"][name]["scale_out"] for name in BETWEEN]
        rows.append(
            (
                f"{one['ep_size']}",
                *(_rows(one["rows"][name]) for name in STRATEGIES),
                *(f"{value:.2f}" if one["num_nodes"] > 1 else "-" for value in outside),
                *(f"{times[name]:,.1f}" if times else "-" for name in BETWEEN),
                STRATEGIES[least] if least else "-",
            )
        )
    columns = ("dedup out", "2-hop out", "dedup us", "2-hop us", "least us")
    header = ("EP", *STRATEGIES.values(), *columns)
    lines = title("CROSSOVERS", remark, width) + table(header, rows)
    out = f"rows between nodes; us: bytes alone, {format_significant(tokens)} tokens a rank"
    return lines + labelled_facts({"out": out, **_words(figures, found)}, width)


def _rows(rows: Mapping[str, float]) -> str:
    total = rows["scale_up"] + rows["scale_out"]
    return f"{total:.4f}" if total < 100 else f"{total:,.0f}"


def _words(figures: Figures, found: Figures) -> dict[str, str]:
    top_k = figures["top_k"]
    return {
        "all-gather": _all_gather(found, top_k),
        "two hops": _two_hops(found),
        "domain": "; ".join(
            f"{one['domain']} ranks {format_bytes(one['rank_dedup'])} by rank_dedup,"
            f" {format_bytes(one['two_hop'])} by two_hop"
            for one in found["domains"]
        )
        + ": payload of a token and layer, there and back, between scale-up domains of that size",
        "TP": _tensor(found["all_reduce"]),
        "weights": "; ".join(
            f"an expert in {one['format']} weighs {format_bytes(one['expert_bytes'])}, as much as"
            f" {one['rows']:,.0f} rows there and back: moving it pays from so many rows of one rank"
            f" on, with uniform routing from {one['tokens_per_rank']:,.0f} tokens a rank"
            for one in found["expert_moves"]
        ),
    }


def _all_gather(found: Figures, top_k: int) -> str:
    copies, dedup = found["copies_beat_allgather"], found["dedup_beats_allgather"]
    first = "never" if copies is None else f"from EP {copies} on (EP > top-{top_k})"
    second = "never" if dedup is None else f"from EP {dedup} on"
    return (
        f"all_to_all, a row for each choice, puts fewer rows on the network than allgather {first};"
        f" rank_dedup {second}, and never more"
    )


def _two_hops(found: Figures) -> str:
    faster, per_node = found["two_hop_beats_dedup"], found["ranks_per_node"]
    if any(one["us"] is None for one in found["table"]):
        return "how long they take is not known: the machine has no rate for a tier that is used"
    if faster is None:
        return f"two_hop is never faster than rank_dedup here, {per_node} ranks a node"
    many = [one["ep_size"] for one in found["table"] if one["num_nodes"] > 1]
    first = "as soon as there are two nodes" if faster <= many[0] else f"from EP {faster} on"
    return (
        "two_hop moves more rows in all and fewer between nodes: at these rates it is faster than"
        f" rank_dedup {first}"
    )


def _tensor(one: Mapping[str, float]) -> str:
    tensor, expert = one["tensor_bytes_per_rank_layer"], one["expert_bytes_per_rank_layer"]
    if not expert:
        return "nothing to compare: no rank sends anything"
    return (
        f"tensor parallelism over the same ranks would all-reduce {format_bytes(tensor)} a rank and"
        f" layer, the round trip of rank_dedup sends {format_bytes(expert)}: {tensor / expert:.2f}"
        " times as much (same tokens and width, both in bf16, one scale-up domain)"
    )
