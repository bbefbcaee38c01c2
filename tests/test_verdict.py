"""Verdicts against the router's law and the reference: each can pass, can fail, and says where."""

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from law_simulation import even, run_shape, simulate, tiers_of
from numpy.typing import NDArray

from comm.analytic.law import GroupLimited, Law, Markov, Uniform, Weighted
from comm.analytic.oracle import ExactTraffic
from comm.analytic.rows import DISPATCHERS
from comm.analytic.run import RunShape
from comm.analytic.significance import has_many, score_destinations
from comm.analytic.traffic import ExpectedTraffic, expected_traffic
from comm.verdict import (
    FALSE_ALARM,
    State,
    Verdict,
    correctness_verdict,
    exit_status,
    expected_verdict,
    not_available,
)


@dataclass(frozen=True)
class Counted:
    """A meter's result; kinds, phases and directions stand in another order than the oracle's."""

    bytes: NDArray[np.int64]
    rows: NDArray[np.int64]
    received: NDArray[np.int64]
    layers: tuple[int, ...]
    directions: tuple[str, ...]
    phases: tuple[str, ...]
    kinds: tuple[str, ...]

    def cell(self, layer: int, phase: str, kind: str, src: int, dst: int) -> tuple[int, ...]:
        """Index of a cell of `bytes`, forward."""
        forward = self.directions.index("forward")
        return layer, forward, self.phases.index(phase), self.kinds.index(kind), src, dst


def counted(exact: ExactTraffic) -> Counted:
    """What a faultless run counts."""
    num_bytes, rows = exact.bytes[:, ::-1, ::-1, ::-1].copy(), exact.rows[:, ::-1, ::-1].copy()
    names = exact.directions[::-1], exact.phases[::-1], exact.kinds[::-1]
    return Counted(num_bytes, rows, num_bytes.sum(axis=3), tuple(range(len(rows))), *names)


@dataclass(frozen=True)
class Case:
    """A simulated run and what was expected of it."""

    run: RunShape
    traffic: Counted
    expected: ExpectedTraffic

    def verdict(self, traffic: Counted | None = None) -> Verdict:
        return expected_verdict(traffic or self.traffic, tiers_of(self.run), self.expected)


def case(
    seed: int = 0,
    dispatcher: str = "rank_dedup",
    ranks: int = 6,
    tokens: int = 40,
    law: Law | None = None,
    **settings: Any,
) -> Case:
    """Three experts a rank, nodes of two ranks, K = 3."""
    nodes = np.arange(ranks) // 2
    lane = ranks // settings.get("expert_tp", 1)
    settings = {"num_layers": 3, "width": 16, **settings}
    run = run_shape(dispatcher, [tokens] * ranks, nodes, [3] * lane, 3, **settings)
    law = law or Uniform()
    expected = expected_traffic(run, law)
    assert isinstance(expected, ExpectedTraffic), expected
    return Case(run, counted(simulate(np.random.default_rng(seed), run, law)), expected)


def with_cell(traffic: Counted, cell: tuple[int, ...], change: int) -> Counted:
    """The same traffic with one cell of bytes changed."""
    array = traffic.bytes.copy()
    array[cell] += change
    return replace(traffic, bytes=array)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "rank_dedup", "two_hop", "one_sided"])
@pytest.mark.parametrize("tokens", [2, 40, 2500])
def test_uniform_routing_lies_within(dispatcher: str, tokens: int) -> None:
    one = case(1, dispatcher, tokens=tokens)
    verdict = one.verdict()
    assert verdict.state is State.WITHIN
    # 3 layers and their sum, 4 scopes; with enough rows three tests over destinations
    chi_squares = 3 if tokens == 2500 and dispatcher != "two_hop" else 0
    num_tests = 16 + chi_squares
    bound = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * num_tests))
    assert verdict.bound == pytest.approx(bound)
    assert verdict.reason.startswith(f"worst of {num_tests} tests (")
    assert f"all but 1 of 10,000 faultless runs keep every |z| <= {bound:.2f}" in verdict.reason
    assert ("exact tail" in verdict.reason) == (tokens < 2500)
    assert ("normal" in verdict.reason) == (tokens > 2)
    assert ("3 chi-square" in verdict.reason) == bool(chi_squares)


