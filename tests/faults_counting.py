"""Deliberate faults in what is counted: widths, kinds, places, and bytes left out or told twice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from faults import BY_RANK, CHOSEN, SENT, Late, around, change_result, fault

from comm.meter import EVERY_RANK, Position, Traffic, TrafficMeter
from comm.transport import Transport
from comm.wire import CastFormat


@fault("exact", on=(*SENT, "deduplicated"))
def rows_padded_to_the_hidden_width(patch):
    """rows travel at twice the latent width, filled up with zeros"""

    def encode(original, self, rows):
        return original(self, torch.nn.functional.pad(rows, (0, rows.shape[1])))

    def decode(original, self, packed, width, dtype):
        return original(self, packed, 2 * width, dtype)[:, :width]

    around(patch, CastFormat, "encode", encode)
    around(patch, CastFormat, "decode", decode)


@fault("do not sum to", on=SENT)
def padding_not_counted(patch):
    """rows are padded and the meter is told of the values alone"""

    def start(original, self, position, message, *rest):
        padded = torch.nn.functional.pad(message, (0, 64))
        pending = original(self, position, padded, *rest)
        return Late(pending, lambda rows: rows[:, : message.shape[1]])

    around(patch, Transport, "start_all_to_all", start)


@dataclass(frozen=True)
class Booking:
    """What the meter is told: of a message, or, where that is None, of rows in shared memory.

    out, back: rows to and from each of `ranks`; empty: those of `out` that are padding
    """

    position: Position
    message: torch.Tensor | None
    parts: list
    out: list[int]
    back: list[int]
    ranks: np.ndarray | slice
    empty: list[int] | None = None

    @property
    def own(self):
        """The place of this rank among `ranks`."""
        rank = dist.get_rank()
        return rank if self.ranks is EVERY_RANK else self.ranks.tolist().index(rank)


def recount(patch, change):
    """The meter books change(booking) instead, nothing where that is None."""

    def record(original, self, position, message, parts, out, back, ranks, empty, group):
        one = change(Booking(position, message, list(parts), list(out), list(back), ranks, empty))
        if one is not None:
            booked = (one.position, one.message, one.parts, one.out, one.back, one.ranks, one.empty)
            original(self, *booked, group)

    def put(original, self, position, parts, rows_to, ranks):
        one = change(Booking(position, None, list(parts), list(rows_to), [0] * len(rows_to), ranks))
        if one is not None:
            original(self, one.position, one.parts, one.out, one.ranks)

    def taken(original, self, position, row_bytes, rows_from, ranks):
        rows_from = list(rows_from)
        one = change(Booking(position, None, [], [0] * len(rows_from), rows_from, ranks))
        if one is not None:
            original(self, one.position, row_bytes, one.back, one.ranks)

    around(patch, TrafficMeter, "record", record)
    around(patch, TrafficMeter, "put", put)
    around(patch, TrafficMeter, "taken", taken)


def rename_kind(patch, kind, name):
    def change(booking):
        parts = [(name if part == kind else part, rows) for part, rows in booking.parts]
        return replace(booking, parts=parts)

    recount(patch, change)


def leave_out(patch, kind):
    def change(booking):
        return replace(booking, parts=[part for part in booking.parts if part[0] != kind])

    recount(patch, change)


@fault("do not sum to", run="fp8", on=SENT)
def scales_not_counted(patch):
    """the meter is not told of the block scales"""
    leave_out(patch, "scales")


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

    def change(booking):
        return None if booking.parts and booking.parts[0][0] == "counts" else booking

    recount(patch, change)


@fault("exact")
def combine_not_counted(patch):
    """the way back passes the meter by"""
    recount(patch, lambda booking: None if booking.position.phase == "combine" else booking)


@fault("exact")
def one_rank_not_counted(patch):
    """rank 1 alone counts nothing"""
    recount(patch, lambda booking: None if dist.get_rank() == 1 else booking)


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

    def change(booking):
        out, back, empty = list(booking.out), list(booking.back), booking.empty
        out[booking.own] = back[booking.own] = 0
        if empty is not None:
            empty = [n * (place != booking.own) for place, n in enumerate(empty)]
        message = None if booking.message is None else booking.message[: sum(out)]
        return replace(booking, message=message, out=out, back=back, empty=empty)

    recount(patch, change)


@fault("exact")
def counted_twice(patch):
    """every message is booked twice"""
    for name in ("record", "put", "taken"):
        around(patch, TrafficMeter, name, twice)


def twice(function, *arguments):
    function(*arguments)
    function(*arguments)


def move(**changes):
    """change for `recount`: another position"""
    return lambda booking: replace(booking, position=replace(booking.position, **changes))


@fault("kernel", on=SENT)
def one_row_too_many_counted(patch):
    """rank 1 books a row of each message twice, to the rank after it"""

    def change(booking):
        if dist.get_rank() != 1 or len(booking.message) == 0:
            return booking
        out = list(booking.out)
        out[(booking.own + 1) % len(out)] += 1
        message = torch.cat([booking.message, booking.message[:1]])
        return replace(booking, message=message, out=out)

    recount(patch, change)


@fault("kernel", on=SENT)
def one_message_passes_the_meter_by(patch):
    """bytes that no prediction knows of travel beside each message, and the meter is not told"""

    def start(original, self, *rest):
        work = original(self, *rest)
        extra = torch.ones(self.group.size, dtype=torch.uint8)
        dist.all_to_all_single(extra.clone(), extra, group=self.group.process_group)
        return work

    around(patch, Transport, "_start", start)


@fault("exact")
def combine_booked_as_dispatch(patch):
    """the way back is booked to the phase of the way out"""
    recount(patch, move(phase="dispatch"))


@fault("exact", on=CHOSEN)  # every layer of an all-gather moves the same
def booked_to_the_wrong_layer(patch):
    """the two layers' bytes change places"""
    recount(patch, lambda booking: move(layer=1 - booking.position.layer)(booking))


@fault("tuple.index(x)")
def booked_as_backward(patch):
    """the forward pass is booked as the backward one, which a run without training has not"""
    recount(patch, move(direction="backward"))


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

    def change(booking):
        return replace(booking, back=[*booking.back[:-1], booking.back[-1] - 1])

    recount(patch, change)
