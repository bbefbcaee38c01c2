"""Group-limited routing with scores that are pure chance."""

from __future__ import annotations

import numpy as np

from comm.analytic.law import GroupLimited, Law, Uniform
from moe.model import GROUP_SCORES
from moe.philox import Purpose, words_per_item
from moe.routing.base import Choice, RoutingContext, RoutingSource


class BestGroups(RoutingSource):
    """Independent uniform scores for all experts; the K best of the M best groups.

    The experts are cut into num_expert_groups equal groups of consecutive numbers. A group is
    ranked by its best expert (group_score "max") or by the sum of its two best ("top2_sum"). Each
    of the three values is the option's or, where that is None, the model's.
    """

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        options = context.options
        self.num_groups = options.num_expert_groups or context.num_expert_groups
        self.num_limited = options.num_limited_groups or context.num_limited_groups
        self.group_score = options.group_score or context.group_score
        _check(context, self.num_groups, self.num_limited, self.group_score)

    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> Choice:
        run, size = self.context, self.context.num_experts // self.num_groups
        words = words_per_item(
            run.seed, Purpose.GROUP_SCORES, layer, step, first_token, num_tokens, run.num_experts
        )
        # integers, one bit short: the sum of two fits a word, and no sum is rounded
        scores = (words >> np.uint64(1)).reshape(num_tokens, self.num_groups, size)
        best = min(2, size) if self.group_score == "top2_sum" else 1
        group_scores = np.partition(scores, size - best, axis=2)[:, :, size - best :].sum(axis=2)
        kept = _largest(group_scores, self.num_limited)
        inside = np.take_along_axis(scores, kept[:, :, None], axis=1)
        places = _largest(inside.reshape(num_tokens, self.num_limited * size), run.top_k)
        groups = np.take_along_axis(kept, places // size, axis=1)
        return Choice(groups * size + places % size)

    @property
    def law(self) -> Law:
        if self.num_limited == self.num_groups:
            return Uniform()  # the K best of independent scores are any K
        return GroupLimited(self.num_groups, self.num_limited, self.group_score)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest of each row of [T, n], ascending: int64 [T, count]."""
    rest = values.shape[1] - count
    if rest == 0:
        return np.tile(np.arange(count), (len(values), 1))
    # sorted, because the order inside a part differs from processor to processor
    return np.sort(np.argpartition(values, rest, axis=1)[:, rest:], axis=1)


def _check(context: RoutingContext, groups: int, limited: int, group_score: str) -> None:
    experts, top_k = context.num_experts, context.top_k
    if experts % groups:
        nearest = min(
            (n for n in range(1, experts + 1) if experts % n == 0), key=lambda n: abs(n - groups)
        )
        raise ValueError(
            f"router.num_expert_groups={groups}: must divide num_experts={experts};"
            f" nearest: {nearest}"
        )
    size = experts // groups
    least = -(-top_k // size)
    if not least <= limited <= groups:
        raise ValueError(
            f"router.num_limited_groups={limited}: must lie in {least} .. {groups}, so that"
            f" top_k={top_k} experts fit; nearest: {min(max(limited, least), groups)}"
        )
    if group_score not in GROUP_SCORES:
        raise ValueError(f"router.group_score={group_score!r}: must be one of {GROUP_SCORES}")
    if group_score == "top2_sum" and size < 2 and limited < groups:
        raise ValueError(
            f"router.group_score=top2_sum: groups of num_experts={experts} in"
            f" num_expert_groups={groups} have one expert; nearest: max"
        )
