"""For tests of your own: what traffic should be, what it was, and where the two differ.

with count_traffic(ranks_per_node=4) as traffic:       # on ranks, see docs/testing.md
    output = my_layer(tokens)
assert_traffic(traffic.gather(), op="all_to_all", tier="network", expected=row_bytes * rows)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from comm.analytic.traffic import Estimate
from comm.report.units import format_bytes
from comm.topology import TIER_NAMES

if TYPE_CHECKING:
    from comm.counting import count_traffic

__all__ = ["assert_traffic", "count_traffic", "expected_rows"]

WORST = 6  # pairs of ranks that are shown
SIGMAS = 5  # standard deviations from a law that are chance


class Measured(Protocol):
    """comm.counting.Traffic after gather(), comm.report.reading.Result, or one of your own."""

    def matrix(self, **where: Any) -> NDArray[np.int64]: ...


def __getattr__(name: str) -> Any:
    """count_traffic, which needs torch, when it is first asked for."""
    if name == "count_traffic":
        from comm.counting import count_traffic

        return count_traffic
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def assert_traffic(
    measured: Measured,
    *,
    expected: float | ArrayLike | Measured | Estimate,
    rel: float = 0.0,
    **where: Any,
) -> None:
    """Hold counted bytes to what is expected: equal, or within rel x expected.

    expected: bytes in all; or a matrix [R, R] of bytes from each rank (row) to each, and then every
        pair must agree; or another measurement, of which the same choice is taken; or what a law
        says, `moe.predict(...).of(...)`, whose scatter is allowed for
    where: what of the traffic, tier="network", op=... or phase=..., as `measured.matrix` takes it.
        Of a matrix that is given, too, only the pairs of the tier count
    Raises AssertionError with both numbers and the pairs that differ most, ValueError for the
    traffic of one rank alone.
    """
    __tracebackhide__ = True
    if getattr(measured, "rank", None) is not None:
        raise ValueError("this is the traffic of one rank only: hold traffic.gather() to it")
    counted = np.asarray(measured.matrix(**where))
    if hasattr(expected, "matrix"):
        expected = expected.matrix(**where)
    if isinstance(expected, Estimate):
        scatter = SIGMAS * expected.std
        _hold_total(counted, expected.mean, max(rel * expected.mean, scatter), where)
        return
    wanted = np.asarray(expected)
    if wanted.ndim == 0:
        _hold_total(counted, float(wanted), rel * abs(float(wanted)), where)
        return
    if wanted.shape != counted.shape:
        raise ValueError(f"expected has shape {wanted.shape}, the traffic is of {counted.shape}")
    if "tier" in where:
        wanted = np.where(_pairs(measured, where["tier"]), wanted, 0)
    _hold_pairs(counted, wanted, rel, where)


def expected_rows(
    topk_ids: Sequence[ArrayLike], owner: ArrayLike, *, deduplicate: bool = False
) -> NDArray[np.int64]:
    """Rows from each rank to each that tokens make with these experts: int64 [R, R].

    topk_ids: for each source rank int [T, K], the experts of its tokens; -1 is none
    owner: int [E], the rank of each expert
    deduplicate: a token makes one row for each rank that it goes to, not one for each expert
    """
    owner, size = np.asarray(owner), len(topk_ids)
    rows = np.zeros((size, size), np.int64)
    for src, ids in enumerate(topk_ids):
        ids = np.asarray(ids)
        ranks = np.where(ids >= 0, owner[ids], -1)
        for dst in range(size):
            hits = ranks == dst
            rows[src, dst] = hits.any(axis=1).sum() if deduplicate else hits.sum()
    return rows


def _pairs(measured: Any, tier: str) -> NDArray[np.bool_]:
    """Which pairs of ranks are of a tier."""
    tiers = measured.topology.tiers() if hasattr(measured, "topology") else measured.tiers
    return tiers > 0 if tier == "network" else tiers == TIER_NAMES.index(tier)


def _hold_total(counted: NDArray, wanted: float, room: float, where: dict[str, Any]) -> None:
    """room: bytes that may be missing or too much"""
    __tracebackhide__ = True
    total = int(counted.sum())
    if abs(total - wanted) <= room:
        return
    rows = _worst(counted, np.zeros_like(counted))
    pairs = [f"    rank {src} -> rank {dst}: {counted[src, dst]:,} B" for src, dst in rows]
    raise AssertionError(
        "\n".join([_sums(total, wanted, room, where), "  counted by pair:", *pairs])
    )


def _hold_pairs(counted: NDArray, wanted: NDArray, rel: float, where: dict[str, Any]) -> None:
    __tracebackhide__ = True
    wrong = np.abs(counted - wanted) > rel * np.abs(wanted)
    if not wrong.any():
        return
    head = _sums(int(counted.sum()), float(wanted.sum()), 0, where)
    of_each = f", each by more than {rel:.2%}" if rel else ""
    differing = f"  {wrong.sum():,} of {wrong.size:,} pairs differ{of_each}; the most:"
    pairs = [
        f"    rank {src} -> rank {dst}: counted {counted[src, dst]:,} B, expected"
        f" {wanted[src, dst]:,.10g} B, {_signed(counted[src, dst] - wanted[src, dst])}"
        for src, dst in _worst(np.where(wrong, counted, 0), np.where(wrong, wanted, 0))
    ]
    raise AssertionError("\n".join([head, differing, *pairs]))


def _worst(counted: NDArray, wanted: NDArray) -> list[tuple[int, int]]:
    """Pairs of ranks by the size of the difference."""
    apart = np.abs(counted - wanted)
    order = np.argsort(-apart, axis=None, kind="stable")[:WORST]
    places = [divmod(int(place), counted.shape[1]) for place in order]
    return [place for place in places if apart[place]]


def _sums(total: int, wanted: float, room: float, where: dict[str, Any]) -> str:
    what = ", ".join(f"{name}={value}" for name, value in where.items()) or "all traffic"
    share = f" ({(total - wanted) / wanted:+.2%})" if wanted else ""
    within = f"; allowed {room:,.10g} B" if room else ""
    return (
        f"{what}: counted {total:,} B ({format_bytes(total)}), expected {wanted:,.10g} B"
        f" ({format_bytes(wanted)}): {_signed(total - wanted)}{share}{within}"
    )


def _signed(difference: float) -> str:
    return f"{abs(difference):,.10g} B {'more' if difference > 0 else 'less'}"
