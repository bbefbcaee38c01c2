"""Verdicts: measured traffic and outputs held against what was predicted.

    exact        every cell equals the oracle's                             EXACT or OUTSIDE
    conserved    sent = received, dispatched pairs = combined pairs         EXACT or OUTSIDE
    expected     every scope lies where uniform routing lets it lie         EXACT, WITHIN or OUTSIDE
    correctness  outputs lie within the error bound of the wire formats     EXACT, WITHIN or OUTSIDE

A verdict that cannot be given is NOT_AVAILABLE with its reason, and does not touch the exit status.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite, isnan
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from comm.analytic.oracle import ExactTraffic
from comm.analytic.tail import rare_events, tail_probability
from comm.analytic.traffic import SCOPES, ExpectedTraffic

FALSE_ALARM = 1e-4  # probability that a faultless run is called OUTSIDE, all its tests together
# Below this many expected hits or misses the exact tail replaces z. 25 is the least that will do:
# a Poisson count of mean 25 passes z = 5 twelve times as often as a normal one, of mean 400 1.6.
RARE_EVENTS = 400.0

SCOPE_WORDS = {"scale_up": "inside node", "scale_out": "between nodes", "remote": "network"}

# Exit status of a run in which the named verdict is OUTSIDE.
EXIT_STATUS = {"exact": 3, "conserved": 3, "expected": 3, "correctness": 4, "kernel": 5}


class State(StrEnum):
    """What became of one comparison."""

    EXACT = "EXACT"
    WITHIN = "WITHIN"
    OUTSIDE = "OUTSIDE"
    NOT_AVAILABLE = "NOT_AVAILABLE"


@dataclass(frozen=True)
class Verdict:
    """One comparison: its worst pair of numbers, the bound it was held to, and why."""

    name: str
    state: State
    measured: float | None
    predicted: float | None
    bound: float | None
    reason: str


class CountedTraffic(Protocol):
    """What is needed of the meter's result; axes as named there, labels in the tuples."""

    @property
    def bytes(self) -> NDArray[np.int64]: ...  # [layer, direction, phase, kind, src, dst]
    @property
    def rows(self) -> NDArray[np.int64]: ...  # [layer, direction, phase, src, dst]
    @property
    def received(self) -> NDArray[np.int64]: ...  # [layer, direction, phase, src, dst]
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def directions(self) -> tuple[str, ...]: ...
    @property
    def phases(self) -> tuple[str, ...]: ...
    @property
    def kinds(self) -> tuple[str, ...]: ...


def not_available(name: str, reason: str) -> Verdict:
    """A verdict that cannot be given."""
    return Verdict(name, State.NOT_AVAILABLE, None, None, None, reason)


def exact_verdict(traffic: CountedTraffic, exact: ExactTraffic) -> Verdict:
    """Counted bytes and rows against the oracle's, cell by cell.

    The oracle describes the forward direction: any byte in another one is a difference.
    """
    forward = traffic.directions.index("forward")
    phases = [traffic.phases.index(phase) for phase in exact.phases]
    kinds = [traffic.kinds.index(kind) for kind in exact.kinds]
    predicted_bytes = np.zeros_like(traffic.bytes)
    predicted_rows = np.zeros_like(traffic.rows)
    for p, phase in enumerate(phases):
        predicted_rows[:, forward, phase] = exact.rows[:, p]
        for k, kind in enumerate(kinds):
            predicted_bytes[:, forward, phase, kind] = exact.bytes[:, p, k]

    axes = (traffic.layers, traffic.directions, traffic.phases)
    words = ("counted", "predicted")
    return _equality(
        "exact",
        [
            _Pair(traffic.bytes, predicted_bytes, (*axes, traffic.kinds), "B", words),
            _Pair(traffic.rows, predicted_rows, axes, "rows", words),
        ],
    )


