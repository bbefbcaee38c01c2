"""The exact count, held to a slow one that loops over everything."""

import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import chosen, random_run, simple_run
from slow_traffic import SlowTraffic

from comm.analytic import choices
from comm.analytic.choices import capacity, kept_choices
from comm.analytic.oracle import ExactTraffic, count_copies, exact_traffic
from comm.analytic.rows import DISPATCHERS, KINDS
from comm.topology import LinkTier, Topology


def cells(array: np.ndarray, *labels: Iterable[Any]) -> dict[tuple[Any, ...], int]:
    """The cells that are not 0, by layer, labels and ranks."""
    found = {}
    for cell in np.argwhere(array).tolist():
        names = [axis[i] for axis, i in zip(labels, cell[1:], strict=False)]  # type: ignore[index]
        found[cell[0], *names, *cell[-2:]] = int(array[tuple(cell)])
    return found


def table(exact: ExactTraffic, phase: str, direction: str = "forward") -> np.ndarray:
    """[src, dst] rows of one phase, over all layers."""
    place = exact.directions.index(direction), exact.phases.index(phase)
    return exact.rows[:, *place].sum(axis=0)


def kind(exact: ExactTraffic, phase: str, name: str, direction: str = "forward") -> np.ndarray:
    """[src, dst] bytes of one kind in one phase, over all layers."""
    place = exact.directions.index(direction), exact.phases.index(phase), KINDS.index(name)
    return exact.bytes[:, *place].sum(axis=0)


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
    assert table(exact, "dispatch").tolist() == rows
    np.testing.assert_array_equal(table(exact, "combine"), np.transpose(rows))
    deduplicated = replace(run, deduplicate=True)
    if dispatcher == "one_sided":
        exact = exact_traffic(deduplicated, np.array([[[[1, 2, 3]]]]))
        assert table(exact, "dispatch").tolist() == [[1, 1], [0, 0]]


def test_nothing_is_sent_twice_over_a_node_boundary_for_one_token() -> None:
    """Cyclic nodes of 3 and 2 ranks, every expert chosen: one row over the boundary, once."""
    run = simple_run("two_hop", 5, 5, top_k=5, node_of_rank=(0, 1, 0, 1, 0))
    ids = np.tile(np.arange(5), (1, 1, 5, 1))
    rows = table(exact_traffic(run, ids), "dispatch")
    between = Topology(run.node_of_rank).tiers() == LinkTier.SCALE_OUT
    assert rows[between].sum() == 5
    # local indices 0, 1, 2 of node 0 meet 0, 1, 0 of node 1
    assert [int(rows[0, 1]), int(rows[2, 3]), int(rows[4, 1])] == [1, 1, 1]
    direct = table(exact_traffic(replace(run, dispatcher="rank_dedup"), ids), "dispatch")
    assert direct[between].sum() == 2 * 3 * 2


def test_self_node_and_network_are_apart_and_sum_up() -> None:
    """Two nodes of 8: what stays on the rank is 1/16 of all copies, and no part of the network."""
    run = simple_run("all_to_all", 16, 32, top_k=32, node_of_rank=(0,) * 8 + (1,) * 8)
    rows = table(exact_traffic(run, np.tile(np.arange(32), (1, 1, 16, 1))), "dispatch")
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
    assert table(exact, "dispatch").sum() == 2 * 5 * 2
    assert kind(exact, "dispatch", "counts").tolist() == [[32 + 3 * 8] * 2] * 2


def test_fixed_slots_send_empty_rows() -> None:
    """T = 65536, K = 4, E = 256: room for 1024 rows for each (source, expert); 1.25: for 1280."""
    run = simple_run("padded", 2, 256, tokens_per_rank=(65536, 100), top_k=4)
    assert capacity(run).tolist() == [[1024, 1024]]
    assert capacity(replace(run, capacity_factor=1.25, chunks=2)).tolist() == [[640] * 2] * 2
    ids = np.tile(np.arange(4), (1, 1, 65636, 1))
    exact = exact_traffic(run, ids)
    assert table(exact, "dispatch").tolist() == [[128 * 1024] * 2] * 2
    useful = kind(exact, "dispatch", "hidden") // 32
    assert useful.tolist() == [[4 * 1024, 0], [4 * 100, 0]]
    padding = kind(exact, "dispatch", "padding") // 32
    np.testing.assert_array_equal(useful + padding, table(exact, "dispatch"))
    kept = kept_choices(run, ids)[0, 0]
    assert kept[:1024].all() and not kept[1024:65536].any() and kept[65536:].all()


