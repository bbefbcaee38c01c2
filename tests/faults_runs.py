"""Deliberate faults in runs with more to them: replicas, groups, chunks, shards, four bits."""

from __future__ import annotations

import numpy as np
import torch
from faults import A_FEW, around, change_result, fault
from faults_counting import move, recount

import comm.rebalance
import moe.layer
from comm import wire
from comm.dispatch.base import Dispatcher
from comm.dispatch.sharded import Sharded
from comm.replicas import ReplicaChooser
from comm.wire import WIRE_FORMATS
from moe.experts import Experts
from moe.plan import Plan

# -- replicas and experts that move ----------------------------------------------------------------


@fault("exact", run="rebalance", on=("all_to_all", "rank_dedup", "two_hop", "one_sided"))
def served_by_another_replica_than_recorded(patch):
    """rows go to the first replica of an expert, whatever was chosen and written down"""

    def dispatch(original, self, hidden, ids, weights, slots=None):
        return original(self, hidden, ids, weights, None)

    around(patch, Dispatcher, "dispatch_async", dispatch)


@fault("exact", run="rebalance", on=A_FEW)
def two_replicas_compute_one_choice(patch):
    """the second choice of a token meets another replica of the first one's expert"""

    def dispatch(original, self, hidden, ids, weights, slots=None):
        if slots is None:  # before the experts moved there are no replicas
            return original(self, hidden, ids, weights)
        slots = slots.clone()
        replicas = torch.from_numpy(self.setup.placement.replicas)[ids[:, 0]]  # [T, n]
        other = torch.where(replicas == slots[:, :1], -1, replicas).amax(1)
        slots[:, 1] = torch.where(other >= 0, other, slots[:, 1])
        return original(self, hidden, ids, weights, slots)

    around(patch, Dispatcher, "dispatch_async", dispatch)


@fault("expert 0 is served by slot", run="rebalance", on=A_FEW)
def replicas_of_another_expert(patch):
    """choices are looked up one expert further on, and so recorded"""

    def slots(original, self, ids, numbers):
        return original(self, (ids + 1) % self.placement.num_experts, numbers)

    around(patch, ReplicaChooser, "slots", slots)


@fault("exact", run="rebalance", on=("all_to_all",))
def moved_from_the_wrong_rank(patch):
    """an expert comes from the neighbour of the rank that held it"""

    def astray(found):
        found = found.copy()
        expert, source, destination = found[0]
        found[0, 1] = next(rank for rank in range(4) if rank not in (source, destination))
        return found

    def rows(original, *arguments):
        return original(*arguments).clamp(min=0)  # the neighbour has another expert to send

    change_result(patch, comm.rebalance, "moves", astray)
    around(patch, comm.rebalance, "_rows", rows)


@fault("exact", run="rebalance", on=("all_to_all",))
def experts_moved_that_were_there(patch):
    """every slot's expert is sent anew, from the rank to itself where it was there"""

    def all_slots(before, after):
        source = before.slot_rank[before.logical_to_physical[after.physical_to_logical]]
        return np.stack([after.physical_to_logical, source, after.slot_rank], axis=1)

    patch.setattr(comm.rebalance, "moves", all_slots)


@fault("correctness", run="rebalance", on=("all_to_all", "one_sided"))
def moved_weights_mixed_up(patch):
    """experts that arrive change places"""

    def arranged(original, before, after, rank, weights, received, experts):
        return original(before, after, rank, weights, received.roll(1, 0), experts)

    around(patch, comm.rebalance, "_arranged", arranged)


