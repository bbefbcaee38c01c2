"""The figures of a run carried to a machine: how long its bytes take there at full size.

The bytes of a token are those of `full_scale`, worked out anew at the full width; tokens of a rank
are the run's. The factors only say how far that is from the run: what a row carries beside its
values (block scales, ids, weights) and what a pair of ranks is told (counts) do not grow by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comm.report.full_scale import NETWORK_TIERS, PAYLOAD_KINDS

NOT_SCALED = (
    "block scales round up with the width, ids and weights stay, counts are sent once for a pair"
    " of ranks: none of them grows by these factors"
)


def carried(full: Mapping[str, Any] | None, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Least time of a forward pass of the mean rank on the configured machine, by tier.

    full: the record's `full_scale`; None where a run had no tokens or knows no machine
    """
    machine = manifest["config"].get("hardware")
    if full is None or machine is None:
        return None
    tokens = sum(manifest["tokens_per_rank"]) / len(manifest["tokens_per_rank"])
    shape = manifest["shape"]
    payload = {tier: _payload(full, tier) * full["num_moe_layers"] for tier in NETWORK_TIERS}
    GBps = {"scale_up": machine["scale_up_GBps"], "scale_out": _scale_out(machine)}
    return {
        "machine": machine["name"],
        "tokens_per_rank": tokens,
        "GBps": GBps,
        "payload_bytes": {tier: payload[tier] * tokens for tier in NETWORK_TIERS},
        "us": {tier: _us(payload[tier] * tokens, GBps[tier]) for tier in NETWORK_TIERS},
        "factors": {
            "width": full["payload_width"] / (shape["latent_size"] or shape["hidden_size"]),
            "layers": full["num_moe_layers"] / shape["num_moe_layers"],
            "tokens": 1.0,
        },
    }


def _payload(full: Mapping[str, Any], tier: str) -> float:
    """Payload of a token in a layer that crosses a tier, all phases of the forward pass."""
    return sum(
        phase["rows"][tier] * sum(phase["row_bytes"].get(kind, 0) for kind in PAYLOAD_KINDS)
        for phase in full["phases"].values()
    )


def _scale_out(machine: Mapping[str, Any]) -> float | None:
    """What cards and fabric leave to a rank; None: not known."""
    rate, cards, over = (
        machine[name] for name in ("scale_out_GBps", "nics_per_rank", "oversubscription")
    )
    return None if None in (rate, cards, over) else rate * cards / over


def _us(num_bytes: float, GBps: float | None) -> float | None:
    """Microseconds; None: bytes at a rate that is not known."""
    if not num_bytes:
        return 0.0
    return None if GBps is None else num_bytes / GBps / 1e3
