"""From counted arrays and predictions to the run.json dictionary ("wideep.run/1").

Pure: plain arrays and values in, plain JSON values out. docs/run_record.md explains each field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from comm.analytic.rows import PAYLOAD_KINDS
from comm.report.carried import carried
from comm.report.full_scale import full_scale
from comm.report.load import balance, timing
from comm.report.tally import EXPECTED_SCOPES, MOE_PHASES, NETWORK, Tally

SCHEMA = "wideep.run/1"
REPORTS = ("written", "no library", "off")


@dataclass(frozen=True)
class RunInputs:
    """Everything that a record is made of.

    manifest: what ran, where and when (docs/run_record.md lists the fields)
    traffic: comm.meter.Traffic; exact: ExactTraffic; expected: None for a router without a law
    tiers: [R, R] LinkTier of every pair
    expert_rows: [L, E] choices of each logical expert, all ranks and measured steps
    seconds: times of parts other than the phases ("experts", "step"), slowest rank
    correctness: for each layer a dictionary of layer, routed_error, hidden_error and, in training,
        gradient_error and worst_gradient
    conventions: the field's numerators, each with its name, figures and who prints it
    choices: experts chosen, and how many of them found no room, counted and predicted
    wire_errors: phase -> relative rms error of the format in this run's rows
    placement: what replicas and balancing did for the load; None where nothing was balanced
    kernel: what TCP acknowledged in each group; None where the kernel was not asked
    interfaces: of each host what was counted leaving it and what it sent; () for one host
    fan_out: tokens by the number of ranks that they reach, counted and in closed form
    report_html: what becomes of report.html, one of REPORTS
    """

    manifest: Mapping[str, Any]
    traffic: Any
    exact: Any
    expected: Any | None
    tiers: np.ndarray
    verdicts: Sequence[Any]
    headline: Any
    expert_rows: np.ndarray
    status: int
    result_dir: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    correctness: Sequence[Mapping[str, float]] = ()
    correctness_bound: float | None = None
    gradient_bound: float | None = None
    conventions: Sequence[Mapping[str, Any]] = ()
    choices: Mapping[str, int] = field(default_factory=dict)
    wire_errors: Mapping[str, float] = field(default_factory=dict)
    placement: Mapping[str, Any] | None = None
    kernel: Mapping[str, Any] | None = None
    interfaces: Sequence[Mapping[str, Any]] = ()
    fan_out: Mapping[str, Any] | None = None
    report_html: str = "off"


def build_record(run: RunInputs) -> dict[str, Any]:
    """The run.json dictionary of one run."""
    traffic, manifest = run.traffic, run.manifest
    tally = Tally.of(traffic, run.exact, run.expected, run.tiers)
    full = _full_scale(tally, manifest)
    return plain(
        {
            "schema": SCHEMA,
            "status": run.status,
            "result_dir": run.result_dir,
            "manifest": manifest,
            "verdicts": [_verdict(verdict) for verdict in run.verdicts],
            "totals": _totals(tally),
            "headline": _headline(run.headline),
            "full_scale": full,
            "carried": carried(full, manifest),
            "rounds": _rounds(tally, manifest["steps"]),
            "collectives": traffic.collectives,
            "timing": timing(traffic, run.seconds),
            "balance": balance(traffic, run.expert_rows, run.exact.copies),
            "correctness": {
                "bound": run.correctness_bound,
                "gradient_bound": run.gradient_bound,
                "layers": run.correctness,
            },
            "conventions": run.conventions,
            "choices": run.choices,
            "wire_errors": run.wire_errors,
            "placement": run.placement,
            "kernel": run.kernel,
            "interfaces": run.interfaces,
            "fan_out": run.fan_out,
            "report_html": run.report_html,
            "layers": list(_layer_rows(tally)),
        }
    )


def differing(traffic: Any, exact: Any) -> np.ndarray:
    """Cells whose counted bytes are not the predicted ones: int64 [n, 7], docs/run_record.md."""
    found = []
    for layer, (counted, predicted) in enumerate(zip(traffic.bytes, exact.bytes, strict=True)):
        for place in np.argwhere(counted != predicted).tolist():
            found.append((layer, *place, int(predicted[tuple(place)])))
    return np.array(found, np.int64).reshape(-1, 7)


def plain(value: Any) -> Any:
    """The same value in JSON's own types.

    Arrays and tuples become lists, numpy's numbers Python's, and what JSON cannot say (NaN,
    infinity) null.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _rounds(tally: Tally, num_steps: int) -> int:
    """Logical rounds of the tokens' rows: one for each phase of a layer, in each direction."""
    phases = sum(phase in MOE_PHASES for phase in tally.traffic.phases)
    return len(tally.traffic.layers) * len(tally.directions) * phases * num_steps