def conserved_verdict(traffic: CountedTraffic) -> Verdict:
    """What was sent was received, and each dispatched row was answered by one combined row."""
    axes = (traffic.layers, traffic.directions)
    sent = traffic.bytes.sum(axis=3)
    dispatched = traffic.rows[:, :, traffic.phases.index("dispatch")]
    combined = traffic.rows[:, :, traffic.phases.index("combine")].swapaxes(-1, -2)
    return _equality(
        "conserved",
        [
            _Pair(sent, traffic.received, (*axes, traffic.phases), "B", ("sent", "received")),
            _Pair(dispatched, combined, axes, "rows", ("dispatched", "combined on the way back")),
        ],
    )


@dataclass(frozen=True)
class _Pair:
    """Two arrays [..., src, dst] that must be equal, and how to speak of them.

    axes: the labels of all axes but the last two; words: what the left and right number are
    """

    left: NDArray[np.int64]
    right: NDArray[np.int64]
    axes: tuple[Sequence[int | str], ...]
    unit: str
    words: tuple[str, str]

    def describe(self, cell: tuple[int, ...]) -> str:
        """'layer 2, combine, hidden, rank 3 -> rank 5: counted 1,024 B, predicted 2,048 B'"""
        *indices, src, dst = cell
        layer, *labels = (axis[i] for axis, i in zip(self.axes, indices, strict=True))
        place = ", ".join([f"layer {layer}", *(str(x) for x in labels if x != "forward")])
        left, right = (
            f"{word} {int(side[cell]):,} {self.unit}"
            for word, side in zip(self.words, (self.left, self.right), strict=True)
        )
        return f"{place}, rank {src} -> rank {dst}: {left}, {right}"


def _equality(name: str, pairs: Sequence[_Pair]) -> Verdict:
    """EXACT when all pairs are equal, else OUTSIDE with the first wrong cell in words."""
    wrong = [(pair, np.argwhere(pair.left != pair.right)) for pair in pairs]
    num_cells, num_wrong = sum(pair.left.size for pair in pairs), sum(len(w) for _, w in wrong)
    if not num_wrong:
        total = int(pairs[0].left.sum())
        return Verdict(
            name, State.EXACT, total, total, 0, f"all {num_cells:,} cells equal, {total:,} B"
        )
    pair, cells = next((pair, cells) for pair, cells in wrong if len(cells))
    first = tuple(cells[0].tolist())
    reason = f"{pair.describe(first)}; {num_wrong:,} of {num_cells:,} cells differ"
    return Verdict(name, State.OUTSIDE, int(pair.left[first]), int(pair.right[first]), 0, reason)


@dataclass(frozen=True)
class _Test:
    """One scope of one layer (or of all of them) against the law."""

    place: str
    method: str
    measured: int
    mean: float
    std: float
    z: float


def expected_verdict(
    traffic: CountedTraffic, tiers: NDArray[np.integer], expected: ExpectedTraffic
) -> Verdict:
    """Forward bytes of every scope, for each layer and for all layers, against uniform routing.

    tiers: [R, R] LinkTier of each (src, dst)

    Three methods. Where the law leaves no freedom, equality. Where fewer than `RARE_EVENTS` hits or
    misses are expected, the exact tail probability, stated as the z of equal probability. Else z.
    The bound is the two-sided normal quantile of `FALSE_ALARM` shared among the tests of the run.
    """
    forward = traffic.bytes[:, traffic.directions.index("forward")].sum(axis=(1, 2))
    groups: dict[str, tuple[int, ...]] = {
        f"layer {label}": (index,) for index, label in enumerate(traffic.layers)
    }
    if len(groups) > 1:
        groups["all layers"] = tuple(range(len(groups)))
    tests = []
    for scope in expected.scopes:
        inside = np.isin(tiers, SCOPES[scope])
        for label, layers in groups.items():
            measured = sum(int(forward[layer][inside].sum()) for layer in layers)
            place = f"{label}, {SCOPE_WORDS.get(scope, scope)}"
            tests.append(_test(place, measured, expected, scope, layers))

    num_random = sum(test.std > 0 for test in tests)
    bound = _bound(num_random)
    worst = max(tests, key=lambda test: (abs(test.z), test.std > 0))
    within = State.WITHIN if num_random else State.EXACT
    state = within if abs(worst.z) <= bound else State.OUTSIDE
    return Verdict(
        "expected", state, worst.measured, worst.mean, bound, _reason(worst, tests, bound)
    )


