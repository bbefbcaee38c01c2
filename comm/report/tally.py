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


def by_tier(cells: np.ndarray, tiers: np.ndarray) -> np.ndarray:
    """Sum pairs into link tiers: [..., R, R] -> [..., 3]."""
    return np.stack([cells[..., tiers == tier].sum(axis=-1) for tier in LinkTier], axis=-1)


@dataclass(frozen=True)
class Tally:
    """Traffic of a run by link tier, and what was predicted for it.

    traffic: comm.meter.Traffic; expected: ExpectedTraffic, None for a router without a law
    measured: [L, D, P, K, 3] bytes; exact: [L, P, K, 3] bytes, forward; rows: [L, D, P, 3]
    differing: [L, P] sum of |counted - exact| over kinds and pairs, forward: errors that cancel
        in a sum over pairs do not cancel here
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
        forward = traffic.directions.index("forward")
        pairs = zip(traffic.bytes, exact.bytes, strict=True)  # by layer: the arrays are large
        differing = [
            np.abs(bytes_[forward] - exact_).sum(axis=(1, 2, 3)) for bytes_, exact_ in pairs
        ]
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

    def phase(self, d: int, layers: Sequence[int], p: int) -> dict[str, Any]:
        """Rows, network bytes and byte errors of one phase, summed over layers given by index."""
        forward = d == self.forward
        return {
            "direction": self.traffic.directions[d],
            "phase": self.traffic.phases[p],
            "rows": dict(zip(TIER_NAMES, self.rows[layers, d, p].sum(axis=0), strict=True)),
            "network": self.scope("network", d, layers, [p]),
            "differing_bytes": self.differing[layers, p].sum() if forward else None,
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
        measured = self.measured[:, d][np.ix_(layers, phases, kinds, tiers)].sum()
        if d != self.forward:
            return _compare(measured, None, None, None)
        exact = self.exact[np.ix_(layers, phases, kinds, tiers)].sum()
        if self.expected is None:
            return _compare(measured, exact, None, None)
        estimate = self.expected.of(
            EXPECTED_SCOPES[scope],
            layers=tuple(layers),
            phases=tuple(traffic.phases[p] for p in phases),
            kinds=tuple(traffic.kinds[k] for k in kinds),
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
