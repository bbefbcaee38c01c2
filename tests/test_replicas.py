"""Which replica serves a token, against a loop that looks for it slowly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.balance import balance
from comm.placement import build_placement, placement_from_slots
from comm.replicas import REPLICA_POLICIES, ReplicaChooser

#        rank 0        rank 1        rank 2
# slot   0  1  2       3  4  5       6  7
#        0  1  2       3  0  1       0  3
SMALL = placement_from_slots("small", 4, [0, 1, 2, 3, 0, 1, 0, 3], [0, 3, 6, 8])
NODES = (7, 4, 7)


def splitmix64(state):
    """Sebastiano Vigna's generator, one output, in Python's own integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state // 2**30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state // 2**27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state // 2**31)


def test_the_hash_is_splitmix64():
    """The first outputs of the published generator from the state 0."""
    gamma = 0x9E3779B97F4A7C15
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(gamma) == 0x6E789E6AA1B965F4
    assert splitmix64(2 * gamma % 2**64) == 0x06C45D188009454F


def slow_slots(placement, policy, ids, numbers, seed=0, layer=0, rank=0, nodes=None):
    """The same choice, one at a time, from the definition of each policy."""
    chosen = []
    for number, row in zip(numbers.tolist(), ids.tolist(), strict=True):
        chosen.append([])
        for expert in row:
            if expert < 0:
                chosen[-1].append(placement.num_slots)
                continue
            slots = [
                slot
                for slot, held in enumerate(placement.physical_to_logical.tolist())
                if held == expert
            ]
            owner = placement.slot_rank.tolist()
            turn = number
            if policy == "random":
                key = splitmix64(splitmix64(seed % 2**64) ^ layer)
                turn = splitmix64(splitmix64(key ^ number) ^ expert) // 2
            if policy == "nearest":
                here = [slot for slot in slots if owner[slot] == rank]
                near = [slot for slot in slots if nodes[owner[slot]] == nodes[rank]]
                slots = here or near or slots
            chosen[-1].append(slots[turn % len(slots)])
    return chosen


def test_by_hand():
    """Tokens 0..3, each choosing all four experts, from rank 0, which shares a node with rank 2."""
    ids, numbers = torch.arange(4).expand(4, 4), torch.arange(4)
    round_robin = ReplicaChooser(SMALL, "round_robin")
    assert round_robin.slots(ids, numbers).tolist() == [
        [0, 1, 2, 3],
        [4, 5, 2, 7],
        [6, 1, 2, 3],
        [0, 5, 2, 7],
    ]
    nearest = ReplicaChooser(SMALL, "nearest", rank=0, node_of_rank=NODES)
    assert nearest.slots(ids, numbers).tolist() == [[0, 1, 2, 7]] * 4
    nearest = ReplicaChooser(SMALL, "nearest", rank=2, node_of_rank=NODES)
    assert nearest.slots(ids, numbers).tolist() == [[6, 1, 2, 7]] * 4
    alone = ReplicaChooser(SMALL, "nearest", rank=1, node_of_rank=(0, 1, 2))
    assert alone.slots(ids, numbers).tolist() == [[4, 5, 2, 3]] * 4
    far = placement_from_slots("far", 2, [0, 1, 0, 1, 1], [0, 1, 2, 3, 4, 5])  # 1 not on node 0
    source = ReplicaChooser(far, "nearest", rank=0, node_of_rank=(0, 1, 0, 1, 1))
    assert source.slots(torch.tensor([[1]] * 4), torch.arange(4)).flatten().tolist() == [1, 3, 4, 1]
    asked = ReplicaChooser(far, "nearest", rank=3, node_of_rank=(0, 1, 0, 1, 1))
    assert asked.slots(torch.tensor([[0, 1]] * 3), torch.arange(3)).tolist() == [
        [0, 3],
        [2, 3],
        [0, 3],
    ]


@st.composite
def situations(draw):
    num_experts, num_ranks = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    num_slots = draw(st.integers(num_experts, num_experts * num_ranks))
    load = draw(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts))
    placement = placement_from_slots("any", num_experts, *balance(load, num_ranks, num_slots))
    tokens, top_k = draw(st.integers(0, 12)), draw(st.integers(1, num_experts))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.array([generator.permutation(num_experts)[:top_k] for _ in range(tokens)])
    ids = ids.reshape(tokens, top_k).astype(np.int64)
    ids[generator.random(ids.shape) < 0.2] = -1
    numbers = draw(st.integers(0, 2**62)) + np.arange(tokens)
    nodes = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    where = {
        "seed": draw(st.integers(-(2**63), 2**64 - 1)),
        "layer": draw(st.integers(0, 91)),
        "rank": draw(st.integers(0, num_ranks - 1)),
    }
    return placement, torch.from_numpy(ids), torch.from_numpy(numbers), nodes, where


@pytest.mark.parametrize("policy", REPLICA_POLICIES)
@settings(max_examples=150, deadline=None)
@given(situations())
def test_equal_to_the_slow_loop(policy, situation):
    placement, ids, numbers, nodes, where = situation
    slots = ReplicaChooser(placement, policy, node_of_rank=nodes, **where).slots(ids, numbers)
    assert slots.dtype == torch.int64 and slots.shape == ids.shape
    assert slots.tolist() == slow_slots(placement, policy, ids, numbers, nodes=nodes, **where)
    held = np.append(placement.physical_to_logical, -1)[slots.numpy()]
    assert held.tolist() == ids.tolist()  # the one slot chosen holds the expert; none holds none


