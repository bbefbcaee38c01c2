"""Deliberate faults in who is chosen and with which weight: what goes into a dispatch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from faults import BY_RANK, DRAWN, EVERY, around, change_destinations, change_result, fault

from comm.analytic.law import NoLaw
from comm.dispatch.base import Dispatcher
from moe.routing.base import Choice
from moe.routing.product import HotRank
from moe.routing.uniform import UniformSubsets
from moe.synthetic import topk_ids


def change_weights(patch, change):
    def dispatch(original, self, hidden, ids, weights, slots=None):
        return original(self, hidden, ids, change(weights), slots)

    around(patch, Dispatcher, "dispatch_async", dispatch)


@fault("correctness")
def one_weight_doubled(patch):
    """the weight of one choice of each rank's first token counts twice"""

    def double_first(weights):
        weights = weights.clone()
        weights[:1, :1] *= 2
        return weights

    change_weights(patch, double_first)


@fault("correctness", on=(*EVERY, "renormalized"))
def all_weights_doubled(patch):
    """every router weight counts twice, which RMSNorm hides behind the combine"""
    change_weights(patch, lambda weights: 2 * weights)


@fault("correctness", on=(*EVERY, "renormalized"))
def weights_applied_twice(patch):
    """every router weight is squared: applied on both sides of the wire"""
    change_weights(patch, lambda weights: weights * weights)


@fault("correctness")
def weights_of_another_token(patch):
    """each token is summed with the weights of its neighbour"""
    change_weights(patch, lambda weights: weights.roll(1, 0))


def draw(patch, choose, law=None):
    """The uniform router answers choose(draw of E experts, first token) -> ids [T, K], where `draw`
    is a function of E; law: what it says it follows."""

    def choice(self, step, layer, first_token, num_tokens):
        run = self.context

        def uniform(num_experts):
            return topk_ids(run.seed, step, layer, first_token, num_tokens, num_experts, run.top_k)

        return Choice(choose(uniform, first_token))

    patch.setattr(UniformSubsets, "choose", choice)
    if law is not None:
        patch.setattr(UniformSubsets, "law", law)


def mask_choices(patch):
    """Of every three tokens, the first chooses nothing and the second one expert fewer."""

    def choose(uniform, first_token):
        ids = uniform(30)
        turn = (first_token + np.arange(len(ids))) % 3
        ids[turn == 0] = -1
        ids[turn == 1, -1] = -1
        return ids

    draw(patch, choose, NoLaw("some choices are masked"))


@fault("exact")
def masked_wraps_to_the_last_expert(patch):
    """-1 reads the last entry of the table of slots"""
    mask_choices(patch)

    def slots(original, self, ids):
        return original(self, torch.where(ids < 0, self.setup.placement.num_experts - 1, ids))

    around(patch, Dispatcher, "_slots", slots)


@fault("exact", on=BY_RANK)
def masked_token_sent(patch):
    """a token that chose nothing goes to rank 0 all the same"""
    mask_choices(patch)

    def destinations(hit, slots):
        hit = hit.clone()
        hit[0] |= ~hit.any(0)
        return hit

    change_destinations(patch, destinations)


@fault("expected", on=("rank_dedup", "two_hop", "deduplicated"))
def half_of_the_experts_chosen(patch):
    """the uniform router draws from the first half of the experts only"""
    draw(patch, lambda uniform, first_token: uniform(15))


@fault("expected", on=DRAWN)
def experts_chosen_close_to_home(patch):
    """the uniform router draws from the experts of the token's own rank only"""
    first_expert = {0: 0, 9: 8, 14: 23}  # by the first token of a rank; rank 2 has none
    draw(patch, lambda uniform, first_token: uniform(7) + first_expert[first_token])


@fault("expected", on=("all_to_all", "one_sided"), run="hot rank")
def another_rank_is_hot(patch):
    """the router heats the experts of rank 1 and says that it were those of rank 0"""

    def choose(original, self, *arguments):
        with pytest.MonkeyPatch.context() as while_it_draws:
            change_result(while_it_draws, HotRank, "weights", lambda weights: np.roll(weights, 8))
            return original(self, *arguments)

    around(patch, HotRank, "choose", choose)
