"""Exchanges between ranks that take one another for other hosts."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from comm.exchange import Messages, receive_first
from comm.kernel import KernelWitness
from comm.meter import Position, TrafficMeter
from comm.transport import Transport


def rows(rng, world):
    """A ragged message, some of it empty: what to send, and rows to and from each rank."""
    table = rng.integers(0, 4, (world.world_size, world.world_size))
    out, back = table[world.rank].tolist(), table[:, world.rank].tolist()
    number = 100 * world.rank + torch.arange(5 * sum(out), dtype=torch.int64) % 100
    return number.to(torch.uint8).view(-1, 5), out, back


def both_ways(world, rounds):
    """Whether receive_first brings what gloo's own all-to-all brings, all rounds in flight."""
    group, pending, expected = world.metered_group, [], []
    rng = np.random.default_rng(3)
    for _ in range(rounds):
        message, out, back = rows(rng, world)
        expected.append(torch.empty((sum(back), 5), dtype=torch.uint8))
        dist.all_to_all_single(expected[-1], message, back, out, group)
        received = torch.full_like(expected[-1], 0xAB)
        pending.append(receive_first(received, message, back, out, group, world.timeout))
    for one in pending:
        one.wait()
    return [
        bool((one.rows[0] == wanted).all()) for one, wanted in zip(pending, expected, strict=True)
    ]


def metered(world, linked):
    """What kernel and meter saw of three exchanges, between hosts or not."""
    world = replace(world, local_world_size=1 if linked else world.world_size)
    meter = TrafficMeter(1, world.world_size)
    transport, rng = Transport(world, meter), np.random.default_rng(4)
    witness = KernelWitness(world, [transport.group])
    witness.begin()
    for _ in range(3):
        message, out, back = rows(rng, world)
        position, parts = Position(0, "dispatch"), [("hidden", message)]
        pending = transport.start_all_to_all(position, message, parts, out, back)
        pending.wait()
        assert isinstance(pending.work, Messages) is linked
    return witness.end(), meter.carried, meter.sent


def nobody_answers(world):
    """Seconds until an exchange that the other rank never begins is given up, and what it says."""
    if world.rank == 1:
        time.sleep(2)
        return None
    rows, out = torch.zeros((2, 1), dtype=torch.uint8), [1, 1]
    pending = receive_first(
        torch.empty_like(rows), rows, out, out, world.metered_group, timedelta(seconds=0.5)
    )
    started = time.monotonic()
    try:
        pending.wait()
    except RuntimeError as error:
        return time.monotonic() - started, str(error)