@pytest.mark.parametrize(
    ("factor", "tokens", "rows"),
    # 0.1 x 30 x 8 / 24 is 1 exactly, which no binary 0.1 says; one token is never refused
    [(0.1, 10, 1), (0.1, 30, 1), (0.1, 31, 2), (1.0, 3, 1), (1e-9, 1, 1), (1.0, 0, 0)],
)
def test_capacity_is_exact(factor: float, tokens: int, rows: int) -> None:
    run = simple_run("padded", 2, 24, tokens_per_rank=(0, tokens), top_k=8, capacity_factor=factor)
    assert capacity(run).tolist() == [[rows, rows]]


def test_groups_do_not_meet() -> None:
    run = simple_run("allgather", 6, 4, ep_size=2, training=True, expert_values=6, shared_values=3)
    exact = exact_traffic(run, np.zeros((1, 1, 6, 1), int))
    lanes = np.kron(np.eye(3, dtype=int), np.ones((2, 2), int))
    assert table(exact, "dispatch").tolist() == lanes.tolist()
    gradients = kind(exact, "grad_sync", "gradients", "backward")
    # 3 shared values on 6 ranks: one each on the first three; 2 experts of 24 B with two others
    assert gradients[0].tolist() == [8, 8, 8 + 48, 4, 4 + 48, 4]
    assert gradients[5].tolist() == [4, 4 + 48, 4, 0 + 48, 0, 0]


