"""The few figures of a run that a sweep compares: of one token, at the model's full size. Pure.

Runs of different ranks, tokens and layers differ in everything but that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comm.analytic.rows import PAYLOAD_KINDS, row_bytes
from comm.report.full_scale import NETWORK_TIERS, WIRE_OF

Record = Mapping[str, Any]


def run_figures(record: Record) -> dict[str, Any]:
    """Of a run.json dictionary.

    rows_per_token: dispatched, in one layer, that leave the token's rank
    scale_up_bytes, scale_out_bytes, network_bytes: of a forward pass
    expected_bytes, expected_std: of network_bytes by the router's law; None without one
    payload: tier -> payload that the run counted, forward, at its own widths
    """
    full = record["full_scale"]
    figures: dict[str, Any] = {
        "payload": {tier: _payload(record, tier) for tier in NETWORK_TIERS},
        "verdicts": {one["name"]: one["state"] for one in record["verdicts"]},
    }
    if full is None:
        return figures
    rows = full["phases"]["dispatch"]["rows"]
    mean, std = expected_full_size(record)
    return figures | {
        "rows_per_token": sum(rows[tier] for tier in NETWORK_TIERS),
        **{name: full["forward_pass"][name] for name in ("scale_up_bytes", "scale_out_bytes")},
        "network_bytes": full["forward_pass"]["network_bytes"],
        "expected_bytes": mean,
        "expected_std": std,
    }


def _payload(record: Record, tier: str) -> int:
    return sum(
        cell["measured_bytes"]
        for cell in record["totals"]["cells"]
        if cell["direction"] == "forward"
        and cell["kind"] in PAYLOAD_KINDS
        and cell["tier"] == tier
        and cell["phase"] in WIRE_OF
    )


def expected_full_size(record: Record) -> tuple[float | None, float | None]:
    """Mean and standard deviation of what one token puts on the network in a forward pass.

    Rows are what the law is about: they are taken out of the expected bytes of each phase, at the
    run's width, and weighed again at full width. Phases carry the same rows, so their deviations
    add.
    """
    about, full = record["manifest"], record["full_scale"]
    tokens = sum(about["tokens_per_rank"]) * about["steps"] * about["shape"]["num_moe_layers"]
    mean = std = 0.0
    for entry in record["totals"]["phases"]:
        phase, network = entry["phase"], entry["network"]
        if entry["direction"] != "forward" or phase not in full["phases"]:
            continue
        if network["expected_bytes"] is None:
            return None, None
        weight = sum(full["phases"][phase]["row_bytes"].values()) / _row_bytes(about, phase)
        weight *= full["num_moe_layers"] / tokens
        mean += weight * (network["expected_bytes"] - _expected_counts(record, phase))
        std += weight * network["expected_std"]
    return mean, std


def _row_bytes(about: Mapping[str, Any], phase: str) -> int:
    """Of one row, as wide as in the run."""
    shape = about["shape"]
    parts = row_bytes(
        about["dispatcher"],
        phase,
        about["wire"][WIRE_OF[phase]],
        shape["latent_size"] or shape["hidden_size"],
        shape["top_k"],
        deduplicate=about["config"]["dispatcher"]["deduplicate"],
    )
    return sum(parts.values())


def _expected_counts(record: Record, phase: str) -> float:
    """Of the counts messages, which are as many whatever was chosen."""
    return sum(
        cell["expected_bytes"]
        for cell in record["totals"]["cells"]
        if cell["direction"] == "forward"
        and (cell["phase"], cell["kind"]) == (phase, "counts")
        and cell["tier"] in NETWORK_TIERS
    )
