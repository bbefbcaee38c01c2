"""The page's notes on its table, and the sections that follow: headline, full size, time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from comm.report.answer import LABEL, Record, labelled_facts, truth
from comm.report.layout import Line, labelled, paragraph, table, title
from comm.report.table_rows import TIER_WORDS, folded_layers, shown_tiers
from comm.report.units import format_bytes, format_count, format_seconds, format_significant

NOTES_ON_TIERS = {
    ("self",): "one rank: nothing leaves it",
    ("self", "scale_up"): "one node: nothing goes between nodes",
    ("self", "scale_out"): "every rank is a node: nothing stays inside one",
}
FACTOR_NAMES = {"remote_share": "network share"}  # where the page's word is not the record's
FACTOR_WORDS = {
    "remote_share": "choices of an expert on another rank",
    "rows_per_copy": "rows sent for each such choice; below 1 is deduplication",
    "hops": "times that a row is sent on its way",
    "padding": "rows sent for each useful row",
    "width": "values of a row for each value of the hidden state",
    "format": "bytes of a value, scales included, for the 2 B of BF16",
    "metadata": "all bytes for each byte of payload: ids, weights, counts",
}


def table_notes(record: Record, width: int) -> list[Line]:
    """What the table by layer counts, what it leaves out, and what of it crossed the network."""
    about, totals = record["manifest"], record["totals"]
    tiers = shown_tiers(record)
    network = totals["tiers"]["network"]
    parts = " (inside node + between nodes)" if len(tiers) == 3 else ""
    notes = {
        "network": f"{format_bytes(network['measured_bytes'])}, all that leaves a rank{parts}:"
        f" {format_bytes(totals['network_payload_bytes'])} payload (hidden, scales),"
        f" {format_bytes(totals['network_metadata_bytes'])} metadata (ids, weights, counts)",
        "rows": "hidden states sent, those that stay on their rank (self) included; - is none",
        "bytes": "by kind and by place are the same bytes; either sum is exact where diff. is 0",
        "z": _legend_of_z(about["router"], network),
    }
    if note := NOTES_ON_TIERS.get(tuple(tiers)):
        notes["place"] = note
    if folded := folded_layers(record):
        notes["folded"] = _folded(record, folded)
    return labelled_facts(notes, width)


def _legend_of_z(router: str, network: Mapping[str, Any]) -> str:
    if network["expected_bytes"] is None:
        return f"none: the {router} router follows no law"
    note = (
        "= is no spread, and equal"
        if network["z"] is None
        else "dispatch and combine of a layer move the same rows, so they share one z"
    )
    return f"network bytes, in standard deviations from the law of the {router} router; {note}"


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
        rows.append(
            [
                f"{phase}, a layer",
                format_significant(sent),
                *_sums(figures, parts),
                format_bytes(full["headline_bytes"]),
            ]
        )
    rows.append(
        [
            f"pass, {full['rounds']} rounds",
            "",
            *_sums(full["forward_pass"], parts),
            format_bytes(full["rounds"] * full["headline_bytes"]),
        ]
    )
    lines += table(header, rows, bold_last=True)
    legend = f"top_k x {full['hidden_size']} x 2 B a round"
    if full["payload_width"] != full["hidden_size"]:
        legend += (
            f"; with the {full['payload_width']} values really sent"
            f" {format_bytes(full['headline_at_payload_width_bytes'])}"
        )
    lines += labelled(
        "  bytes", "of one token, what leaves its rank; payload + metadata = network", width, LABEL
    )
    lines += labelled("  headline", legend, width, LABEL)
    return lines + labelled("  not scaled", "; ".join(full["assumptions"]), width, LABEL)


def _sums(figures: Mapping[str, float], parts: Sequence[str]) -> list[str]:
    return [format_bytes(figures[f"{part}_bytes"]) for part in parts]


def timing(record: Record, width: int) -> list[Line]:
    """How long the phases took, and who was busiest."""
    times, balance = record["timing"], record["balance"]
    lines = title(
        "TIME",
        f"slowest rank, {record['rounds']} rounds, {record['collectives']:,}"
        " collectives; emulated on this machine, not a forecast",
        width,
    )
    names = ("algbw_GBps", "busbw_GBps", "wirebw_GBps")
    rows = [
        [
            phase,
            format_seconds(figures["seconds"]),
            *(
                "-" if figures[name] is None else f"{format_bytes(figures[name] * 1e9)}/s"
                for name in names
            ),
        ]
        for phase, figures in times.items()
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
    return lines + labelled("  balance", _balance(balance), width, LABEL)


def _folded(record: Record, folded: Sequence[int]) -> str:
    """Which layers share the folded rows, and the range of their z."""
    figures = [entry["network"]["z"] for entry in record["layers"] if entry["layer"] in folded]
    zs = [z for z in figures if z is not None]
    spread = f", z from {min(zs):+.2f} to {max(zs):+.2f}" if zs else ""
    kept = sorted(set(range(folded[0], folded[-1])) - set(folded))
    without = f" (without {', '.join(map(str, kept))})" if kept else ""
    return (
        f"rows {folded[0]}-{folded[-1]} are sums over {format_count(len(folded), 'layer')}"
        f"{without}{spread}; run.json has them one by one"
    )


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
