"""Deliberate faults, one function each, planted in a run by patching what the ranks call.

A fault patches every rank alike, and keeps counts and rows consistent where ranks must agree, so
that a run ends in a verdict or in an error, never in ranks that wait for one another. Its docstring
says what is wrong.

    faults.py           strategies: rows, weights, masked tokens
    faults_counting.py  the meter, and rows of another width than it is told of
    faults_below.py     the shared ground: placement, wire, permute
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from comm import permute
from comm.dispatch.allgather import AllGather
from comm.dispatch.base import Dispatcher
from comm.dispatch.rank_dedup import RankDedup
from comm.transport import Transport
from moe.synthetic import ROUTERS, RouterKind, topk_ids

EVERY = ("all_to_all", "rank_dedup", "allgather")
BY_RANK = ("rank_dedup", "allgather")
CHOSEN = ("all_to_all", "rank_dedup")  # the strategies whose destinations depend on who owns what


@dataclass(frozen=True)
class Fault:
    """plant: function of a MonkeyPatch, called on every rank before the run
    caught_by: the verdict that must be OUTSIDE, or words of the error that must end the run
    on: the dispatchers it makes sense for; run: which configuration of test_mutations
    """

    plant: Callable[..., None]
    caught_by: str
    on: tuple[str, ...] = EVERY
    run: str = "bf16"


FAULTS: dict[str, Fault] = {}


def fault(caught_by: str, **where):
    def enter(plant):
        FAULTS[plant.__name__] = Fault(plant, caught_by, **where)
        return plant

    return enter


def around(patch, owner, name, wrapper):
    """wrapper(original, *arguments) takes the place of owner.name."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def change_result(patch, owner, name, change):
    """owner.name returns change(result)."""
    around(patch, owner, name, lambda original, *args, **kw: change(original(*args, **kw)))


# -- rows ------------------------------------------------------------------------------------------


@fault("exact", on=("all_to_all",))
def last_choice_dropped(patch):
    """the row of each rank's last expert is neither announced nor sent"""

    def drop(found):
        choice, rows_per_slot = found
        if len(choice):
            rows_per_slot = rows_per_slot.clone()
            rows_per_slot[rows_per_slot.nonzero()[-1]] -= 1
        return choice[:-1], rows_per_slot

    change_result(patch, permute, "order_by_slot", drop)


@fault("exact", on=BY_RANK)
def last_pair_dropped(patch):
    """each rank's last (destination, token) pair is neither announced nor sent"""

    def drop(hit):
        return flipped(hit, hit.nonzero()[-1:])

    for strategy in (RankDedup, AllGather):
        change_result(patch, strategy, "_destinations", drop)


@fault("exact", on=("rank_dedup",))
def pair_without_expert_sent(patch):
    """a token also goes to a rank that owns none of its experts"""
    change_result(patch, RankDedup, "_destinations", lambda hit: flipped(hit, (~hit).nonzero()[:1]))


def flipped(hit, cells):
    hit = hit.clone()
    for rank, token in cells.tolist():
        hit[rank, token] = ~hit[rank, token]
    return hit


@fault("exact")
def row_sent_twice(patch):
    """the last row to the last rank that gets any goes out twice, the second answer is dropped"""
    doubled = []  # the destination of the second copy, from announce to combine

    def announce(original, self, position, counts, *rest):
        counts = [np.array(count) for count in counts]
        doubled[:] = [rank for rank, count in enumerate(counts) if count.sum()][-1:]
        for rank in doubled:
            counts[rank][counts[rank].nonzero()[0][-1]] += 1
        return original(self, position, counts, *rest)

    def all_to_all(original, self, position, message, parts, out, back):
        out, back = list(out), list(back)
        for rank in doubled:
            if position.phase == "dispatch":
                out[rank] += 1
                message = torch.cat([message, message[-1:]])  # nobody after it gets a row
            else:
                back[rank] += 1
        returned = original(self, position, message, parts, out, back)
        return returned[:-1] if doubled and position.phase == "combine" else returned

    around(patch, Transport, "announce", announce)
    around(patch, Transport, "all_to_all", all_to_all)


