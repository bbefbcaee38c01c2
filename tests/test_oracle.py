"""The exact count, held to a slow one that loops over everything."""

import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import bytes_of, chosen, random_run, rows_of, simple_run
from slow_traffic import SlowTraffic

from comm.analytic.choices import kept_choices
from comm.analytic.oracle import count_copies, exact_traffic
from comm.analytic.rows import DISPATCHERS, KINDS
from comm.topology import LinkTier, Topology


def cells(array: np.ndarray, *labels: Iterable[Any]) -> dict[tuple[Any, ...], int]:
    """The cells that are not 0, by layer, labels and ranks."""
    found = {}
    for cell in np.argwhere(array).tolist():
        names = [axis[i] for axis, i in zip(labels, cell[1:], strict=False)]  # type: ignore[index]
        found[cell[0], *names, *cell[-2:]] = int(array[tuple(cell)])
    return found


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_equals_the_slow_count(dispatcher: str, seed: int) -> None:
    """Any lanes, shards, chunks, replicas, nodes, formats; inference and training."""
    run, ids, slots = random_run(seed, dispatcher)
    exact, slow = exact_traffic(run, ids, slots), SlowTraffic(run, ids, slots)
    axes = exact.directions, exact.phases, exact.kinds
    assert cells(exact.bytes, *axes) == {cell: n for cell, n in slow.bytes.items() if n}
    assert cells(exact.rows, *axes[:2]) == {cell: n for cell, n in slow.rows.items() if n}
    assert (exact.directions, exact.phases, exact.kinds) == (run.directions, run.phases, KINDS)
    dropped = np.argwhere((ids >= 0) & ~kept_choices(run, ids, slots))
    assert set(map(tuple, dropped.tolist())) == slow.dropped
    np.testing.assert_array_equal(count_copies(run, ids, slots), exact.copies)
    np.testing.assert_array_equal(exact.copies.sum(), (ids >= 0).sum())


@pytest.mark.parametrize(
    ("dispatcher", "rows"),
    [
        ("all_to_all", [[1, 2], [0, 0]]),
        ("one_sided", [[1, 2], [0, 0]]),
        ("rank_dedup", [[1, 1], [0, 0]]),
        ("allgather", [[1, 1], [0, 0]]),
        ("two_hop", [[2, 1], [0, 0]]),
        ("hierarchical_allgather", [[2, 1], [0, 0]]),
        ("padded", [[2, 2], [2, 2]]),
    ],
)
def test_the_worked_example(dispatcher: str, rows: list[list[int]]) -> None:
    run = simple_run(dispatcher, 2, 4, tokens_per_rank=(1, 0), top_k=3)
    exact = exact_traffic(run, np.array([[[[1, 2, 3]]]]))
    assert rows_of(exact, "dispatch").tolist() == rows
    np.testing.assert_array_equal(rows_of(exact, "combine"), np.transpose(rows))
    deduplicated = replace(run, deduplicate=True)
    if dispatcher == "one_sided":
        exact = exact_traffic(deduplicated, np.array([[[[1, 2, 3]]]]))
        assert rows_of(exact, "dispatch").tolist() == [[1, 1], [0, 0]]


def test_nothing_is_sent_twice_over_a_node_boundary_for_one_token() -> None:
    """Cyclic nodes of 3 and 2 ranks, every expert chosen: one row over the boundary, once."""
    run = simple_run("two_hop", 5, 5, top_k=5, node_of_rank=(0, 1, 0, 1, 0))
    ids = np.tile(np.arange(5), (1, 1, 5, 1))
    rows = rows_of(exact_traffic(run, ids), "dispatch")
    between = Topology(run.node_of_rank).tiers() == LinkTier.SCALE_OUT
    assert rows[between].sum() == 5
    # local indices 0, 1, 2 of node 0 meet 0, 1, 0 of node 1
    assert [int(rows[0, 1]), int(rows[2, 3]), int(rows[4, 1])] == [1, 1, 1]
    direct = rows_of(exact_traffic(replace(run, dispatcher="rank_dedup"), ids), "dispatch")
    assert direct[between].sum() == 2 * 3 * 2


def test_self_node_and_network_are_apart_and_sum_up() -> None:
    """Two nodes of 8: what stays on the rank is 1/16 of all copies, and no part of the network."""
    run = simple_run("all_to_all", 16, 32, top_k=32, node_of_rank=(0,) * 8 + (1,) * 8)
    rows = rows_of(exact_traffic(run, np.tile(np.arange(32), (1, 1, 16, 1))), "dispatch")
    tiers = Topology(run.node_of_rank).tiers()
    by_tier = [int(rows[tiers == tier].sum()) for tier in LinkTier]
    assert by_tier == [16 * 2, 16 * 14, 16 * 16]
    assert sum(by_tier) == rows.sum() == 16 * 32


