"""Perfect balance without chance: picks go round the ranks, and inside a rank round its experts.

The picks of a run have numbers: n = ((step * L + layer) * tokens + token) * K + k, with the tokens
of all ranks. Pick n goes to unit n % U, as that unit's visit number n // U, and a unit serves its
visits with its members in turn:

    U = 3 ranks, experts {0 1} {2 3} {4 5}, K = 2     token 0     1     2     3
                                                      ids   0 2   4 1   3 5   0 2
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comm.analytic.law import Law, NoLaw
from moe.routing.base import Choice, RoutingContext, RoutingSource

IntArray = NDArray[np.int64]


class Balanced(RoutingSource):
    """Over any run of consecutive tokens, the picks of two units differ by at most one.

    The units of a layer are the ranks that hold experts, however many each holds; their picks are
    equal, so the experts of a rank with few of them get more picks each (inside a rank, they differ
    by at most one, too). A rank without experts gets none. Where a token meets a rank ceil(K / U)
    times and some rank has fewer experts than that, the units are the experts instead: equal picks
    for each expert, taken from the ranks in turn.

    An expert counts for the rank with its first slot; replicas take picks elsewhere.
    """

    uses_ranks = True

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        plans = [_plan(ranks, context.top_k) for ranks in context.expert_rank]
        self._members = [members for members, _, _ in plans]
        self._sizes = [sizes for _, sizes, _ in plans]
        self.by_rank = tuple(by_rank for _, _, by_rank in plans)

    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> Choice:
        run, sizes = self.context, self._sizes[layer]
        # picks run on from layer to layer and from step to step, so that remainders even out
        first = ((step * run.num_layers + layer) * run.num_tokens + first_token) * run.top_k
        picks = first + np.arange(num_tokens * run.top_k, dtype=np.int64)
        visit, unit = np.divmod(picks, len(sizes))
        ids = self._members[layer][unit, visit % sizes[unit]]
        return Choice(ids.reshape(num_tokens, run.top_k))

    @property
    def law(self) -> Law:
        units = "rank with experts" if all(self.by_rank) else "expert"
        return NoLaw(f"nothing is left to chance: every {units} gets the same number of picks")


def _plan(expert_rank: IntArray, top_k: int) -> tuple[IntArray, IntArray, bool]:
    """The units of one layer: members int64 [U, most], -1 beyond sizes int64 [U]; ranks or not."""
    holders = [np.flatnonzero(expert_rank == rank) for rank in np.unique(expert_rank)]
    by_rank = min(map(len, holders)) >= -(-top_k // len(holders))
    if not by_rank:
        # the first expert of each rank, then the second ones: neighbours belong to other ranks
        place = np.empty_like(expert_rank)
        for experts in holders:
            place[experts] = np.arange(len(experts))
        holders = list(np.lexsort((expert_rank, place))[:, None])
    sizes = np.array([len(experts) for experts in holders], dtype=np.int64)
    members = np.full((len(holders), sizes.max()), -1, dtype=np.int64)
    for row, experts in zip(members, holders, strict=True):
        row[: len(experts)] = experts
    return members, sizes, by_rank
