"""Sums gradients between the ranks that hold the same parameter.

    replicated   held by every rank: rank j sums part j of R nearly equal ones, then hands it round

                 rank 0: a b c      a a' a" -> rank 0: A               A B C
                 rank 1: a' b' c'   b b' b" -> rank 1: B   -> everyone A B C
                 rank 2: a" b" c"   c c' c" -> rank 2: C               A B C

    experts      held by some ranks (replicas, other expert-parallel groups): each sends its
                 gradient to each other holder, and every holder sums in order of ranks

So all holders end with the same bits. Gradients travel in fp32; both sides know the sizes, so
nothing is announced, and what travels are values, not rows. The caller books the time.

Legend: R ranks of the transport's group, which must be all of the world; V values of one expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from comm.meter import Position
from comm.placement import ExpertPlacement
from comm.transport import Transport
from comm.wire import as_bytes, view_as

VALUE_BYTES = 4  # fp32


def gradients_of(parameters: Iterable[Parameter]) -> list[Tensor]:
    """The gradient of each parameter, made of zeros where backward left none."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def expert_holders(
    placement: ExpertPlacement, rank: int, world_size: int, ep_size: int, expert_tp: int = 1
) -> dict[int, tuple[int, ...]]:
    """Who holds this rank's share of each of its experts: logical id -> global ranks, ascending.

    In slot order. placement: over the ep_size / expert_tp positions of a lane, the same in every
    group. Rank = group * ep_size + position * expert_tp + shard.
    """
    position, shard = divmod(rank % ep_size, expert_tp)
    holders = {}
    for expert in placement.local_experts(position).tolist():
        slots = placement.replicas[expert]
        positions = placement.slot_rank[slots[slots >= 0]].tolist()
        holders[expert] = tuple(
            first + place * expert_tp + shard
            for first in range(0, world_size, ep_size)
            for place in positions
        )
    return holders


def sync_replicated(transport: Transport, layer: int, tensors: Sequence[Tensor]) -> None:
    """Replace each gradient by its sum over all ranks, in place; a collective.

    tensors: the same shapes on every rank; summed in fp32 whatever their dtype
    """
    size, rank = transport.group.size, transport.group.rank
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    parts = [len(flat) // size + (part < len(flat) % size) for part in range(size)]
    own = parts[rank]
    given = _exchange(transport, layer, flat[:, None], parts, [own] * size).view(size, own)
    summed = sum_in_order(given)
    everywhere = _exchange(transport, layer, summed.repeat(size)[:, None], [own] * size, parts)
    for tensor, values in zip(
        tensors, everywhere[:, 0].split([tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.detach().copy_(values.view_as(tensor))


def sync_experts(
    transport: Transport, layer: int, holders: Mapping[int, Sequence[int]], gradients: Tensor
) -> None:
    """Replace each expert's gradient by its sum over the ranks that hold it, in place; a
    collective, also for ranks that hold nothing in common.

    holders: logical id of each local expert, in slot order -> the ranks that hold it, this one
        included; an expert's holders must be told the same on each of them
    gradients: [local experts, V], the same V wherever there are experts
    """
    size, rank = transport.group.size, transport.group.rank
    # Both ends list what they have in common by logical id: their slots may be in another order.
    common: list[list[int]] = [[] for _ in range(size)]
    for slot, (_, ranks) in sorted(enumerate(holders.items()), key=lambda entry: entry[1][0]):
        for other in set(ranks) - {rank}:
            common[other].append(slot)
    splits = [len(slots) for slots in common]
    slots = torch.tensor(sum(common, []), dtype=torch.int64, device=gradients.device)
    own = gradients.detach().float()
    received = _exchange(transport, layer, own.index_select(0, slots), splits, splits)
    first = np.cumsum(splits) - splits
    total = torch.zeros_like(own)
    for other in range(size):
        if other == rank:
            total += own
        else:
            mine = slots[first[other] : first[other] + splits[other]]
            total[mine] += received[first[other] : first[other] + splits[other]]
    gradients.detach().copy_(total)


def sum_in_order(terms: Tensor) -> Tensor:
    """[n, V] -> [V], the first term first: the same bits on any machine."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def _exchange(
    transport: Transport,
    layer: int,
    values: Tensor,
    input_splits: list[int],
    output_splits: list[int],
) -> Tensor:
    """fp32 rows [n, V] to and from each rank of the group, staged: gone with the next exchange."""
    message = as_bytes(values)
    received = transport.all_to_all(
        Position(layer, "grad_sync", "backward"),
        message,
        [("gradients", message)],
        input_splits,
        output_splits,
    )
    if not received.numel():  # nothing has no stride that a view could accept
        return values.new_zeros(sum(output_splits), values.shape[1])
    return view_as(received, torch.float32)
