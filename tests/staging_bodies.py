"""What ranks do in tests of rows that go through the host's memory; functions that can be pickled.

Without a GPU the device is the CPU once more: copies are real, and what is left uncopied shows as
the memory's old contents.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from run_configs import emulate_all

from comm import staging
from comm.meter import Position, TrafficMeter
from comm.transport import Transport

POISON = 0xAB


def staged(world):
    return replace(world, staged=True)


def exchange(world, rows_to):
    """Rows to each rank as `rows_to[src][dst]`: what arrived, and how often a message was copied.

    The sent memory is spoilt while the rows travel, and the memory they arrive in before.
    """
    calls = {"to_host": 0, "to_device": 0}

    def counted(name, original):
        def copy(*tensors):
            calls[name] += 1
            return original(*tensors)

        return copy

    for name in calls:
        setattr(staging, name, counted(name, getattr(staging, name)))
    transport = Transport(staged(world), TrafficMeter(1, world.world_size))
    out, position = rows_to[world.rank], Position(0, "dispatch")
    counted_rows = transport.announce(position, np.array(out)[:, None], 1, 8, 0).wait()
    rows_from = counted_rows.flatten().tolist()
    received = transport.staging("received", sum(rows_from), 8).fill_(POISON)
    message = torch.full((sum(out), 8), world.rank, dtype=torch.uint8)
    pending = transport.start_all_to_all(position, message, [("hidden", message)], out, rows_from)
    message.fill_(0xCD)  # it went from the host's copy
    before = received.clone()
    arrived = pending.wait()
    same_memory = arrived.data_ptr() == received.data_ptr()
    return rows_from, before, arrived.clone(), same_memory, calls, transport.meter.collectives


def on_a_device_without_memory(world):
    """gloo cannot take a tensor of `meta`, which stands for a GPU here: where do tensors lie?"""
    device = torch.device("meta")
    staging.to_host = lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype)
    transport = Transport(replace(staged(world), device=device), TrafficMeter(1, world.world_size))
    position, splits = Position(0, "dispatch"), [2] * world.world_size
    message = torch.empty((sum(splits), 8), dtype=torch.uint8, device=device)
    received = transport.all_to_all(position, message, [("hidden", message)], splits, splits)
    digests = transport.world.all_digests("the same")
    return received.device.type, len(set(digests)), transport.world.link_device.type


def emulate_staged(world, configs):
    return emulate_all(staged(world), configs)
