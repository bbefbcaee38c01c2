"""The headline formula and its seven factors."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import random_run, simple_run

from comm.analytic.headline import FACTORS, Headline, headline, headline_of_run
from comm.analytic.oracle import exact_traffic
from comm.analytic.rows import DISPATCHERS, KINDS
from comm.analytic.run import RunShape


def of_run(run: RunShape, ids: np.ndarray, slots: np.ndarray | None, hidden_size: int) -> Headline:
    """Headline of a run in which exactly the right bytes moved."""
    exact = exact_traffic(run, ids, slots)
    dispatched = exact.bytes[:, 0, exact.phases.index("dispatch")].sum(axis=0)
    rows = exact.rows[:, 0, exact.phases.index("dispatch")].sum(axis=0)
    kind_bytes = dict(zip(KINDS, dispatched, strict=True))
    return headline_of_run(run, exact, kind_bytes, rows, hidden_size)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_product_of_the_factors_is_the_ratio(dispatcher: str, seed: int) -> None:
    """Whatever the lanes, shards, nodes, formats and chunks."""
    run, ids, slots = random_run(seed, dispatcher)
    result = of_run(run, ids, slots, hidden_size=100)
    tokens = sum(run.tokens_per_rank)
    if tokens == 0:
        assert (result.ratio, result.factors) == (None, ())
        return
    num_steps, num_layers, _, top_k = ids.shape
    assert result.headline_bytes == top_k * tokens * num_steps * num_layers * 100 * 2
    assert result.ratio == result.measured_bytes / result.headline_bytes
    assert tuple(name for name, _ in result.factors) == FACTORS
    assert prod(factor for _, factor in result.factors) == pytest.approx(result.ratio, rel=1e-12)
    factors = dict(result.factors)
    if dispatcher != "padded":
        assert factors["padding"] == 1
    if dispatcher not in ("two_hop", "hierarchical_allgather"):
        assert factors["hops"] == 1


@pytest.mark.parametrize(
    ("dispatcher", "due", "useful", "sent"),
    [
        ("all_to_all", 3, 3, 3),
        ("rank_dedup", 2, 2, 2),
        ("allgather", 3, 3, 3),
        ("one_sided", 3, 3, 3),
        # to rank 1 inside the node, and to the proxy on the other one, which owns expert 4
        ("two_hop", 2, 2, 2),
        # rank 0 -> rank 1, rank 0 -> rank 2 -> rank 3: three ranks, three rows
        ("hierarchical_allgather", 3, 3, 3),
        # 4 ranks, each with one row for each of the 2 slots of 3 others; all 3 choices fit
        ("padded", 3, 3, 4 * 6),
    ],
)
def test_each_factor_by_hand(dispatcher: str, due: int, useful: int, sent: int) -> None:
    """4 ranks of 2 experts on 2 nodes, one token on rank 0, K = 4 in experts {0, 2, 3, 4}, mxfp8.

    3 of its 4 copies leave the rank; per rank they are 2 rows, to everyone 3.
    """
    run = simple_run(
        dispatcher,
        4,
        8,
        top_k=4,
        tokens_per_rank=(1, 0, 0, 0),
        node_of_rank=(0, 0, 1, 1),
        width=128,
        wire_dispatch="mxfp8",
    )
    result = of_run(run, np.array([[[[0, 2, 3, 4]]]]), None, hidden_size=256)
    payload, full_row = 128 + 4, 2 * 128
    words = {"all_to_all": 2, "one_sided": 2, "padded": 3}.get(dispatcher, 1)
    counts = 12 * (32 + 8 * words)
    if dispatcher in ("two_hop", "hierarchical_allgather"):
        counts += 4 * 40  # once more to the other rank of the node
    metadata = {"all_to_all": 0, "padded": 0, "one_sided": 4}.get(dispatcher, 4 * 8)
    # The rows of a rank without tokens are empty: every rank sends as many as the first.
    measured = sent * (payload + metadata) + counts
    assert result.measured_bytes == measured
    assert dict(result.factors) == pytest.approx(
        {
            "remote_share": 3 / 4,
            "rows_per_copy": due / 3,
            "hops": useful / due,
            "padding": sent / useful,
            "width": 0.5,
            "format": payload / full_row,
            "metadata": measured / (sent * payload),
        }
    )


def test_a_row_that_is_forwarded_is_two_hops() -> None:
    """The owner, rank 3, is not the proxy of rank 0 on the other node: that is rank 2."""
    run = simple_run("two_hop", 4, 4, tokens_per_rank=(1, 0, 0, 0), node_of_rank=(0, 0, 1, 1))
    factors = dict(of_run(run, np.array([[[[3]]]]), None, 16).factors)
    assert (factors["rows_per_copy"], factors["hops"]) == (1, 2)


def test_dropped_choices_are_fewer_rows_for_a_copy() -> None:
    """8 tokens of rank 0 want expert 1, of two: room for 0.25 x 8 / 2 = 1 row, sent both ways."""
    run = simple_run("padded", 2, 2, tokens_per_rank=(8, 0), capacity_factor=0.25)
    factors = dict(of_run(run, np.ones((1, 1, 8, 1), int), None, 16).factors)
    assert (factors["remote_share"], factors["rows_per_copy"]) == (1, 1 / 8)
    assert factors["padding"] == 2


def test_every_shard_asked_is_more_rows_for_a_copy() -> None:
    shards = {"expert_tp": 2, "expert_tp_mode": "all"}
    run = simple_run("all_to_all", 4, 2, tokens_per_rank=(1, 0, 0, 0), **shards)
    factors = dict(of_run(run, np.array([[[[1]]]]), None, 16).factors)
    assert (factors["remote_share"], factors["rows_per_copy"]) == (1, 2)


def test_half_the_headline_is_the_width_of_kimi_k3() -> None:
    """One copy to each of 16 remote ranks in BF16: 114,688 B, where the headline says 229,376."""
    result = headline({"hidden": 114_688}, 16, 16, 1, 1, 16, 7168, 3584)
    assert (result.headline_bytes, result.ratio) == (229_376, 0.5)
    assert [name for name, factor in result.factors if factor != 1] == ["width"]


def test_counts_alone_are_metadata() -> None:
    """Every choice is local: no remote copy, but the empty exchange is still announced."""
    result = headline({"hidden": 0, "counts": 80}, 0, 0, 1, 1, 2, 4, 4)
    assert dict(result.factors)["metadata"] == result.ratio == 5.0


def test_an_all_gather_sends_rows_that_no_copy_asked_for() -> None:
    result = headline({"hidden": 8, "counts": 40}, 1, 0, 1, 1, 2, 4, 4)
    factors = dict(result.factors)
    assert factors["remote_share"] == 1
    assert factors["rows_per_copy"] == 8 / 16
    assert prod(factors.values()) == pytest.approx(48 / 16)


def test_one_rank_sends_nothing() -> None:
    result = headline({"hidden": 0, "counts": 0}, 0, 0, 5, 1, 2, 4, 4)
    assert result.ratio == 0
    assert prod(factor for _, factor in result.factors) == 0
