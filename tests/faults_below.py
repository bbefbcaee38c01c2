"""Deliberate faults in the shared ground that the strategies stand on: placement, wire, permute."""

from __future__ import annotations

import numpy as np
import torch
from faults import BY_RANK, CHOSEN, PER_COPY, SENT, around, change_result, fault

from comm import permute, placement, wire
from comm.placement import ExpertPlacement
from comm.wire import WIRE_FORMATS, CastFormat, Fp8Block, MxFp8

ENCODED = (*SENT, "deduplicated")  # one_sided writes a plain type into the window in one pass

# -- placement -------------------------------------------------------------------------------------


def sizes(patch, experts_per_rank):
    patch.setattr(placement, "experts_per_rank", experts_per_rank)


@fault("exact", on=CHOSEN)
def remainder_on_the_last_rank(patch):
    """30 experts on 4 ranks as 7 7 7 9"""

    def heaped(num_experts, world_size):
        base, more = divmod(num_experts, world_size)
        return np.array([base] * (world_size - 1) + [base + more])

    sizes(patch, heaped)


@fault("exact", on=CHOSEN)
def blocks_of_the_ceiling(patch):
    """30 experts on 4 ranks as 8 8 8 6"""

    def ceiling(num_experts, world_size):
        ends = np.minimum(np.arange(world_size + 1) * -(-num_experts // world_size), num_experts)
        return np.diff(ends)

    sizes(patch, ceiling)


@fault("exact", on=CHOSEN, run="round_robin")
def remainder_of_round_robin_on_the_last_rank(patch):
    """dealt out one by one, but the ranks' blocks are cut as 7 7 7 9"""
    remainder_on_the_last_rank(patch)


@fault("exact", on=CHOSEN)
def two_experts_swapped(patch):
    """the first and the last expert live on each other's rank, with their weights"""

    def swap(experts):
        experts = experts.copy()
        experts[[0, -1]] = experts[[-1, 0]]
        return experts

    change_result(patch, placement, "contiguous", swap)
    patch.setitem(placement.PLACEMENTS, "contiguous", placement.contiguous)


@fault("correctness")
def weights_of_another_expert(patch):
    """each slot holds the weights of the next expert of its rank"""
    change_result(patch, ExpertPlacement, "local_experts", lambda experts: np.roll(experts, 1))


@fault("correctness")
def choices_of_another_expert(patch):
    """experts 0 and 1, of one rank, are looked up in each other's slot"""

    def look_up(self):
        slots = np.argsort(self.physical_to_logical)
        slots[[0, 1]] = slots[[1, 0]]
        return slots

    patch.setattr(ExpertPlacement, "logical_to_physical", property(look_up))


# -- wire ------------------------------------------------------------------------------------------


def change_hidden(patch, wire_format, change):
    """The format puts change(bytes of the values) on the wire."""

    def encode(original, self, rows):
        parts = original(self, rows)
        return [(kind, change(part) if kind == "hidden" else part) for kind, part in parts]

    around(patch, wire_format, "encode", encode)


def change_scales(patch, wire_format, change):
    def encode(original, self, rows):
        parts = dict(original(self, rows))
        return [("hidden", parts["hidden"]), ("scales", change(parts["scales"].clone()))]

    around(patch, wire_format, "encode", encode)


@fault("correctness", on=ENCODED)
def second_half_of_a_row_lost(patch):
    """the second half of each row arrives as zeros"""

    def lose(values):
        row_bytes = values.shape[1]
        return values * (torch.arange(row_bytes) < row_bytes // 2)

    change_hidden(patch, CastFormat, lose)


@fault("correctness", on=ENCODED)
def half_of_the_mantissa_lost(patch):
    """the last four of bf16's eight significant bits are cut off"""

    def encode(original, self, rows):
        kept = rows.to(self.dtype).view(torch.int16) & ~0xF
        return original(self, kept.view(self.dtype))

    around(patch, CastFormat, "encode", encode)


@fault("correctness")
def decoded_one_value_off(patch):
    """each row arrives shifted by one value"""
    change_result(patch, CastFormat, "decode", lambda rows: rows.roll(1, 1))


@fault("correctness", on=ENCODED)
def bytes_swapped(patch):
    """the two bytes of each value arrive the other way round"""
    change_hidden(patch, CastFormat, lambda values: values.unflatten(1, (-1, 2)).flip(2).flatten(1))


@fault("exact")
def bf16_travels_as_fp32(patch):
    """nothing is narrowed for the wire"""
    patch.setitem(WIRE_FORMATS, "bf16", WIRE_FORMATS["fp32"])


@fault("exact", run="fp8")
def fp8_travels_as_bf16(patch):
    """what should be one byte a value are two"""
    patch.setitem(WIRE_FORMATS, "fp8_block128", WIRE_FORMATS["bf16"])


@fault("correctness", run="fp8")
def dispatch_scale_off_by_two(patch):
    """fp8_block128 sends twice the scale of every block"""

    def double(scales):
        return (2 * scales.view(torch.float32)).view(torch.uint8)

    change_scales(patch, Fp8Block, double)


@fault("correctness", run="fp8")
def combine_scale_off_by_two(patch):
    """mxfp8 sends one more than the exponent of every block"""
    change_scales(patch, MxFp8, lambda exponents: exponents + 1)


@fault("correctness", run="fp8")
def one_block_off_by_two(patch):
    """mxfp8 sends one more than the exponent of the first block only"""

    def first(exponents):
        exponents[:, 0] += 1
        return exponents

    change_scales(patch, MxFp8, first)


@fault("correctness", run="fp8")
def scale_of_the_partial_block_lost(patch):
    """fp8_block128 sends scale one for the last, partial block"""

    def forget(scales):
        scales.view(torch.float32)[:, -1] = 1
        return scales

    change_scales(patch, Fp8Block, forget)


@fault("exact", run="fp8", on=ENCODED)
def no_scale_for_the_partial_block(patch):
    """mxfp8 sends no scale for the last, partial block"""
    change_scales(patch, MxFp8, lambda exponents: exponents[:, :-1])

    def decode(original, self, packed, width, dtype):
        ones = torch.full((len(packed), 1), 127, dtype=torch.uint8)
        return original(self, torch.cat([packed, ones], 1), width, dtype)

    around(patch, MxFp8, "decode", decode)


@fault("correctness", run="fp8")
def scales_not_applied(patch):
    """the receiver takes fp8 values as they are"""
    around(
        patch,
        wire,
        "apply_scales",
        lambda original, hidden, scales, *rest: original(hidden, torch.ones_like(scales), *rest),
    )


# -- permute ---------------------------------------------------------------------------------------


@fault("correctness", on=("all_to_all", *BY_RANK))
def order_not_inverted(patch):
    """rows go back in the order in which they came"""
    patch.setattr(permute, "inverse", lambda order, *_: order)


@fault("correctness", on=("all_to_all", "padded"))
def regrouped_one_row_off(patch):
    """every expert's first row is the last one of the expert before"""
    change_result(patch, permute, "regroup_by_expert", lambda index: index.roll(1))


@fault("correctness", on=("all_to_all",))
def not_regrouped(patch):
    """experts take rows in the order of their sources"""
    patch.setattr(permute, "regroup_by_expert", lambda rows: torch.arange(int(rows.sum())))


@fault("correctness", on=PER_COPY)
def choices_one_row_off(patch):
    """each row is filled from the choice of the row before"""
    change_result(patch, permute, "order_by_slot", lambda found: (found[0].roll(1), found[1]))


@fault("correctness")
def summed_without_weights(patch):
    """the weighted sum is a plain one"""

    def plain(original, rows, index, first_row, weights=None):
        return original(rows, index, first_row)

    around(patch, permute, "weighted_sum", plain)


@fault("correctness")
def last_term_of_a_sum_lost(patch):
    """every sum over rows leaves out its last row"""

    def shorter(original, rows, index, first_row, weights=None):
        weights = None if weights is None else weights[:-1]
        return original(rows, index[:-1], first_row.clamp(max=max(len(index) - 1, 0)), weights)

    around(patch, permute, "weighted_sum", shorter)


@fault("correctness")
def returned_row_added_twice(patch):
    """the first row of the first sum is added in place of the second one too"""

    def twice(original, rows, index, first_row, weights=None):
        index = index.clone()
        index[1:2] = index[:1]
        return original(rows, index, first_row, weights)

    around(patch, permute, "weighted_sum", twice)


@fault("correctness", on=BY_RANK)
def partial_sums_in_rank_order(patch):
    """partial sums are added as they lie, not token by token"""
    change_result(
        patch,
        permute,
        "rows_in_token_order",
        lambda found: (torch.arange(len(found[0])), found[1]),
    )


@fault("correctness", on=PER_COPY)
def outputs_in_slot_order(patch):
    """experts' outputs are added as they lie, not token by token"""
    change_result(
        patch,
        permute,
        "rows_in_choice_order",
        lambda found: (found[0].sort().values, *found[1:]),
    )


@fault("correctness", on=BY_RANK)
def local_slots_one_off(patch):
    """a rank takes the choices of the slots one before its own"""

    def shifted(original, slots, first_slot, num_local):
        return original(slots, max(first_slot - 1, 0), num_local)

    around(patch, permute, "local_choices", shifted)


@fault("exact", on=("rank_dedup", "two_hop", "deduplicated"))
def last_rank_never_hit(patch):
    """no token is sent to the last rank, or the last node"""

    def forget(hit):
        hit = hit.clone()
        hit[-1] = False
        return hit

    change_result(patch, permute, "ranks_hit", forget)
