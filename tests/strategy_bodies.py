"""One trip out and back, forward and backward, on ranks with nodes and lanes, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import rank_bodies
import torch

from comm.dispatch import build_dispatcher
from comm.dispatch.base import DispatchOptions, DispatchSetup
from comm.meter import Traffic, TrafficMeter
from comm.placement import build_placement, placement_from_slots
from comm.transport import Transport
from comm.wire import WIRE_FORMATS


@dataclass(frozen=True)
class Case:
    """nodes: node of each global rank; lanes: the ranks that dispatch among themselves, () for all

    placed: contiguous, round_robin or replicas; routing: random, or all tokens to "one rank"
    """

    dispatcher: str
    tokens: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    lanes: tuple[tuple[int, ...], ...] = ()
    placed: str = "contiguous"
    routing: str = "random"
    absent: float = 0.0
    top_k: int = 5
    num_experts: int = 30
    width: int = 33
    wires: tuple[str, str, str] = ("fp32", "fp32", "fp32")
    dtype: torch.dtype = torch.float32
    training: bool = False
    options: DispatchOptions = field(default_factory=DispatchOptions)

    def lane_of(self, rank, world_size):
        return next((lane for lane in self.lanes if rank in lane), tuple(range(world_size)))

    def placement(self, size):
        """Of the positions of a lane; replicas: every other position also has the expert after its
        last, so that positions differ in slots."""
        if self.placed != "replicas":
            return build_placement(self.placed, self.num_experts, size)
        local = [
            list(build_placement("contiguous", self.num_experts, size).local_experts(position))
            for position in range(size)
        ]
        for position in range(1, size, 2):
            extra = (max(local[position], default=position) + 1) % self.num_experts
            local[position] += [extra] if extra not in local[position] else []
        first = np.append(0, np.cumsum([len(experts) for experts in local]))
        return placement_from_slots("replicas", self.num_experts, np.concatenate(local), first)


def routed(case, world, placement):
    """This rank's batch, and the slots [T, K] of its choices: replicas of an expert take turns."""
    tokens = case.tokens[world.rank % len(case.tokens)]
    hidden, ids, weights = rank_bodies.batch(
        world, tokens, case.top_k, case.width, case.num_experts, case.absent
    )
    if case.routing == "one rank":
        loaded = placement.local_experts(placement.world_size // 2)[: case.top_k]
        ids = torch.full_like(ids, -1)
        ids[:, : len(loaded)] = torch.from_numpy(loaded)
    slots = torch.full_like(ids, placement.num_slots)
    for token, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                found = (placement.physical_to_logical == expert).nonzero()[0]
                slots[token, k] = int(found[(token + k) % len(found)])
    return hidden.to(case.dtype), ids, weights, slots


def gradient_of_output(world, shape):
    """What the loss multiplies each output by."""
    generator = torch.Generator().manual_seed(77 + world.rank)
    return torch.randn(shape, generator=generator)


def setup_of(world, case):
    """The setup of one layer over poisoned staging memory, and the meter."""
    meter = TrafficMeter(1, world.world_size)
    lanes = case.lanes or (tuple(range(world.world_size)),)
    nodes = case.nodes or (0,) * world.world_size
    lane = case.lane_of(world.rank, world.world_size)
    parts = [
        [rank for rank in lane if nodes[rank] == node] for lane in lanes for node in set(nodes)
    ]
    transports = [
        Transport(world, meter, world.split(partition))
        for partition in (lanes, [part for part in parts if part])
    ]
    for transport in transports:
        transport.staging("received", 8192, 256).fill_(0xAB)
        transport.staging("sent", 8192, 256).fill_(0xCD)
    dispatch, combine, backward = (WIRE_FORMATS[name] for name in case.wires)
    setup = DispatchSetup(
        transports[0],
        case.placement(len(lane)),
        dispatch,
        combine,
        0,
        case.width,
        case.top_k,
        dtype=case.dtype,
        wire_backward=backward,
        node_of_rank=tuple(nodes[rank] for rank in lane) if case.nodes else (),
        node_transport=transports[1] if case.nodes else None,
        options=case.options,
    )
    return setup, meter


def trips(world, cases):
    return [trip(world, case) for case in cases]


def trip(world, case):
    """What the tests look at, by name."""
    setup, meter = setup_of(world, case)
    dispatcher = build_dispatcher(case.dispatcher, setup)
    hidden, ids, weights, slots = routed(case, world, setup.placement)
    seen = {"hidden": hidden.clone(), "ids": ids, "weights": weights.clone(), "slots": slots}
    hidden.requires_grad_(case.training)
    weights.requires_grad_(case.training)
    arrived = dispatcher.dispatch(hidden, ids, weights, slots)
    experts = torch.from_numpy(setup.placement.local_experts(setup.rank))
    expert_of_row = torch.repeat_interleave(experts, arrived.tokens_per_expert)
    output = arrived.expert_input * rank_bodies.scale_of(expert_of_row)[:, None].to(case.dtype)
    if case.training:
        output.retain_grad()
    combined = dispatcher.combine(output, arrived.handle)
    if case.training:
        back = gradient_of_output(world, combined.shape).to(case.dtype)
        (combined * back).sum().backward()
        seen |= {
            "hidden_grad": hidden.grad,
            "weights_grad": weights.grad,
            "output_grad": output.grad.clone(),
        }
    return seen | {
        "expert_input": arrived.expert_input.detach().clone(),
        "expert_of_row": expert_of_row,
        "combined": combined.detach().clone(),
        "kept": getattr(arrived.handle, "kept", None),
        "capacity": getattr(arrived.handle, "capacity", None),
        "meter": meter,
    }


def messages(world, case):
    """The rows of every message of a trip: position, bytes, and how many to each rank are empty."""
    sent = []
    start = Transport.start_all_to_all

    def listen(self, position, message, parts, splits, others, empty_rows=None):
        sent.append((str(position), message.clone().split(splits), empty_rows))
        return start(self, position, message, parts, splits, others, empty_rows)

    Transport.start_all_to_all = listen  # this process ends with the test
    trip(world, case)
    return sent


def overlapped(world, case):
    """Two dispatches in flight at once on setups of their own, then two combines: outputs, and
    those of the same done one after the other."""
    outputs = []
    for together in (True, False):
        case = replace(case, training=False)
        setups = [setup_of(world, case)[0] for _ in range(2)]
        dispatchers = [build_dispatcher(case.dispatcher, setup) for setup in setups]
        hidden, ids, weights, slots = routed(case, world, setups[0].placement)
        chunks = [(t[::2], t[1::2]) for t in (hidden, ids, weights, slots)]
        started = (
            [
                dispatcher.dispatch_async(*(both[number] for both in chunks))
                for number, dispatcher in enumerate(dispatchers)
            ]
            if together
            else []
        )
        results = [pending.wait() for pending in started] or [
            dispatcher.dispatch(*(both[number] for both in chunks))
            for number, dispatcher in enumerate(dispatchers)
        ]
        combining = [
            dispatcher.combine_async(result.expert_input, result.handle)
            for dispatcher, result in zip(dispatchers, results, strict=True)
        ]
        outputs.append([pending.wait().clone() for pending in combining])
    return outputs


def assert_counts(ranks, rows, num_bytes, case):
    """The meters of all ranks hold these rows and bytes and no others, and all was received."""
    traffic = Traffic.assemble([seen["meter"] for seen in ranks])
    axes = (traffic.directions, traffic.phases)
    assert counted(traffic.rows[0], *axes) == rows, case
    assert counted(traffic.bytes[0], *axes, traffic.kinds) == num_bytes, case
    assert np.array_equal(traffic.received[0], traffic.bytes[0].sum(2)), case


def counted(array, *axes):
    """What is not zero, by the names on the first axes and the numbers on the last two."""
    return {
        (*(axis[i] for axis, i in zip(axes, place, strict=False)), *place[-2:]): int(array[place])
        for place in map(tuple, np.argwhere(array).tolist())
    }
