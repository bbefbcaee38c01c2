"""Exact tail probability of a row count, where rows (or rows that fail to appear) are rare.

A z score trusts the normal curve, which is poor far out for counts of few events. Here the law of
one token is convolved over all tokens instead. What is counted are *events*: rows above the least
possible number, or rows missing from the greatest, whichever are fewer. Events cannot be negative,
so a distribution cut after n entries is still exact in those n entries.
"""

from functools import lru_cache
from math import ceil, floor, sqrt

import numpy as np
from numpy.typing import NDArray

from comm.analytic.row_laws import Population, RowLaw

# Below this many expected hits or misses the exact tail replaces z. 25 is the least that will do:
# a Poisson count of mean 25 passes z = 5 twelve times as often as a normal one, of mean 400 1.6.
RARE_EVENTS = 400.0
NEGLIGIBLE = 1e-300  # the smallest probability told apart from zero


def rare_events(population: Population) -> float:
    """Expected number of events: hits or misses, the fewer."""
    above = below = 0.0
    for tokens, law in population:
        least, most = _support(law)
        above += tokens * (law.mean - least)
        below += tokens * (most - law.mean)
    return min(above, below)


def tail_probability(population: Population, rows: float) -> float:
    """Two-sided probability of a total at least as far out as `rows`, at most 1.

    Twice the smaller tail; both tails hold `rows` itself, so the test never rejects too often.
    Accurate to a relative 1e-9 or so, cut off at `NEGLIGIBLE`. Meant for few expected events:
    the work grows with the square of their number.
    """
    probabilities, origin, sign = _event_distribution(population)
    events = sign * (rows - origin)
    at_most = probabilities[: max(0, floor(events) + 1)].sum()
    at_least = probabilities[max(0, ceil(events)) :].sum()
    return float(max(NEGLIGIBLE, min(1.0, 2 * min(at_most, at_least))))


@lru_cache(maxsize=256)  # layers placed alike ask for the same one
def _event_distribution(population: Population) -> tuple[NDArray[np.float64], int, int]:
    """(P(events = n), rows at no event, +1 or -1 for rows above or below that)."""
    supports = [_support(law) for _, law in population]
    least = sum(n * low for (n, _), (low, _) in zip(population, supports, strict=True))
    most = sum(n * high for (n, _), (_, high) in zip(population, supports, strict=True))
    mean = sum(n * law.mean for n, law in population)
    sd = sqrt(sum(n * law.variance for n, law in population))
    from_below = mean - least <= most - mean
    # 40 deviations: beyond any bound, and a single token may bring many events.
    length = ceil(min(mean - least, most - mean) + 40 * sd) + 64
    total = np.ones(1)
    for (tokens, law), (low, high) in zip(population, supports, strict=True):
        pmf = law.pmf()[low : high + 1]
        total = _add(total, _times(pmf if from_below else pmf[::-1], tokens, length), length)
    return (total, least, 1) if from_below else (total, most, -1)


@lru_cache(maxsize=1024)
def _support(law: RowLaw) -> tuple[int, int]:
    """Least and greatest number of rows of a token."""
    possible = np.flatnonzero(law.pmf())
    return int(possible[0]), int(possible[-1])


def _times(pmf: NDArray[np.float64], count: int, length: int) -> NDArray[np.float64]:
    """Distribution of a sum of `count` independent draws, its first `length` entries."""
    total = np.ones(1)
    while count:
        if count & 1:
            total = _add(total, pmf, length)
        count >>= 1
        if count:
            pmf = _add(pmf, pmf, length)
    return total


def _add(one: NDArray[np.float64], other: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Distribution of the sum of two independent counts."""
    return np.convolve(one, other)[:length]
