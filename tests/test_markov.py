"""Tokens that resemble the one before, against the chain itself."""

from itertools import combinations

import numpy as np
import pytest
from law_simulation import run_shape, simulate, tiers_of

from comm.analytic.fanout import Copies
from comm.analytic.law import Markov, Uniform
from comm.analytic.markov import Chain, Sequences
from comm.analytic.traffic import ExpectedTraffic, expected_traffic

REUSE, NUM_EXPERTS, TOP_K = 0.7, 7, 3
SETS = [frozenset(subset) for subset in combinations(range(NUM_EXPERTS), TOP_K)]


def set_transition() -> np.ndarray:
    """[sets, sets] the chain on sets, from its description."""
    moves = np.zeros((len(SETS), len(SETS)))
    for i, old in enumerate(SETS):
        outside = set(range(NUM_EXPERTS)) - old
        for left in range(TOP_K + 1):
            for stay in combinations(sorted(old), TOP_K - left):
                chance = REUSE ** len(stay) * (1 - REUSE) ** left
                draws = list(combinations(sorted(outside), left))
                for new in draws:
                    moves[i, SETS.index(frozenset(stay) | set(new))] += chance / len(draws)
    return moves


@pytest.mark.parametrize(
    ("a", "b"), [((0, 1), (0, 1)), ((0, 1), (4, 5, 6)), ((0, 1), (0, 1, 2)), ((0, 1, 2), (1, 2))]
)
def test_covariances_of_the_chain_on_sets(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    chain, moves = Chain(REUSE, NUM_EXPERTS, TOP_K), set_transition()
    np.testing.assert_allclose(moves.sum(axis=1), 1)
    np.testing.assert_allclose(moves.mean(axis=0), 1 / len(SETS))  # uniform stays uniform
    copies_a, copies_b = (np.array([len(s & set(block)) for s in SETS]) for block in (a, b))
    miss_a, miss_b = copies_a == 0, copies_b == 0
    overlap = len(set(a) & set(b))
    course = chain.miss_covariance(len(a), len(b), overlap, 5)
    power, at_once = np.eye(len(SETS)), None
    for lag in range(6):
        joint = (miss_a @ power @ miss_b) / len(SETS)
        assert course[lag] == pytest.approx(joint - miss_a.mean() * miss_b.mean(), abs=1e-13)
        together = (copies_a @ power @ copies_b) / len(SETS) - copies_a.mean() * copies_b.mean()
        at_once = together if at_once is None else at_once
        assert together == pytest.approx(at_once * chain.copies_decay(5)[lag], abs=1e-13)
        power = power @ moves


def test_count_in_a_block_is_a_chain() -> None:
    chain, moves = Chain(REUSE, NUM_EXPERTS, TOP_K), set_transition()
    block = {0, 1, 2, 3}
    count = np.array([len(s & block) for s in SETS])
    lumped = chain.transition(4)
    for i in range(len(SETS)):
        seen = np.bincount(count, moves[i], minlength=TOP_K + 1)
        np.testing.assert_allclose(lumped[count[i]], seen, atol=1e-14)


def test_pairs_of_tokens_by_counting() -> None:
    sequences = Sequences((3, 0, 5, 4, 9), 5)
    rank = np.repeat(np.arange(5), (3, 0, 5, 4, 9))
    one, other, counts = sequences.pairs(4)
    found = {(i, j): n for i, j, n in zip(one.tolist(), other.tolist(), counts, strict=True)}
    for lag in range(5):
        for i in range(5):
            for j in range(5):
                pairs = sum(
                    rank[t] == i and rank[t + lag] == j and t // 5 == (t + lag) // 5
                    for t in range(len(rank) - lag)
                )
                assert (found[i, j][lag] if (i, j) in found else 0) == pairs
    assert sequences.longest == 5 and Sequences((2, 1), 99).longest == 3


def expect(law: Markov | Uniform, **settings: int) -> ExpectedTraffic:
    run = run_shape("rank_dedup", [8, 8], [0, 0], [6, 6], 3, **settings)
    found = expected_traffic(run, law)
    assert isinstance(found, ExpectedTraffic)
    return found


def test_between_independence_and_identity() -> None:
    free = expect(Uniform()).flows[0]
    alone = expect(Markov(0.9, 1)).flows[0]  # chains of one token
    np.testing.assert_allclose(alone.rows_var, free.rows_var, rtol=1e-12)
    np.testing.assert_allclose(alone.rows_mean, free.rows_mean, rtol=1e-12)
    # A set that never changes: all 8 tokens of a chain make the same rows.
    frozen = expect(Markov(1.0, 8)).flows[0]
    np.testing.assert_allclose(frozen.rows_var, 8 * free.rows_var, rtol=1e-10)
    some = [expect(Markov(reuse, 8)).flows[0].rows_var[0, 3] for reuse in (0.0, 0.5, 0.9)]
    # Without reuse the next set is drawn from the others: less than independent.
    assert some[0] < free.rows_var[0, 3] < some[1] < some[2] < frozen.rows_var[0, 3]
    two = expect(Markov(0.9, 8), num_steps=2).flows[0]
    assert two.rows_var[0, 3] == pytest.approx(2 * some[2])  # steps are independent
    assert expect(Markov(0.9, 8)).flows[0].populations[0] == (None,) * 4


def test_long_chains_by_simulation() -> None:
    """The variance of a run of 40 tokens, several times that of independent ones."""
    run = run_shape("two_hop", [15, 10, 15], [0, 1, 1], [4, 4, 4], 3)
    expected, rng = expected_traffic(run, Markov(0.9, 100)), np.random.default_rng(1)
    assert isinstance(expected, ExpectedTraffic)
    rows = [simulate(rng, run, Markov(0.9, 100)).rows[0, 0, 0] for _ in range(500)]
    between = tiers_of(run) == 2
    seen = np.array([cells[between].sum() for cells in rows])
    flow = expected.flows[0]
    assert seen.mean() == pytest.approx(flow.rows_mean[0, 2], abs=4 * seen.std() / 500**0.5)
    assert seen.var() == pytest.approx(flow.rows_var[0, 2], rel=4 * (2 / 500) ** 0.5)
    free = expected_traffic(run, Uniform())
    assert isinstance(free, ExpectedTraffic)
    assert flow.rows_var[0, 2] > 3 * free.flows[0].rows_var[0, 2]


def test_slope_is_that_of_copies() -> None:
    chain = Chain(0.6, 20, 4)
    assert chain.slope == pytest.approx(0.6 - 4 * 0.4 / 16)
    assert Copies(5, 20, 4).variance > 0
    assert chain.memory(40) == pytest.approx(100)
    assert Chain(1.0, 20, 4).memory(40) == float("inf")


def test_impossible_chains_are_refused() -> None:
    for reuse, top_k, message in [(1.5, 2, "reuse=1.5"), (0.5, 5, "top_k=5 .* num_experts=8")]:
        with pytest.raises(ValueError, match=message):
            Chain(reuse, 8, top_k)
