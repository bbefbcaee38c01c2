"""The sections after the table: headline, full size, time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from comm.report.answer import LABEL, Record, labelled_facts, there_and_back, truth
from comm.report.carried import NOT_SCALED
from comm.report.layout import Line, labelled, paragraph, table, title
from comm.report.table_rows import TIER_WORDS, phase_label, shown_tiers
from comm.report.units import format_bytes, format_seconds, format_significant

FACTOR_NAMES = {"remote_share": "network share"}  # where the page's word is not the record's
FACTOR_WORDS = {
    "remote_share": "choices of an expert on another rank",
    "rows_per_copy": "rows due for each such choice; < 1: deduplicated or dropped",
    "hops": "times that a row is sent on its way",
    "padding": "rows sent for each useful row",
    "width": "values of a row for each value of the hidden state",
    "format": "bytes of a value, scales included, for the 2 B of BF16",
    "metadata": "all bytes for each byte of payload: ids, weights, counts",
}


def headline(record: Record, width: int) -> list[Line]:
    """The formula and, factor by factor, the way from it to what was counted."""
    figures = record["headline"]
    remark = f"{figures['formula']} against what dispatch, one way, put on the network"
    lines = title("HEADLINE", remark, width)
    if figures["ratio"] is None:
        return lines + paragraph("no tokens: nothing to compare", width)
    so_far = itertools.accumulate(
        (factor["value"] for factor in figures["factors"]),
        lambda product, value: product * value,
        initial=1.0,
    )
    rows = [("headline", "", format_bytes(figures["headline_bytes"]), "")]
    for factor, product in zip(figures["factors"], itertools.islice(so_far, 1, None), strict=True):
        rows.append(
            (
                FACTOR_NAMES.get(factor["name"], factor["name"].replace("_", " ")),
                f"x {factor['value']:.4f}",
                format_bytes(round(product * figures["headline_bytes"])),
                FACTOR_WORDS.get(factor["name"], ""),
            )
        )
    rows.append(
        (
            "counted",
            f"= {figures['ratio']:.4f}",
            format_bytes(figures["measured_bytes"]),
            truth(figures),
        )
    )
    words = max(len(row[3]) for row in rows)
    rows = [(*row[:3], row[3].ljust(words)) for row in rows]
    return lines + table(("factor", "", "leaves", "what it is".ljust(words)), rows, bold_last=True)


def full_scale(record: Record, width: int) -> list[Line]:
    """One token at the unscaled model's size."""
    full = record["full_scale"]
    if full is None:
        return []
    wire = ", ".join(f"{phase} {name}" for phase, name in full["wire"].items())
    lines = title(
        "FULL SIZE",
        f"one token of {full['model']}: {full['num_moe_layers']} MoE layers,"
        f" {full['payload_width']} values a row, {wire}",
        width,
    )
    tiers = [tier for tier in shown_tiers(record) if tier != "self"]
    tiers = tiers if len(tiers) == 2 else []  # one alone is the same as the network column
    parts = (*tiers, "payload", "metadata", "network")
    header = ["", "rows", *(TIER_WORDS.get(part, part) for part in parts), "headline"]
    rows = []
    for phase, figures in full["phases"].items():
        sent = figures["rows"]["scale_up"] + figures["rows"]["scale_out"]
        formula = format_bytes(full["headline_bytes"]) if phase in full["wire"] else ""
        rows.append(
            [f"{phase}, a layer", format_significant(sent), *_sums(figures, parts), formula]
        )
    rows.append(
        [
            f"pass, {full['rounds']} rounds",
            "",
            *_sums(full["forward_pass"], parts),
            format_bytes(there_and_back(full)),
        ]
    )
    lines += table(header, rows, bold_last=True)
    legend = f"top_k x {full['hidden_size']} x 2 B each way"
    if full["payload_width"] != full["hidden_size"]:
        legend += (
            f"; with the {full['payload_width']} values really sent"
            f" {format_bytes(full['headline_at_payload_width_bytes'])}"
        )
    lines += labelled(
        "  bytes", "of one token, what leaves its rank; payload + metadata = network", width, LABEL
    )
    lines += labelled("  headline", legend, width, LABEL)
    lines += labelled("  not scaled", "; ".join(full["assumptions"]), width, LABEL)
    return lines + _on_machine(record, width)


