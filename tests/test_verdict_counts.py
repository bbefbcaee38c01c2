"""The verdicts of equality, exact and conserved: each can pass, each can fail, and says where."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_runs import chosen, random_run, simple_run

from comm.analytic.oracle import ExactTraffic, exact_traffic
from comm.analytic.paths import answered_pairs
from comm.analytic.rows import DISPATCHERS
from comm.analytic.run import RunShape
from comm.verdict import State, conserved_verdict, exact_verdict


@dataclass(frozen=True)
class Counted:
    """A meter's result; every axis stands in another order than the oracle's."""

    bytes: NDArray[np.int64]
    rows: NDArray[np.int64]
    received: NDArray[np.int64]
    layers: tuple[int, ...]
    directions: tuple[str, ...]
    phases: tuple[str, ...]
    kinds: tuple[str, ...]

    def cell(self, layer: int, *labels: str, src: int, dst: int) -> tuple[int, ...]:
        axes = zip((self.directions, self.phases, self.kinds), labels, strict=False)
        return (layer, *(axis.index(label) for axis, label in axes), src, dst)


def counted(exact: ExactTraffic) -> Counted:
    """What a faultless run counts."""
    num_bytes = exact.bytes[:, ::-1, ::-1, ::-1]
    return Counted(
        num_bytes,
        exact.rows[:, ::-1, ::-1],
        num_bytes.sum(axis=3),
        tuple(range(len(exact.rows))),
        exact.directions[::-1],
        exact.phases[::-1],
        exact.kinds[::-1],
    )


def with_cell(traffic: Counted, name: str, cell: tuple[int, ...], change: int) -> Counted:
    """The same traffic with one cell changed."""
    array = getattr(traffic, name).copy()
    array[cell] += change
    return replace(traffic, **{name: array})


def sharded(mode: str = "gather", dispatcher: str = "all_to_all") -> RunShape:
    """Three layers of a training run: 6 ranks, every expert on two of them."""
    return simple_run(
        dispatcher,
        6,
        9,
        num_layers=3,
        training=True,
        expert_tp=2,
        expert_tp_mode=mode,
        tokens_per_rank=(40,) * 6,
        top_k=3,
        shared_values=10,
    )


def judged(run: RunShape) -> tuple[Counted, ExactTraffic]:
    exact = exact_traffic(run, *chosen(np.random.default_rng(0), run))
    return counted(exact), exact


def test_exact_when_all_cells_are_equal() -> None:
    traffic, exact = judged(sharded())
    verdict = exact_verdict(traffic, exact)
    assert verdict.state is State.EXACT
    assert verdict.measured == verdict.predicted == exact.bytes.sum()
    # 3 layers, 2 directions, 5 phases, 36 pairs: bytes of 8 kinds, and rows
    assert verdict.reason == f"all {3 * 2 * 5 * 36 * 9:,} cells equal, {exact.bytes.sum():,} B"


def test_exact_names_the_first_wrong_cell() -> None:
    traffic, exact = judged(sharded())
    place = traffic.cell(2, "forward", "combine", "hidden", src=3, dst=5)
    before = int(traffic.bytes[place])
    wrong = with_cell(traffic, "bytes", place, 1024)
    wrong = with_cell(wrong, "rows", traffic.cell(0, "forward", "combine", src=4, dst=0), -2)
    verdict = exact_verdict(wrong, exact)
    assert verdict.state is State.OUTSIDE
    assert (verdict.measured, verdict.predicted) == (before + 1024, before)
    assert verdict.reason == (
        f"layer 2, combine, hidden, rank 3 -> rank 5: counted {before + 1024:,} B,"
        f" predicted {before:,} B; 2 of 9,720 cells differ"
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("phase", ["dispatch", "combine", "tp_gather", "tp_reduce", "grad_sync"])
def test_no_cell_is_left_out(direction: str, phase: str) -> None:
    traffic, exact = judged(sharded())
    place = f"layer 1, {phase}" if direction == "forward" else f"layer 1, backward, {phase}"
    for kind in traffic.kinds:
        cell = traffic.cell(1, direction, phase, kind, src=0, dst=4)
        verdict = exact_verdict(with_cell(traffic, "bytes", cell, 1), exact)
        assert verdict.state is State.OUTSIDE
        assert verdict.reason.startswith(f"{place}, {kind}, rank 0 -> rank 4: counted")
    cell = traffic.cell(1, direction, phase, src=0, dst=4)
    verdict = exact_verdict(with_cell(traffic, "rows", cell, 1), exact)
    assert verdict.state is State.OUTSIDE
    assert verdict.reason.startswith(f"{place}, rank 0 -> rank 4: counted")


def test_a_direction_or_phase_that_only_one_side_knows_must_be_empty() -> None:
    traffic, exact = judged(sharded())
    forward = traffic.directions.index("forward")
    only_forward = replace(
        traffic,
        bytes=traffic.bytes[:, [forward]],
        rows=traffic.rows[:, [forward]],
        directions=("forward",),
    )
    verdict = exact_verdict(only_forward, exact)
    assert verdict.state is State.OUTSIDE
    assert verdict.reason.startswith("layer 0, backward, ")
    inference, predicted = judged(replace(sharded(), training=False, shared_values=0))
    idle = replace(
        inference,
        bytes=np.concatenate([inference.bytes, np.zeros_like(inference.bytes)], axis=1),
        rows=np.concatenate([inference.rows, np.zeros_like(inference.rows)], axis=1),
        directions=("forward", "backward"),
    )
    assert exact_verdict(idle, predicted).state is State.EXACT
    busy = with_cell(idle, "bytes", idle.cell(0, "backward", "combine", "ids", src=1, dst=1), 4)
    assert exact_verdict(busy, predicted).reason.startswith(
        "layer 0, backward, combine, ids, rank 1 -> rank 1: counted 4 B, predicted 0 B"
    )


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_faultless_run_is_conserved(dispatcher: str, seed: int) -> None:
    run, ids, slots = random_run(seed, dispatcher)
    exact = exact_traffic(run, ids, slots)
    traffic = counted(exact)
    assert exact_verdict(traffic, exact).state is State.EXACT
    verdict = conserved_verdict(traffic, answered_pairs(run), training=run.training)
    assert verdict.state is State.EXACT, verdict.reason


def test_what_was_sent_was_received() -> None:
    traffic, _ = judged(sharded())
    cell = traffic.cell(1, "backward", "tp_reduce", src=0, dst=1)
    lost = conserved_verdict(with_cell(traffic, "received", cell, -8), training=True)
    assert lost.state is State.OUTSIDE
    assert lost.reason.startswith("layer 1, backward, tp_reduce, rank 0 -> rank 1: sent ")
    assert "received" in lost.reason and "1 of" in lost.reason


@pytest.mark.parametrize(
    ("direction", "phase", "src", "dst", "words"),
    [
        ("forward", "combine", 5, 1, "layer 2, rank 1 -> rank 5: dispatched"),
        ("forward", "dispatch", 1, 5, "layer 2, rank 1 -> rank 5: dispatched"),
        ("backward", "combine", 1, 5, "layer 2, backward, rank 5 -> rank 1: dispatched"),
        ("backward", "dispatch", 5, 1, "layer 2, backward, rank 5 -> rank 1: dispatched"),
        ("forward", "tp_reduce", 2, 3, "layer 2, rank 3 -> rank 2: gathered"),
        ("backward", "tp_gather", 2, 3, "layer 2, backward, rank 2 -> rank 3: gathered"),
    ],
)
def test_every_row_is_answered(direction: str, phase: str, src: int, dst: int, words: str) -> None:
    run = sharded()
    traffic, _ = judged(run)
    cell = traffic.cell(2, direction, phase, src=src, dst=dst)
    for answered in (None, answered_pairs(run)):
        unanswered = conserved_verdict(with_cell(traffic, "rows", cell, -1), answered)
        assert unanswered.state is State.OUTSIDE
        assert unanswered.reason.startswith(words)
    assert conserved_verdict(traffic).state is State.EXACT


@pytest.mark.parametrize("phase", ["dispatch", "combine", "tp_gather", "tp_reduce"])
def test_every_row_comes_back_in_training(phase: str) -> None:
    """A direction that is consistent in itself but moved too little is found by the other."""
    traffic, _ = judged(sharded())
    pair = {"dispatch": (4, 0), "combine": (0, 4), "tp_gather": (1, 0), "tp_reduce": (0, 1)}
    other = {"dispatch": "combine", "combine": "dispatch", "tp_gather": "tp_reduce"}
    src, dst = pair[phase]
    lost = with_cell(traffic, "rows", traffic.cell(0, "backward", phase, src=src, dst=dst), -1)
    answer = other.get(phase, "tp_gather")
    lost = with_cell(lost, "rows", traffic.cell(0, "backward", answer, src=dst, dst=src), -1)
    assert conserved_verdict(lost).state is State.EXACT
    verdict = conserved_verdict(lost, training=True)
    assert verdict.state is State.OUTSIDE
    assert "backward on the way back" in verdict.reason
    assert "2 of" in verdict.reason


def test_rows_to_other_shards_are_not_answered() -> None:
    run = sharded("all")
    traffic, _ = judged(run)
    assert conserved_verdict(traffic, answered_pairs(run), training=True).state is State.EXACT
    assert conserved_verdict(traffic, training=True).state is State.OUTSIDE
    crossed = with_cell(traffic, "rows", traffic.cell(0, "forward", "combine", src=0, dst=1), 1)
    verdict = conserved_verdict(crossed, answered_pairs(run), training=True)
    assert verdict.state is State.OUTSIDE
    assert verdict.reason.startswith(
        "layer 0, rank 1 -> rank 0: dispatched 0 rows, combined on the way back 1 rows"
    )
    lost = traffic.cell(1, "backward", "dispatch", src=0, dst=1)
    verdict = conserved_verdict(
        with_cell(traffic, "rows", lost, -1), answered_pairs(run), training=True
    )
    assert verdict.reason.startswith("layer 1, dispatch, rank 1 -> rank 0: forward ")