@fault("correctness", run="rebalance", on=("all_to_all", "one_sided"))
def moved_weights_cut_short(patch):
    """the last bytes of an expert that moves are zeros"""

    def arranged(original, before, after, rank, weights, received, experts):
        received = received.clone()
        received[:, -len(received[0]) // 3 :] = 0
        return original(before, after, rank, weights, received, experts)

    around(patch, comm.rebalance, "_arranged", arranged)


# -- groups and chunks -----------------------------------------------------------------------------


@fault("exact", run="groups")
def served_by_another_group(patch):
    """ranks 0 and 2 serve each other, as if they were the group that 0 and 1 are"""
    patch.setattr(Plan, "groups", ((0, 2), (1, 3)))


@fault("exact", run="chunks")
def last_token_of_the_chunks_lost(patch):
    """a layer's last token is in no chunk"""

    def without_last(original, dispatchers, experts, z, *choices):
        parts = [None if part is None else part[:-1] for part in (z, *choices)]
        output, dropped = original(dispatchers, experts, *parts)
        return torch.cat([output, torch.zeros_like(z[-1:])]), dropped

    around(patch, moe.layer, "routed", without_last)


@fault("correctness", run="chunks")
def chunks_put_together_in_another_order(patch):
    """the outputs of the tokens are those of their neighbours a chunk away"""

    def turned(original, dispatchers, experts, z, *choices):
        output, dropped = original(dispatchers, experts, z, *choices)
        return output.roll(len(z) // 2, 0), dropped

    around(patch, moe.layer, "routed", turned)


@fault("exact", run="chunks", on=("all_to_all", "rank_dedup", "two_hop", "one_sided"))
def all_tokens_in_one_chunk(patch):
    """a layer's tokens travel at once"""

    def at_once(original, dispatchers, *rest):
        return original(dispatchers[:1], *rest)

    around(patch, moe.layer, "routed", at_once)


# -- experts that several ranks share --------------------------------------------------------------

SHARDED = ("all_to_all", "rank_dedup", "two_hop", "padded", "deduplicated")


def change_parts(patch, change):
    """Each rank sends change(rows [M, W] by lane, rows of each lane, own lane) to be summed."""

    def start(original, self, phase, direction, wire, by_lane, rows):
        if phase == "tp_reduce":
            by_lane = change(by_lane.clone(), rows, self.lane)
        return original(self, phase, direction, wire, by_lane, rows)

    around(patch, Sharded, "_start_sum", start)


@fault("correctness", run="shards", on=SHARDED)
def own_shard_left_out(patch):
    """a row's sum over shards has all parts but the one computed at home"""

    def forget(by_lane, rows, lane):
        by_lane[sum(rows[:lane]) : sum(rows[: lane + 1])] = 0
        return by_lane

    change_parts(patch, forget)


@fault("correctness", run="shards", on=SHARDED)
def other_shard_left_out(patch):
    """a row's sum over shards has only the part computed at home"""

    def forget(by_lane, rows, lane):
        by_lane[: sum(rows[:lane])] = 0
        by_lane[sum(rows[: lane + 1]) :] = 0
        return by_lane

    change_parts(patch, forget)


@fault("correctness", run="shards to all", on=("all_to_all", "rank_dedup", "allgather"))
def part_of_a_shard_lost(patch):
    """the last part that a rank computes is zero"""

    def forget(by_lane, rows, lane):
        by_lane[-1:] = 0
        return by_lane

    change_parts(patch, forget)


@fault("correctness", run="shards", on=("all_to_all", "rank_dedup"))
def rows_between_shards_one_place_off(patch):
    """each shard takes the row before for each row that it was handed"""

    def start(original, self, phase, direction, wire, own, rows):
        finish = original(self, phase, direction, wire, own, rows)
        return lambda: finish().roll(1, 0)

    around(patch, Sharded, "_start_share", start)


@fault("correctness", run="shards", on=("all_to_all", "rank_dedup"))
def the_same_shard_on_every_rank(patch):
    """all ranks of a shard group hold the first part of their experts"""

    def made(original, self, *arguments, shard, **rest):
        return original(self, *arguments, shard=(0, shard[1]), **rest)

    around(patch, Experts, "__init__", made)


# -- four-bit formats ------------------------------------------------------------------------------


@fault("correctness", run="mxfp4")
def nibbles_swapped_by_the_sender(patch):
    """the second of two values lies in the low half of their byte"""
    change_result(patch, wire, "quantise_fp4", lambda packed: packed << 4 | packed >> 4)


@fault("correctness", run="nvfp4", on=A_FEW)
def nibbles_swapped_by_the_receiver(patch):
    """the low half of a byte is read as the second value"""

    def unpack(original, hidden, width):
        return original(hidden << 4 | hidden >> 4, width)

    around(patch, wire, "unpack_fp4", unpack)


@fault("correctness", run="nvfp4", on=A_FEW)
def signs_of_four_bit_values_lost(patch):
    """the highest bit of each nibble is cleared"""
    change_result(patch, wire, "quantise_fp4", lambda packed: packed & 0x77)


@fault("exact", run="mxfp4")
def four_bit_values_a_byte_each(patch):
    """two values should share a byte"""
    patch.setitem(WIRE_FORMATS, "mxfp4", WIRE_FORMATS["mxfp8"])


# -- counted ---------------------------------------------------------------------------------------


@fault("exact", run="rebalance", on=("all_to_all", "two_hop"))
def moved_weights_booked_as_dispatch(patch):
    """the weights of experts that move are booked to the rows' phase"""

    def change(booking):
        moved = booking.position.phase == "rebalance"
        return move(phase="dispatch")(booking) if moved else booking

    recount(patch, change)


@fault("exact", run="shards", on=("all_to_all", "rank_dedup"))
def reduced_parts_booked_as_combine(patch):
    """what shards of an expert send each other is booked to the way back"""

    def change(booking):
        reduced = booking.position.phase == "tp_reduce"
        return move(phase="combine")(booking) if reduced else booking

    recount(patch, change)
