"""What the tests run on ranks: functions of (world, ...), importable by a forked rank."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import torch

from comm.dispatch import build_dispatcher
from comm.dispatch.base import DispatchOptions, DispatchSetup
from comm.meter import Position, TrafficMeter
from comm.placement import build_placement
from comm.transport import Transport
from comm.wire import WIRE_FORMATS, as_bytes


def who_am_i(world):
    return world.rank, world.world_size


def fail_on(world, rank, how):
    """One rank ends badly while the others wait for it in a collective."""
    if world.rank == rank:
        if how == "raise":
            raise KeyError("the cause")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "hang":
            time.sleep(3600)
    world.gather(world.rank)
    torch.distributed.barrier()
    return world.rank


def pids(world):
    return os.getpid()


def hang_and_tell(world, folder):
    (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
    time.sleep(3600)


def disagree(world, what, groups=None):
    """The last rank means another message than its mates; groups: all of the world, or parts."""
    group = None if groups is None else world.split(groups)
    transport = Transport(world, TrafficMeter(4, world.world_size), group)
    mine = world.rank == world.world_size - 1
    direction = "backward" if mine and what == "direction" else "forward"
    phase = "combine" if mine and what == "phase" else "dispatch"
    position = Position(3 if mine and what == "layer" else 2, phase, direction)
    slots = 3 if what == "counts" and not mine else 1  # who expects more than was sent
    counts = [np.ones(1, dtype=np.int64)] * transport.group.size
    if what == "counts" and not mine:
        counts = [np.ones(3, dtype=np.int64)] * (transport.group.size - 1) + [counts[-1]]
    torch.empty(1 << 16, dtype=torch.uint8).fill_(0xAB)  # what the next allocation finds
    transport.announce(
        position,
        counts,
        num_expected=slots,
        row_bytes=640 if mine and what == "row bytes" else 512,
        wire_code=4 if mine and what == "wire format" else 1,
    ).wait()


def place_otherwise(world, num_experts):
    """The last rank has another placement in layer 1; what each rank is told."""
    from comm.header import SplitMismatch
    from moe.assemble import check_placements

    names = ["contiguous", "contiguous"]
    if world.rank == world.world_size - 1:
        names[1] = "round_robin"
    try:
        check_placements(
            world, [build_placement(name, num_experts, world.world_size) for name in names]
        )
    except SplitMismatch as error:
        return str(error)
    return ""


def exchange_poisoned(world, rows_to, groups=None):
    """Rows to each rank as `rows_to[src][dst]`, received over memory full of 0xAB.

    groups: parts of the world that exchange by themselves; rows_to then goes by place in the group
    """
    group = None if groups is None else world.split(groups)
    transport = Transport(world, TrafficMeter(1, world.world_size), group)
    transport.staging("received", 4096, 8).fill_(0xAB)
    out = rows_to[transport.group.rank]
    counts = np.array(out)[:, None]
    position = Position(0, "dispatch")
    rows_from = transport.announce(position, counts, 1, 8, 0).wait().flatten().tolist()
    transport.staging("received", 4096, 8).fill_(0xAB)
    message = torch.full((sum(out), 8), world.rank, dtype=torch.uint8)
    pending = transport.start_all_to_all(position, message, [("hidden", message)], out, rows_from)
    transport.staging("sent", 4096, 8).fill_(0xCD)  # there is time for other work meanwhile
    return rows_from, pending.wait().clone(), transport.meter.sent.sum(axis=(0, 1, 2))


def exchange_large(world, row_bytes, num_rows):
    """Rank 0 sends rank 1 so many rows; what arrived at both ends of it, and what was counted."""
    transport = Transport(world, TrafficMeter(1, world.world_size))
    message = torch.empty((num_rows if world.rank == 0 else 0, row_bytes), dtype=torch.uint8)
    if world.rank == 0:
        message[0], message[-1] = 3, 7  # the rest is never touched, and so costs no memory
    splits = [0, len(message)], [num_rows if world.rank == 1 else 0, 0]
    received = transport.all_to_all(
        Position(0, "dispatch"), message, [("hidden", message)], *splits
    )
    ends = [int(received[0, 0]), int(received[-1, -1])] if len(received) else []
    return ends, int(transport.meter.sent.sum())


def exchange_types(world, dtypes):
    """Values of types that gloo has no collectives for, there and back as bytes."""
    transport, found = Transport(world, TrafficMeter(1, world.world_size)), []
    for name in dtypes:
        bits = torch.arange(256, dtype=torch.int32).view(torch.uint8)
        values = bits.view(getattr(torch, name)).view(8, -1)  # any bit pattern, NaN as well
        message = as_bytes(values)
        splits = [len(message) // world.world_size] * world.world_size
        position = Position(0, "dispatch")
        transport.staging("received", *message.shape).fill_(0xAB)
        got = transport.all_to_all(position, message, [("hidden", message)], splits, splits)
        found.append((got.clone(), message))
    return found


def batch(world, tokens, top_k, width, num_experts, absent=0.0):
    """This rank's tokens: hidden, ids and weights that are powers of two."""
    generator = torch.Generator().manual_seed(1000 * world.world_size + world.rank)
    ids = (
        torch.stack(
            [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)]
        )
        if tokens
        else torch.empty(0, top_k, dtype=torch.int64)
    )
    ids = torch.where(torch.rand(ids.shape, generator=generator) < absent, -1, ids)
    weights = 2.0 ** torch.randint(-4, 1, ids.shape, generator=generator)
    return torch.randn(tokens, width, generator=generator), ids, weights


