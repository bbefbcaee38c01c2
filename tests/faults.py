"""Deliberate faults, one function each, planted in a run by patching what the ranks call.

A fault patches every rank alike, and keeps counts and rows consistent where ranks must agree, so
that a run ends in a verdict or in an error, never in ranks that wait for one another. Its docstring
says what is wrong.

    faults.py             rows, as all strategies send them
    faults_choices.py     who is chosen, and with which weight
    faults_strategies.py  what one strategy has of its own: two hops, padding, shared memory
    faults_runs.py        runs with more to them: replicas, groups, chunks, shards, four bits
    faults_training.py    gradients, on their way back and between ranks
    faults_counting.py    the meter, and rows of another width than it is told of
    faults_below.py       the shared ground: placement, wire, permute
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from run_configs import TO_ALL, VARIANTS

from comm import permute
from comm.dispatch.allgather import AllGather
from comm.dispatch.hierarchical_allgather import HierarchicalAllGather
from comm.dispatch.rank_dedup import RankDedup
from comm.dispatch.two_hop import TwoHop
from comm.transport import PendingRows, Transport
from moe.settings import DispatcherConfig

DISPATCHERS = VARIANTS | {
    "renormalized": DispatcherConfig("padded", capacity_factor=0.6, renormalize=True)
}
EVERY = tuple(VARIANTS)
PER_COPY = ("all_to_all", "padded", "one_sided")
BY_RANK = ("rank_dedup", "allgather", "two_hop", "hierarchical_allgather", "deduplicated")
SENT = ("all_to_all", "rank_dedup", "allgather", "two_hop", "hierarchical_allgather", "padded")
COMPACT = tuple(name for name in SENT if name != "padded")  # every row that is sent is filled
SHARED = ("one_sided", "deduplicated")
A_FEW = ("all_to_all", "rank_dedup", "two_hop", "padded", "one_sided")
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


FAULTS: dict[str, Fault] = {}  # those of this file, and of every other that was imported


def every_fault() -> dict[str, Fault]:
    for part in ("choices", "strategies", "runs", "training", "counting", "below"):
        import_module(f"faults_{part}")
    return FAULTS


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
