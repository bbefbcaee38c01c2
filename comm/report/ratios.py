"""Ratios of times that were measured in turns, with a confidence interval. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A median ratio and the interval that holds it with probability CONFIDENCE."""

    value: float
    low: float
    high: float


def paired_ratio(seconds: np.ndarray, reference: np.ndarray) -> Ratio:
    """Geometric mean over cases of the median ratio of times measured in the same iteration.

    seconds, reference: float64 [cases, iterations]
    The interval comes from drawing iterations again with replacement (bootstrap, fixed seed).
    """
    logs = np.log(seconds / reference)
    draws = np.random.default_rng(0).integers(
        logs.shape[1], size=(RESAMPLES, *logs.shape)
    )  # [resample, case, iteration]
    resampled = np.take_along_axis(logs[None], draws, axis=2)
    means = np.median(resampled, axis=2).mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    value = np.median(logs, axis=1).mean()
    return Ratio(*(float(np.exp(number)) for number in (value, low, high)))