def scale_of(expert):
    """What expert number `expert` multiplies its rows by: elementwise, so equal in any order."""
    return 1.0 + expert / 64.0


def out_and_back(world, cases):
    """For each case (dispatcher, placement, wire, tokens of each rank): input, routing, output."""
    results = []
    for name, placed, wire, tokens, absent in cases:
        num_experts, top_k, width = 30, 5, 33
        placement = build_placement(placed, num_experts, world.world_size)
        meter = TrafficMeter(1, world.world_size)
        transport = Transport(world, meter)
        transport.staging("received", 4096, 256).fill_(0xAB)
        transport.staging("sent", 4096, 256).fill_(0xCD)
        formats = (WIRE_FORMATS[wire], WIRE_FORMATS[wire])
        roomy = DispatchOptions(capacity_factor=num_experts / top_k)  # nothing is dropped
        dispatcher = build_dispatcher(
            name, DispatchSetup(transport, placement, *formats, 0, width, top_k, options=roomy)
        )
        hidden, ids, weights = batch(
            world, tokens[world.rank % len(tokens)], top_k, width, num_experts, absent
        )
        arrived = dispatcher.dispatch(hidden, ids, weights)
        experts = torch.from_numpy(placement.local_experts(world.rank))
        expert_of_row = torch.repeat_interleave(experts, arrived.tokens_per_expert)
        output = arrived.expert_input * scale_of(expert_of_row)[:, None]
        combined = dispatcher.combine(output, arrived.handle)
        results.append((hidden, ids, weights, arrived.expert_input, expert_of_row, combined, meter))
    return results


def misuse(world, name):
    """Every wrong argument in turn; the message of each refusal."""
    placement = build_placement("contiguous", 8, world.world_size)
    wire = WIRE_FORMATS["fp32"]
    transport = Transport(world, TrafficMeter(1, world.world_size))
    dispatcher = build_dispatcher(name, DispatchSetup(transport, placement, wire, wire, 0, 4, 2))
    hidden, ids, weights = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    wrong = [
        (torch.zeros(3, 5), ids, weights),
        (hidden, ids[:, :1], weights),
        (hidden, ids, weights[:2]),
        (hidden, ids + 8, weights),
        (hidden, ids - 2, weights),
        (hidden, ids.to(torch.uint8), weights),
    ]
    messages = []
    for arguments in wrong:
        try:
            dispatcher.dispatch(*arguments)
        except ValueError as error:
            messages.append(str(error))
    return messages


def same_config(world, configs):
    """What each rank says when rank r was started with configs[r]."""
    from moe.jobs.ranks import check_same_config

    try:
        check_same_config(world, configs[world.rank])
    except ValueError as error:
        return str(error)
    return ""