@pytest.mark.parametrize("dispatcher", ["allgather", "hierarchical_allgather"])
def test_a_gather_does_not_depend_on_the_number_of_choices(dispatcher: str) -> None:
    received = []
    for top_k in (1, 4, 8):
        run = simple_run(dispatcher, 4, 8, tokens_per_rank=(3, 0, 2, 1), top_k=top_k)
        exact = exact_traffic(run, np.tile(np.arange(top_k), (1, 1, 6, 1)))
        received.append((exact.deliveries[0] * (1 - np.eye(4, dtype=int))).sum(axis=0).tolist())
    assert received == [[3, 6, 4, 5]] * 3  # the tokens of the other ranks


def test_each_expert_is_computed_once_whatever_its_replicas() -> None:
    """2 ranks, 4 experts in 6 slots, K = 2: R T K assignments arrive, all ranks together."""
    run = simple_run(
        "all_to_all",
        2,
        4,
        physical_to_logical=(np.array([0, 1, 2, 3, 0, 1]),),
        slot_rank=(np.array([0, 0, 0, 1, 1, 1]),),
        tokens_per_rank=(5, 5),
        top_k=2,
    )
    ids, slots = chosen(np.random.default_rng(3), run, masked=0)
    exact = exact_traffic(run, ids, slots)
    assert rows_of(exact, "dispatch").sum() == 2 * 5 * 2
    assert bytes_of(exact, "dispatch", "counts").tolist() == [[32 + 3 * 8] * 2] * 2


def test_shards_gather_and_reduce() -> None:
    """4 ranks, 2 shards: one token of rank 1 for both experts, at rank 1 and at rank 3."""
    ids = np.array([[[[0, 1]]]])
    run = simple_run("rank_dedup", 4, 2, expert_tp=2, top_k=2, tokens_per_rank=(0, 1, 0, 0))
    exact = exact_traffic(run, ids)
    asked = [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    gathered = np.zeros((4, 4), int)
    gathered[1, 0] = gathered[3, 2] = 1
    assert rows_of(exact, "dispatch").tolist() == asked
    np.testing.assert_array_equal(rows_of(exact, "tp_gather"), gathered)
    np.testing.assert_array_equal(rows_of(exact, "tp_reduce"), gathered.T)
    everywhere = exact_traffic(replace(run, expert_tp_mode="all"), ids)
    assert "tp_gather" not in everywhere.phases
    assert rows_of(everywhere, "dispatch")[1].tolist() == [1, 1, 1, 1]
    np.testing.assert_array_equal(rows_of(everywhere, "combine"), np.transpose(asked))
    np.testing.assert_array_equal(rows_of(everywhere, "tp_reduce"), gathered.T)
    assert bytes_of(everywhere, "dispatch", "counts").tolist() == [[40] * 4] * 4


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_all_choices_masked_send_nothing_but_counts(dispatcher: str) -> None:
    run = simple_run(dispatcher, 2, 8, tokens_per_rank=(5, 0), top_k=4)
    exact = exact_traffic(run, np.full((1, 1, 5, 4), -1))
    assert not exact.copies.any() and not exact.deliveries.any()
    assert not bytes_of(exact, "dispatch", "hidden").any()
    assert exact.rows.any() == (dispatcher == "padded")  # empty rows are sent all the same
    counts = bytes_of(exact, "dispatch", "counts") + bytes_of(exact, "combine", "counts")
    assert counts.all()
    padding = bytes_of(exact, "dispatch", "padding") + bytes_of(exact, "combine", "padding")
    assert exact.bytes.sum() == counts.sum() + padding.sum()


def test_a_million_identical_tokens_of_one_rank_do_not_overflow() -> None:
    num_tokens, top_k = 1_000_000, 8
    ids = np.broadcast_to(np.arange(top_k, dtype=np.uint8), (1, 1, num_tokens, top_k))
    run = simple_run(
        "rank_dedup",
        2,
        512,
        tokens_per_rank=(num_tokens, 0),
        top_k=top_k,
        width=7168,
        wire_dispatch="fp32",
    )
    tracemalloc.start()
    exact = exact_traffic(run, ids)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bytes_of(exact, "dispatch", "hidden").tolist() == [[28_672_000_000, 0], [0, 0]]
    assert peak < 400e6  # a quarter of the million at a time, several temporaries of it
    crowded = replace(run, dispatcher="padded", capacity_factor=64.0)
    assert bytes_of(exact_traffic(crowded, ids), "dispatch", "hidden")[0, 0] == 8_000_000 * 28_672
