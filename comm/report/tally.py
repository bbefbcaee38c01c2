"""Counted bytes summed to link tiers, each figure beside its predictions. Pure.

Axes: [L] MoE layers run, [D] directions, [P] phases, [K] kinds, [R, R] source x destination.
A *scope* is a link tier or "network", which is scale_up + scale_out: all that leaves a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from comm.topology import TIER_NAMES, LinkTier

NETWORK = (LinkTier.SCALE_UP, LinkTier.SCALE_OUT)
# The name under which ExpectedTraffic knows each scope of the record.
EXPECTED_SCOPES = {
    "self": "self",
    "scale_up": "scale_up",
    "scale_out": "scale_out",
    "network": "remote",
}
FORWARD_ORDER = ("rebalance", "dispatch", "tp_gather", "tp_reduce", "combine")
BACKWARD_ORDER = ("combine", "tp_reduce", "tp_gather", "dispatch", "grad_sync")
# Phases that move what tokens are made of; the others are shown beside them, never added to them.
MOE_PHASES = FORWARD_ORDER[1:]


def phases_in_order(direction: str, phases: Sequence[str]) -> list[int]:
    """Indices of the phases of a direction, in the order in which they happen.

    One that happens in the other direction only (a rebalance, gradients) is left out.
    """
    order = FORWARD_ORDER if direction == "forward" else BACKWARD_ORDER
    return [phases.index(phase) for phase in order if phase in phases]


def by_tier(cells: np.ndarray, tiers: np.ndarray) -> np.ndarray:
    """Sum pairs into link tiers: [..., R, R] -> [..., 3]."""
    return np.stack([cells[..., tiers == tier].sum(axis=-1) for tier in LinkTier], axis=-1)


@dataclass(frozen=True)
class Tally:
    """Traffic of a run by link tier, and what was predicted for it.

    traffic: comm.meter.Traffic; expected: ExpectedTraffic, None for a router without a law
    measured, exact: [L, D, P, K, 3] bytes; rows: [L, D, P, 3]
    differing: [L, D, P] sum of |counted - exact| over kinds and pairs: errors that cancel in a sum
        over pairs do not cancel here
    """

    traffic: Any
    expected: Any | None
    measured: np.ndarray
    exact: np.ndarray
    rows: np.ndarray
    differing: np.ndarray

    @classmethod
    def of(cls, traffic: Any, exact: Any, expected: Any | None, tiers: np.ndarray) -> Tally:
        """tiers: [R, R] LinkTier of every pair."""
        axes = ("directions", "phases", "kinds")
        assert all(getattr(traffic, axis) == getattr(exact, axis) for axis in axes)
        pairs = zip(traffic.bytes, exact.bytes, strict=True)  # by layer: the arrays are large
        differing = [np.abs(bytes_ - exact_).sum(axis=(2, 3, 4)) for bytes_, exact_ in pairs]
        return cls(
            traffic,
            expected,
            by_tier(traffic.bytes, tiers),
            by_tier(exact.bytes, tiers),
            by_tier(traffic.rows, tiers),
            np.array(differing),
        )

    @property
    def forward(self) -> int:
        """Index of the forward direction."""
        return self.traffic.directions.index("forward")

    @property
    def directions(self) -> list[int]:
        """Indices of the directions with traffic; forward is there even when nothing moved."""
        every = range(len(self.traffic.directions))
        return [d for d in every if d == self.forward or self.measured[:, d].any()]

    def phases(self, d: int) -> list[int]:
        """Indices of the phases of a direction, in the order in which they happen."""
        return phases_in_order(self.traffic.directions[d], self.traffic.phases)

    def phase(self, d: int, layers: Sequence[int], p: int) -> dict[str, Any]:
        """Rows, network bytes and byte errors of one phase, summed over layers given by index."""
        return {
            "direction": self.traffic.directions[d],
            "phase": self.traffic.phases[p],
            "rows": dict(zip(TIER_NAMES, self.rows[layers, d, p].sum(axis=0), strict=True)),
            "network": self.scope("network", d, layers, [p]),
            "differing_bytes": self.differing[layers, d, p].sum(),
        }

    def scope(
        self,
        scope: str,
        d: int,
        layers: Sequence[int],
        phases: Sequence[int],
        kinds: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Counted, exact and expected bytes of one scope, summed over the given indices."""
        traffic = self.traffic
        kinds = range(len(traffic.kinds)) if kinds is None else kinds
        tiers = NETWORK if scope == "network" else (LinkTier[scope.upper()],)
        chosen = np.ix_(layers, phases, kinds, tiers)
        measured, exact = self.measured[:, d][chosen].sum(), self.exact[:, d][chosen].sum()
        names = [traffic.phases[p] for p in phases if traffic.phases[p] in MOE_PHASES]
        if self.expected is None or len(names) < len(phases):
            return _compare(measured, exact, None, None)
        estimate = self.expected.of(
            EXPECTED_SCOPES[scope],
            layers=tuple(layers),
            phases=tuple(names),
            kinds=tuple(traffic.kinds[k] for k in kinds),
            directions=(traffic.directions[d],),
        )
        return _compare(measured, exact, float(estimate.mean), float(estimate.std))

    def cells(self, d: int, layers: Sequence[int], p: int) -> list[dict[str, Any]]:
        """Every (kind, tier) of one phase that was counted or predicted; a missing one is zero."""
        cells = [
            {"kind": kind, "tier": tier, **self.scope(tier, d, layers, [p], [k])}
            for k, kind in enumerate(self.traffic.kinds)
            for tier in TIER_NAMES
        ]
        figures = ("measured_bytes", "exact_bytes", "expected_bytes")
        return [cell for cell in cells if any(cell[figure] for figure in figures)]


def _compare(
    measured: int, exact: int | None, mean: float | None, std: float | None
) -> dict[str, Any]:
    """One figure beside its predictions; z is null without a law or without a spread."""
    z = (float(measured) - mean) / std if mean is not None and std else None
    return {
        "measured_bytes": measured,
        "exact_bytes": exact,
        "expected_bytes": mean,
        "expected_std": std,
        "z": z,
    }
