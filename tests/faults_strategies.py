"""Deliberate faults in what one strategy has of its own: two hops, padding, shared memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from faults import SHARED, around, change_result, fault, flipped
from faults_counting import leave_out, recount

from comm import permute
from comm.dispatch import by_rank, padded, two_hop
from comm.dispatch.hop import Hop
from comm.dispatch.shared_round import SharedRound
from comm.dispatch.two_hop import TwoHop
from comm.meter import EVERY_RANK

HOPS = ("two_hop", "hierarchical_allgather")
PADDED = ("padded", "renormalized")

# -- two hops --------------------------------------------------------------------------------------


@fault("exact", on=("two_hop",))
def handed_to_a_second_rank_of_the_node(patch):
    """a proxy also hands a row to a mate that it is not for"""
    change_result(patch, TwoHop, "_inside", lambda hit: flipped(hit, (~hit).nonzero()[:1]))


@fault("exact", on=HOPS)
def sent_twice_over_a_boundary(patch):
    """a token goes to two ranks of another node, and from both to all that it is for"""

    def to_proxies(original, self, hit):
        sent, node = original(self, hit).clone(), self.setup.node_of_rank
        away = [rank for rank in range(len(node)) if node[rank] != node[self.setup.rank]]
        for token in sent[away].any(0).nonzero()[:1, 0].tolist():
            sent[away, token] = True
        return sent

    around(patch, TwoHop, "_to_proxies", to_proxies)


@fault("exact", on=HOPS)
def proxy_of_another_local_index(patch):
    """on other nodes a token is taken in by the proxy of its source's neighbour"""

    def one_further(original, rank, node_of_rank):
        proxies = original(rank, node_of_rank)
        for node in set(proxies) - {node_of_rank[rank]}:
            members = [place for place, other in enumerate(node_of_rank) if other == node]
            proxies[node] = members[(members.index(proxies[node]) + 1) % len(members)]
        return proxies

    around(patch, two_hop, "proxies_of", one_further)


@fault("exact", on=HOPS)
def handed_on_by_the_first_rank_alone(patch):
    """all tokens of a node have the same proxy on another one: its first rank"""

    def first(original, rank, node_of_rank):
        proxies = original(rank, node_of_rank)
        return {
            node: proxy if node == node_of_rank[rank] else node_of_rank.index(node)
            for node, proxy in proxies.items()
        }

    around(patch, two_hop, "proxies_of", first)


def inside_a_node(transport):
    return transport.group.size < dist.get_world_size()


@fault("correctness", on=HOPS)
def partial_lost_in_the_sum_of_a_node(patch):
    """a proxy leaves the last answer of its mates out of its sums"""

    def sums(original, self, *answers):
        if inside_a_node(self.transport):
            answers = [torch.cat([answer[:-1], 0 * answer[-1:]]) for answer in answers]
        return original(self, *answers)

    around(patch, Hop, "sum_answers", sums)


@fault("correctness", on=HOPS)
def row_of_another_token_handed_on(patch):
    """a proxy hands on the row that lies before the one it means"""

    def start(original, transport, position, rows, *rest):
        rows = rows.roll(1, 0) if inside_a_node(transport) else rows
        return original(transport, position, rows, *rest)

    around(patch, by_rank, "start_hop", start)


@fault("exact", on=("two_hop", "hierarchical_allgather"))
def second_hop_not_counted(patch):
    """what a proxy hands on inside its node passes the meter by"""
    recount(patch, lambda booking: None if booking.ranks is not EVERY_RANK else booking)


# -- padding ---------------------------------------------------------------------------------------


@fault("exact", on=PADDED)
def one_row_too_much_for_each_slot(patch):
    """the capacity is one too large"""
    change_result(patch, padded, "slot_capacity", lambda capacity: capacity + 1)


@fault("exact", on=PADDED)
def one_row_too_few_for_each_slot(patch):
    """the capacity is one too small: rounded down"""
    change_result(patch, padded, "slot_capacity", lambda capacity: capacity - 1)


@fault("correctness", on=PADDED)
def last_choices_of_a_slot_kept(patch):
    """where a slot is too full, the first choices are dropped in place of the last ones"""

    def keep_last(original, rows_per_slot, capacity):
        first, place = original(rows_per_slot, capacity)
        slot = place // capacity
        return first + (rows_per_slot - capacity).clamp(min=0)[slot], place

    around(patch, permute, "first_of_each_slot", keep_last)


@fault("correctness", on=("renormalized",))
def weights_of_dropped_experts_lost(patch):
    """what is kept does not take over the weight of what was dropped"""

    def keep(weights, wanted, kept):
        return torch.where(kept, weights, 0)

    patch.setattr(padded, "renormalised", keep)