def _test(
    place: str, measured: int, expected: ExpectedTraffic, scope: str, layers: Sequence[int]
) -> _Test:
    estimate = expected.of(scope, layers)
    if estimate.std == 0:
        z = 0.0 if measured == estimate.mean else inf
        return _Test(place, "equality", measured, estimate.mean, 0.0, z)
    population = expected.population(scope, layers)
    if rare_events(population) >= RARE_EVENTS:
        z = (measured - estimate.mean) / estimate.std
        return _Test(place, "normal", measured, estimate.mean, estimate.std, z)
    bytes_per_row = int(expected.bytes_per_row.sum())
    fixed = int(expected.fixed_bytes[list(layers), ..., expected.scopes.index(scope)].sum())
    probability = tail_probability(population, (measured - fixed) / bytes_per_row)
    z = -NormalDist().inv_cdf(probability / 2)
    sign = 1 if measured >= estimate.mean else -1
    return _Test(place, "exact tail", measured, estimate.mean, estimate.std, sign * z)


def _bound(num_tests: int) -> float:
    """|z| that a faultless run passes in any of its tests with probability FALSE_ALARM at most."""
    return -NormalDist().inv_cdf(FALSE_ALARM / (2 * num_tests)) if num_tests else 0.0


def _reason(worst: _Test, tests: Sequence[_Test], bound: float) -> str:
    methods = [test.method for test in tests]
    used = [m for m in ("normal", "exact tail", "equality") if m in methods]
    if used == ["equality"] and worst.z == 0:
        return f"all {len(tests)} sums equal the law, which leaves no freedom"
    summary = ", ".join(f"{methods.count(m)} {m}" for m in used)
    return f"worst of {len(tests)} sums ({summary}): {worst.place}, {_distance(worst, bound)}"


def _distance(test: _Test, bound: float) -> str:
    """How far a sum lies from the law, and how far it may."""
    if test.method == "equality":
        return (
            f"counted {test.measured:,} B, expected {test.mean:,.0f} B, and here the law leaves no"
            " freedom"
        )
    return (
        f"z = {test.z:+.2f} ({test.method}), counted {test.measured:,} B,"
        f" expected {test.mean:,.0f} +- {test.std:,.0f} B;"
        f" all but 1 of {1 / FALSE_ALARM:,.0f} faultless runs keep every |z| <= {bound:.2f}"
    )


def correctness_verdict(errors: Mapping[str, float], bound: float) -> Verdict:
    """Errors against the dense reference, by name ("layer 0 routed"), and the largest allowed."""
    if not errors:
        return not_available("correctness", "no output was compared with the reference")
    # NaN compares false with everything: it must come first, and must not pass.
    name, worst = max(errors.items(), key=lambda item: (isnan(item[1]), item[1]))
    within = State.EXACT if worst == 0 else State.WITHIN
    state = within if worst <= bound else State.OUTSIDE
    reason = f"worst of {len(errors)} outputs: {name}, error {worst:.2e}, bound {bound:.2e}"
    measured = worst if isfinite(worst) else None  # a record in JSON has no NaN
    return Verdict("correctness", state, measured, 0, bound, reason)


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """0, or the status of the most fundamental verdict that is OUTSIDE: the lowest number.

    Wrong bytes (3) come before wrong outputs (4), which they may well explain, and both before
    counters of the kernel (5), which can only disagree about bytes that were counted.
    """
    outside = [EXIT_STATUS[v.name] for v in verdicts if v.state is State.OUTSIDE]
    return min(outside, default=0)
