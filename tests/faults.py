"""Deliberate faults, one function each, planted in a run by patching what the ranks call.

A fault patches every rank alike, and keeps counts and rows consistent where ranks must agree, so
that a run ends in a verdict or in an error, never in ranks that wait for one another. Its docstring
says what is wrong.

    faults.py             what strategies share: rows, weights, masked tokens, who is chosen
    faults_strategies.py  what one strategy has of its own: two hops, padding, shared memory
    faults_runs.py        runs with more to them: replicas, groups, chunks, shards, training
    faults_counting.py    the meter, and rows of another width than it is told of
    faults_below.py       the shared ground: placement, wire, permute
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from run_configs import TO_ALL, VARIANTS

from comm import permute
from comm.analytic.law import NoLaw
from comm.dispatch.allgather import AllGather
from comm.dispatch.base import Dispatcher
from comm.dispatch.hierarchical_allgather import HierarchicalAllGather
from comm.dispatch.rank_dedup import RankDedup
from comm.dispatch.two_hop import TwoHop
from comm.transport import PendingRows, Transport
from moe.routing.base import Choice
from moe.routing.uniform import UniformSubsets
from moe.settings import DispatcherConfig
from moe.synthetic import topk_ids

DISPATCHERS = VARIANTS | {
    "renormalized": DispatcherConfig("padded", capacity_factor=0.6, renormalize=True)
}
EVERY = tuple(VARIANTS)
PER_COPY = ("all_to_all", "padded", "one_sided")
BY_RANK = ("rank_dedup", "allgather", "two_hop", "hierarchical_allgather", "deduplicated")
SENT = ("all_to_all", "rank_dedup", "allgather", "two_hop", "hierarchical_allgather", "padded")
COMPACT = tuple(name for name in SENT if name != "padded")  # every row that is sent is filled
SHARED = ("one_sided", "deduplicated")
CHOSEN = tuple(name for name in EVERY if name not in TO_ALL)
DRAWN = tuple(name for name in CHOSEN if name != "padded")  # as many bytes whatever is chosen


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
        assert plant.__name__ not in FAULTS
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


def change_destinations(patch, change):
    """change(hit [R, T], strategy) takes the place of what each strategy sends where."""
    for strategy in (RankDedup, AllGather, TwoHop, HierarchicalAllGather):
        around(
            patch,
            strategy,
            "_destinations",
            lambda original, self, slots: change(original(self, slots), slots),
        )


@dataclass(frozen=True)
class Late:
    """Rows on their way that are altered when they are there."""

    rows: PendingRows
    change: Callable[[torch.Tensor], torch.Tensor]

    def wait(self):
        return self.change(self.rows.wait())


# -- rows ------------------------------------------------------------------------------------------


@fault("exact", on=PER_COPY)
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
    change_destinations(patch, lambda hit, _: flipped(hit, hit.nonzero()[-1:]))


@fault("exact", on=("rank_dedup", "two_hop", "deduplicated"))
def pair_without_expert_sent(patch):
    """a token also goes to a rank that owns none of its experts, or is not its proxy"""
    change_destinations(patch, lambda hit, _: flipped(hit, (~hit).nonzero()[:1]))


def flipped(hit, cells):
    hit = hit.clone()
    for rank, token in cells.tolist():
        hit[rank, token] = ~hit[rank, token]
    return hit


@fault("exact", on=COMPACT)
def row_sent_twice(patch):
    """the last row to the last rank that gets any goes out twice, the second answer is dropped"""
    doubled = {}  # road -> the destination of the second copy, from announce to combine

    def announce(original, self, position, counts, *rest):
        counts = [np.array(count) for count in counts]
        doubled[self] = [rank for rank, count in enumerate(counts) if count.sum()][-1:]
        for rank in doubled[self]:
            counts[rank][counts[rank].nonzero()[0][-1]] += 1
        return original(self, position, counts, *rest)

    def start(original, self, position, message, parts, out, back, *rest):
        out, back = list(out), list(back)
        for rank in doubled[self]:
            if position.phase == "dispatch":
                out[rank] += 1
                message = torch.cat([message, message[-1:]])  # nobody after it gets a row
            else:
                back[rank] += 1
        pending = original(self, position, message, parts, out, back, *rest)
        if doubled[self] and position.phase == "combine":
            return Late(pending, lambda rows: rows[:-1])
        return pending

    around(patch, Transport, "announce", announce)
    around(patch, Transport, "start_all_to_all", start)


@fault("conserved", on=SENT)
def more_rows_taken_than_sent(patch):
    """a rank waits for one row more than its neighbour sends; gloo leaves stale memory there"""

    def start(original, self, position, message, parts, out, back, *rest):
        if position.phase == "combine":
            return original(self, position, message, parts, out, back, *rest)
        source = (self.group.rank + 1) % self.group.size
        back = [n + (rank == source) for rank, n in enumerate(back)]
        stale = sum(back[: source + 1]) - 1
        pending = original(self, position, message, parts, out, back, *rest)
        return Late(pending, lambda rows: torch.cat([rows[:stale], rows[stale + 1 :]]))

    around(patch, Transport, "start_all_to_all", start)


def stale(phase, change):
    """A transport that alters what arrived in one phase: change(rows, what the memory held before).

    Ids are left as they are: what they name must exist, or a rank would end while others wait.
    """

    def plant(patch):
        def start(original, self, position, message, parts, out, back, *rest):
            before = self.staging("received", sum(back), message.shape[1]).clone()
            pending = original(self, position, message, parts, out, back, *rest)
            if position.phase != phase:
                return pending
            ids = sum(part.shape[1] for kind, part in parts if kind == "ids")
            return Late(pending, lambda rows: change(rows, before, ids))

        around(patch, Transport, "start_all_to_all", start)

    return plant


def last_row_stale(received, before, ids):
    filled = received.any(1).nonzero()[-1:, 0]
    received[filled, ids:] = before[filled, ids:]
    return received


@fault("correctness", on=SENT)
def dispatched_row_stale(patch):
    """the last dispatched row is what the receive buffer held before"""
    stale("dispatch", last_row_stale)(patch)


@fault("correctness", on=SENT)
def combined_row_stale(patch):
    """the last combined row is what the receive buffer held before"""
    stale("combine", last_row_stale)(patch)


@fault("correctness", on=SENT)
def dispatched_rows_swapped(patch):
    """the first and the last dispatched row change places"""
    stale("dispatch", lambda rows, *_: swapped(rows))(patch)


@fault("correctness", on=SENT)
def combined_rows_swapped(patch):
    """the first and the last combined row change places"""
    stale("combine", lambda rows, *_: swapped(rows))(patch)


def swapped(rows):
    """Rows with the first and the last filled one in each other's place."""
    filled = rows.any(1).nonzero()[:, 0]
    rows = rows.clone()
    rows[filled[:1]], rows[filled[-1:]] = rows[filled[-1:]], rows[filled[:1]].clone()
    return rows


# -- weights and masked tokens ---------------------------------------------------------------------


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


@fault("expected", on=DRAWN)
def half_of_the_experts_chosen(patch):
    """the uniform router draws from the first half of the experts only"""
    draw(patch, lambda uniform, first_token: uniform(15))


@fault("expected", on=DRAWN)
def experts_chosen_close_to_home(patch):
    """the uniform router draws from the experts of the token's own rank only"""
    first_expert = {0: 0, 9: 8, 14: 23}  # by the first token of a rank; rank 2 has none
    draw(patch, lambda uniform, first_token: uniform(7) + first_expert[first_token])
