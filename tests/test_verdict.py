"""Verdicts: each can pass, each can fail, and says where."""

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from comm.analytic.oracle import ExactTraffic, exact_traffic
from comm.analytic.traffic import ExpectedTraffic, expected_traffic
from comm.topology import Topology
from comm.verdict import (
    FALSE_ALARM,
    State,
    Verdict,
    correctness_verdict,
    exit_status,
    expected_verdict,
    not_available,
)

SLOTS, TOP_K, WIDTH = 3, 3, 16  # experts a rank, choices a token, elements a row


@dataclass(frozen=True)
class Counted:
    """A meter's result; the kinds stand in another order than the oracle's."""

    bytes: NDArray[np.int64]
    rows: NDArray[np.int64]
    received: NDArray[np.int64]
    layers: tuple[int, ...]
    directions: tuple[str, ...] = ("backward", "forward")
    phases: tuple[str, ...] = ("combine", "dispatch")
    kinds: tuple[str, ...] = ("padding", "counts", "weights", "ids", "scales", "hidden")


def counted(exact: ExactTraffic) -> Counted:
    """What a faultless run counts."""
    rows = np.zeros((len(exact.rows), 2, *exact.rows.shape[1:]), np.int64)
    num_bytes = np.zeros((len(exact.rows), 2, *exact.bytes.shape[1:]), np.int64)
    rows[:, 1] = exact.rows[:, ::-1]
    num_bytes[:, 1] = exact.bytes[:, ::-1, ::-1]
    layers = tuple(range(len(exact.rows)))
    return Counted(num_bytes, rows, num_bytes.sum(axis=3), layers)


