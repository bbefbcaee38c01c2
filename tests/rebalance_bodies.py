"""What test_rebalance runs on ranks: functions of (world, ...), importable by a forked rank."""

from __future__ import annotations

import numpy as np
import torch

from comm.meter import PHASES, TrafficMeter
from comm.rebalance import move_experts
from comm.transport import Transport

EXPERT_BYTES = 24


def bytes_of(experts):
    """Weights that tell by every byte whose they are: uint8 [len(experts), EXPERT_BYTES]."""
    numbers = np.asarray(experts, dtype=np.int64)[:, None] * 31 + np.arange(EXPERT_BYTES)
    return torch.from_numpy((numbers % 251).astype(np.uint8))


def move_there(world, cases, parts=None):
    """For each case (before, after): the new weights, and what the meter has counted.

    parts: groups of ranks among which the placements apply; all ranks where none are given
    """
    results = []
    group = None if parts is None else world.split(parts)
    for before, after in cases:
        meter = TrafficMeter(3, world.world_size, phases=(*PHASES, "rebalance"))
        transport = Transport(world, meter, group)
        place = transport.group.rank
        transport.staging("received", 64, EXPERT_BYTES).fill_(0xEE)
        weights = bytes_of(before.local_experts(place))
        moved = move_experts(transport, 2, before, after, weights)
        transport.staging("received", 64, EXPERT_BYTES).fill_(0xEE)  # the result must not be there
        untouched = torch.equal(weights, bytes_of(before.local_experts(place)))
        results.append((moved, untouched, meter))
    return results


def misuse(world, placement, other):
    """Every wrong argument in turn; the message of each refusal."""
    transport = Transport(world, TrafficMeter(1, world.world_size, phases=(*PHASES, "rebalance")))
    held = len(placement.local_experts(world.rank))
    right = torch.zeros(held, EXPERT_BYTES, dtype=torch.uint8)
    messages = []
    for after, weights in [
        (placement, right[1:]),
        (placement, right.float()),
        (placement, right.flatten()),
        (other, right),
    ]:
        try:
            move_experts(transport, 0, placement, after, weights)
        except ValueError as error:
            messages.append(str(error))
    return messages
