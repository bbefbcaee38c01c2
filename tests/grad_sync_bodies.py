"""What test_grad_sync runs on ranks: functions of (world, ...), importable by a forked rank."""

from __future__ import annotations

import torch
from torch import Tensor

from comm.grad_sync import expert_holders, sync_experts, sync_replicated
from comm.meter import ALL_PHASES, TrafficMeter
from comm.transport import Transport
from comm.world import World

LAYER = 1


def road(world: World, poison: bool = True) -> Transport:
    transport = Transport(world, TrafficMeter(2, world.world_size, phases=ALL_PHASES))
    if poison:
        transport.staging("received", 512, 64).fill_(0xFF)  # NaN in every float type
    return transport


def replicated_of(rank: int, sizes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """The gradients that a rank brings: awkward numbers, whose sum depends on its order."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(size, generator=generator) * 10.0 ** (rank % 5)).to(dtype) for size in sizes
    ]


def replicated(world: World, cases: list) -> list[tuple[list[Tensor], TrafficMeter]]:
    """For each (sizes, dtype): the synchronised tensors and what was counted."""
    results = []
    for sizes, dtype in cases:
        transport = road(world)
        tensors = replicated_of(world.rank, sizes, dtype)
        sync_replicated(transport, LAYER, tensors)
        transport.staging("received", 512, 64).fill_(0xFF)
        results.append((tensors, transport.meter))
    return results


def expert_gradient(rank: int, expert: int, values: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + expert)
    return torch.randn(values, generator=generator) * 10.0 ** (rank % 5)


def experts(world: World, cases: list) -> list[tuple[dict[int, Tensor], TrafficMeter]]:
    """For each (placement, ep_size, expert_tp, values, dtype): each local expert's gradient."""
    results = []
    for placement, ep_size, expert_tp, values, dtype in cases:
        transport = road(world)
        holders = expert_holders(placement, world.rank, world.world_size, ep_size, expert_tp)
        mine = [expert_gradient(world.rank, expert, values).to(dtype) for expert in holders]
        gradients = torch.stack(mine) if mine else torch.empty(0, 0, dtype=dtype)
        sync_experts(transport, LAYER, holders, gradients)
        transport.staging("received", 512, 64).fill_(0xFF)
        results.append((dict(zip(holders, gradients, strict=True)), transport.meter))
    return results