@fault("conserved")
def more_rows_taken_than_sent(patch):
    """a rank waits for one row more than its neighbour sends; gloo leaves stale memory there"""

    def all_to_all(original, self, position, message, parts, out, back):
        if position.phase == "combine":
            return original(self, position, message, parts, out, back)
        source = (self.world.rank + 1) % self.world.world_size
        back = [n + (rank == source) for rank, n in enumerate(back)]
        stale = sum(back[: source + 1]) - 1
        received = original(self, position, message, parts, out, back)
        return torch.cat([received[:stale], received[stale + 1 :]])

    around(patch, Transport, "all_to_all", all_to_all)


def stale(phase, change):
    """A transport that alters what arrived in one phase; `before` is what the memory held."""

    def plant(patch):
        def all_to_all(original, self, position, message, parts, out, back):
            before = self.staging("received", sum(back), message.shape[1]).clone()
            received = original(self, position, message, parts, out, back)
            return change(received, before) if position.phase == phase else received

        around(patch, Transport, "all_to_all", all_to_all)

    return plant


def last_row_stale(received, before):
    received[-1:] = before[-1:]
    return received


@fault("correctness")
def dispatched_row_stale(patch):
    """the last dispatched row is what the receive buffer held before"""
    stale("dispatch", last_row_stale)(patch)


@fault("correctness")
def combined_row_stale(patch):
    """the last combined row is what the receive buffer held before"""
    stale("combine", last_row_stale)(patch)


@fault("correctness")
def dispatched_rows_swapped(patch):
    """the first and the last dispatched row change places"""
    stale("dispatch", lambda rows, _: swapped(rows))(patch)


@fault("correctness")
def combined_rows_swapped(patch):
    """the first and the last combined row change places"""
    stale("combine", lambda rows, _: swapped(rows))(patch)


def swapped(rows):
    return torch.cat([rows[-1:], rows[1:-1], rows[:1]]) if len(rows) > 1 else rows


# -- weights and masked tokens ---------------------------------------------------------------------


def change_weights(patch, change):
    def dispatch(original, self, hidden, ids, weights):
        return original(self, hidden, ids, change(weights))

    around(patch, Dispatcher, "dispatch", dispatch)


@fault("correctness")
def one_weight_doubled(patch):
    """the weight of one choice of each rank's first token counts twice"""

    def double_first(weights):
        weights = weights.clone()
        weights[:1, :1] *= 2
        return weights

    change_weights(patch, double_first)


@fault("correctness")
def all_weights_doubled(patch):
    """every router weight counts twice, which RMSNorm hides behind the combine"""
    change_weights(patch, lambda weights: 2 * weights)


@fault("correctness")
def weights_applied_twice(patch):
    """every router weight is squared: applied on both sides of the wire"""
    change_weights(patch, lambda weights: weights * weights)


@fault("correctness")
def weights_of_another_token(patch):
    """each token is summed with the weights of its neighbour"""
    change_weights(patch, lambda weights: weights.roll(1, 0))


def mask_choices(patch):
    """Of every three tokens, the first chooses nothing and the second one expert fewer."""

    def choose(seed, step, layer, first_token, num_tokens, num_experts, top_k):
        ids = topk_ids(seed, step, layer, first_token, num_tokens, num_experts, top_k)
        turn = (first_token + np.arange(num_tokens)) % 3
        ids[turn == 0] = -1
        ids[turn == 1, -1] = -1
        return ids

    patch.setitem(ROUTERS, "uniform", RouterKind(choose, law=None))


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

    def destinations(original, self, slots):
        hit = original(self, slots).clone()
        hit[0] |= ~hit.any(0)
        return hit

    for strategy in (RankDedup, AllGather):
        around(patch, strategy, "_destinations", destinations)


@fault("expected", on=("rank_dedup",))
def half_of_the_experts_chosen(patch):
    """the uniform router draws from the first half of the experts only"""

    def choose(seed, step, layer, first_token, num_tokens, num_experts, top_k):
        return topk_ids(seed, step, layer, first_token, num_tokens, num_experts // 2, top_k)

    patch.setitem(ROUTERS, "uniform", RouterKind(choose, law="uniform"))


@fault("expected", on=CHOSEN)
def experts_chosen_close_to_home(patch):
    """the uniform router draws from the experts of the token's own rank only"""
    first_expert = {0: 0, 9: 8, 14: 23}  # by the first token of a rank; rank 2 has none

    def choose(seed, step, layer, first_token, num_tokens, num_experts, top_k):
        ids = topk_ids(seed, step, layer, first_token, num_tokens, 7, top_k)
        return ids + first_expert[first_token]

    patch.setitem(ROUTERS, "uniform", RouterKind(choose, law="uniform"))
