"""The page of job=predict, from the dictionary of a prediction alone.

what was planned   ANSWER in words   TRAFFIC   TIME   CROSSOVERS   CONVENTIONS
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comm.report.answer import LABEL, labelled_facts
from comm.report.conventions_page import conventions
from comm.report.crossover_page import crossovers
from comm.report.layout import Line, labelled, table, title
from comm.report.predict_time import name_of, rate, time, time_in_words
from comm.report.units import (
    BYTE_UNITS,
    format_bytes,
    format_count,
    format_significant,
)

Figures = Mapping[str, Any]

TIERS = {"scale_up": "inside nodes", "scale_out": "between nodes"}
REMARK = "expected under uniform routing, experts placed contiguous"


def page(figures: Figures, version: str, note: str, width: int) -> list[Line]:
    """The whole page; note: what is said below the conventions."""
    lines = labelled(f"WideEP {version}", "predict: no ranks were started", width, LABEL, "bold")
    lines += labelled_facts(_planned(figures), width)
    if figures["reason"] is not None:
        why = f"router={figures['router']}: {figures['reason']}"
        return [
            *lines,
            *title("ANSWER", "nothing can be expected of this run", width),
            *labelled_facts({"NO LAW": why}, width),
        ]
    lines += title("ANSWER", "expected, all of it: nothing was sent", width)
    lines += labelled_facts(answer(figures), width)
    lines += traffic(figures, width) + time(figures, width) + crossovers(figures, width)
    shown = conventions(figures["conventions"], figures["wire"]["dispatch"], width, REMARK)
    return [*lines, *shown, *(labelled("  nccl-tests", note, width, LABEL) if shown else [])]


def _planned(figures: Figures) -> dict[str, str]:
    latent = figures["payload_width"] < figures["hidden_size"]
    slots = ", ".join(
        f"{size} on each of {ranks}" if len(figures["slots_per_rank"]) > 1 else f"{size} on each"
        for size, ranks in figures["slots_per_rank"].items()
    )
    more = figures["slots"] - figures["num_experts"]
    wire, training = figures["wire"], figures["mode"] == "training"
    return {
        "model": f"{figures['model']} at scale {figures['scale']}:"
        f" {format_count(figures['num_moe_layers'], 'MoE layer')},"
        f" {figures['num_experts']} experts, top-{figures['top_k']}, hidden"
        f" {figures['hidden_size']}" + (f", latent {figures['payload_width']}" if latent else ""),
        "ranks": f"{_ranks(figures)}; {_tokens(figures)}",
        "experts": f"placed {figures['placement']}, {slots}"
        + (f"; {figures['slots']} slots, {more} redundant" if more else ""),
        "traffic": f"dispatcher {_dispatcher(figures)}, router {figures['router']}"
        + ("; forward and backward" if training else "")
        + (f"; {figures['chunks']} chunks a layer" if figures["chunks"] > 1 else ""),
        "wire": f"dispatch {wire['dispatch']}, combine {wire['combine']}"
        + (f", backward {wire['backward']}" if training else ""),
        "machine": _machine(figures) if figures["reason"] is None else figures["hardware"],
    }


def _ranks(figures: Figures) -> str:
    ranks, size = figures["ranks"], figures["ep_size"]
    text = f"EP {size}" if size == ranks else f"{ranks} in {ranks // size} groups of EP {size}"
    nodes, most, least = figures["num_nodes"], figures["ranks_per_node"], figures["smallest_node"]
    each = str(most) if most == least else f"{least} to {most}"
    shards = figures["expert_tp"]
    shared = f"; {shards} ranks share each expert" if shards > 1 else ""
    return f"{text} = {format_count(nodes, 'node')} x {each} ranks{shared}"


def _tokens(figures: Figures) -> str:
    mean, most = figures["tokens_per_rank"], figures["most_tokens_per_rank"]
    if mean == most:
        return f"{most:,} tokens a rank"
    return f"{format_significant(mean)} tokens a rank on average, {most:,} at most"


def _dispatcher(figures: Figures) -> str:
    name = figures["dispatcher"]
    if name == "padded":
        return f"padded (capacity factor {figures['capacity_factor']:g})"
    return f"{name} (deduplicated)" if figures["deduplicate"] else name


def _machine(figures: Figures) -> str:
    """Rates of a rank, and where that of the scale-out comes from."""
    domain = figures["scale_up_domain"]
    inside = f"scale-up {rate(figures['scale_up_GBps'])}, {domain or 'all'} ranks a domain"
    if figures["scale_out_GBps"] is None:
        return f"{figures['hardware']}: {inside}; scale-out rate not known"
    return (
        f"{figures['hardware']}: {inside}; scale-out {rate(figures['scale_out_GBps'])} ="
        f" {rate(figures['card_GBps'])} a card x {figures['nics_per_rank']:g} a rank /"
        f" {figures['oversubscription']:g} oversubscription; one direction, of a rank"
    )


def answer(figures: Figures) -> dict[str, str]:
    """The main figures in words, most important first."""
    passes = "step" if figures["mode"] == "training" else "forward pass"
    facts = {
        "A RANK": f"puts {format_bytes(figures['payload_bytes_per_rank_step'])} of payload on the"
        f" network in a {passes} of {format_count(figures['num_moe_layers'], 'MoE layer')} and"
        f" {format_count(figures['rounds'], 'round')}; with ids, weights, counts and padding"
        f" {format_bytes(figures['network_bytes_per_rank_step'])}, standard deviation of the mean"
        f" rank {format_bytes(figures['network_std_per_rank_step'])}",
        "TIERS": _tiers(figures),
        "A TOKEN": _token(figures),
        "BUSIEST": _busiest(figures),
        "MESSAGES": f"{figures['messages_per_rank_step']:,.0f} with rows from each rank in a"
        f" {passes}, {format_bytes(figures['mean_message_bytes'])} each on average",
        "TIME": time_in_words(figures),
    }
    if figures["tokens_per_s"]:
        each = figures["tokens_per_s"]
        facts["RATE"] = (
            f"communication alone allows {format_significant(each)} tokens/s,"
            f" {format_significant(each / figures['ranks'])} of a rank, nothing hidden behind"
            " computation and nothing computed"
        )
    return facts


def _tiers(figures: Figures) -> str:
    parts = [figures[f"{tier}_bytes_per_rank_step"] for tier in TIERS]
    both = sum(parts)
    if not both:
        return "nothing leaves a rank"
    return "; ".join(
        f"{name} {format_bytes(part)} ({part / both:.1%})"
        for name, part in zip(TIERS.values(), parts, strict=True)
    )


def _token(figures: Figures) -> str:
    payload = figures["payload_bytes_per_token_layer"]
    formula = 2 * figures["headline_bytes_per_token_layer"]
    passes, both = (2, ", forward and backward") if figures["mode"] == "training" else (1, "")
    ratio = f": {formula * passes / payload:.2f} times as much" if payload else ""
    dropped = figures["dropped_share"]
    without = f", {100 * dropped:.2f} % of which find no room" if dropped else ""
    return (
        f"makes {figures['rows_per_token']:.4f} rows that leave its rank, for its"
        f" {figures['top_k']} choices{without} ({figures['dispatcher']});"
        f" {format_bytes(payload)} of payload in a layer, there and back{both},"
        f" where the formula top_k x hidden x 2 B says {format_bytes(formula * passes)}{ratio}"
    )


def _busiest(figures: Figures) -> str:
    loads = figures["busiest"]
    if not loads:
        return "no rank has anything to send"
    one = max(loads, key=lambda load: (round(load["rows"] / load["mean_rows"], 9), load["rows"]))
    ratio = one["rows"] / one["mean_rows"]
    where = f"{TIERS[one['tier']]} in a {one['direction']} {one['phase']}"
    even = ratio < 1.00005 and one["ranks"] == figures["ranks"]
    text = (
        f"all ranks are expected to be equally busy, {one['rows']:,.1f} rows {where} of a layer"
        if even
        else f"rank {one['rank']} {one['way']} {one['rows']:,.1f} rows {where} of a layer,"
        f" {ratio:.4f} times the mean; {format_count(one['ranks'], 'rank')} like this"
    )
    if one["guide_rows"] is None:
        return text
    return (
        f"{text}; in a single layer the largest of them has about {one['guide_rows']:,.1f}"
        " (a guide: mean + sd sqrt(2 ln ranks))"
    )


def traffic(figures: Figures, width: int) -> list[Line]:
    """Bytes of the mean rank in one layer: by phase, kind and tier."""
    columns = {
        "row": "row_bytes",
        "hidden": "hidden",
        "scales": "scales",
        "ids+wts": "ids_weights",
        "counts": "counts",
        "padding": "padding",
        "in node": "scale_up",
        "between": "scale_out",
        "network": "network",
        "sd": "network_std",
    }
    phases = figures["phases"]
    seen = [name for name, field in columns.items() if any(one[field] for one in phases)]
    unit = _unit(max(one["network"] for one in phases))
    rows = [
        (name_of(one), *(_size(one[columns[name]], name, unit) for name in seen)) for one in phases
    ]
    if len(phases) > 1:
        sums = {name: sum(one[columns[name]] for one in phases) for name in seen}
        last = ["" if name == "row" else _size(sums[name], name, unit) for name in seen]
        rows.append(["all", *last])
    remark = (
        f"{BYTE_UNITS[unit]} of the mean rank in one layer; row in B; sd of network; self left out"
    )
    lines = title("TRAFFIC", remark, width)
    return lines + table(("phase", *seen), rows, bold_last=len(phases) > 1)


def _unit(most: float) -> int:
    """Power of 1000 of the table's unit: kB, or more where numbers would grow too long."""
    return next((unit for unit in (1, 2, 3, 4) if most / 1000**unit < 1e6), 5)


def _size(num_bytes: float, column: str, unit: int) -> str:
    if column == "row":
        return f"{num_bytes:,.0f}"
    value = num_bytes / 1000**unit
    if not num_bytes or value < 0.005:
        return "<0.01" if num_bytes else "-"
    return f"{value:,.2f}" if value < 1e4 else f"{value:,.0f}"
