"""What a fixed number of rows for each slot drops.

The tokens of a source choose independently, so the number that want one slot is Binomial(T, pi):
pi = K / E under uniform routing, pi_e times the slot's share otherwise. What exceeds the capacity C
is dropped: sum over x > C of (x - C) P(x).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, floor, log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

# Beyond so many deviations and as many tokens there is nothing that a double could add up.
_DEVIATIONS, _TOKENS = 40, 64


@lru_cache(maxsize=1 << 16)
def expected_dropped(num_tokens: int, chance: float, capacity: int) -> float:
    """Expected choices of one slot beyond its capacity, from one source."""
    x, probability = _binomial(num_tokens, chance)
    return float(np.maximum(0, x - capacity) @ probability)


@lru_cache(maxsize=1 << 16)
def kept_variance(num_tokens: int, chance: float, capacity: int) -> float:
    """Variance of the choices of one slot that find a row."""
    x, probability = _binomial(num_tokens, chance)
    short = np.maximum(0, capacity - x)  # of the capacity; it varies as much
    return max(0.0, float(short**2 @ probability) - float(short @ probability) ** 2)


def dropped_share(num_tokens: int, chance: float, capacity: int) -> float:
    """Share of the choices of one source that find no row: sum_{x>C} (x-C) P(x) / (T pi)."""
    wanted = num_tokens * chance
    return expected_dropped(num_tokens, chance, capacity) / wanted if wanted else 0.0


@lru_cache(maxsize=1024)
def _binomial(num_tokens: int, chance: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(x, P(x)) where it is not negligible."""
    if not 0 < chance < 1:
        return np.array([num_tokens if chance else 0]), np.ones(1)
    mean, sd = num_tokens * chance, sqrt(num_tokens * chance * (1 - chance))
    reach = ceil(_DEVIATIONS * sd) + _TOKENS
    x = np.arange(max(0, floor(mean) - reach), min(num_tokens, ceil(mean) + reach) + 1)
    log_factorial = _log_factorials(num_tokens)
    log_p = log_factorial[-1] - log_factorial[x] - log_factorial[num_tokens - x]
    return x, np.exp(log_p + x * log(chance) + (num_tokens - x) * log1p(-chance))


@lru_cache(maxsize=64)
def _log_factorials(last: int) -> NDArray[np.float64]:
    """log n! for n = 0 ... last"""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, last + 1)))])