def _on_machine(record: Record, width: int) -> list[Line]:
    """How long these bytes take on a machine, and how far the run is from that size."""
    carried = record.get("carried")
    if carried is None:
        return []
    parts = [
        f"{format_bytes(carried['payload_bytes'][tier])} of payload {TIER_WORDS[tier]} take "
        + ("a time that is not known" if us is None else format_seconds(us / 1e6))
        + ("" if rate is None else f" at {rate:g} GB/s")
        for tier, us in carried["us"].items()
        for rate in [carried["GBps"][tier]]
        if carried["payload_bytes"][tier]
    ]
    factors, tokens = carried["factors"], carried["tokens_per_rank"]
    text = (
        f"{carried['machine']}, {format_significant(tokens)} tokens a rank, a forward pass of the"
        f" mean rank: {' and '.join(parts) or 'nothing to send'}; bytes alone, no latency"
    )
    factor = (
        f"values of the run x {factors['width']:g} width x {factors['layers']:g} layers x"
        f" {factors['tokens']:g} tokens; {NOT_SCALED}"
    )
    lines = labelled("  machine", text, width, LABEL)
    return lines + labelled("  factor", factor, width, LABEL)


def _sums(figures: Mapping[str, float], parts: Sequence[str]) -> list[str]:
    return [format_bytes(figures[f"{part}_bytes"]) for part in parts]


def timing(record: Record, width: int) -> list[Line]:
    """How long the phases took, and who was busiest."""
    times, balance = record["timing"], record["balance"]
    staging = record["manifest"].get("staging")
    through = f"; rows staged in {staging}, which takes time" if staging else ""
    lines = title(
        "TIME",
        f"slowest rank, {record['rounds']} rounds, {record['collectives']:,}"
        f" collectives; emulated on this machine, not a forecast{through}",
        width,
    )
    rows = [
        [
            phase_label(*_place(name)),
            format_seconds(figures["seconds"]),
            *(
                "-" if figures[rate] is None else f"{format_bytes(figures[rate] * 1e9)}/s"
                for rate in ("algbw_GBps", "busbw_GBps", "wirebw_GBps")
            ),
        ]
        for name, figures in times.items()
        if isinstance(figures, Mapping)
    ]
    rows += [
        [name.removesuffix("_seconds"), format_seconds(seconds), "", "", ""]
        for name, seconds in times.items()
        if name.endswith("_seconds")
    ]
    lines += table(("", "time", "algbw", "busbw", "wirebw"), rows)
    lines += labelled(
        "  bandwidth",
        "algbw: bytes of the mean rank, self included; busbw: without"
        " one rank's share; wirebw: network bytes of the busiest rank",
        width,
        LABEL,
    )
    notes = {"balance": _balance(balance)}
    if record["placement"]:
        notes["placement"] = _placed(record["placement"], record["manifest"]["placement"])
    if chunks := _chunks(record["manifest"]["config"]):
        notes["chunks"] = chunks
    return lines + labelled_facts(notes, width)


def _place(name: str) -> tuple[str, str]:
    """Direction and phase of an entry of `timing`."""
    direction, _, phase = name.rpartition(" ")
    return direction or "forward", phase


def _chunks(config: Mapping[str, Any]) -> str:
    """What the time of a phase is where its rows may travel beneath other work."""
    if config["chunks"] == 1:
        return ""
    if config["mode"] == "training":
        return "in training each is waited for before the next: nothing is hidden"
    return "the time of a phase is what was waited for, without what the experts' work has hidden"


def _placed(figures: Mapping[str, Any], name: str) -> str:
    """What the placement did for the load, and what moved for it."""
    before, after = figures["contiguous"], figures["placed"]
    parts = [
        f"busiest {what} {before[key]:.2f} -> {after[key]:.2f} x the mean in choices served"
        for what, key in (
            ("rank", "by_rank_max_over_mean"),
            ("slot", "by_expert_max_over_mean"),
        )
        if before[key] is not None and after[key] is not None
    ]
    moved = (
        f"{figures['moved_experts']:,} experts moved, {format_bytes(figures['moved_bytes'])} of"
        " weights, once"
        if figures["moved_experts"]
        else "no expert moved"
    )
    return "; ".join([f"contiguous -> {name}, worst layer of each", *parts, moved])


def _balance(balance: Mapping[str, Any]) -> str:
    parts = []
    for owner, what in (("rank", "rows received"), ("expert", "choices")):
        ratio = balance[f"rows_by_{owner}_max_over_mean"]
        if ratio is not None:
            parts.append(
                f"busiest {owner} {ratio:.2f} x the mean in {what}"
                f" ({owner} {balance[f'busiest_{owner}']},"
                f" layer {balance[f'busiest_{owner}_layer']})"
            )
    return "; ".join(parts) or "nothing was routed"