def _layer_rows(tally: Tally) -> Iterator[dict[str, Any]]:
    """One entry a (layer, direction, phase), in the order in which they happen."""
    for i, layer in enumerate(tally.traffic.layers):
        for d in tally.directions:
            for p in tally.phases(d):
                yield {"layer": layer, **tally.phase(d, [i], p), "cells": tally.cells(d, [i], p)}


def _totals(tally: Tally) -> dict[str, Any]:
    """Sums over the layers: of everything, by tier, by phase, and by (phase, kind, tier)."""
    traffic = tally.traffic
    layers = range(len(traffic.layers))
    by_phase, cells = [], []
    for d in tally.directions:
        for p in tally.phases(d):
            where = {"direction": traffic.directions[d], "phase": traffic.phases[p]}
            by_phase.append(tally.phase(d, layers, p))
            cells += [{**where, **cell} for cell in tally.cells(d, layers, p)]
    phases = [p for p, phase in enumerate(traffic.phases) if phase in MOE_PHASES]
    payload_kinds = [k for k, kind in enumerate(traffic.kinds) if kind in PAYLOAD_KINDS]
    network = tally.measured[..., NETWORK].sum(axis=-1)[:, :, phases]  # [L, D, P, K]
    payload = network[..., payload_kinds].sum()
    return {
        "measured_bytes": tally.measured[:, :, phases].sum(),
        "network_payload_bytes": payload,
        "network_metadata_bytes": network.sum() - payload,
        "tiers": {
            scope: tally.scope(scope, tally.forward, layers, phases) for scope in EXPECTED_SCOPES
        },
        "backward": {
            scope: tally.scope(scope, d, layers, phases)
            for scope in EXPECTED_SCOPES
            for d in tally.directions
            if d != tally.forward
        },
        "outside": {  # not part of the figures of the layers' traffic
            phase: tally.measured[:, :, p][..., NETWORK].sum()
            for p, phase in enumerate(traffic.phases)
            if phase not in MOE_PHASES
        },
        "phases": by_phase,
        "cells": cells,
    }


def _full_scale(tally: Tally, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The mean rows of one token in one layer, forward, carried to the unscaled model."""
    layers = range(len(tally.traffic.layers))
    tokens = sum(manifest["tokens_per_rank"]) * manifest["steps"] * len(layers)
    if not tokens:
        return None
    rows_per_token = {
        tally.traffic.phases[p]: {
            tier: int(rows) / tokens
            for tier, rows in tally.phase(tally.forward, layers, p)["rows"].items()
        }
        for p in tally.phases(tally.forward)
        if tally.traffic.phases[p] in MOE_PHASES
    }
    return full_scale(
        rows_per_token,
        manifest["full_shape"],
        manifest["dispatcher"],
        manifest["wire"],
        manifest["config"]["dispatcher"]["deduplicate"],
    )


def _headline(headline: Any) -> dict[str, Any]:
    """The headline formula beside what was counted, and the factors between the two in order."""
    return {
        "formula": headline.formula,
        "headline_bytes": headline.headline_bytes,
        "measured_bytes": headline.measured_bytes,
        "ratio": headline.ratio,
        "factors": [{"name": name, "value": value} for name, value in headline.factors],
    }


def _verdict(verdict: Any) -> dict[str, Any]:
    """One verdict, its state by name."""
    return {
        "name": verdict.name,
        "state": getattr(verdict.state, "name", verdict.state),
        "measured": verdict.measured,
        "predicted": verdict.predicted,
        "bound": verdict.bound,
        "reason": verdict.reason,
    }
