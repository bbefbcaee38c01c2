"""Puts this rank's share of the network together: experts, dispatchers and the roads between ranks.

Roads          the transports of this rank, one set for each chunk, so that chunks overlap
build_layers   every layer of this rank
rebalance      the same layers with experts moved to where the load wants them
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from comm.balance import balance, minimum_redundant
from comm.dispatch import FORWARDING, build_dispatcher
from comm.dispatch.base import Dispatcher, DispatchOptions, DispatchSetup
from comm.dispatch.sharded import build_sharded
from comm.header import SplitMismatch
from comm.meter import Position, TrafficMeter
from comm.placement import ExpertPlacement, placement_from_slots
from comm.rebalance import move_experts
from comm.replicas import ReplicaChooser
from comm.transport import Transport
from comm.wire import WIRE_FORMATS
from comm.world import RankGroup, World
from moe.experts import Experts
from moe.layer import MoELayer
from moe.plan import Partition, Plan


@dataclass(frozen=True)
class Roads:
    """This rank's transports, among the ranks that moe.plan names so.

    world: all ranks; lane, node, group, shards: those of the partition that hold this rank, None
        where nothing of this run goes there
    """

    world: Transport
    lane: Transport
    node: Transport | None
    group: Transport | None
    shards: Transport | None

    @property
    def groups(self) -> list[RankGroup]:
        """The groups of ranks that these transports connect."""
        roads = (self.world, self.lane, self.node, self.group, self.shards)
        return [road.group for road in roads if road is not None]

    @classmethod
    def build(cls, plan: Plan, world: World, meter: TrafficMeter) -> Roads:
        """A collective the first time on a world, for its groups are made then."""

        def among(parts: Partition) -> Transport:
            return Transport(world, meter, world.split(parts))

        sharded = plan.config.expert_tp > 1
        return cls(
            Transport(world, meter),
            among(plan.lanes),
            among(plan.lane_nodes) if plan.config.dispatcher.name in FORWARDING else None,
            among(plan.groups) if sharded and plan.config.expert_tp_mode == "all" else None,
            among(plan.shard_groups) if sharded else None,
        )


def build_layers(
    plan: Plan, world: World, roads: Sequence[Roads], weights: Sequence[Tensor] | None = None
) -> list[MoELayer]:
    """This rank's share of every layer.

    roads: one for each chunk
    weights: of each layer, uint8 [local slots, bytes of an expert], where experts came from other
        ranks; None: those made from the seed
    """
    position = roads[0].lane.group.rank
    layers = []
    for index, placement in enumerate(plan.placements):
        made = {
            "seed": plan.config.seed,
            "layer": index,
            "dtype": plan.dtype,
            "device": world.device,
        }
        experts = Experts(
            plan.shape,
            placement.local_experts(position).tolist(),
            shard=(world.rank % plan.config.expert_tp, plan.config.expert_tp),
            **made,
        )
        if weights is not None:
            load_bytes(experts, weights[index])
        chunks = [_dispatcher(plan, index, road) for road in roads]
        replicas = _replicas(plan, index, world)
        layers.append(MoELayer(plan.shape, experts, chunks, replicas=replicas, **made))
    return layers


def rebalance(
    plan: Plan,
    world: World,
    roads: Sequence[Roads],
    layers: Sequence[MoELayer],
    topk_ids: np.ndarray,
) -> tuple[tuple[ExpertPlacement, ...], list[MoELayer]]:
    """Place the experts by the load seen so far, and really move them; a collective.

    topk_ids: int32 [steps, L, T, K], this rank's choices
    returns: the new placement of each layer, and the layers on it
    """
    num_experts, positions = plan.shape.num_experts, plan.config.num_positions
    redundant = plan.config.placement.num_redundant_experts
    if redundant is None:
        redundant = minimum_redundant(num_experts, positions)
    placements = tuple(
        placement_from_slots(
            "balance", num_experts, *balance(load, positions, num_experts + redundant)
        )
        for load in _load(topk_ids, num_experts, world)
    )
    check_placements(world, placements)
    weights = []
    for index, (before, after) in enumerate(zip(plan.placements, placements, strict=True)):
        position = Position(index, "rebalance")
        roads[0].lane.meter.phase_began(position)
        started, held = time.perf_counter(), to_bytes(layers[index].experts)
        weights.append(move_experts(roads[0].lane, index, before, after, held))
        spent = time.perf_counter() - started
        roads[0].lane.meter.phase_ended(position, spent)
    moved = plan.placed(placements)
    return moved.placements, build_layers(moved, world, roads, weights)


def check_placements(world: World, placements: Sequence[ExpertPlacement]) -> None:
    """Raise SplitMismatch where a rank places experts otherwise than rank 0; a collective.

    Their counts messages would have other lengths, which gloo does not notice.
    """
    texts = [
        repr((one.physical_to_logical.tolist(), one.first_slot.tolist())) for one in placements
    ]
    if len(set(world.all_digests("".join(texts)))) == 1:
        return
    for layer, text in enumerate(texts):
        digests = world.all_digests(text)
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise SplitMismatch(
                    f"layer {layer}: rank {rank} places its experts otherwise (placement"
                    f" {digest:x}) than rank 0 (placement {digests[0]:x})"
                )


def _load(topk_ids: np.ndarray, num_experts: int, world: World) -> np.ndarray:
    """Choices of each expert, all ranks: int64 [L, E]"""
    by_layer = topk_ids.swapaxes(0, 1)
    own = [np.bincount(ids[ids >= 0], minlength=num_experts) for ids in by_layer]
    load = torch.from_numpy(np.stack(own)).to(world.link_device)
    dist.all_reduce(load)
    return load.cpu().numpy()


def to_bytes(experts: Experts) -> Tensor:
    """Weights of this rank's experts: uint8 [local slots, bytes of an expert]."""
    with torch.no_grad():
        rows = torch.cat([experts.gate_up.flatten(1), experts.down.flatten(1)], dim=1)
    values = rows.shape[1]
    return rows.contiguous().view(torch.uint8).view(len(rows), values * rows.element_size())


