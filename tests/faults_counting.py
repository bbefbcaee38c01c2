"""Deliberate faults in what is counted: widths, kinds, places, and bytes left out or told twice."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from faults import BY_RANK, CHOSEN, around, change_result, fault

from comm.meter import Traffic, TrafficMeter
from comm.transport import Transport
from comm.wire import CastFormat


@fault("exact")
def rows_padded_to_the_hidden_width(patch):
    """rows travel at twice the latent width, filled up with zeros"""

    def encode(original, self, rows):
        return original(self, torch.nn.functional.pad(rows, (0, rows.shape[1])))

    def decode(original, self, packed, width, dtype):
        return original(self, packed, 2 * width, dtype)[:, :width]

    around(patch, CastFormat, "encode", encode)
    around(patch, CastFormat, "decode", decode)


@fault("do not sum to")
def padding_not_counted(patch):
    """rows are padded and the meter is told of the values alone"""

    def all_to_all(original, self, position, message, parts, out, back):
        padded = torch.nn.functional.pad(message, (0, 64))
        return original(self, position, padded, parts, out, back)[:, : message.shape[1]]

    around(patch, Transport, "all_to_all", all_to_all)


def recount(patch, change):
    """The meter books change(position, message, parts, out, back) instead."""

    def record(original, self, *message):
        changed = change(*message)
        if changed is not None:
            original(self, *changed)

    around(patch, TrafficMeter, "record", record)


def rename_kind(patch, kind, name):
    def change(position, message, parts, out, back):
        parts = [(name if part == kind else part, rows) for part, rows in parts]
        return position, message, parts, out, back

    recount(patch, change)


@fault("do not sum to", run="fp8")
def scales_not_counted(patch):
    """the meter is not told of the block scales"""

    def change(position, message, parts, out, back):
        return position, message, [part for part in parts if part[0] != "scales"], out, back

    recount(patch, change)


@fault("exact", run="fp8")
def scales_booked_as_hidden(patch):
    """block scales are counted as values"""
    rename_kind(patch, "scales", "hidden")


@fault("exact", on=BY_RANK)
def ids_booked_as_weights(patch):
    """expert ids are counted as router weights"""
    rename_kind(patch, "ids", "weights")


@fault("exact")
def hidden_booked_as_padding(patch):
    """values are counted as padding"""
    rename_kind(patch, "hidden", "padding")


@fault("exact")
def counts_not_counted(patch):
    """the exchange of counts passes the meter by"""
    recount(patch, lambda *message: None if message[2][0][0] == "counts" else message)


@fault("exact")
def combine_not_counted(patch):
    """the way back passes the meter by"""
    recount(patch, lambda *message: None if message[0].phase == "combine" else message)


@fault("exact")
def one_rank_not_counted(patch):
    """rank 1 alone counts nothing"""
    recount(patch, lambda *message: None if dist.get_rank() == 1 else message)


@fault("exact")
def self_counted_as_remote(patch):
    """rows that a rank keeps are booked to its neighbour"""

    def move(meters):
        for rank, meter in enumerate(meters):
            for counted in (meter.sent, meter.rows):
                counted[..., (rank + 1) % len(meters)] += counted[..., rank]
                counted[..., rank] = 0

    def assemble(original, meters):
        move(meters)
        return original(meters)

    around(patch, Traffic, "assemble", assemble)


@fault("exact")
def self_not_counted(patch):
    """rows that a rank keeps are not counted"""

    def change(position, message, parts, out, back):
        out = [n * (rank != dist.get_rank()) for rank, n in enumerate(out)]
        back = [n * (rank != dist.get_rank()) for rank, n in enumerate(back)]
        return position, message[: sum(out)], parts, out, back

    recount(patch, change)


@fault("exact")
def counted_twice(patch):
    """every message is booked twice"""

    def record(original, self, *message):
        original(self, *message)
        original(self, *message)

    around(patch, TrafficMeter, "record", record)


@fault("exact")
def combine_booked_as_dispatch(patch):
    """the way back is booked to the phase of the way out"""
    recount(patch, lambda position, *rest: (replace(position, phase="dispatch"), *rest))


@fault("exact", on=CHOSEN)  # every layer of an all-gather moves the same
def booked_to_the_wrong_layer(patch):
    """the two layers' bytes change places"""
    recount(patch, lambda position, *rest: (replace(position, layer=1 - position.layer), *rest))


@fault("exact")
def booked_as_backward(patch):
    """the forward pass is booked as the backward one"""
    recount(patch, lambda position, *rest: (replace(position, direction="backward"), *rest))


@fault("exact")
def warm_up_counted(patch):
    """the meter cannot be switched off"""
    patch.setattr(TrafficMeter, "enabled", property(lambda self: True, lambda self, on: None))


@fault("exact")
def source_and_destination_change_places(patch):
    """the whole matrix is put together transposed"""

    def transpose(traffic):
        arrays = ("bytes", "rows", "received")
        turned = {name: getattr(traffic, name).swapaxes(-1, -2) for name in arrays}
        return replace(traffic, **turned)

    change_result(patch, Traffic, "assemble", transpose)


@fault("conserved")
def received_rows_miscounted(patch):
    """receivers miss one row of every message"""

    def change(position, message, parts, out, back):
        return position, message, parts, out, [*back[:-1], back[-1] - 1]

    recount(patch, change)
