"""Exact tail probabilities of totals."""

from itertools import product
from math import comb, exp

import numpy as np
import pytest

from comm.analytic.fanout import Constant, Copies, Distinct
from comm.analytic.tail import NEGLIGIBLE, rare_events, tail_probability


def two_sided(totals: dict[int, float], rows: int) -> float:
    """The definition, from the whole distribution."""
    at_most = sum(p for total, p in totals.items() if total <= rows)
    at_least = sum(p for total, p in totals.items() if total >= rows)
    return min(1.0, 2 * min(at_most, at_least))


def enumerated(population: tuple) -> dict[int, float]:
    """Distribution of the total, token by token."""
    laws = [law.pmf() for tokens, law in population for _ in range(tokens)]
    totals: dict[int, float] = {}
    for rows in product(*(range(len(pmf)) for pmf in laws)):
        probability = float(np.prod([pmf[x] for pmf, x in zip(laws, rows, strict=True)]))
        totals[sum(rows)] = totals.get(sum(rows), 0.0) + probability
    return {total: p for total, p in totals.items() if p}


@pytest.mark.parametrize(
    "population",
    [
        ((3, Copies(2, 9, 3)), (2, Copies(1, 9, 3))),  # hits are rare
        ((3, Copies(8, 9, 3)), (2, Copies(7, 9, 3))),  # misses are rare, two rows are certain
        ((4, Distinct.of([1, 2, 2], 7, 3)), (1, Distinct.of([2, 2], 7, 3))),
        ((2, Constant(3)), (3, Copies(2, 6, 2))),
    ],
)
def test_every_total_of_a_few_tokens(population: tuple) -> None:
    totals = enumerated(population)
    for rows in totals:
        assert tail_probability(population, rows) == pytest.approx(
            two_sided(totals, rows), rel=1e-10
        )
    # totals that cannot be
    assert tail_probability(population, max(totals) + 1) == NEGLIGIBLE
    assert tail_probability(population, min(totals) - 1) == NEGLIGIBLE


def test_events_are_hits_or_misses_whichever_are_fewer() -> None:
    assert rare_events(((10, Copies(1, 100, 2)),)) == pytest.approx(0.2)
    assert rare_events(((10, Copies(99, 100, 2)),)) == pytest.approx(0.2)
    assert rare_events(((10, Constant(5)),)) == 0
    assert rare_events(()) == 0


def test_a_node_missed_once_in_seventy_five_thousand() -> None:
    """R = 8, N = 2: the chance that no expert of the other node is chosen is 1.33e-5."""
    other_node = Distinct.of([448], 896, 16)
    population = ((2048, other_node),)
    miss = comb(448, 16) / comb(896, 16)
    assert miss == pytest.approx(1.33e-5, abs=5e-8)
    assert rare_events(population) == pytest.approx(2048 * miss)
    assert tail_probability(population, 2048) == 1  # what happens 97 times in 100
    assert tail_probability(population, 2047) == pytest.approx(2 * (1 - (1 - miss) ** 2048))
    many = ((1_000_000, other_node),)  # 13.3 misses expected: nearly Poisson
    mean = 1_000_000 * miss
    poisson = exp(-mean) * sum(mean**n / np.prod(np.arange(1.0, n + 1)) for n in range(4))
    assert tail_probability(many, 999_997) == pytest.approx(2 * poisson, rel=1e-3)
    assert tail_probability(many, 1_000_000 - 4000) == NEGLIGIBLE


def test_rows_between_two_counts_are_as_far_out_as_the_nearer_tail() -> None:
    population = ((5, Copies(2, 9, 3)),)
    up, down = tail_probability(population, 9), tail_probability(population, 0)
    assert tail_probability(population, 8.5) == up
    assert tail_probability(population, 0.5) == down


def test_false_alarms_stay_below_the_level() -> None:
    """Draw totals from the law: P(p <= a) must not exceed a."""
    rng = np.random.default_rng(2)
    law = Copies(3, 200, 4)
    draws = rng.hypergeometric(3, 197, 4, size=(20_000, 100)).sum(axis=1)
    p_of = {rows: tail_probability(((100, law),), rows) for rows in set(draws.tolist())}
    p = np.array([p_of[rows] for rows in draws.tolist()])
    for level in (0.01, 0.05, 0.2):
        assert (p <= level).mean() <= level + 3 * np.sqrt(level / len(p))
    assert (p <= 0.2).mean() > 0.05  # and it does reject
