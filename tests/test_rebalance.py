"""Experts that move: which, from where, and that their bytes arrive, on real ranks."""

import numpy as np
import pytest
import rebalance_bodies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rebalance_bodies import EXPERT_BYTES, bytes_of

from comm.balance import balance
from comm.meter import KINDS, Traffic
from comm.placement import build_placement, placement_from_slots
from comm.rebalance import moves
from comm.spawn import run_ranks


def slow_moves(before, after):
    """Rank by rank and slot by slot: what it holds now and did not hold, from the first holder."""
    found = []
    for rank in range(after.world_size):
        had = before.local_experts(rank).tolist()
        for expert in after.local_experts(rank).tolist():
            if expert not in had:
                holders = [
                    other
                    for other in range(before.world_size)
                    if expert in before.local_experts(other).tolist()
                ]
                found.append([expert, holders[0], rank])
    return found


def test_the_worked_example():
    """The picture at the top of comm/rebalance.py."""
    before = placement_from_slots("before", 4, [0, 1, 2, 3], [0, 2, 4])
    after = placement_from_slots("after", 4, [0, 2, 1, 2, 3], [0, 2, 5])
    assert moves(before, after).tolist() == [[2, 1, 0], [1, 0, 1]]


def test_nothing_moves_when_nothing_changes_but_the_order():
    before = placement_from_slots("before", 4, [0, 1, 2, 3], [0, 2, 4])
    turned = placement_from_slots("turned", 4, [1, 0, 3, 2], [0, 2, 4])
    assert moves(before, before).shape == (0, 3)
    assert moves(before, turned).shape == (0, 3)


def test_a_replica_given_up_does_not_move():
    replicated = placement_from_slots("replicated", 2, [0, 1, 0, 1], [0, 2, 4])
    single = build_placement("contiguous", 2, 2)
    assert moves(replicated, single).shape == (0, 3)
    assert moves(single, replicated).tolist() == [[1, 1, 0], [0, 0, 1]]


@st.composite
def two_placements(draw):
    num_experts, num_ranks = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    both = []
    for name in ("before", "after"):
        num_slots = draw(st.integers(num_experts, num_experts * num_ranks))
        load = draw(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts))
        slots, first_slot = balance(load, num_ranks, num_slots)
        both.append(placement_from_slots(name, num_experts, slots, first_slot))
    return both


@settings(max_examples=200, deadline=None)
@given(two_placements())
def test_equal_to_the_slow_count(both):
    before, after = both
    found = moves(before, after)
    assert found.dtype == np.int64
    assert found.tolist() == slow_moves(before, after)
    assert (found[:, 1] != found[:, 2]).all()


def test_placements_of_other_experts_or_ranks_are_refused():
    placement = build_placement("contiguous", 8, 4)
    for other in (build_placement("round_robin", 9, 4), build_placement("round_robin", 8, 3)):
        with pytest.raises(ValueError, match="contiguous has 8 experts on 4 ranks, round_robin"):
            moves(placement, other)


def _cases():
    """Placements of seven experts on four ranks; some ranks hold none before or after."""
    contiguous = build_placement("contiguous", 7, 4)
    dealt = build_placement("round_robin", 7, 4)
    hot = placement_from_slots("hot", 7, *balance([90, 1, 1, 60, 1, 1, 1], 4, 11))
    descending = placement_from_slots(
        "descending", 7, [6, 5, 4, 3, 2, 1, 0, 6, 0, 3], [0, 4, 7, 7, 10]
    )
    heap = placement_from_slots("heap", 7, np.arange(7), [0, 0, 7, 7, 7])
    return [
        (contiguous, dealt),
        (contiguous, hot),
        (hot, contiguous),
        (hot, descending),
        (contiguous, heap),
        (heap, hot),
        (hot, hot),
        (contiguous, descending),
    ]


def _check(results, cases, ranks):
    """Every rank's weights and meters, against the slow count; ranks: global, of one group."""
    for index, (before, after) in enumerate(cases):
        pairs = np.zeros((len(ranks), len(ranks)), dtype=np.int64)
        for _, source, destination in slow_moves(before, after):
            pairs[source, destination] += 1
        for place, rank in enumerate(ranks):
            moved, untouched, _ = results[rank][index]
            assert untouched
            assert torch.equal(moved, bytes_of(after.local_experts(place)))
        ledger = Traffic.assemble([result[index][2] for result in results])
        inside = np.ix_(ranks, ranks)
        weights = ledger.bytes[2, 0, 2, KINDS.index("expert_weights")][inside]
        assert weights.tolist() == (pairs * EXPERT_BYTES).tolist()
        assert ledger.rows[2, 0, 2][inside].tolist() == pairs.tolist()
        assert ledger.received[2, 0, 2][inside].tolist() == (pairs * EXPERT_BYTES).tolist()


def test_weights_arrive_where_the_new_placement_wants_them():
    cases = _cases()
    results = run_ranks(rebalance_bodies.move_there, 4, cases, deadline_s=60)
    _check(results, cases, [0, 1, 2, 3])
    for index, (before, after) in enumerate(cases):
        ledger = Traffic.assemble([result[index][2] for result in results])
        assert ledger.bytes.sum() == EXPERT_BYTES * len(slow_moves(before, after))  # nothing else
        assert ledger.rows.sum() == len(slow_moves(before, after))
        # Where nothing moves, no message is sent.
        assert ledger.collectives == min(1, len(slow_moves(before, after)))


def test_two_interleaved_groups_move_their_own_experts():
    """Groups of ranks 0 2 4 and 1 3 5: the placement counts places, the ledger global ranks."""
    cases = [
        (
            build_placement("contiguous", 8, 3),
            placement_from_slots("hot", 8, *balance([50, 9, 9, 9, 1, 1, 1, 1], 3, 10)),
        )
    ]
    parts = [[0, 2, 4], [1, 3, 5]]
    results = run_ranks(rebalance_bodies.move_there, 6, cases, parts, deadline_s=60)
    for ranks in parts:
        _check(results, cases, ranks)
    total = sum(result[0][2].sent.sum() for result in results)
    assert total == 2 * EXPERT_BYTES * len(slow_moves(*cases[0]))


def test_wrong_arguments_are_refused():
    placement = build_placement("contiguous", 8, 2)
    other = build_placement("contiguous", 9, 2)
    for rank, messages in enumerate(
        run_ranks(rebalance_bodies.misuse, 2, placement, other, deadline_s=60)
    ):
        assert len(messages) == 4
        assert f"weights of rank {rank} are torch.uint8 (3, {EXPERT_BYTES})" in messages[0]
        assert "torch.uint8 (4, bytes of an expert)" in messages[0]
        assert "torch.float32" in messages[1]
        assert f"torch.uint8 ({4 * EXPERT_BYTES},)" in messages[2]
        assert "8 experts on 2 ranks, contiguous 9" in messages[3]
