"""The routing of a run carried to the unscaled model.

Only the number of rows is taken from the run. The bytes of a row are worked out again at the
full width, because block scales round up and ids and weights do not grow with the width: bytes
of the run times a ratio of widths would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comm.analytic.rows import PAYLOAD_KINDS, row_bytes

BF16_BYTES = 2  # the headline formula's bytes of one value, whatever the wire carries
NETWORK_TIERS = ("scale_up", "scale_out")

ASSUMPTIONS = (
    "ranks and nodes are those of this run, and so are the rows a token",
    "every layer routes like the mean of the layers run",
    "counts messages are left out: fixed for a pair of ranks, they fade with tokens",
)
ON_PADDING = "a padded row counts as payload, empty or not"
WIRE_OF = {  # the format of each phase, by the name that it has in the configuration
    "dispatch": "dispatch",
    "tp_gather": "dispatch",
    "tp_reduce": "combine",
    "combine": "combine",
}


def full_scale(
    rows_per_token: Mapping[str, Mapping[str, float]],
    shape: Mapping[str, Any],
    dispatcher: str,
    wire: Mapping[str, str],
    deduplicate: bool = False,
) -> dict[str, Any]:
    """Bytes of one token at full size: by phase and layer, by layer, and by forward pass.

    rows_per_token: phase -> tier -> rows of one token in one layer, counted and averaged
    shape: the unscaled model (`latent_size`, `hidden_size`, `top_k`, `num_moe_layers`, `name`)
    wire: "dispatch" and "combine" -> wire format; others are left alone
    deduplicate: of dispatcher=one_sided
    """
    width = shape["latent_size"] or shape["hidden_size"]
    num_layers = shape["num_moe_layers"]
    phases = {
        phase: _phase(
            rows,
            row_bytes(
                dispatcher,
                phase,
                wire[WIRE_OF[phase]],
                width,
                shape["top_k"],
                deduplicate=deduplicate,
            ),
        )
        for phase, rows in rows_per_token.items()
    }
    layer = {
        field: sum(phase[field] for phase in phases.values())
        for field in (
            "scale_up_bytes",
            "scale_out_bytes",
            "payload_bytes",
            "metadata_bytes",
            "network_bytes",
        )
    }
    return {
        "model": shape["name"],
        "payload_width": width,
        "hidden_size": shape["hidden_size"],
        "num_moe_layers": num_layers,
        "rounds": len(phases) * num_layers,
        "wire": {way: wire[way] for way in ("dispatch", "combine")},
        "phases": phases,
        "layer": layer,
        "forward_pass": {field: value * num_layers for field, value in layer.items()},
        "headline_bytes": shape["top_k"] * shape["hidden_size"] * BF16_BYTES,
        "headline_at_payload_width_bytes": shape["top_k"] * width * BF16_BYTES,
        "assumptions": [*ASSUMPTIONS, *([ON_PADDING] if dispatcher == "padded" else [])],
    }


def _phase(rows: Mapping[str, float], bytes_of_row: Mapping[str, int]) -> dict[str, Any]:
    """One token, one layer, one way: rows by tier and the bytes that leave the token's rank."""
    row = sum(bytes_of_row.values())
    payload = sum(bytes_of_row.get(kind, 0) for kind in PAYLOAD_KINDS)
    network_rows = sum(rows[tier] for tier in NETWORK_TIERS)
    return {
        "rows": dict(rows),
        "row_bytes": {kind: size for kind, size in bytes_of_row.items() if size},
        **{f"{tier}_bytes": rows[tier] * row for tier in NETWORK_TIERS},
        "payload_bytes": network_rows * payload,
        "metadata_bytes": network_rows * (row - payload),
        "network_bytes": network_rows * row,
    }
