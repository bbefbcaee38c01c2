"""The rows of the table by layer: which layers have their own, and what is summed into each. Pure.

The layers in the middle of a deep model are summed into one row a phase; a layer whose bytes
differ from the prediction keeps its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

KIND_COLUMNS = {
    "payload": ("hidden", "scales"),
    "metadata": ("ids", "weights", "counts"),
    "hidden": ("hidden",),
    "scales": ("scales",),
    "ids + weights": ("ids", "weights"),
    "counts": ("counts",),
    "padding": ("padding",),
    "beside": ("expert_weights", "gradients"),
}
OPTIONAL_KINDS = ("padding", "beside")  # columns of runs that have them
# One column for two where a page is too narrow, the first one first.
INSTEAD = {"payload": ("hidden", "scales"), "metadata": ("ids + weights", "counts")}
OUTSIDE = ("rebalance", "grad_sync")  # moved beside the tokens: shown, and in no sum of theirs
TIER_WORDS = {"self": "self", "scale_up": "inside node", "scale_out": "between nodes"}
MAX_LAYERS = 8  # more are folded
EDGE_LAYERS = 2  # kept at each end of a fold
NO_LAW = {"expected_bytes": None}
MAX_EXCEPTIONS = 6  # layers kept inside a fold because they differ


@dataclass(frozen=True)
class Row:
    """One row of the table; layers and phases are summed into it where it stands for several."""

    layer: str
    phase: str
    rows: int
    kinds: Mapping[str, int]
    tiers: Mapping[str, int]
    exact: int | None
    differing: int | None  # sum of |counted - exact| over pairs and kinds
    z: str


def body_rows(record: Mapping[str, Any]) -> list[Row]:
    """A row a layer and phase, and in the place of the folded layers one a phase."""
    folded = folded_layers(record)
    rows: list[Row] = []
    for entry in record["layers"]:
        if entry["layer"] not in folded:
            rows.append(_row(str(entry["layer"]), [entry]))
        elif entry["layer"] == folded[0]:
            same = [
                e
                for e in record["layers"]
                if e["layer"] in folded
                and (e["direction"], e["phase"]) == (entry["direction"], entry["phase"])
            ]
            rows.append(_row(f"{folded[0]}-{folded[-1]}", same))
    # The label stands beside the first phase only.
    return [
        rows[0],
        *(
            replace(row, layer="") if row.layer == previous.layer else row
            for previous, row in itertools.pairwise(rows)
        ),
    ]


def total_rows(record: Mapping[str, Any]) -> list[Row]:
    """A row a phase, one for all of them, and one for each phase that no sum includes."""
    totals = record["totals"]
    phases = [
        {
            **phase,
            "cells": [
                cell
                for cell in totals["cells"]
                if (cell["direction"], cell["phase"]) == (phase["direction"], phase["phase"])
            ],
        }
        for phase in totals["phases"]
    ]
    moved = [phase for phase in phases if phase["phase"] not in OUTSIDE]
    rows = [_row("total" if i == 0 else "", [phase]) for i, phase in enumerate(moved)]
    network = totals["tiers"]["network"] if not totals["backward"] else NO_LAW
    whole = replace(
        _row("", [{**phase, "network": network} for phase in moved]),
        phase="both" if len(moved) == 2 else "all",
        z=format_z(network),
    )
    beside = [phase for phase in phases if phase["phase"] in OUTSIDE]
    return [*rows, whole, *(_row("beside" if i == 0 else "", [p]) for i, p in enumerate(beside))]


def phase_label(direction: str, phase: str) -> str:
    """A phase as the page calls it; one that happens in one direction only needs no other word."""
    return phase if direction == "forward" or phase in OUTSIDE else f"back {phase}"


def shown_tiers(record: Mapping[str, Any]) -> list[str]:
    """Tiers that exist among the ranks of the run, self first."""
    nodes = record["manifest"]["node_of_rank"]
    there = {
        "self": True,
        "scale_up": len(set(nodes)) < len(nodes),
        "scale_out": len(set(nodes)) > 1,
    }
    return [tier for tier in TIER_WORDS if there[tier]]


def folded_layers(record: Mapping[str, Any]) -> list[int]:
    """Layers in the middle of a deep model that share one pair of rows; often none."""
    entries = record["layers"]
    layers = list(dict.fromkeys(entry["layer"] for entry in entries))
    if len(layers) <= MAX_LAYERS:
        return []
    differ = dict.fromkeys(e["layer"] for e in entries if e["differing_bytes"])
    kept = {*layers[:EDGE_LAYERS], *layers[-EDGE_LAYERS:], *list(differ)[:MAX_EXCEPTIONS]}
    return [layer for layer in layers if layer not in kept]


def _row(layer: str, entries: Sequence[Mapping[str, Any]]) -> Row:
    """Entries of `layers`, summed."""
    cells = [cell for entry in entries for cell in entry["cells"]]
    return Row(
        layer=layer,
        phase=phase_label(entries[0]["direction"], entries[0]["phase"]),
        rows=sum(sum(entry["rows"].values()) for entry in entries),
        kinds={name: _sum(cells, "kind", kinds) for name, kinds in KIND_COLUMNS.items()},
        tiers={tier: _sum(cells, "tier", (tier,)) for tier in TIER_WORDS},
        exact=_sum_known(cell["exact_bytes"] for cell in cells),
        differing=_sum_known(entry["differing_bytes"] for entry in entries),
        z=format_z(entries[0]["network"]) if len(entries) == 1 else "",
    )


def _sum(cells: Sequence[Mapping[str, Any]], axis: str, names: Sequence[str]) -> int:
    return sum(cell["measured_bytes"] for cell in cells if cell[axis] in names)


def _sum_known(figures: Iterable[int | None]) -> int | None:
    """The sum, None when one of the figures is."""
    total = 0
    for figure in figures:
        if figure is None:
            return None
        total += figure
    return total


def format_z(figure: Mapping[str, Any]) -> str:
    """z with its sign; "=" or "!=" where the law leaves no spread; "" without a law."""
    if figure["expected_bytes"] is None:
        return ""
    if figure["z"] is None:
        return "=" if figure["measured_bytes"] == round(figure["expected_bytes"]) else "!="
    z = figure["z"]
    if abs(z) >= 1e4:
        return f"{z:+.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{z:+.{2 if abs(z) < 10 else 1 if abs(z) < 100 else 0}f}"
