"""What stands below the table by layer: what it counts, what it leaves out, and what of the choices
and of the rows' precision was lost on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comm.report.answer import LABEL, MARK, Record, labelled_facts
from comm.report.layout import Line, labelled
from comm.report.table_rows import OUTSIDE, folded_layers, shown_tiers
from comm.report.units import format_bytes, format_count, format_significant

NOTES_ON_TIERS = {
    ("self",): "one rank: nothing leaves it",
    ("self", "scale_up"): "one node: nothing goes between nodes",
    ("self", "scale_out"): "every rank is a node: nothing stays inside one",
}
WORTH_A_LINE = 2.0**-8  # rounding error from which formats get a line: more than that of bf16
TWICE = ("two_hop", "hierarchical_allgather")  # dispatchers whose rows are forwarded
WHAT_MOVED = {
    "rebalance": "weights of experts, once, before the first step that counts",
    "grad_sync": "gradients, summed between the ranks that hold the same weights",
}


def table_notes(record: Record, width: int) -> list[Line]:
    """Notes on the table by layer, one label each."""
    about, totals = record["manifest"], record["totals"]
    tiers = shown_tiers(record)
    notes = {
        "network": _network(totals, len(tiers) == 3),
        "rows": f"hidden states sent, those that stay on their rank (self) included"
        f"{_which_rows(about['dispatcher'], totals)}; - is none",
        "bytes": "by kind and by place are the same bytes; either sum is exact where diff. is 0",
        "z": _legend_of_z(about["router"], totals),
    }
    if note := NOTES_ON_TIERS.get(tuple(tiers)):
        notes["place"] = note
    if folded := folded_layers(record):
        notes["folded"] = _folded(record, folded)
    if absent := _absent(record["choices"]):
        notes["absent"] = absent
    if staging := about.get("staging"):
        notes["staging"] = (
            f"rows went from each GPU through {staging} and gloo: bytes are the same, times and"
            " bandwidths are not those of GPUs"
        )
    if totals["outside"]:
        notes["beside"] = _beside(totals["outside"])
    if any(error is None or error > WORTH_A_LINE for error in record["wire_errors"].values()):
        notes["rounding"] = _rounding(record["wire_errors"], about["wire"])
    return labelled_facts(notes, width) + _dropped(record, width)


def _absent(choices: Mapping[str, int]) -> str:
    """Choices that name no expert, which every figure of "a token" still has in its mean."""
    chosen = choices.get("chosen", 0)
    possible = choices.get("possible", chosen)
    if possible == chosen:
        return ""
    return (
        f"{possible - chosen:,} of {possible:,} choices name no expert and send nothing; figures of"
        " a token, and the network share below, are means over all tokens, these included"
    )


def _network(totals: Mapping[str, Any], several_tiers: bool) -> str:
    """What left a rank, and what it consists of."""
    payload, metadata = totals["network_payload_bytes"], totals["network_metadata_bytes"]
    empty = sum(
        cell["measured_bytes"]
        for cell in totals["cells"]
        if cell["kind"] == "padding" and cell["tier"] != "self"
    )
    both = ", forward and backward" if totals["backward"] else ""
    parts = " (inside node + between nodes)" if several_tiers else ""
    padding = f", {format_bytes(empty)} padding (empty rows)" if empty else ""
    return (
        f"{format_bytes(payload + metadata)}, all that leaves a rank{both}{parts}:"
        f" {format_bytes(payload)} payload (hidden, scales),"
        f" {format_bytes(metadata - empty)} metadata (ids, weights, counts){padding}"
    )


def _which_rows(dispatcher: str, totals: Mapping[str, Any]) -> str:
    """What else is a row, where it is not plainly a token on its way."""
    words = ""
    if dispatcher in TWICE:
        words += ", and counted at each hop"
    if dispatcher == "padded":
        words += ", and empty ones"
    if "rebalance" in totals["outside"]:
        words += "; those of rebalance are experts"
    return words


def _legend_of_z(router: str, totals: Mapping[str, Any]) -> str:
    network = totals["tiers"]["network"]
    if network["expected_bytes"] is None:
        return f"none: the {router} router follows no law"
    if network["z"] is None:
        note = "= is no spread, and equal"
    elif len(totals["phases"]) == 2:
        note = "dispatch and combine of a layer move the same rows, so they share one z"
    else:
        note = "phases of a layer that move the same rows share one z"
    return f"network bytes, in standard deviations from the law of the {router} router; {note}"


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


def _beside(outside: Mapping[str, int]) -> str:
    """Phases that move no tokens: what they are, and that no other figure holds them."""
    parts = [
        f"{phase} {format_bytes(outside[phase])} on the network ({WHAT_MOVED[phase]})"
        for phase in OUTSIDE
        if phase in outside
    ]
    return "; ".join(parts) + ": checked with the rest, and in no figure of the tokens' own traffic"


def _rounding(errors: Mapping[str, float | None], wire: Mapping[str, str]) -> str:
    """Errors by way; None is one that is not finite."""
    parts = [
        f"{way} {wire[way]} "
        + ("not finite" if error is None else f"{format_significant(100 * error, 3)} %")
        for way, error in errors.items()
    ]
    return f"rms error of a row's values on the wire over their rms: {', '.join(parts)}"


def _dropped(record: Record, width: int) -> list[Line]:
    """Choices that found no room, where room is limited; marked where they are not as predicted."""
    choices = record["choices"]
    if record["manifest"]["dispatcher"] != "padded" or not choices:
        return []
    dropped, predicted = choices["dropped"], choices["predicted_dropped"]
    share = dropped / choices["chosen"] if choices["chosen"] else 0
    text = (
        f"{dropped:,} of {choices['chosen']:,} choices found no room ({100 * share:.2f} %);"
        f" {predicted:,} predicted from the recorded routing"
    )
    right = dropped == predicted
    label = f"{'  ' if right else MARK}dropped"
    return labelled(label, text, width, LABEL, "" if right else "bold red")