def test_shards_gather_and_reduce() -> None:
    """4 ranks, 2 shards: one token of rank 1 for both experts, at rank 1 and at rank 3."""
    ids = np.array([[[[0, 1]]]])
    run = simple_run("rank_dedup", 4, 2, expert_tp=2, top_k=2, tokens_per_rank=(0, 1, 0, 0))
    exact = exact_traffic(run, ids)
    asked = [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    gathered = np.zeros((4, 4), int)
    gathered[1, 0] = gathered[3, 2] = 1
    assert table(exact, "dispatch").tolist() == asked
    np.testing.assert_array_equal(table(exact, "tp_gather"), gathered)
    np.testing.assert_array_equal(table(exact, "tp_reduce"), gathered.T)
    everywhere = exact_traffic(replace(run, expert_tp_mode="all"), ids)
    assert "tp_gather" not in everywhere.phases
    assert table(everywhere, "dispatch")[1].tolist() == [1, 1, 1, 1]
    np.testing.assert_array_equal(table(everywhere, "combine"), np.transpose(asked))
    np.testing.assert_array_equal(table(everywhere, "tp_reduce"), gathered.T)
    assert kind(everywhere, "dispatch", "counts").tolist() == [[40] * 4] * 4


def test_moved_experts() -> None:
    moves = np.array([[1, 3, 1, 0], [1, 2, 1, 0], [0, 0, 0, 1]])
    run = simple_run("rank_dedup", 2, 4, num_layers=2, num_steps=3, moves=moves, expert_bytes=100)
    exact = exact_traffic(run, np.full((3, 2, 2, 1), -1))
    moved = exact.bytes[:, 0, exact.phases.index("rebalance"), KINDS.index("expert_weights")]
    assert moved.tolist() == [[[0, 100], [0, 0]], [[0, 0], [200, 0]]]  # once, not in every step
    assert table(exact, "rebalance").tolist() == [[0, 1], [2, 0]]
    for column, message in enumerate(
        ("layer 9..9, valid are 0..1", "expert 9", "source rank 9", "destination rank 9")
    ):
        wrong = np.zeros((1, 4), int)
        wrong[0, column] = 9
        with pytest.raises(ValueError, match=f"moves holds {message}"):
            exact_traffic(replace(run, moves=wrong), np.full((3, 2, 2, 1), -1))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_all_choices_masked_send_nothing_but_counts(dispatcher: str) -> None:
    run = simple_run(dispatcher, 2, 8, tokens_per_rank=(5, 0), top_k=4)
    exact = exact_traffic(run, np.full((1, 1, 5, 4), -1))
    assert not exact.copies.any() and not exact.deliveries.any()
    assert not kind(exact, "dispatch", "hidden").any()
    assert exact.rows.any() == (dispatcher == "padded")  # empty rows are sent all the same
    counts = kind(exact, "dispatch", "counts") + kind(exact, "combine", "counts")
    assert counts.all()
    padding = kind(exact, "dispatch", "padding") + kind(exact, "combine", "padding")
    assert exact.bytes.sum() == counts.sum() + padding.sum()


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_batches_do_not_show(dispatcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ids, slots = random_run(7, dispatcher, tokens_per_rank=(50,), node_of_rank=(0,),
        ep_size=None, expert_tp=1, expert_tp_mode="gather", num_experts=6, top_k=4,
        physical_to_logical=(np.arange(6),), slot_rank=(np.zeros(6, int),), chunks=3,
        capacity_factor=0.5, num_steps=2, moves=np.zeros((0, 4), int))  # fmt: skip
    whole, kept = exact_traffic(run, ids, slots), kept_choices(run, ids, slots)
    assert (kept == (ids >= 0)).all() == (dispatcher != "padded")
    monkeypatch.setattr(choices, "_BATCH_CHOICES", 12)
    np.testing.assert_array_equal(whole.bytes, exact_traffic(run, ids, slots).bytes)
    np.testing.assert_array_equal(kept, kept_choices(run, ids, slots))


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
    assert kind(exact, "dispatch", "hidden").tolist() == [[28_672_000_000, 0], [0, 0]]
    assert peak < 400e6  # a quarter of the million at a time, several temporaries of it
    crowded = replace(run, dispatcher="padded", capacity_factor=64.0)
    assert kind(exact_traffic(crowded, ids), "dispatch", "hidden")[0, 0] == 8_000_000 * 28_672


def test_narrow_id_types_are_lossless() -> None:
    ids = np.array([[[[255, 256, -1, 257, 301, 895]]]], np.int16)
    tokens = tuple(int(rank == 200) for rank in range(896))
    run = simple_run("rank_dedup", 896, 896, tokens_per_rank=tokens, top_k=6)
    rows = table(exact_traffic(run, ids), "dispatch")
    assert np.argwhere(rows).tolist() == [[200, e] for e in (255, 256, 257, 301, 895)]


def test_foreign_choices_are_refused() -> None:
    run = simple_run("all_to_all", 2, 4, top_k=2, num_steps=1)
    good = np.array([[[[0, 1], [2, -1]]]])
    assert exact_traffic(run, good).rows.sum() == 2 * 3
    for wrong, message in [
        (np.array([[[[0, 4], [2, -1]]]]), r"topk_ids holds -1\.\.4, valid are 0\.\.3 and -1"),
        (np.array([[[[0, -2], [2, -1]]]]), "topk_ids holds -2"),
        (good[:, :, :1], r"topk_ids has shape \(1, 1, 1, 2\), the run has .* = \(1, 1, 2, 2\)"),
        (good[..., :1], "topk_ids has shape"),
        (np.concatenate([good, good]), r"topk_ids has shape \(2, 1, 2, 2\)"),
    ]:
        for function in (exact_traffic, kept_choices, count_copies):
            with pytest.raises(ValueError, match=message):
                function(run, wrong)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1], [2, 3]], "token 1: expert -1 is served by slot 3, which holds expert 3"),
        ([[0, -1], [2, -1]], "token 0: expert 1 is served by slot -1, which is none"),
        ([[0, 1], [3, -1]], "token 1: expert 2 is served by slot 3, which holds expert 3"),
        ([[0, 1], [4, -1]], "token 1: expert 2 is served by slot 4, which does not exist"),
        ([[0, 1], [-2, -1]], "token 1: expert 2 is served by slot -2, which does not exist"),
    ],
)
def test_a_slot_must_hold_the_expert_that_was_chosen(
    slots: list[list[int]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simple_run("all_to_all", 2, 4, top_k=2, num_layers=2, num_steps=2)
    good = np.tile(np.array([[0, 1], [2, -1]]), (2, 2, 1, 1))
    np.testing.assert_array_equal(  # experts 0..3 in slots 0..3
        exact_traffic(run, good, good).bytes, exact_traffic(run, good).bytes
    )
    wrong = good.copy()
    wrong[1, 1] = slots
    monkeypatch.setattr(choices, "_BATCH_CHOICES", 2)  # the token is named across batches
    with pytest.raises(ValueError, match=f"step 1, layer 1, {message}"):
        exact_traffic(run, good, wrong)


def test_replicas_need_the_slots_that_served() -> None:
    run = simple_run(
        "all_to_all",
        1,
        2,
        physical_to_logical=(np.array([0, 1, 1]),),
        slot_rank=(np.zeros(3, int),),
    )
    with pytest.raises(ValueError, match="layer 0: expert 1 has 2 slots"):
        exact_traffic(run, np.array([[[[0]]]]))
    lost = replace(run, physical_to_logical=(np.array([0, -1, -1]),))
    assert table(exact_traffic(lost, np.array([[[[0]]]])), "dispatch").sum() == 1
    with pytest.raises(ValueError, match="token 0: expert 1 is served by slot -1, which is none"):
        exact_traffic(lost, np.array([[[[1]]]]))