@fault("correctness", on=("renormalized",))
def weights_scaled_by_the_number_dropped(patch):
    """kept weights grow by the number of choices, not by their weights"""

    def scale(weights, wanted, kept):
        factor = wanted.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
        return torch.where(kept, weights * factor, 0)

    patch.setattr(padded, "renormalised", scale)


@fault("correctness", on=("padded",))
def weights_renormalised_unasked(patch):
    """kept weights take over those of dropped experts although nobody said so"""

    def settled(original, self, result):
        handle = result.handle
        weights = padded.renormalised(handle.weights, handle.wanted, handle.kept)
        return replace(result, handle=replace(handle, weights=weights))

    around(patch, padded.Padded, "_settled", settled)


@fault("correctness", on=PADDED)
def filled_rows_taken_for_packed_ones(patch):
    """experts take a source's rows as if no empty ones lay between them"""

    def regroup(original, rows_from, capacity=None):
        return original(rows_from)

    around(patch, permute, "regroup_by_expert", regroup)


@fault("exact", on=("padded", "renormalized"))
def empty_rows_booked_as_hidden(patch):
    """padding counts as values"""
    recount(patch, lambda booking: replace(booking, empty=None))


@fault("exact", on=("padded", "renormalized"))
def filled_rows_booked_as_padding(patch):
    """a slot's whole room counts as padding"""

    def change(booking):
        return booking if booking.empty is None else replace(booking, empty=booking.out)

    recount(patch, change)


# -- shared memory ---------------------------------------------------------------------------------


@fault("correctness", on=SHARED)
def row_taken_from_the_round_before(patch):
    """a rank takes the last row of a round before it is there: what the memory held before"""

    def take(original, self, index, entry_bytes=0):
        rows = original(self, index, entry_bytes)
        rows[-1:] = before(self).index_select(0, torch.from_numpy(index[-1:]))
        return rows

    def take_to_answer(original, self, index, entry_bytes, dtype):
        rows, lent = original(self, index, entry_bytes, dtype)
        rows[-1:] = before(self).index_select(0, torch.from_numpy(index[-1:])).view(dtype)
        return rows, lent

    def take_runs(original, self, starts, lengths):
        rows = original(self, starts, lengths)
        rank = max((rank for rank, length in enumerate(lengths) if length), default=0)
        last = rank * self.stride + starts[rank] + lengths[rank] - 1
        rows[-1:] = before(self)[last : last + 1]
        return rows

    around(patch, SharedRound, "take", take)
    around(patch, SharedRound, "take_to_answer", take_to_answer)
    around(patch, SharedRound, "take_runs", take_runs)


def before(shared_round):
    """The table of the round before: the other copy of the window."""
    shared_round._window._round -= 1
    table = shared_round.table
    shared_round._window._round += 1
    return table


@fault("correctness", on=SHARED)
def rows_taken_one_place_further_on(patch):
    """every run of rows is taken from one row behind its beginning"""

    def further(heard):
        starts, lengths = heard
        return starts + 1, lengths

    change_result(patch, SharedRound, "hear_announced", further)


@fault("correctness", on=("one_sided",))
def answers_taken_one_place_further_on(patch):
    """experts say that a source's answers begin one row behind where they do"""

    def tell(original, self, words, lengths):
        return original(self, words + 1, lengths)

    around(patch, SharedRound, "tell", tell)


@fault("correctness", on=("one_sided",))
def wrong_numbers_of_tokens(patch):
    """the list names for each place the token of the place before"""

    def lay_out_list(original, self, ids):
        return original(self, np.roll(ids, 1))

    around(patch, SharedRound, "lay_out_list", lay_out_list)


@fault("correctness", on=("deduplicated",))
def answers_laid_out_for_another_rank(patch):
    """answers are put into the region of the source before"""

    def hand_back(original, self, packed, parts, starts, order):
        rolled = torch.cat([packed[-1:], packed[:-1]])
        return original(self, rolled, parts, starts, order)

    around(patch, SharedRound, "hand_back", hand_back)


@fault("exact", on=("one_sided",))
def numbers_of_tokens_not_counted(patch):
    """the list by which experts find their rows passes the meter by"""
    leave_out(patch, "ids")


@fault("exact", on=SHARED, run="fp8")
def scales_in_shared_memory_not_counted(patch):
    """the meter is not told of the block scales"""
    leave_out(patch, "scales")


@fault("exact", on=("one_sided",))
def a_row_counted_once_however_often_taken(patch):
    """a rank that takes a token's row for several of its experts takes it once"""

    def change(booking):
        rows = booking.parts and booking.parts[0][0] == "ids"
        return replace(booking, out=[min(n, 1) for n in booking.out]) if rows else booking

    recount(patch, change)


@fault("conserved", on=SHARED)
def last_row_taken_not_counted(patch):
    """takers book all rows of the last rank but one"""

    def change(booking):
        return replace(booking, back=[*booking.back[:-1], max(booking.back[-1] - 1, 0)])

    recount(patch, change)
