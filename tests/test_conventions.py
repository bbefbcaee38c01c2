"""One routing, every numerator of the field."""

from dataclasses import replace

import numpy as np
import pytest
from random_runs import chosen, random_run, simple_run

from comm.analytic.conventions import (
    NCCL_TESTS_NOTE,
    PRINTED_BY,
    Convention,
    conventions_of_run,
    expected_conventions,
)
from comm.analytic.oracle import exact_traffic
from comm.topology import LinkTier, Topology

# T = 4096, K = 8, E = 256, 16 ranks on 2 nodes, rows of 7392 B: copies of a token, MB of a rank.
REFERENCE = {
    "copies, self included": (8.0000, 242.2),
    "min(ranks, top_k)": (8.0000, 242.2),
    "copies, remote": (7.5000, 227.1),
    "distinct ranks, self included": (6.5233, 197.5),
    "distinct ranks, remote": (6.1156, 185.2),
    "two hops, inside the node": (5.7079, 172.8),
    "copies, between nodes": (4.0000, 121.1),
    "distinct ranks, between nodes": (3.2616, 98.8),
    "distinct nodes, own node included": (1.9930, 60.3),
    "distinct nodes, remote": (0.9965, 30.2),
    "all-gather, remote": (15, 454.2),
    "all-gather, between nodes": (8, 242.2),
}


def by_name(table: tuple[Convention, ...]) -> dict[str, Convention]:
    return {one.name: one for one in table}


def test_the_reference_table() -> None:
    table = expected_conventions(16, 8, 256, 8, 4096, 7392)
    found = {
        one.name: (round(one.rows_per_token, 4), round(one.num_bytes / 1e6, 1)) for one in table
    }
    assert found == REFERENCE
    printed = {one.name: one.printed_by for one in table}
    assert printed == PRINTED_BY
    assert printed["distinct ranks, self included"] == 'DeepEP "NVL", MORI "XGMI"'
    assert "N/(N-1)" in printed["distinct nodes, own node included"]
    assert "busbw" in NCCL_TESTS_NOTE


def test_a_perfect_router_reaches_no_more_ranks_than_there_are() -> None:
    """min(R, K) is K copies only where R >= K; Kimi K3 on 8 ranks makes 8 of 16 copies."""
    table = by_name(expected_conventions(8, 8, 896, 16, 1, 1))
    assert table["min(ranks, top_k)"].rows_per_token == 8
    assert table["copies, self included"].rows_per_token == pytest.approx(16)
    assert table["copies, remote"].rows_per_token == pytest.approx(14.0)  # off-rank, not deduped
    assert round(table["distinct ranks, remote"].rows_per_token, 4) == 6.1894


def test_two_nodes_are_reached_once_each() -> None:
    """896 / 16 on 2 nodes: 16 logical copies, and 2.0 node copies."""
    table = by_name(expected_conventions(16, 8, 896, 16, 1, 1))
    assert table["distinct nodes, own node included"].rows_per_token == pytest.approx(2, abs=1e-4)


