"""A wanted imbalance: weights whose spread is found by bisection."""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np

from moe.routing.base import RoutingContext
from moe.routing.product import ProductSource
from moe.routing.weighted import FloatArray, inclusion, rounded

_GRID = 2.0**-20  # steps of sigma: far coarser than a double, so that all machines end on the same
_CLOSE = 1e-4  # what max/mean is good to: the four decimals that a message shows are accepted
_SPAN = 1e6  # the heaviest expert over the lightest, at most


class Skew(ProductSource):
    """Log-normal weights such that the busiest unit is `max_over_mean` times as busy as the mean.

    by=rank: a unit is a rank of the expert-parallel group, all experts of a rank weigh the same,
    and the mean is over all the ranks of the group, those without experts included.
    by=expert: a unit is an expert, and placement means nothing.

    The n-th heaviest of U units weighs exp(sigma * z), z the (U - n + 1/2) / U quantile of the
    normal distribution; which unit is the n-th is drawn for each layer, or goes by number
    (order=id), and is the same in all steps. sigma is bisected for each layer, so that the largest
    of the units' expected picks of a token, over their mean, is max_over_mean to 1e-4 or better.
    """

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        self.uses_ranks = context.options.by == "rank"
        self._weights = [self._layer_weights(layer) for layer in range(context.num_layers)]

    def weights(self, step: int, layer: int) -> FloatArray:
        return self._weights[layer]

    def _layer_weights(self, layer: int) -> FloatArray:
        run, options = self.context, self.context.options
        if options.by == "rank":
            units, unit_of_expert = np.unique(run.expert_rank[layer], return_inverse=True)
            num_units = run.group_size
        else:
            units = unit_of_expert = np.arange(run.num_experts)
            num_units = run.num_experts
        place = np.argsort(self.order(layer, len(units)))  # 0 for the hottest unit
        sizes = np.bincount(place[unit_of_expert], minlength=len(units))
        sigma = _sigma(tuple(sizes.tolist()), num_units, run.top_k, options.max_over_mean)
        return _unit_weights(len(units), sigma)[place[unit_of_expert]]


@lru_cache(maxsize=256)
def _sigma(sizes: tuple[int, ...], num_units: int, top_k: int, wanted: float) -> float:
    """The spread that makes max/mean of the units' expected picks the wanted one.

    sizes: [U] experts of each unit, the hottest first; num_units: units that the mean is over
    Raises ValueError where no spread with weights within a factor of 1e6 does.
    """
    low, high = 0, int(np.log(_SPAN) / max(2 * _quantiles(len(sizes))[0], 1e-9) / _GRID)
    high = min(high, int(16 / _GRID))
    least, most = (_max_over_mean(sizes, num_units, top_k, one * _GRID) for one in (low, high))
    if not least - _CLOSE <= wanted <= most + _CLOSE:
        nearest = least if wanted < least else most
        raise ValueError(
            f"router.max_over_mean={wanted}: from {least:.4f} to {most:.4f} can be had with this"
            f" placement and top_k={top_k}; nearest: {nearest:.4f}"
        )
    if wanted <= least + _CLOSE:
        return 0.0
    while high - low > 1:
        middle = (low + high) // 2
        if _max_over_mean(sizes, num_units, top_k, middle * _GRID) < wanted:
            low = middle
        else:
            high = middle
    return high * _GRID


def _max_over_mean(sizes: tuple[int, ...], num_units: int, top_k: int, sigma: float) -> float:
    units = np.repeat(np.arange(len(sizes)), sizes)
    chances = inclusion(_unit_weights(len(sizes), sigma)[units], top_k)
    return float(np.bincount(units, chances).max() / (top_k / num_units))


def _unit_weights(num_units: int, sigma: float) -> FloatArray:
    """[U] falling."""
    return rounded(np.exp(sigma * _quantiles(num_units)))


@lru_cache(maxsize=16)
def _quantiles(count: int) -> FloatArray:
    """[count] normal quantiles at (i + 1/2) / count, falling, their sum 0."""
    normal = NormalDist()
    falling = np.array([-normal.inv_cdf((index + 0.5) / count) for index in range(count)])
    falling.flags.writeable = False
    return falling
