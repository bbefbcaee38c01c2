"""Orders of rows, each against a slow loop, equality exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm import permute


def random_slots(num_tokens, top_k, num_slots, seed=0, absent=0.2):
    generator = torch.Generator().manual_seed(seed)
    slots = (
        torch.stack(
            [torch.randperm(num_slots, generator=generator)[:top_k] for _ in range(num_tokens)]
        )
        if num_tokens
        else torch.empty(0, top_k, dtype=torch.int64)
    )
    return torch.where(torch.rand(slots.shape, generator=generator) < absent, num_slots, slots)


def starts(lengths):
    """Where runs of these lengths begin when they lie end to end."""
    return [sum(lengths[:index]) for index in range(len(lengths))]


@given(st.lists(st.integers(0, 9)), st.booleans())
@settings(max_examples=50, deadline=None)
def test_stable_order_keeps_equal_keys_in_place(keys, many):
    num_keys = 1 << 31 if many else 10  # in 64 bits and in 32
    order = permute.stable_order(torch.tensor(keys, dtype=torch.int64), num_keys).tolist()
    assert order == sorted(range(len(keys)), key=lambda index: keys[index])


def test_inverse():
    order = torch.tensor([2, 0, 3, 1])
    assert permute.inverse(order)[order].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_order_by_slot(seed):
    slots = random_slots(13, 4, 9, seed)
    choice, rows_per_slot = permute.order_by_slot(slots, 9)
    flat = slots.flatten().tolist()
    expected = sorted((slot, index) for index, slot in enumerate(flat) if slot < 9)
    assert choice.tolist() == [index for _, index in expected]
    assert rows_per_slot.tolist() == [flat.count(slot) for slot in range(9)]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_hit_and_the_way_back(seed):
    slot_rank = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 4, 5])  # rank 3 owns nothing, 5 is nobody
    slots = random_slots(13, 4, 9, seed)
    hit = permute.ranks_hit(slots, slot_rank, 5)
    sets = [{int(slot_rank[slot]) for slot in row if slot < 9} for row in slots.tolist()]
    assert hit.tolist() == [[rank in ranks for ranks in sets] for rank in range(5)]

    sent = [(rank, token) for rank in range(5) for token in range(13) if rank in sets[token]]
    row, first_row = permute.rows_in_token_order(hit)
    back = sorted(range(len(sent)), key=lambda index: (sent[index][1], sent[index][0]))
    assert row.tolist() == back
    assert first_row.tolist() == starts([len(ranks) for ranks in sets])


@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
def test_rows_in_choice_order(absent):
    slots = random_slots(13, 4, 9, seed=2, absent=absent)
    choice, _ = permute.order_by_slot(slots, 9)
    row, first_row, valid = permute.rows_in_choice_order(choice, 13, 4)
    flat = choice.tolist()
    assert row.tolist() == sorted(range(len(flat)), key=lambda index: flat[index])
    assert first_row.tolist() == starts([sum(slot < 9 for slot in r) for r in slots.tolist()])
    assert torch.arange(13 * 4)[valid].tolist() == sorted(flat)


@pytest.mark.parametrize(("first_slot", "num_local"), [(0, 3), (3, 2), (9, 0)])
def test_local_choices(first_slot, num_local):
    slots = random_slots(11, 4, 9, seed=3)
    choice, local, first = permute.local_choices(slots, first_slot, num_local)
    flat = slots.flatten().tolist()
    mine = range(first_slot, first_slot + num_local)
    expected = [index for index, slot in enumerate(flat) if slot in mine]
    assert choice.tolist() == expected
    assert local.tolist() == [flat[index] - first_slot for index in expected]
    assert first.tolist() == starts([sum(slot in mine for slot in row) for row in slots.tolist()])


def test_regroup_by_expert_is_the_picture():
    rows_from = np.array([[2, 1], [1, 2]])  # src 0: e0 e0 e1, src 1: e0 e1 e1
    assert permute.regroup_by_expert(rows_from).tolist() == [0, 1, 3, 2, 4, 5]


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_regroup_by_expert(rows_from):
    received = [
        (expert, source)
        for source, counts in enumerate(rows_from)
        for expert, count in enumerate(counts)
        for _ in range(count)
    ]
    wanted = sorted(range(len(received)), key=lambda index: received[index])
    assert permute.regroup_by_expert(np.array(rows_from)).tolist() == wanted


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(3, 5),
)
@settings(max_examples=50, deadline=None)
def test_regroup_by_expert_where_runs_are_padded(rows_from, capacity):
    received = [
        (expert, source, filled)
        for source, counts in enumerate(rows_from)
        for expert, count in enumerate(counts)
        for filled in [True] * count + [False] * (capacity - count)
    ]
    order = sorted(range(len(received)), key=lambda index: received[index][:2])
    wanted = [index for index in order if received[index][2]]
    assert permute.regroup_by_expert(np.array(rows_from), capacity).tolist() == wanted


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_first_of_each_slot(rows_per_slot, capacity):
    sorted_slots = [slot for slot, count in enumerate(rows_per_slot) for _ in range(count)]
    first, places = [], []
    for number, slot in enumerate(sorted_slots):
        within = number - sorted_slots.index(slot)
        if within < capacity:
            first.append(number)
            places.append(slot * capacity + within)
    rows = torch.tensor(rows_per_slot, dtype=torch.int64)
    found = permute.first_of_each_slot(rows, capacity)
    assert [part.tolist() for part in found] == [first, places]


def test_first_of_each_slot_is_the_picture():
    first, place = permute.first_of_each_slot(torch.tensor([3, 1, 0, 2]), 2)
    assert first.tolist() == [0, 1, 3, 4, 5] and place.tolist() == [0, 1, 2, 6, 7]


def test_regroup_without_local_experts():
    assert permute.regroup_by_expert(np.zeros((3, 0), dtype=np.int64)).tolist() == []


def slow_weighted_sum(rows, index, rows_per_bag, weights):
    sums, start = [], 0
    for count in rows_per_bag.tolist():
        total = torch.zeros(rows.shape[1])
        for position in range(start, start + count):
            total += weights[position] * rows[index[position]].float()
        sums.append(total)
        start += count
    return torch.stack(sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [True, False])
def test_weighted_sum(dtype, weighted):
    """Weights that are powers of two make every product exact, so fp32 sums are equal bit by bit.

    16-bit results are those sums rounded once; at a tie either neighbour is a nearest one.
    """
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(20, 24, generator=generator).to(dtype)
    rows_per_bag = torch.tensor([3, 0, 16, 1, 0])
    index = torch.randint(20, (20,), generator=generator)
    weights = 2.0 ** torch.randint(-3, 3, (20,), generator=generator)
    expected = slow_weighted_sum(rows, index, rows_per_bag, weights if weighted else torch.ones(20))
    first_row = permute.run_starts(rows_per_bag)
    result = permute.weighted_sum(rows, index, first_row, weights if weighted else None)
    assert result.dtype == dtype
    if dtype == torch.float32:
        assert torch.equal(result, expected)
    half_an_ulp = torch.finfo(dtype).eps / 2
    assert ((result.float() - expected).abs() <= half_an_ulp * expected.abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_not_rounded_to_the_type_of_the_rows(dtype):
    """A weight in bf16 is off by up to 0.4 %; summed with what rounding lost it is not."""
    weights = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.5
    rows = torch.ones(1, 8, dtype=dtype)
    index = torch.zeros(64, dtype=torch.int64)
    summed = permute.weighted_sum(rows, index, torch.tensor([0]), weights)
    assert torch.equal(summed[0], weights.sum().to(dtype).expand(8))


def test_weighted_sum_of_nothing():
    empty = permute.weighted_sum(
        torch.empty(0, 6), torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    )
    assert torch.equal(empty, torch.zeros(3, 6))