def load_bytes(experts: Experts, weights: Tensor) -> None:
    """The inverse of `to_bytes`, in place."""
    rows = weights.contiguous().view(experts.gate_up.dtype)
    parts = [
        parameter.shape[1] * parameter.shape[2] for parameter in (experts.gate_up, experts.down)
    ]
    gate_up, down = rows.split(parts, dim=1)
    with torch.no_grad():
        experts.gate_up.copy_(gate_up.view_as(experts.gate_up))
        experts.down.copy_(down.view_as(experts.down))


def _dispatcher(plan: Plan, layer: int, road: Roads) -> Dispatcher:
    config = plan.config
    setup = DispatchSetup(
        transport=road.lane,
        placement=plan.placements[layer],
        wire_dispatch=WIRE_FORMATS[config.wire.dispatch],
        wire_combine=WIRE_FORMATS[config.wire.combine],
        wire_backward=WIRE_FORMATS[config.wire.backward],
        layer=layer,
        width=plan.shape.payload_width,
        top_k=plan.shape.top_k,
        dtype=plan.dtype,
        node_of_rank=plan.nodes_of_lane(road.lane.world.rank),
        node_transport=road.node,
        options=DispatchOptions(
            capacity_factor=config.dispatcher.capacity_factor,
            renormalize=config.dispatcher.renormalize,
            deduplicate=config.dispatcher.deduplicate,
        ),
    )
    build = partial(build_dispatcher, config.dispatcher.name)
    if road.shards is None:
        return build(setup)
    return build_sharded(build, setup, road.shards, road.group)


def _replicas(plan: Plan, layer: int, world: World) -> ReplicaChooser | None:
    """Who says which replica serves a token; None where every expert has but one slot."""
    placement, lane = plan.placements[layer], plan.lane_of(world.rank)
    if not placement.num_redundant_experts:
        return None
    return ReplicaChooser(
        placement,
        plan.config.placement.replica_choice,
        seed=plan.config.seed,
        layer=layer,
        rank=lane.index(world.rank),
        node_of_rank=plan.nodes_of_lane(world.rank),
        device=world.device,
    )
