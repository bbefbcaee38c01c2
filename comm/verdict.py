"""Verdicts: measured traffic and outputs held against what was predicted.

    exact        every cell equals the oracle's                             EXACT or OUTSIDE
    conserved    sent = received, dispatched pairs = combined pairs         EXACT or OUTSIDE
    expected     every scope lies where the law of the router lets it       EXACT, WITHIN or OUTSIDE
    correctness  outputs lie within the error bound of the wire formats     EXACT, WITHIN or OUTSIDE
    gradients    and so do gradients, in training                           EXACT, WITHIN or OUTSIDE
    kernel       the kernel acknowledged what was counted (comm.reconcile)  EXACT or OUTSIDE

A verdict that cannot be given is NOT_AVAILABLE with its reason, and does not touch the exit status.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite, isnan
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from comm.analytic.oracle import ExactTraffic
from comm.analytic.patterns import SCOPES
from comm.analytic.rows import ROW_PHASES
from comm.analytic.significance import METHODS, Score, has_many, score_destinations, score_sum
from comm.analytic.traffic import ExpectedTraffic

FALSE_ALARM = 1e-4  # probability that a faultless run is called OUTSIDE, all its tests together

SCOPE_WORDS = {"scale_up": "inside node", "scale_out": "between nodes", "remote": "network"}

# Exit status of a run in which the named verdict is OUTSIDE.
EXIT_STATUS = {
    "exact": 3,
    "conserved": 3,
    "expected": 3,
    "correctness": 4,
    "gradients": 4,
    "kernel": 5,
    "interfaces": 5,
}


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
    """Counted bytes and rows against the oracle's, cell by cell, in every direction and phase.

    What only one of the two knows of (a direction, a phase, a kind) must be 0 in the other.
    """
    axes: list[tuple[str, ...]] = []
    for axis in ("directions", "phases", "kinds"):
        known = getattr(traffic, axis)
        axes.append((*known, *(x for x in getattr(exact, axis) if x not in known)))
    words, layers = ("counted", "predicted"), traffic.layers

    def compared(name: str, labels: Sequence[tuple[str, ...]], unit: str) -> _Pair:
        return _Pair(
            _relabelled(getattr(traffic, name), _labels(traffic, len(labels)), labels),
            _relabelled(getattr(exact, name), _labels(exact, len(labels)), labels),
            (layers, *labels),
            unit,
            words,
        )

    return _equality("exact", [compared("bytes", axes, "B"), compared("rows", axes[:2], "rows")])


def _labels(traffic: CountedTraffic | ExactTraffic, num_axes: int) -> tuple[tuple[str, ...], ...]:
    return (traffic.directions, traffic.phases, traffic.kinds)[:num_axes]


def _relabelled(
    cells: NDArray[np.int64],
    labels: Sequence[tuple[str, ...]],
    wanted: Sequence[tuple[str, ...]],
) -> NDArray[np.int64]:
    """[layer, *labels, src, dst] in the order of other labels, 0 where there was none."""
    if tuple(labels) == tuple(wanted):
        return cells
    shape = (len(cells), *map(len, wanted), *cells.shape[-2:])
    moved = np.zeros(shape, np.int64)
    places = ([new.index(label) for label in old] for old, new in zip(labels, wanted, strict=True))
    moved[np.ix_(range(len(cells)), *places)] = cells
    return moved


def conserved_verdict(
    traffic: CountedTraffic,
    answered: NDArray[np.bool_] | None = None,
    training: bool = False,
) -> Verdict:
    """What was sent was received, and every row was answered along the reversed pair.

    answered: [src, dst] pairs whose dispatched rows are answered by a combine, both ways (None:
        all); where experts are sharded and dispatched to every shard, those inside a lane
    training: backward, every row of the forward direction went back once, in its own phase
    """
    axes = (traffic.layers, traffic.directions)
    sent = traffic.bytes.sum(axis=3)
    pairs = [_Pair(sent, traffic.received, (*axes, traffic.phases), "B", ("sent", "received"))]
    dispatched = _rows_of(traffic, "dispatch")
    asked = dispatched if answered is None else np.where(answered, dispatched, 0)
    back = _rows_of(traffic, "combine").swapaxes(-1, -2)
    words = ("dispatched", "combined on the way back")
    pairs.append(_Pair(asked, back, axes, "rows", words))
    if "tp_gather" in traffic.phases:
        gathered = _rows_of(traffic, "tp_gather")
        reduced = _rows_of(traffic, "tp_reduce").swapaxes(-1, -2)
        words = ("gathered", "reduced on the way back")
        pairs.append(_Pair(gathered, reduced, axes, "rows", words))
    if training:
        pairs.append(_both_ways(traffic))
    return _equality("conserved", pairs)


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


def _rows_of(traffic: CountedTraffic, phase: str) -> NDArray[np.int64]:
    """[layer, direction, src, dst] rows of one phase."""
    return traffic.rows[:, :, traffic.phases.index(phase)]


def _both_ways(traffic: CountedTraffic) -> _Pair:
    """Rows of each phase forward, and backward along the reversed pairs."""
    moves_tokens = [phase for phase in traffic.phases if phase in ROW_PHASES]
    phases = [traffic.phases.index(phase) for phase in moves_tokens]
    forward, backward = (
        traffic.rows[:, traffic.directions.index(name)][:, phases]
        for name in ("forward", "backward")
    )
    words = ("forward", "backward on the way back")
    return _Pair(forward, backward.swapaxes(-1, -2), (traffic.layers, moves_tokens), "rows", words)


@dataclass(frozen=True)
class _Test:
    """One comparison with the law, and of what."""

    place: str
    score: Score

    @property
    def is_random(self) -> bool:
        return self.score.std > 0


def expected_verdict(
    traffic: CountedTraffic, tiers: NDArray[np.integer], expected: ExpectedTraffic
) -> Verdict:
    """Bytes of every scope, for each layer and for all layers, against the law of the router.

    tiers: [R, R] LinkTier of each (src, dst)

    Phases that move the same rows are one sum, both directions together; rows that shards hand to
    each other are another. Where rows go straight to their rank, a chi-square over destinations is
    added for each layer. The methods are those of `comm.analytic.significance`. The bound is the
    two-sided normal quantile of `FALSE_ALARM` shared among the tests of the run.
    """
    tests = [*_sum_tests(traffic, tiers, expected), *_destination_tests(traffic, expected)]
    num_random = sum(test.is_random for test in tests)
    bound = _bound(num_random)
    worst = max(tests, key=lambda test: (abs(test.score.z), test.is_random))
    within = State.WITHIN if num_random else State.EXACT
    state = within if abs(worst.score.z) <= bound else State.OUTSIDE
    measured = worst.score.measured if isfinite(worst.score.measured) else None
    reason = _reason(worst, tests, bound)
    return Verdict("expected", state, measured, worst.score.mean, bound, reason)


def _sum_tests(
    traffic: CountedTraffic, tiers: NDArray[np.integer], expected: ExpectedTraffic
) -> Iterator[_Test]:
    groups: dict[str, tuple[int, ...]] = {
        f"layer {label}": (index,) for index, label in enumerate(traffic.layers)
    }
    if len(groups) > 1:
        groups["all layers"] = tuple(range(len(groups)))
    directions = [traffic.directions.index(name) for name in expected.directions]
    flows = [flow for flow in expected.flows if not flow.bounded or not flow.bytes_per_row.sum()]
    for flow in flows:
        names = flow.phases(expected.phases)
        phases = [traffic.phases.index(name) for name in names]
        moved = sum(traffic.bytes[:, d, p].sum(axis=1) for d in directions for p in phases)
        label_of_flow = f"{' and '.join(names)}, " if len(flows) > 1 else ""
        for scope in expected.scopes:
            inside = np.isin(tiers, SCOPES[scope])
            by_layer = [int(cells[inside].sum()) for cells in moved]
            for label, layers in groups.items():
                measured = sum(by_layer[layer] for layer in layers)
                place = f"{label}, {label_of_flow}{SCOPE_WORDS.get(scope, scope)}"
                yield _Test(place, score_sum(expected, flow, scope, layers, measured))


def _destination_tests(traffic: CountedTraffic, expected: ExpectedTraffic) -> Iterator[_Test]:
    forward, dispatch = traffic.directions.index("forward"), traffic.phases.index("dispatch")
    for flow in expected.flows:
        for layer, destinations in enumerate(flow.destinations):
            if destinations is not None and has_many(destinations):
                rows = traffic.rows[layer, forward, dispatch].sum(axis=0)
                place = f"layer {traffic.layers[layer]}, rows by destination"
                yield _Test(place, score_destinations(destinations, rows))


def _bound(num_tests: int) -> float:
    """|z| that a faultless run passes in any of its tests with probability FALSE_ALARM at most."""
    return -NormalDist().inv_cdf(FALSE_ALARM / (2 * num_tests)) if num_tests else 0.0


def _reason(worst: _Test, tests: Sequence[_Test], bound: float) -> str:
    methods = [test.score.method for test in tests]
    used = [method for method in METHODS if method in methods]
    if used == ["equality"] and worst.score.z == 0:
        return f"all {len(tests)} sums equal the law, which leaves no freedom"
    summary = ", ".join(f"{methods.count(m)} {m}" for m in used)
    return f"worst of {len(tests)} tests ({summary}): {worst.place}, {_distance(worst, bound)}"


def _distance(test: _Test, bound: float) -> str:
    """How far a sum lies from the law, and how far it may."""
    score = test.score
    bounded = f"all but 1 of {1 / FALSE_ALARM:,.0f} faultless runs keep every |z| <= {bound:.2f}"
    if score.method == "equality":
        return (
            f"counted {score.measured:,.0f} B, expected {score.mean:,.0f} B, and here the law"
            " leaves no freedom"
        )
    if score.method == "chi-square":
        return (
            f"z = {score.z:+.2f}, chi-square {score.measured:,.1f} with {score.mean:.0f} degrees of"
            f" freedom; {bounded}"
        )
    return (
        f"z = {score.z:+.2f} ({score.method}), counted {score.measured:,.0f} B,"
        f" expected {score.mean:,.0f} +- {score.std:,.0f} B; {bounded}"
    )


def correctness_verdict(
    errors: Mapping[str, float], bound: float, name: str = "correctness"
) -> Verdict:
    """Errors against the dense reference, by name ("layer 0 routed"), and the largest allowed.

    name: of the verdict, "correctness" of outputs or "gradients"
    """
    what = {"correctness": "output", "gradients": "gradient"}[name]
    if not errors:
        return not_available(name, f"no {what} was compared with the reference")
    # NaN compares false with everything: it must come first, and must not pass.
    where, worst = max(errors.items(), key=lambda item: (isnan(item[1]), item[1]))
    within = State.EXACT if worst == 0 else State.WITHIN
    state = within if worst <= bound else State.OUTSIDE
    reason = f"worst of {len(errors)} {what}s: {where}, error {worst:.2e}, bound {bound:.2e}"
    measured = worst if isfinite(worst) else None  # a record in JSON has no NaN
    return Verdict(name, state, measured, 0, bound, reason)


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """0, or the status of the most fundamental verdict that is OUTSIDE.

    Bytes that the kernel did not see (5) come first: nothing that was compared with a wrong count
    means anything. Then the lowest number: wrong bytes (3) may well explain wrong outputs (4).
    """
    outside = [EXIT_STATUS[v.name] for v in verdicts if v.state is State.OUTSIDE]
    kernel = EXIT_STATUS["kernel"]
    return kernel if kernel in outside else min(outside, default=0)
