"""How far a measured sum lies from what a law expects, in deviations of a normal curve.

    equality     the law leaves no freedom
    normal       many events: z = (measured - mean) / deviation
    exact tail   few events: the two-sided probability (`tail`), told as the z of equal probability
    Bernstein    few events and no known distribution: an upper bound of that probability
    chi-square   rows of all destinations at once, against their covariance

Bernstein: a sum of independent parts, none further than M from its mean, lies t or more away with
probability of at most 2 exp(-t^2 / 2 / (variance + M t / 3)). A test by it is weaker, never unfair.

The chi-square is the squared length of the deviation in units of the covariance, over the k
directions that the law leaves free (copies add up to K, so they have one less than ranks). Its cube
root is nearly normal (Wilson and Hilferty): (chi-square / k)^(1/3) has mean 1 - 2 / 9k and variance
2 / 9k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from comm.analytic.populations import Destinations
from comm.analytic.tail import NEGLIGIBLE, RARE_EVENTS, rare_events, tail_probability
from comm.analytic.traffic import ExpectedTraffic, Flow

METHODS = ("normal", "exact tail", "Bernstein", "chi-square", "equality")
_FREE = 1e-9  # of the largest eigenvalue: directions with less are not free
_ROUNDING = 1e-2  # rows; a deviation where none may be is at least 1 / sqrt(R)


@dataclass(frozen=True)
class Score:
    """One comparison: how it was made, what was expected, and how far off the measured value is.

    mean, std: bytes; of a chi-square, its degrees of freedom and their deviation
    """

    method: str
    measured: float
    mean: float
    std: float
    z: float


def score_sum(
    expected: ExpectedTraffic,
    flow: Flow,
    scope: str,
    layers: Sequence[int],
    measured: int,
) -> Score:
    """Bytes of a scope in the phases of a flow, all directions and kinds, summed over layers."""
    phases = flow.phases(expected.phases)
    estimate = expected.of(scope, layers, phases)
    mean, std = estimate.mean, estimate.std
    if std == 0:
        return Score("equality", measured, mean, 0.0, 0.0 if measured == mean else inf)
    per_row = abs(int(flow.bytes_per_row.sum()))
    population = expected.population(flow, scope, layers)
    if population is not None and rare_events(population) < RARE_EVENTS:
        rows = (measured - expected.fixed(scope, layers, phases)) / per_row
        method, probability = "exact tail", tail_probability(population, rows)
    else:
        apart = max(flow.apart[layer] for layer in layers)  # rows
        if population is not None or (std / per_row) ** 2 >= RARE_EVENTS * apart:
            return Score("normal", measured, mean, std, (measured - mean) / std)
        method, probability = "Bernstein", _bernstein(measured - mean, std, apart * per_row)
    z = -NormalDist().inv_cdf(max(NEGLIGIBLE, probability) / 2)
    return Score(method, measured, mean, std, z if measured >= mean else -z)


def _bernstein(distance: float, std: float, apart: float) -> float:
    """Upper bound of the probability that a sum lies so far from its mean."""
    t = abs(distance)
    return min(1.0, 2 * exp(-(t**2) / 2 / (std**2 + apart * t / 3)))


def has_many(destinations: Destinations) -> bool:
    """Whether every rank receives, and fails to receive, enough rows for a normal curve."""
    variance = destinations[1].diagonal()
    # Of n events the variance is at most n, for hits as for misses.
    return bool((variance >= RARE_EVENTS).all())


def score_destinations(destinations: Destinations, rows: NDArray[np.integer]) -> Score:
    """rows: [R] received by each rank, all sources together."""
    mean, covariance = destinations
    values, vectors = np.linalg.eigh(covariance)
    along = vectors.T @ (rows - mean)
    free = values > _FREE * values.max()
    k = int(free.sum())
    chi_square = float((along[free] ** 2 / values[free]).sum())
    if (np.abs(along[~free]) > _ROUNDING).any():
        return Score("chi-square", inf, k, sqrt(2 * k), inf)
    z = ((chi_square / k) ** (1 / 3) - (1 - 2 / (9 * k))) / sqrt(2 / (9 * k))
    return Score("chi-square", chi_square, k, sqrt(2 * k), z)