def run(
    seed: int = 0,
    dispatcher: str = "rank_dedup",
    world_size: int = 6,
    tokens: int = 40,
    num_layers: int = 3,
) -> tuple[Counted, ExactTraffic, NDArray[np.int8], ExpectedTraffic]:
    """A run with uniform routing on nodes of two ranks, and what is predicted for it."""
    rng = np.random.default_rng(seed)
    num_experts = SLOTS * world_size
    ids = rng.random((1, num_layers, world_size * tokens, num_experts)).argsort()[..., :TOP_K]
    owner = np.array([np.arange(num_experts) // SLOTS] * num_layers)
    slots = np.full((num_layers, world_size), SLOTS)
    token_rank = np.repeat(np.arange(world_size), tokens)
    exact = exact_traffic(dispatcher, ids, token_rank, owner, slots, "bf16", "bf16", WIDTH)
    tiers = Topology.blocks(world_size, min(2, world_size)).tiers()
    expected = expected_traffic(
        dispatcher, [tokens] * world_size, slots, tiers, TOP_K, 1, "bf16", "bf16", WIDTH
    )
    return counted(exact), exact, tiers, expected


def with_cell(traffic: Counted, name: str, cell: tuple[int, ...], change: int) -> Counted:
    """The same traffic with one cell changed."""
    array = getattr(traffic, name).copy()
    array[cell] += change
    return replace(traffic, **{name: array})


@pytest.mark.parametrize("dispatcher", ["all_to_all", "rank_dedup"])
@pytest.mark.parametrize("tokens", [2, 40, 400])
def test_uniform_routing_lies_within(dispatcher: str, tokens: int) -> None:
    traffic, _, tiers, expected = run(1, dispatcher, tokens=tokens)
    verdict = expected_verdict(traffic, tiers, expected)
    assert verdict.state is State.WITHIN
    # 3 layers and their sum, 4 scopes
    assert verdict.bound == pytest.approx(NormalDist().inv_cdf(1 - FALSE_ALARM / 32))
    assert verdict.reason.startswith("worst of 16 sums (")
    assert f"all but 1 of 10,000 faultless runs keep every |z| <= {verdict.bound:.2f}" in (
        verdict.reason
    )
    few, many = "exact tail", "normal"
    assert ({2: few, 400: many}.get(tokens) or few) in verdict.reason
    assert {2: many, 400: few}.get(tokens, "!") not in verdict.reason


def test_a_row_in_twenty_too_many_lies_outside() -> None:
    """Enough tokens to tell: every scope, phase and kind grows alike."""
    traffic, _, tiers, expected = run(1, tokens=400)
    forged = replace(traffic, bytes=traffic.bytes + traffic.bytes // 20)
    verdict = expected_verdict(forged, tiers, expected)
    assert verdict.state is State.OUTSIDE
    assert verdict.reason.startswith("worst of 16 sums (16 normal): all layers, network, z = +")
    assert verdict.measured is not None and verdict.predicted is not None
    assert verdict.measured > verdict.predicted


def test_self_counted_as_remote_lies_outside() -> None:
    traffic, _, tiers, expected = run(2, tokens=100)
    diagonal = np.arange(6)
    shifted = traffic.bytes.copy()
    shifted[..., diagonal, (diagonal + 1) % 6] += shifted[..., diagonal, diagonal]
    shifted[..., diagonal, diagonal] = 0
    verdict = expected_verdict(replace(traffic, bytes=shifted), tiers, expected)
    assert verdict.state is State.OUTSIDE


def test_rare_events_use_the_exact_tail() -> None:
    """Two tokens on two ranks: every hit is certain or nearly so, z would be meaningless."""
    traffic, _, tiers, expected = run(3, "all_to_all", world_size=2, tokens=1, num_layers=1)
    verdict = expected_verdict(traffic, tiers, expected)
    assert verdict.state is State.WITHIN
    # no node but one: two tiers and their sum in one layer, between nodes equality
    assert "worst of 4 sums (3 exact tail, 1 equality)" in verdict.reason
    impossible = with_cell(traffic, "bytes", (0, 1, 0, 5, 0, 1), 6 * 2 * 2 * WIDTH)
    assert expected_verdict(impossible, tiers, expected).state is State.OUTSIDE


def test_a_law_without_freedom_means_equality() -> None:
    traffic, _, tiers, expected = run(4, "allgather")
    verdict = expected_verdict(traffic, tiers, expected)
    assert (verdict.state, verdict.bound) == (State.EXACT, 0)
    assert verdict.reason == "all 16 sums equal the law, which leaves no freedom"
    off_by_one = with_cell(traffic, "bytes", (2, 1, 0, 5, 0, 5), 1)
    verdict = expected_verdict(off_by_one, tiers, expected)
    assert verdict.state is State.OUTSIDE
    counted = int(traffic.bytes[2, 1][..., tiers == 2].sum())
    assert verdict.reason == (
        f"worst of 16 sums (16 equality): layer 2, between nodes, counted {counted + 1:,} B,"
        f" expected {counted:,} B, and here the law leaves no freedom"
    )
    alone = run(5, world_size=1)
    assert expected_verdict(alone[0], *alone[2:]).state is State.EXACT
    idle = run(5, tokens=0)
    assert expected_verdict(idle[0], *idle[2:]).state is State.EXACT


@pytest.mark.parametrize(
    ("src", "dst", "words"), [(0, 0, "self"), (0, 1, "inside node"), (0, 5, "network")]
)
def test_reasons_name_places_in_the_words_of_the_page(src: int, dst: int, words: str) -> None:
    traffic, _, tiers, expected = run(6, tokens=400)
    forged = with_cell(traffic, "bytes", (0, 1, 1, 5, src, dst), 10**6)
    verdict = expected_verdict(forged, tiers, expected)
    assert verdict.state is State.OUTSIDE
    assert f": layer 0, {words}, z = +" in verdict.reason
    for machine_name in ("scale_up", "scale_out", "remote"):
        assert machine_name not in verdict.reason


def test_false_alarms_are_rare() -> None:
    """400 faultless runs, every one of 16 tests: none is called OUTSIDE (0.04 would be)."""
    for seed in range(400):
        traffic, _, tiers, expected = run(100 + seed, tokens=3 + seed % 30, num_layers=2)
        assert expected_verdict(traffic, tiers, expected).state is State.WITHIN


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
        (["kernel", "correctness"], 4),
        (["correctness", "exact", "kernel"], 3),
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
