"""Rows of strategies on uneven machines, and where one begins to cost less than another."""

from math import comb

import pytest

from comm.analytic.crossover import all_reduce_bytes, expert_move, first_better, order
from comm.analytic.strategies import Machine, Rows


def hit(experts):
    """Chance that one of 16 choices among 896 falls on so many experts."""
    return 1 - comb(896 - experts, 16) / comb(896, 16)


def test_rows_are_means_over_uneven_ranks():
    """72 ranks of 13 and 12 experts: each is a source once, and no row for itself."""
    rows = Machine(72, 72, 896, 16).rows
    every = 32 * hit(13) + 40 * hit(12)
    assert rows["rank_dedup"].remote == pytest.approx(every * 71 / 72)
    assert round(every, 4) == 14.5442  # traffic_model.md
    assert rows["all_to_all"].remote == pytest.approx(16 * (1 - 1 / 72))
    assert rows["allgather"] == Rows(71.0, 0.0)


def test_rows_are_means_over_uneven_nodes():
    """128 ranks of 7 experts, 72 on one node and 56 on the other."""
    rows = Machine(128, 72, 896, 16).rows
    assert rows["rank_dedup"].scale_out == pytest.approx(2 * 72 * 56 / 128 * hit(7))
    assert rows["allgather"].scale_out == pytest.approx(2 * 72 * 56 / 128)
    first = (72 * hit(56 * 7) + 56 * hit(72 * 7)) / 128
    assert rows["two_hop"].scale_out == pytest.approx(first)
    # 72 sources: their own node's 71 others, and the other's 55 that are not the proxy
    inside = (72 * (71 + 55) + 56 * (55 + 71)) / 128 * hit(7)
    assert rows["two_hop"].scale_up == pytest.approx(inside)


def test_time_is_that_of_the_slower_tier():
    rows = Rows(scale_up=9.0, scale_out=1.0)
    assert rows.ns_per_byte({"scale_up": 900, "scale_out": 50}) == 1 / 50
    assert rows.ns_per_byte({"scale_up": 90, "scale_out": 50}) == 9 / 90
    assert rows.ns_per_byte({"scale_up": 90, "scale_out": None}) is None
    assert Rows(9.0, 0.0).ns_per_byte({"scale_up": 90, "scale_out": None}) == 9 / 90


def test_equals_share_a_place_in_the_order():
    cost = {"a": 2.0, "b": 1.0, "c": 2.0 * (1 + 1e-15), "d": 3.0}
    assert order(cost) == (("b",), ("a", "c"), ("d",))


def test_better_from_somewhere_on_means_to_the_end():
    costs = {2: (1, 2), 4: (3, 2), 8: (2, 2), 16: (1, 2), 32: (1, 2)}

    def cost_of(ranks):
        return dict(zip("ab", costs[ranks], strict=True)) if ranks in costs else None

    assert first_better("a", "b", (2, 4, 8, 16, 32), cost_of) == 16
    assert first_better("a", "b", (2, 4, 8), cost_of) is None  # equal at last
    assert first_better("a", "b", (2, 3), cost_of) is None  # not known at last


def test_an_expert_weighs_as_much_as_so_many_rows():
    """4 x 8 values, three times, in BF16: 192 B; 2 of 10 experts a token."""
    move = expert_move("bf16", 4, 8, 10, 2, round_trip_bytes=16)
    assert (move.expert_bytes, move.rows, move.tokens_per_rank) == (192, 12.0, 60.0)
    assert expert_move("mxfp4", 32, 2, 10, 2, 16).expert_bytes == 3 * (32 + 2)


def test_an_all_reduce_is_two_rings():
    assert all_reduce_bytes(4, 100, 10) == 2 * 3 / 4 * 1000
    assert all_reduce_bytes(1, 100, 10) == 0
