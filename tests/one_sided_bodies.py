"""What test_shm.py and test_one_sided.py run on ranks."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from gradient_bodies import train
from rank_bodies import batch, scale_of

from comm import barrier, shm
from comm.dispatch import DISPATCHERS, build_dispatcher
from comm.dispatch.base import DispatchOptions, DispatchSetup
from comm.dispatch.shared_round import SharedRound
from comm.meter import Position, TrafficMeter
from comm.placement import build_placement
from comm.transport import Transport
from comm.wire import WIRE_FORMATS

PRELOAD = ("moe.layer", "comm.dispatch.sharded", "comm.grad_sync", "model_presets", "comm.shm")


def transport_of(world, layers=1, group=None):
    return Transport(world, TrafficMeter(layers, world.world_size), group)


def rounds(world, count):
    """Ragged rounds with slow writers and slow takers: how many rows were not as they should be."""
    window, wrong = transport_of(world).window, 0
    delays = random.Random(world.rank)
    for number in range(1, count + 1):
        shape = random.Random(number)
        row_bytes = shape.choice((8, 24, 4096))
        rows = [shape.randrange(40) for _ in range(world.world_size)]
        window.begin()
        mine = torch.full((rows[world.rank], row_bytes), (7 * number + world.rank) % 251)
        window.put("rows", [("hidden", mine.to(torch.uint8))])
        window.publish([number, row_bytes, 0, 0])
        tags = window.meet()
        wrong += int((tags != [number, row_bytes, 0, 0]).sum())
        table, stride = window.table("rows", row_bytes), window.stride("rows", row_bytes)
        for place in delays.sample(range(world.world_size), world.world_size):
            if delays.random() < 0.1:
                time.sleep(delays.random() / 100)  # meanwhile the others go on if they may
            taken = table[place * stride : place * stride + rows[place]]
            wrong += int((taken != (7 * number + place) % 251).any(1).sum())
    return wrong


def end_in_round(world, how, at):
    """Rank 1 goes at one point of a round while the others go on."""
    window = transport_of(world).window

    def leave(point):
        if world.rank == 1 and point == at:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise KeyError("the cause")
            time.sleep(3600)

    for _ in range(3):
        window.begin()
        window.put("rows", [("hidden", torch.zeros(5, 8, dtype=torch.uint8))])
        window.publish([0] * 4)
        window.meet()
    leave("between")
    window.begin()
    leave("before publish")
    window.publish([0] * 4)
    leave("before meet")
    window.meet()
    window.begin()
    window.publish([0] * 4)
    window.meet()
    return world.rank


def killed_in_the_barrier(world):
    """Rank 1 is killed after it was counted, as the last one, and before it says so."""
    window = transport_of(world).window
    barrier = window._barrier
    if world.rank == 1:
        time.sleep(0.5)
        barrier._publish_if_complete = lambda: os.kill(os.getpid(), signal.SIGKILL)
    window.begin()
    window.publish([0] * 4)
    window.meet()
    started = time.monotonic()
    try:
        window.begin()
        window.publish([0] * 4)
        window.meet()
    except ConnectionError as error:
        seconds = time.monotonic() - started
        raise RuntimeError(f"first round over, then {seconds:.1f} s: {error}") from error


def refused(world, what):
    """How opening or filling a window fails; the message on this rank."""
    if what == "machine" and world.rank == 1:
        shm._machine = lambda: ("another", "pid:[1]")
    if what == "memory" and world.rank == 0:
        shm._new_memory = lambda span: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory"))
    if what == "map" and world.rank == 1:
        shm.Window = lambda *arguments: (_ for _ in ()).throw(OSError(12, "no room for a map"))
    if what == "free":
        shm.free_bytes = lambda: 5 << 20
    try:
        window = transport_of(world).window
        window.begin()
        rows = 1 << 44 if what == "worst" else 10_000
        window.room("rows", rows, 1024, world.rank)
    except (ValueError, shm.WindowError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def memory_is_given_back(world):
    """Open windows and mappings of this rank before, with and after three transports."""

    def held():
        with open("/proc/self/maps") as file:
            maps = sum("wideep-window" in line for line in file)
        files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return maps, sum("wideep-window" in name for name in files)

    seen = [held()]
    transports = [transport_of(world) for _ in range(3)]
    for transport in transports:
        transport.window.begin()
        transport.window.put("rows", [("hidden", torch.zeros(100, 64, dtype=torch.uint8))])
        transport.window.publish([0] * 4)
        transport.window.meet()
    seen.append(held())
    transports.clear()
    del transport
    seen.append(held())
    return seen


def setup_of(world, transport, wires, top_k, width, num_experts, dedup, layer=0, placed=None):
    placement = build_placement(placed or "contiguous", num_experts, transport.group.size)
    formats = [WIRE_FORMATS[name] for name in wires]
    return DispatchSetup(
        transport, placement, *formats[:2], layer, width, top_k, wire_backward=formats[2],
        options=DispatchOptions(deduplicate=dedup),
    )  # fmt: skip


def count_layers(world, cases):
    """Several layers and steps over one transport: (routing, meter) of each case."""
    results = []
    for dedup, wires, num_experts, tokens, absent in cases:
        transport = transport_of(world, layers=3)
        routing = []
        for step in range(2):
            for layer in range(3):
                placed = ("contiguous", "round_robin")[layer % 2]
                setup = setup_of(world, transport, wires, 4, 33, num_experts, dedup, layer, placed)
                dispatcher = build_dispatcher("one_sided", setup)
                own = (tokens[world.rank % len(tokens)] * (layer + 1 + step)) % 17
                hidden, ids, weights = batch(world, own, 4, 33, num_experts, absent)
                arrived = dispatcher.dispatch(hidden, ids, weights)
                dispatcher.combine(arrived.expert_input, arrived.handle)
                routing.append((layer, setup.placement.slot_rank, ids))
        results.append((routing, transport.meter))
    return results


def like(world, names, cases, parts=None):
    """For each case the outputs of two strategies that add up in the same order."""
    DISPATCHERS["one_sided_dedup"] = ("comm.dispatch.one_sided_dedup", "OneSidedDedup")
    group = world.split(parts) if parts else None
    transports = {name: transport_of(world, group=group) for name in names}
    results = []
    for wire, num_experts, tokens, absent, dtype in cases:
        outputs = []
        for name in names:
            transport = transports[name]
            placement = build_placement("round_robin", num_experts, transport.group.size)
            formats = WIRE_FORMATS[wire], WIRE_FORMATS[wire]
            setup = DispatchSetup(transport, placement, *formats, 0, 40, 3, dtype)
            own = tokens[world.rank % len(tokens)]
            hidden, ids, weights = batch(world, own, 3, 40, num_experts, absent)
            dispatcher = build_dispatcher(name, setup)
            arrived = dispatcher.dispatch(hidden.to(dtype), ids, weights)
            experts = torch.from_numpy(placement.local_experts(transport.group.rank))
            expert = torch.repeat_interleave(experts, arrived.tokens_per_expert)
            scaled = (arrived.expert_input * scale_of(expert)[:, None]).to(dtype)
            outputs.append((arrived.expert_input, dispatcher.combine(scaled, arrived.handle)))
        results.append(outputs)
    rows = [transports[name].meter.rows for name in names]
    return results, rows


def all_to_one(world):
    """Every token of every rank chooses the two experts of the last rank; rows received."""
    transport = transport_of(world)
    setup = setup_of(world, transport, ("fp32",) * 3, 2, 8, 2 * world.world_size, False)
    ids = torch.tensor([[2 * world.world_size - 1, 2 * world.world_size - 2]]).expand(50, 2)
    hidden = torch.randn(50, 8)
    dispatcher = build_dispatcher("one_sided", setup)
    arrived = dispatcher.dispatch(hidden, ids.contiguous(), torch.full((50, 2), 0.5))
    output = dispatcher.combine(arrived.expert_input, arrived.handle)
    return len(arrived.expert_input), torch.equal(output, hidden)


def in_flight_together(world, chunks):
    """Dispatches of several transports begun before the first is finished."""
    experts, outputs = 3 * world.world_size, []
    for dedup in (False, True):
        parts = []
        for number in range(chunks):
            setup = setup_of(world, transport_of(world), ("fp32",) * 3, 2, 8, experts, dedup)
            hidden, ids, weights = batch(world, 3 + number + world.rank, 2, 8, experts)
            weights = torch.full_like(weights, 0.5)
            dispatcher = build_dispatcher("one_sided", setup)
            parts.append((hidden, dispatcher, dispatcher.dispatch_async(hidden, ids, weights)))
        back = []
        for hidden, dispatcher, pending in parts:
            arrived = pending.wait()
            back.append((hidden, dispatcher.combine_async(arrived.expert_input, arrived.handle)))
        outputs += [torch.equal(pending.wait(), hidden) for hidden, pending in back]
    return outputs


def disagree(world, what):
    """Rank 1 means another message than rank 0."""
    mine = world.rank == 1
    if what == "phase":
        position = Position(0, "combine" if mine else "dispatch")
        round_ = SharedRound(transport_of(world), position, 8, 0)
        round_.publish()
        round_.meet()
    layer = 1 if mine and what == "layer" else 0
    wire = "bf16" if mine and what == "wire format" else "fp16"
    width = 10 if mine and what == "row bytes" else 8
    setup = setup_of(
        world, transport_of(world, 2), (wire,) * 3, 2, width, 8, what == "layer", layer
    )
    dispatcher = build_dispatcher("one_sided", setup)
    dispatcher.dispatch(torch.zeros(3, width), torch.zeros(3, 2).long(), torch.ones(3, 2))


def train_both(world, cases):
    """`train` for cases of one_sided, of one_sided_dedup and of their twins over gloo."""
    DISPATCHERS["one_sided_dedup"] = ("comm.dispatch.one_sided_dedup", "OneSidedDedup")
    return train(world, cases)


def dispatch_for_ever(world, folder):
    """Tell the process id, then dispatch and combine until killed."""
    transport = transport_of(world)
    (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
    for number in range(10**9):
        setup = setup_of(world, transport, ("bf16",) * 3, 2, 64, 8, number % 2 == 1)
        dispatcher = build_dispatcher("one_sided", setup)
        hidden, ids, weights = batch(world, 1 + number % 50, 2, 64, 8)
        arrived = dispatcher.dispatch(hidden, ids, weights)
        dispatcher.combine(arrived.expert_input, arrived.handle)
        if number == 3:
            (folder / f"{world.rank}.busy").touch()


def count_again(routing, world_size, top_k, row, dedup):
    """Bytes by (layer, phase, kind, src, dst) from what every rank chose, token by token.

    routing: by rank, by call: (layer, slot_rank, ids)
    """
    cells = np.zeros((3, 2, 8, world_size, world_size), dtype=np.int64)
    dispatch, combine, hidden, scales, ids, weights, counts = 0, 1, 0, 1, 2, 3, 4
    for src, calls in enumerate(routing):
        for layer, slot_rank, chosen in calls:
            owned = [int((slot_rank == rank).sum()) for rank in range(world_size)]
            for dst in range(world_size):
                cells[layer, dispatch, counts, src, dst] += 32 + 8 * (1 if dedup else owned[dst])
                cells[layer, combine, counts, src, dst] += 0 if dedup else 8 * owned[src]
            # Contiguous and round-robin slots alike are numbered rank after rank.
            experts = np.concatenate([
                [e for e in range(len(slot_rank)) if e % world_size == rank]
                if layer % 2
                else range(start, end)
                for rank, (start, end) in enumerate(pairwise(np.cumsum([0, *owned])))
            ]).astype(int)  # fmt: skip
            owner = dict(zip(experts.tolist(), slot_rank.tolist(), strict=True))
            for token in chosen.tolist():
                owners = [owner[expert] for expert in token if expert >= 0]
                for dst in sorted(set(owners)) if dedup else owners:
                    cells[layer, dispatch, hidden, src, dst] += row[0][0]
                    cells[layer, dispatch, scales, src, dst] += row[0][1]
                    cells[layer, dispatch, ids, src, dst] += 4 * top_k if dedup else 4
                    cells[layer, dispatch, weights, src, dst] += 4 * top_k if dedup else 0
                    cells[layer, combine, hidden, dst, src] += row[1][0]
                    cells[layer, combine, scales, dst, src] += row[1][1]
    return cells


def refused_when_built(world, dedup):
    """On a GPU, and on another system: what is said."""
    said = []
    for change in ("device", "system"):
        elsewhere = replace(world, device=torch.device("cuda")) if change == "device" else world
        setup = setup_of(elsewhere, transport_of(elsewhere), ("fp32",) * 3, 2, 8, 8, dedup)
        if change == "system":
            barrier.sys = SimpleNamespace(platform="darwin")
        try:
            build_dispatcher("one_sided", setup)
        except ValueError as error:
            said.append(str(error))
    return said


def chosen(world):
    return [
        type(build_dispatcher("one_sided", setup_of(
            world, transport_of(world), ("fp32",) * 3, 2, 8, 8, dedup
        ))).__name__
        for dedup in (False, True)
    ]  # fmt: skip


def in_every_mode(world):
    """Inference, plain and training by turns on one window: is each step right?"""
    right = []
    for dedup in (False, True):
        setup = setup_of(world, transport_of(world), ("fp32",) * 3, 2, 8, 12, dedup)
        dispatcher = build_dispatcher("one_sided", setup)
        hidden, ids, weights = batch(world, 9, 2, 8, 12)
        weights = torch.full_like(weights, 0.5)
        for mode in ("inference", "plain", "training", "inference", "training"):
            with torch.inference_mode(mode == "inference"):
                x = hidden.clone().requires_grad_(mode == "training")
                arrived = dispatcher.dispatch(x, ids, weights)
                output = dispatcher.combine(arrived.expert_input, arrived.handle)
                right.append(torch.equal(output, hidden))
                if mode == "training":
                    output.sum().backward()
                    right.append(torch.equal(x.grad, torch.ones_like(x)))
    return right


def weighed(world, dtype):
    """(hidden, weights, what came back) of tokens whose experts return what they get."""
    transport = transport_of(world)
    placement = build_placement("contiguous", 24, world.world_size)
    wire = WIRE_FORMATS["bf16" if dtype == torch.bfloat16 else "fp32"]
    dispatcher = build_dispatcher(
        "one_sided", DispatchSetup(transport, placement, wire, wire, 0, 40, 8, dtype)
    )
    hidden, ids, _ = batch(world, 30 + world.rank, 8, 40, 24)
    hidden, weights = hidden.to(dtype), torch.rand(ids.shape)
    with torch.inference_mode():
        arrived = dispatcher.dispatch(hidden, ids, weights)
        return hidden, weights, dispatcher.combine(arrived.expert_input, arrived.handle).clone()
