"""Gradient synchronisation: the sums, their bits on every holder, and the bytes of every pair."""

from __future__ import annotations

from typing import Any

import grad_sync_bodies
import numpy as np
import pytest
import torch
from grad_sync_bodies import LAYER, expert_gradient, replicated_of

from comm.grad_sync import expert_holders, gradients_of
from comm.meter import ALL_PHASES, DIRECTIONS, KINDS, Traffic
from comm.placement import ExpertPlacement, build_placement, placement_from_slots
from comm.spawn import run_ranks

PRELOAD = ("comm.grad_sync",)
SIZES: list[Any] = [([(7, 3), (2,), ()], torch.float32), ([(2,)], torch.float32)]
SIZES += [([(5, 4), (9,)], torch.bfloat16)]


def counted(meters: list) -> np.ndarray:
    """int64 [src, dst], bytes; everything else in the ledger must be empty."""
    traffic = Traffic.assemble(meters)
    place = (
        LAYER,
        DIRECTIONS.index("backward"),
        ALL_PHASES.index("grad_sync"),
        KINDS.index("gradients"),
    )
    assert traffic.bytes.sum() == traffic.bytes[place].sum() and not traffic.rows.any()
    assert np.array_equal(traffic.received, traffic.bytes.sum(axis=3))
    return traffic.bytes[place]


def in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    """fp32, the lowest rank first."""
    total = torch.zeros_like(terms[0], dtype=torch.float32)
    for term in terms:
        total = total + term.float()
    return total


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_replicated_gradients_are_summed_in_order_of_ranks(world_size: int) -> None:
    ranks = run_ranks(grad_sync_bodies.replicated, world_size, SIZES, preload=PRELOAD)
    for case, (sizes, dtype) in enumerate(SIZES):
        given = [replicated_of(rank, sizes, dtype) for rank in range(world_size)]
        for index in range(len(sizes)):
            wanted = in_order([tensors[index] for tensors in given]).to(dtype)
            for rank in ranks:
                assert torch.equal(rank[case][0][index], wanted), (case, index)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_pair_carries_both_its_chunks(world_size: int) -> None:
    """4 (chunk of dst + chunk of src), of the nearly equal chunks the first are the longer."""
    ranks = run_ranks(grad_sync_bodies.replicated, world_size, SIZES, preload=PRELOAD)
    for case, (sizes, _) in enumerate(SIZES):
        values = sum(int(np.prod(size)) for size in sizes)
        chunk = [len(range(rank, values, world_size)) for rank in range(world_size)]
        wanted = [
            [4 * (chunk[dst] + chunk[src]) for dst in range(world_size)]
            for src in range(world_size)
        ]
        assert counted([rank[case][1] for rank in ranks]).tolist() == wanted


# Replicas in another order on each position; position 2 holds experts that nobody else does.
UNEVEN = placement_from_slots("test", 5, [3, 0, 1, 0, 3, 4, 2], [0, 3, 5, 7])
EMPTY = build_placement("contiguous", 2, 3)  # position 2 holds none
CASES: list[tuple[int, ExpertPlacement, int, int]] = [  # ranks, placement, ep_size, expert_tp
    (6, UNEVEN, 3, 1),
    (6, UNEVEN, 6, 2),
    (6, EMPTY, 3, 1),
    (6, build_placement("round_robin", 7, 6), 6, 1),
    (6, build_placement("contiguous", 3, 1), 1, 1),
    (6, build_placement("contiguous", 3, 1), 2, 2),
    (1, build_placement("contiguous", 3, 1), 1, 1),
]
VALUES = 6


def slow_holders(placement: ExpertPlacement, world_size: int, ep_size: int, tp: int) -> list[set]:
    """What each rank holds: (expert, shard)."""
    held = []
    for rank in range(world_size):
        position, shard = rank % ep_size // tp, rank % tp
        held.append({(int(expert), shard) for expert in placement.local_experts(position)})
    return held


@pytest.mark.parametrize("world_size", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_summed_by_all_that_hold_them(world_size: int, dtype: torch.dtype) -> None:
    cases = [case for case in CASES if case[0] == world_size]
    given = [(*case[1:], VALUES, dtype) for case in cases]
    ranks = run_ranks(grad_sync_bodies.experts, world_size, given, preload=PRELOAD)
    for index, (_, placement, ep_size, tp) in enumerate(cases):
        held = slow_holders(placement, world_size, ep_size, tp)
        for rank in range(world_size):
            found, _ = ranks[rank][index]
            assert sorted(found) == sorted(expert for expert, _ in held[rank])
            for expert, gradient in found.items():
                same = [r for r in range(world_size) if (expert, rank % tp) in held[r]]
                terms = [expert_gradient(r, expert, VALUES).to(dtype) for r in same]
                assert torch.equal(gradient, in_order(terms).to(dtype)), (index, rank, expert)
        wanted = [
            [4 * VALUES * len(held[src] & held[dst]) * (src != dst) for dst in range(world_size)]
            for src in range(world_size)
        ]
        assert counted([rank[index][1] for rank in ranks]).tolist() == wanted


def test_holders_are_listed_in_slot_order() -> None:
    assert expert_holders(UNEVEN, 1, 6, 3) == {0: (0, 1, 3, 4), 3: (0, 1, 3, 4)}
    assert list(expert_holders(UNEVEN, 0, 6, 3)) == [3, 0, 1]
    # two shards a position: rank 3 is shard 1 of position 1
    assert expert_holders(UNEVEN, 3, 12, 6, 2) == {0: (1, 3, 7, 9), 3: (1, 3, 7, 9)}


def test_a_parameter_without_gradient_gets_zeros() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    used.sum().backward()
    first, second = gradients_of([used, unused])
    assert torch.equal(first, torch.ones(2, 3)) and first is used.grad
    assert torch.equal(second, torch.zeros(2, 3)) and second is unused.grad