@pytest.mark.parametrize(
    ("ranks", "per_node", "num_experts", "top_k"),
    [(16, 8, 256, 8), (6, 3, 32, 4), (5, 2, 13, 3), (9, 4, 7, 2), (4, 1, 8, 8), (3, 8, 9, 2)],
)
def test_counted_tables_follow_the_expected_one(
    ranks: int, per_node: int, num_experts: int, top_k: int
) -> None:
    """Uneven experts and a smaller last node included; 4.5 deviations of what was seen."""
    rng = np.random.default_rng(5)
    tokens, steps = 40, 30
    run = simple_run(
        "padded",  # whatever the dispatcher does
        ranks,
        num_experts,
        top_k=top_k,
        tokens_per_rank=(tokens,) * ranks,
        node_of_rank=tuple(rank // per_node for rank in range(ranks)),
        wire_dispatch="mxfp8",
        width=40,
    )
    shape = (1, 1, ranks * tokens, num_experts)
    tables = []
    for _ in range(steps):
        ids = rng.random(shape).argsort(axis=-1)[..., :top_k]
        tables.append([one.rows_per_token for one in conventions_of_run(run, ids)])
    expected = expected_conventions(ranks, per_node, num_experts, top_k, tokens, 42)
    means, spread = np.mean(tables, axis=0), np.std(tables, axis=0)
    for one, mean, deviation in zip(expected, means, spread, strict=True):
        assert abs(one.rows_per_token - mean) <= 4.5 * deviation / steps**0.5 + 1e-12, one.name
        assert one.num_bytes == pytest.approx(one.rows_per_token * tokens * 42)


@pytest.mark.parametrize("seed", range(25))
def test_numerators_are_what_the_strategies_send(seed: int) -> None:
    """The rows of each strategy, counted by the oracle, are one line of the table each."""
    run, ids, slots = random_run(seed, "two_hop")
    counted = {
        dispatcher: exact_traffic(replace(run, dispatcher=dispatcher), ids, slots)
        .rows[:, 0, 0]
        .sum(0)
        for dispatcher in ("all_to_all", "rank_dedup", "two_hop", "allgather")
    }
    tiers = Topology(run.node_of_rank).tiers()
    remote, between = tiers != LinkTier.SELF, tiers == LinkTier.SCALE_OUT
    tokens = sum(run.tokens_per_rank) * run.num_layers * run.num_steps
    rows = {
        name: round(one.rows_per_token * tokens)
        for name, one in by_name(conventions_of_run(run, ids, slots)).items()
    }
    assert rows["copies, self included"] == counted["all_to_all"].sum()
    assert rows["copies, remote"] == counted["all_to_all"][remote].sum()
    assert rows["copies, between nodes"] == counted["all_to_all"][between].sum()
    assert rows["distinct ranks, self included"] == counted["rank_dedup"].sum()
    assert rows["distinct ranks, remote"] == counted["rank_dedup"][remote].sum()
    assert rows["distinct ranks, between nodes"] == counted["rank_dedup"][between].sum()
    assert rows["two hops, inside the node"] == (
        counted["two_hop"][tiers == LinkTier.SCALE_UP].sum()
    )
    assert rows["distinct nodes, remote"] == counted["two_hop"][between].sum()
    assert rows["all-gather, remote"] == counted["allgather"][remote].sum()
    assert rows["all-gather, between nodes"] == counted["allgather"][between].sum()
    own = rows["distinct nodes, own node included"] - rows["distinct nodes, remote"]
    assert 0 <= own <= tokens


def test_bytes_are_of_one_rank_layer_and_step() -> None:
    run = simple_run(
        "rank_dedup", 2, 4, tokens_per_rank=(6, 2), top_k=2, num_layers=3, num_steps=5, width=8
    )
    ids, slots = chosen(np.random.default_rng(1), run, masked=0)
    table = by_name(conventions_of_run(run, ids, slots))
    # 8 tokens, 2 copies of 16 B each, on 2 ranks
    assert table["copies, self included"].num_bytes == pytest.approx(8 * 2 * 16 / 2)
    masked = by_name(conventions_of_run(run, np.full_like(ids, -1)))
    assert {one.rows_per_token for one in masked.values()} == {0}


def test_nothing_to_route() -> None:
    run = simple_run("rank_dedup", 2, 4, tokens_per_rank=(0, 0))
    table = conventions_of_run(run, np.zeros((1, 1, 0, 1), int))
    assert [one.rows_per_token for one in table] == [0] * len(PRINTED_BY)
    with pytest.raises(ValueError, match="ranks_per_node=0"):
        expected_conventions(4, 0, 8, 2, 1, 1)
    with pytest.raises(ValueError, match="top_k=9"):
        expected_conventions(4, 2, 8, 9, 1, 1)