@pytest.mark.parametrize("policy", REPLICA_POLICIES)
def test_each_choice_is_served_once(policy):
    """Field case 12: two ranks, four experts, six slots, top-2."""
    placement = placement_from_slots("case 12", 4, [0, 1, 2, 0, 2, 3], [0, 3, 6])
    tokens, top_k = 50, 2
    received = np.zeros(2, dtype=np.int64)
    generator = torch.Generator().manual_seed(1)
    for rank in range(2):
        ids = torch.rand(tokens, 4, generator=generator).topk(top_k).indices
        numbers = rank * tokens + torch.arange(tokens)
        chooser = ReplicaChooser(placement, policy, rank=rank, node_of_rank=(0, 0))
        slots = chooser.slots(ids, numbers).flatten().numpy()
        received += np.bincount(placement.slot_rank[slots], minlength=2)
    assert received.sum() == 2 * tokens * top_k
    assert received.min() > 0


@pytest.mark.parametrize("policy", ["round_robin", "random"])
def test_the_choice_does_not_depend_on_who_holds_the_token(policy):
    ids, numbers = torch.arange(4).expand(30, 4), torch.arange(30)
    whole = ReplicaChooser(SMALL, policy, rank=0).slots(ids, numbers)
    parts = [
        ReplicaChooser(SMALL, policy, rank=rank, node_of_rank=NODES).slots(
            ids[10 * rank : 10 * rank + 10], numbers[10 * rank : 10 * rank + 10]
        )
        for rank in range(3)
    ]
    assert torch.cat(parts).tolist() == whole.tolist()


def test_random_is_even_and_independent():
    """5-sigma bounds; the draws are fixed, so this passes or fails for ever."""
    placement = placement_from_slots("thrice", 2, [0, 1, 0, 1, 0, 1], [0, 2, 4, 6])
    tokens = 30_000
    ids, numbers = torch.tensor([[0, 1]]).expand(tokens, 2), torch.arange(tokens)

    def ranks(**where):
        return (ReplicaChooser(placement, "random", **where).slots(ids, numbers) // 2).numpy()

    base = ranks(seed=3, layer=1)
    bound = 5 * (tokens * (1 / 9) * (8 / 9)) ** 0.5
    for others in (base[:, 1], np.roll(base[:, 0], 1), *(
        ranks(**where)[:, 0] for where in ({"seed": 4, "layer": 1}, {"seed": 3, "layer": 2})
    )):  # fmt: skip
        together = np.bincount(3 * base[:, 0] + others, minlength=9)
        assert np.abs(together - tokens / 9).max() < bound


def test_random_choices_are_the_same_for_ever():
    """A recorded run must replay: the values, once published, do not change."""
    chooser = ReplicaChooser(SMALL, "random", seed=1, layer=2)
    slots = chooser.slots(torch.tensor([[0, 3]] * 6), torch.arange(6))
    assert slots.tolist() == [[6, 7], [0, 3], [4, 3], [4, 7], [6, 3], [4, 7]]


@pytest.mark.parametrize("policy", REPLICA_POLICIES)
def test_without_replicas_the_policies_agree(policy):
    placement = build_placement("round_robin", 7, 3)
    ids = torch.tensor([[0, 6, -1], [5, 1, 2], [-1, -1, -1]])
    chooser = ReplicaChooser(placement, policy, rank=1, node_of_rank=(0, 0, 1))
    expected = np.append(placement.logical_to_physical, 7)[ids.numpy()]
    assert chooser.slots(ids, torch.arange(3)).tolist() == expected.tolist()


@pytest.mark.parametrize("policy", REPLICA_POLICIES)
def test_no_tokens(policy):
    chooser = ReplicaChooser(SMALL, policy, node_of_rank=NODES)
    empty = chooser.slots(torch.empty(0, 2, dtype=torch.int64), torch.arange(0))
    assert empty.shape == (0, 2) and empty.dtype == torch.int64


IDS, NUMBERS = torch.tensor([[0, 1], [2, 3]]), torch.arange(2)


@pytest.mark.parametrize(
    ("ids", "numbers", "message"),
    [
        (IDS + 1, NUMBERS, r"topk_ids span 1\.\.4; experts are 0\.\.3, and -1 means"),
        (IDS - 2, NUMBERS, r"topk_ids span -2\.\.1"),
        (IDS.to(torch.uint8), NUMBERS, "topk_ids is torch.uint8, must be torch.int64"),
        (IDS, NUMBERS.to(torch.int32), "token_number is torch.int32"),
        (IDS.flatten(), NUMBERS, r"topk_ids is \(4,\), must be"),
        (IDS, torch.arange(3), r"token_number is \(3,\), must be \(2,\)"),
        (IDS, NUMBERS - 1, "token_number holds -1"),
    ],
)
def test_wrong_arguments_are_refused(ids, numbers, message):
    with pytest.raises(ValueError, match=message):
        ReplicaChooser(SMALL, "round_robin").slots(ids, numbers)


@pytest.mark.parametrize(
    ("policy", "where", "message"),
    [
        ("closest", {}, "replica_choice=closest: choose round_robin, random, nearest"),
        ("nearest", {}, "3 ranks; node_of_rank has none"),
        ("nearest", {"node_of_rank": (0, 1)}, "3 ranks; node_of_rank has 2"),
        ("nearest", {"node_of_rank": NODES, "rank": 3}, "rank=3 is not among the 3"),
    ],
)
def test_wrong_choosers_are_refused(policy, where, message):
    with pytest.raises(ValueError, match=message):
        ReplicaChooser(SMALL, policy, **where)
