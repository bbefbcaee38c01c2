"""The laws that a router may claim to follow: what a prediction of averages is made from.

A law says how the set of K experts of a token is distributed, nothing about ranks. `traffic` turns
it into rows and bytes. Tokens are independent of one another under all of them but `Markov`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Uniform:
    """Every set of K experts is equally likely."""


@dataclass(frozen=True)
class Weighted:
    """A set of K experts is as likely as the product of its experts' weights.

    weights: float64 [V, E] variants, >= 0, at least K of each positive; a common factor is nothing
    variant: int [steps, L] which one holds in a layer of a step
    """

    weights: NDArray[np.float64]
    variant: NDArray[np.int64]


@dataclass(frozen=True)
class Markov:
    """Token by token, each expert stays with probability `reuse`; those that leave are replaced by
    a uniform draw from the experts that were not in the set.

    sequence: tokens of a chain; the first of each (global token % sequence == 0) is drawn uniformly
    """

    reuse: float
    sequence: int


@dataclass(frozen=True)
class GroupLimited:
    """Independent uniform scores; experts are taken inside the best groups only.

    group_score: "max" (a group is ranked by its best expert) or "top2_sum"
    """

    num_expert_groups: int
    num_limited_groups: int
    group_score: str


@dataclass(frozen=True)
class NoLaw:
    """No closed form; the reason is shown instead of a verdict."""

    reason: str


Law = Uniform | Weighted | Markov | GroupLimited | NoLaw