@pytest.mark.parametrize("dispatcher", ["rank_dedup", "two_hop"])
def test_a_row_in_twenty_too_many_lies_outside(dispatcher: str) -> None:
    """Enough tokens to tell: every scope, phase and kind grows alike."""
    one = case(1, dispatcher, tokens=400)
    verdict = one.verdict(replace(one.traffic, bytes=one.traffic.bytes + one.traffic.bytes // 20))
    assert verdict.state is State.OUTSIDE
    assert ": all layers, " in verdict.reason and "z = +" in verdict.reason
    assert verdict.measured is not None and verdict.predicted is not None
    assert verdict.measured > verdict.predicted


def test_self_counted_as_remote_lies_outside() -> None:
    one = case(2, tokens=100)
    diagonal, shifted = np.arange(6), one.traffic.bytes.copy()
    shifted[..., diagonal, (diagonal + 1) % 6] += shifted[..., diagonal, diagonal]
    shifted[..., diagonal, diagonal] = 0
    assert one.verdict(replace(one.traffic, bytes=shifted)).state is State.OUTSIDE


def test_rare_events_use_the_exact_tail() -> None:
    """Two tokens on two ranks: every hit is certain or nearly so, z would be meaningless."""
    one = case(3, "all_to_all", ranks=2, tokens=1, num_layers=1)
    verdict = one.verdict()
    assert verdict.state is State.WITHIN
    # no node but one: two tiers and their sum in one layer, between nodes equality
    assert "worst of 4 tests (3 exact tail, 1 equality)" in verdict.reason
    cell = one.traffic.cell(0, "dispatch", "hidden", 0, 1)
    impossible = with_cell(one.traffic, cell, 6 * 2 * 2 * 16)
    assert one.verdict(impossible).state is State.OUTSIDE


def test_a_node_missed_once_in_seventy_five_thousand() -> None:
    """R = 8, N = 2, Kimi K3: one miss is nothing strange, ten are."""
    nodes = [0] * 4 + [1] * 4
    run = run_shape("two_hop", [256] * 8, nodes, even(896, 8), 16, width=4)
    one = expected_traffic(run, Uniform())
    assert isinstance(one, ExpectedTraffic)
    traffic = counted(simulate(np.random.default_rng(0), run, Uniform()))
    per_row = int(one.flows[0].bytes_per_row.sum())
    cell = traffic.cell(0, "dispatch", "hidden", 0, 4)
    for misses, state in [(0, State.WITHIN), (1, State.WITHIN), (4, State.OUTSIDE)]:
        missed = with_cell(traffic, cell, -misses * per_row)
        verdict = expected_verdict(missed, tiers_of(run), one)
        assert verdict.state is state, verdict.reason
        if state is State.OUTSIDE:
            assert "between nodes, z = -" in verdict.reason and "(exact tail)" in verdict.reason


def test_a_law_without_freedom_means_equality() -> None:
    for dispatcher in ("allgather", "hierarchical_allgather", "padded"):
        one = case(4, dispatcher)
        verdict = one.verdict()
        assert (verdict.state, verdict.bound) == (State.EXACT, 0)
        assert verdict.reason == "all 16 sums equal the law, which leaves no freedom"
        off_by_one = with_cell(one.traffic, one.traffic.cell(2, "combine", "hidden", 0, 5), 1)
        verdict = one.verdict(off_by_one)
        assert verdict.state is State.OUTSIDE
        total = int(one.traffic.bytes[2][..., tiers_of(one.run) == 2].sum())
        assert verdict.reason == (
            f"worst of 16 tests (16 equality): layer 2, between nodes, counted {total + 1:,} B,"
            f" expected {total:,} B, and here the law leaves no freedom"
        )
    alone = case(5, ranks=1)
    assert alone.verdict().state is State.EXACT
    idle = case(5, tokens=0)
    assert idle.verdict().state is State.EXACT


@pytest.mark.parametrize(
    ("src", "dst", "words"), [(0, 0, "self"), (0, 1, "inside node"), (0, 5, "network")]
)
def test_reasons_name_places_in_the_words_of_the_page(src: int, dst: int, words: str) -> None:
    one = case(6, tokens=400)
    cell = one.traffic.cell(0, "dispatch", "hidden", src, dst)
    verdict = one.verdict(with_cell(one.traffic, cell, 10**6))
    assert verdict.state is State.OUTSIDE
    assert f": layer 0, {words}, z = +" in verdict.reason
    for machine_name in ("scale_up", "scale_out", "remote"):
        assert machine_name not in verdict.reason


def test_backward_and_shards_are_tested_apart() -> None:
    one = case(7, ranks=4, tokens=60, num_layers=2, training=True, expert_tp=2)
    verdict = one.verdict()
    assert verdict.state is State.WITHIN
    assert verdict.reason.startswith("worst of 24 tests (")
    for phase, words in [
        ("combine", "dispatch and combine"),
        ("tp_reduce", "tp_gather and tp_reduce"),
    ]:
        for direction in one.traffic.directions:
            cell = list(one.traffic.cell(1, phase, "hidden", 0, 1))
            cell[1] = one.traffic.directions.index(direction)
            broken = one.verdict(with_cell(one.traffic, tuple(cell), 10**6))
            assert broken.state is State.OUTSIDE
            assert words in broken.reason, broken.reason
    # Phases that move no tokens are not held to a law.
    cell = list(one.traffic.cell(1, "grad_sync", "gradients", 0, 1))
    cell[1] = one.traffic.directions.index("backward")
    assert one.verdict(with_cell(one.traffic, tuple(cell), 10**6)) == verdict


def test_rows_by_destination() -> None:
    """A swap of destinations inside a node keeps every tier: only the chi-square sees it."""
    one = case(8, "all_to_all", tokens=2500, num_layers=1)
    assert "1 chi-square" in one.verdict().reason
    rows = one.traffic.rows.copy()
    place = (0, 0, one.traffic.phases.index("dispatch"))
    # Rank 2 and rank 3 share a node: rank 0's rows for one go to the other.
    rows[(*place, 0, 3)] += rows[(*place, 0, 2)]
    rows[(*place, 0, 2)] = 0
    verdict = one.verdict(replace(one.traffic, rows=rows))
    assert verdict.state is State.OUTSIDE
    assert "layer 0, rows by destination, z = +" in verdict.reason
    assert "with 5 degrees of freedom" in verdict.reason  # copies add up to K
    rows[(*place, 0, 2)] += 1  # one copy that cannot be
    rows[(*place, 0, 3)] += 600
    verdict = one.verdict(replace(one.traffic, rows=rows))
    assert (verdict.state, verdict.measured) == (State.OUTSIDE, None)


@pytest.mark.parametrize("kind", ["all_to_all", "rank_dedup"])
def test_chi_square_is_a_chi_square(kind: str) -> None:
    """z over many runs: nearly normal, the tails included."""
    weights = Weighted(10 ** np.random.default_rng(3).uniform(0, 1, (1, 12)), np.zeros((1, 1), int))
    run = run_shape(kind, [900] * 4, [0, 0, 1, 1], [3] * 4, 3)
    expected, rng = expected_traffic(run, weights), np.random.default_rng(5)
    assert isinstance(expected, ExpectedTraffic)
    destinations = expected.flows[0].destinations[0]
    assert destinations is not None and has_many(destinations)
    z = np.array(
        [
            score_destinations(destinations, simulate(rng, run, weights).rows[0, 0, 0].sum(0)).z
            for _ in range(400)
        ]
    )
    assert abs(z.mean()) < 0.25 and 0.85 < z.std() < 1.15
    for level in (1.0, 2.0):
        assert (z > level).mean() == pytest.approx(1 - NormalDist().cdf(level), abs=0.06)


LAWS: list[tuple[str, Law, dict[str, Any]]] = [
    *((name, Uniform(), {"training": True}) for name in DISPATCHERS),
    ("rank_dedup", Uniform(), {"expert_tp": 2}),
    ("all_to_all", Uniform(), {"replicas": [(0, 3), (4, 1)], "replica_choice": "nearest"}),
    ("rank_dedup", Uniform(), {"replicas": [(0, 3), (4, 1)], "replica_choice": "random"}),
    ("rank_dedup", GroupLimited(6, 2, "max"), {}),
    ("two_hop", Markov(0.8, 16), {}),
    ("all_to_all", Markov(0.95, 1000), {}),
]


@pytest.mark.parametrize("chosen", range(len(LAWS)))
def test_false_alarms_are_rare(chosen: int) -> None:
    """40 faultless runs of each: none is called OUTSIDE."""
    name, law, settings = LAWS[chosen]
    settings = {"num_layers": 1, **settings}
    for seed in range(40):
        one = case(100 + seed, name, tokens=2 + seed % 10, law=law, **settings)
        assert one.verdict().state in (State.WITHIN, State.EXACT), one.verdict().reason


def test_without_a_distribution_the_bound_is_bernsteins() -> None:
    settings: dict[str, Any] = {"replicas": [(0, 3), (4, 1)], "replica_choice": "random"}
    one = case(9, "rank_dedup", tokens=20, **settings)
    verdict = one.verdict()
    assert verdict.state is State.WITHIN and "Bernstein" in verdict.reason
    bytes_twice = replace(one.traffic, bytes=2 * one.traffic.bytes)
    assert one.verdict(bytes_twice).state is State.OUTSIDE


def test_correctness() -> None:
    errors = {"layer 0 routed": 1e-3, "layer 1 hidden": 2e-3}
    within = correctness_verdict(errors, 4e-3)
    assert (within.state, within.measured, within.bound) == (State.WITHIN, 2e-3, 4e-3)
    outside = correctness_verdict(errors, 1.5e-3)
    assert outside.state is State.OUTSIDE
    assert "layer 1 hidden" in outside.reason
    assert correctness_verdict({"layer 0 routed": 0.0}, 0.0).state is State.EXACT
    assert correctness_verdict({}, 1.0).state is State.NOT_AVAILABLE


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_is_outside(broken: float) -> None:
    for errors in ({"a": broken, "b": 1e-3}, {"b": 1e-3, "a": broken}):
        verdict = correctness_verdict(errors, 1.0)
        assert (verdict.state, verdict.measured) == (State.OUTSIDE, None)
        assert ": a, error" in verdict.reason


@pytest.mark.parametrize(
    ("outside", "status"),
    [
        ([], 0),
        (["exact"], 3),
        (["conserved"], 3),
        (["expected"], 3),
        (["correctness"], 4),
        (["kernel"], 5),
        (["kernel", "correctness"], 5),
        (["correctness", "exact", "kernel"], 5),
        (["correctness", "exact"], 3),
    ],
)
def test_exit_status(outside: list[str], status: int) -> None:
    verdicts = [Verdict(name, State.OUTSIDE, 1, 2, 0, "") for name in outside]
    neutral = [
        not_available("expected", "the router has no law"),
        Verdict("exact", State.EXACT, 1, 1, 0, ""),
        Verdict("expected", State.WITHIN, 1, 1, 3, ""),
    ]
    assert exit_status([*neutral, *verdicts]) == status
