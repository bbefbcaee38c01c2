"""Every dispatcher against a slow loop over tokens, equality exact."""

import itertools

import pytest
import rank_bodies
import torch

from comm.dispatch import DISPATCHERS
from comm.placement import PLACEMENTS, build_placement
from comm.spawn import run_ranks

TOKENS = [(7, 0, 3, 12), (0, 0, 0, 1), (5,), (0,)]
CASES = [
    (dispatcher, placement, "fp32", tokens, absent)
    for dispatcher, placement, tokens, absent in itertools.product(
        DISPATCHERS, PLACEMENTS, TOKENS, (0.0, 0.3, 1.0)
    )
]


@pytest.fixture(scope="module", params=[1, 3, 4, 32], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    """One world for all cases: by case, by rank. 32 ranks leave two without an expert."""
    world_size = request.param
    cases = CASES if world_size < 32 else CASES[::3]
    by_rank = run_ranks(rank_bodies.out_and_back, world_size, cases)
    return world_size, list(zip(cases, zip(*by_rank, strict=True), strict=True))


def test_each_choice_reaches_its_expert_once(results):
    """Rows, in slot order: exactly the tokens that chose the expert, unchanged."""
    _, cases = results
    for case, ranks in cases:
        wanted = sorted(
            (expert, token.tolist())
            for hidden, ids, *_ in ranks
            for token, row in zip(hidden, ids.tolist(), strict=True)
            for expert in row
            if expert >= 0
        )
        arrived = sorted(
            (expert, row.tolist())
            for _, _, _, expert_input, expert_of_row, *_ in ranks
            for row, expert in zip(expert_input, expert_of_row.tolist(), strict=True)
        )
        assert arrived == wanted, case


def slow_combine(dispatcher, placement, token, ids, weights):
    """The documented order of summation: ascending k, for by-rank strategies inside each rank."""
    terms = [
        (int(placement.slot_rank[placement.logical_to_physical[expert]]), weight, expert)
        for expert, weight in zip(ids, weights, strict=True)
        if expert >= 0
    ]
    if dispatcher in ("all_to_all", "padded", "one_sided"):
        groups = [terms]
    else:
        groups = [[t for t in terms if t[0] == rank] for rank in sorted({t[0] for t in terms})]
    total = torch.zeros_like(token)
    for group in groups:
        partial = torch.zeros_like(token)
        for _, weight, expert in group:
            partial = partial + weight * (token * rank_bodies.scale_of(expert))
        total = total + partial
    return total


def test_outputs_are_the_weighted_sums_bit_by_bit(results):
    world_size, cases = results
    for case, ranks in cases:
        placement = build_placement(case[1], 30, world_size)
        for hidden, ids, weights, _, _, combined, _ in ranks:
            expected = [
                slow_combine(case[0], placement, *token)
                for token in zip(hidden, ids.tolist(), weights.tolist(), strict=True)
            ]
            assert combined.shape == hidden.shape
            for row, wanted in zip(combined, expected, strict=True):
                assert torch.equal(row, wanted), case


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_wrong_arguments_are_refused_by_name(dispatcher):
    messages = run_ranks(rank_bodies.misuse, 1, dispatcher)[0]
    assert messages == [
        "hidden is (3, 5), must be (3, 4)",
        "topk_ids is (3, 1), must be (3, 2)",
        "topk_weights is (2, 2), must be (3, 2)",
        "topk_ids span 8..8; experts are 0..7, and -1 means no expert",
        "topk_ids span -2..-2; experts are 0..7, and -1 means no expert",
        "topk_ids is torch.uint8, must be torch.int64",
    ]


def test_results_do_not_live_in_the_staging_memory():
    """A second dispatch must not change what the first one handed over."""
    case = ("rank_dedup", "contiguous", "fp32", (7, 2), 0.0)
    first, second = run_ranks(rank_bodies.out_and_back, 2, [case, case])[0]
    assert torch.equal(first[3], second[3]) and torch.equal(first[5], second[5])
