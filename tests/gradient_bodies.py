"""Training steps of whole MoE layers, on ranks and in one process, for the gradient tests.

`train` runs on ranks: real dispatchers, real collectives, gradients synchronised.
`plain` is the same network in one process: indexing and sums that torch differentiates itself,
rounding on the wire as a function whose gradient is that of the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from model_presets import small
from torch import Tensor

from comm.dispatch import build_dispatcher
from comm.dispatch.base import DispatchOptions, DispatchSetup
from comm.dispatch.sharded import build_sharded
from comm.grad_sync import expert_holders, gradients_of, sync_experts, sync_replicated
from comm.meter import ALL_PHASES, TrafficMeter
from comm.placement import ExpertPlacement, build_placement, placement_from_slots
from comm.transport import Transport
from comm.wire import WIRE_FORMATS, WireFormat, pack
from comm.world import World
from moe.experts import Experts
from moe.layer import MoELayer, pre_norm
from moe.model import ModelShape

PRELOAD = ("moe.layer", "comm.dispatch.sharded", "comm.grad_sync", "model_presets")
SEED = 5


@dataclass(frozen=True)
class Case:
    """tokens: of each rank; wires: dispatch, combine, backward; absent: share of ids that are -1
    hot: all tokens choose the experts of position 0; mode: of expert_tp > 1
    replicas: slots of each position where experts have several, () for one slot an expert
    """

    dispatcher: str
    tokens: tuple[int, ...]
    wires: tuple[str, str, str] = ("fp32", "fp32", "fp32")
    model: str = "kimi_k3"
    num_experts: int = 10
    top_k: int = 3
    absent: float = 0.2
    hot: bool = False
    placement: str = "round_robin"
    num_layers: int = 1
    chunks: int = 1
    ep_size: int | None = None
    expert_tp: int = 1
    mode: str = "gather"
    dtype: torch.dtype = torch.float32
    replicas: tuple[tuple[int, ...], ...] = ()
    inner: int = 24

    @property
    def shape(self) -> ModelShape:
        changes = {"num_experts": self.num_experts, "top_k": self.top_k}
        changes["intermediate_size"] = self.inner
        return small(self.model, num_expert_groups=1, num_limited_groups=1, **changes)

    @property
    def formats(self) -> tuple[WireFormat, ...]:
        return tuple(WIRE_FORMATS[name] for name in self.wires)

    @property
    def group_size(self) -> int:
        return self.ep_size or len(self.tokens)

    @property
    def placed(self) -> ExpertPlacement:
        if self.replicas:
            slots = sum(self.replicas, ())
            first = [sum(map(len, self.replicas[:i])) for i in range(len(self.replicas) + 1)]
            return placement_from_slots("test", self.num_experts, slots, first)
        positions = self.group_size // self.expert_tp
        return build_placement(self.placement, self.num_experts, positions)

    def batch(self) -> tuple[Tensor, list[Tensor], Tensor]:
        """x [T, H], ids [T, K] of each layer and grad [T, H] of all ranks' tokens."""
        generator = torch.Generator().manual_seed(sum(self.tokens) + 7)
        total = sum(self.tokens)
        x, grad = (torch.randn(total, self.shape.hidden_size, generator=generator) for _ in "xg")
        eligible = self.num_experts
        if self.hot:  # contiguous placement: the first experts are those of position 0
            eligible = int(self.placed.slots_per_rank[0])
        ids = []
        for _ in range(self.num_layers):
            order = torch.rand(total, eligible, generator=generator).argsort(1)
            chosen = order[:, : self.top_k]
            ids.append(
                torch.where(torch.rand(chosen.shape, generator=generator) < self.absent, -1, chosen)
            )
        return x.to(self.dtype), ids, grad.to(self.dtype)

    def slots(self, ids: Tensor, first_token: int) -> Tensor | None:
        """The slot of each choice where experts have replicas: taken in turn, token by token."""
        if not self.replicas:
            return None
        placement = self.placed
        turn = torch.arange(first_token, first_token + len(ids))[:, None]
        counts = torch.from_numpy(placement.replica_count)[ids.clamp(min=0)]
        slots = torch.from_numpy(placement.replicas)[ids.clamp(min=0), turn % counts]
        return torch.where(ids < 0, placement.num_slots, slots)


@dataclass(frozen=True)
class Gradients:
    """output: [T, H] of the last layer with its residual; x: [T, H]
    layers: of each, by parameter name, where the experts' are [n, ...] in the order of `experts`
    experts: logical ids in slot order; meter: None in one process
    """

    output: Tensor
    x: Tensor
    layers: list[dict[str, Tensor]]
    experts: list[int]
    meter: TrafficMeter | None = None


class ReplicaOf:
    """Stands in for a ReplicaChooser."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def slots(self, topk_ids: Tensor, numbers: Tensor) -> Tensor:
        return self.case.slots(topk_ids, int(numbers[0]) if len(numbers) else 0)


def node_of(rank: int) -> int:
    """Four ranks a node, for strategies that look at nodes."""
    return rank // 4


def transports(case: Case, world: World, meter: TrafficMeter) -> dict[str, Transport]:
    """This rank's, among the parts of the world that the recipe names."""
    size, shards = case.group_size, case.expert_tp
    groups = [range(first, first + size) for first in range(0, world.world_size, size)]
    parts = {
        "lane": [group[shard::shards] for group in groups for shard in range(shards)],
        "group": groups,
        "shards": [range(first, first + shards) for first in range(0, world.world_size, shards)],
    }
    parts["node"] = [
        ranks
        for lane in parts["lane"]
        for node in {node_of(rank) for rank in lane}
        if (ranks := [rank for rank in lane if node_of(rank) == node])
    ]
    return {name: Transport(world, meter, world.split(part)) for name, part in parts.items()}


def dispatcher_of(case: Case, roads: dict[str, Transport], layer: int) -> Any:
    dispatch, combine, backward = case.formats
    setup = DispatchSetup(
        roads["lane"],
        case.placed,
        dispatch,
        combine,
        layer,
        case.shape.payload_width,
        case.top_k,
        case.dtype,
        wire_backward=backward,
        node_of_rank=tuple(node_of(rank) for rank in roads["lane"].group.ranks),
        node_transport=roads["node"],
        options=DispatchOptions(capacity_factor=case.num_experts),  # room for everything
    )
    build = partial(build_dispatcher, case.dispatcher)
    if case.expert_tp == 1:
        return build(setup)
    group = roads["group"] if case.mode == "all" else None
    return build_sharded(build, setup, roads["shards"], group)


def stack(
    case: Case,
    layers: list[MoELayer],
    part: slice,
) -> tuple[Tensor, Tensor]:
    """Forward and backward of this process's tokens: the output and the gradient of x."""
    x, ids, grad = case.batch()
    leaf = x[part].clone().requires_grad_()
    hidden = leaf
    for layer, chosen in zip(layers, ids, strict=True):
        out = layer(pre_norm(hidden), chosen[part], first_token=part.start)
        hidden = hidden + out.hidden
    hidden.backward(grad[part])
    return hidden.detach(), leaf.grad


def train(world: World, cases: list[Case]) -> list[Gradients]:
    """Each case on real ranks, with gradients summed over those that hold the same weights."""
    return [train_one(world, case) for case in cases]


def own_experts(case: Case, world: World) -> list[int]:
    """Logical experts of this rank, in slot order."""
    position = world.rank % case.group_size // case.expert_tp
    return case.placed.local_experts(position).tolist()


def layers_of(case: Case, world: World, meter: TrafficMeter) -> list[MoELayer]:
    """This rank's share of every layer, a dispatcher for each chunk."""
    owned, shard = own_experts(case, world), world.rank % case.expert_tp
    # All layers share a chunk's transports, and so their staging memory, as in a run.
    roads = [transports(case, world, meter) for _ in range(case.chunks)]
    layers = []
    for index in range(case.num_layers):
        made = {"seed": SEED, "layer": index, "dtype": case.dtype}
        experts = Experts(case.shape, owned, shard=(shard, case.expert_tp), **made)
        chunks = [dispatcher_of(case, road, index) for road in roads]
        replicas = ReplicaOf(case) if case.replicas else None
        layers.append(MoELayer(case.shape, experts, chunks, replicas=replicas, **made))
    return layers


def infer(world: World, cases: list[Case]) -> list[Tensor]:
    """Only forward, in inference mode, where chunks overlap: the output of each case."""
    outputs = []
    for case in cases:
        layers = layers_of(
            case, world, TrafficMeter(case.num_layers, world.world_size, phases=ALL_PHASES)
        )
        first = sum(case.tokens[: world.rank])
        x, ids, _ = case.batch()
        part = slice(first, first + case.tokens[world.rank])
        with torch.inference_mode():
            hidden = x[part]
            for layer, chosen in zip(layers, ids, strict=True):
                hidden = hidden + layer(pre_norm(hidden), chosen[part], first_token=first).hidden
        outputs.append(hidden.clone())
    return outputs


def only_experts_train(world: World, case: Case) -> str:
    """What is said when neither hidden states nor weights require gradients, and experts do."""
    meter = TrafficMeter(1, world.world_size)
    dispatcher = dispatcher_of(case, transports(case, world, meter), 0)
    hidden = torch.zeros(4, case.shape.payload_width)
    arrived = dispatcher.dispatch(hidden, case.batch()[1][0], torch.ones(4, case.top_k))
    experts = Experts(case.shape, own_experts(case, world), seed=SEED, layer=0)
    rows = experts(arrived.expert_input, arrived.tokens_per_expert)
    with torch.no_grad():
        assert not dispatcher.combine(rows, arrived.handle).any()
    try:
        dispatcher.combine(rows, arrived.handle)
    except ValueError as error:
        return str(error)
    return ""


def train_one(world: World, case: Case) -> Gradients:
    meter = TrafficMeter(case.num_layers, world.world_size, phases=ALL_PHASES)
    layers = layers_of(case, world, meter)
    first = sum(case.tokens[: world.rank])
    output, x = stack(case, layers, slice(first, first + case.tokens[world.rank]))
    everyone, owned = Transport(world, meter), own_experts(case, world)
    holders = expert_holders(
        case.placed, world.rank, world.world_size, case.group_size, case.expert_tp
    )
    found = []
    for index, layer in enumerate(layers):
        named = dict(layer.named_parameters())
        assert all(p.grad is not None for p in named.values())  # zeros, where nothing came
        shared = [p for name, p in named.items() if not name.startswith("experts.")]
        sync_replicated(everyone, index, gradients_of(shared))
        for name in ("experts.gate_up", "experts.down"):
            (gradient,) = gradients_of([named[name]])
            sync_experts(
                everyone,
                index,
                holders,
                gradient.view(len(owned), gradient[0].numel() if owned else 0),
            )
        found.append({name: p.grad for name, p in named.items()})
    return Gradients(output, x, found, owned, meter)


class Rounded(torch.autograd.Function):
    """Rounding on the wire, whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wire: WireFormat) -> Tensor:
        return wire.decode(pack(wire.encode(rows)), rows.shape[1], rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(frozen=True)
class Ready:
    """A phase that was done at once."""

    value: Any

    def wait(self) -> Any:
        return self.value


@dataclass(frozen=True)
class Arrived:
    expert_input: Tensor
    tokens_per_expert: Tensor
    handle: Any
    num_dropped: int = 0


@dataclass(frozen=True)
class PlainDispatcher:
    """A dispatcher in one process, in operations that torch differentiates.

    by_rank: answers are summed by rank before they are rounded
    """

    case: Case
    by_rank: bool

    def dispatch_async(self, z: Tensor, ids: Tensor, weights: Tensor, slots: Any = None) -> Ready:
        placement = self.case.placed
        padded = torch.cat([torch.from_numpy(placement.logical_to_physical), torch.tensor([-1])])
        slots = padded[ids]
        token, k = (slots >= 0).nonzero(as_tuple=True)
        order = slots[token, k].argsort(stable=True)
        token, k = token[order], k[order]
        counts = torch.bincount(slots[token, k], minlength=placement.num_slots)
        rank = torch.from_numpy(placement.slot_rank)[slots[token, k]]
        rows = Rounded.apply(z, self.case.formats[0])[token]
        return Ready(Arrived(rows, counts, (token, rank, weights[token, k], z)))

    def combine_async(self, rows: Tensor, handle: Any) -> Ready:
        token, rank, weights, z = handle
        wire = self.case.formats[1]
        if not self.by_rank:
            rows = Rounded.apply(rows, wire)
        weighted = weights[:, None] * rows.float()
        if not self.by_rank:
            return Ready(torch.zeros_like(z.float()).index_add(0, token, weighted).to(z.dtype))
        sums = torch.zeros(len(z) * self.case.placed.world_size, z.shape[1])
        place = token * self.case.placed.world_size + rank
        sums = Rounded.apply(sums.index_add(0, place, weighted).to(z.dtype), wire)
        return Ready(
            sums.unflatten(0, (len(z), self.case.placed.world_size)).float().sum(1).to(z.dtype)
        )


def plain(case: Case) -> Gradients:
    """The same network and batch in one process, all experts in slot order."""
    case = replace(case, replicas=())
    owned = case.placed.physical_to_logical.tolist()
    layers = []
    for index in range(case.num_layers):
        made = {"seed": SEED, "layer": index, "dtype": case.dtype}
        experts = Experts(case.shape, owned, **made)
        dispatcher = PlainDispatcher(case, case.dispatcher != "all_to_all")
        layers.append(MoELayer(case.shape, experts, [dispatcher], **made))
    output, x = stack(case, layers, slice(0, sum(case.tokens)))
    found = [{name: p.grad for name, p in layer.named_parameters()} for layer in layers]
    return Gradients(output, x, found, owned)


def assembled(case: Case, ranks: list[Gradients], join: Callable) -> Gradients:
    """The ranks' results as one, experts by logical id; every holder must have the same.

    join: (name, [gradient of each shard of one expert]) -> gradient of the whole expert
    """
    shards, size = case.expert_tp, case.group_size
    layers = []
    for index in range(case.num_layers):
        merged = dict(ranks[0].layers[index])
        for rank in ranks:
            for name, gradient in rank.layers[index].items():
                if not name.startswith("experts."):
                    assert torch.equal(gradient, merged[name]), name
        for name in ("experts.gate_up", "experts.down"):
            found: dict[int, Tensor] = {}
            for first in range(0, len(ranks), shards):
                group = ranks[first : first + shards]
                for slot, expert in enumerate(group[0].experts):
                    whole = join(name, [one.layers[index][name][slot] for one in group])
                    assert torch.equal(found.setdefault(expert, whole), whole), (name, expert)
            merged[name] = torch.stack([found[expert] for expert in range(case.num_experts)])
        layers.append(merged)
    assert len(ranks) % size == 0
    return Gradients(
        torch.cat([rank.output for rank in ranks]),
        torch.cat([rank.x for rank in ranks]),
        layers,
        list(range(case.num_experts)),
    )


def by_expert(case: Case, one: Gradients) -> Gradients:
    """Experts of the plain run in order of their ids."""
    order = torch.tensor(one.experts).argsort()
    layers = [
        {
            name: gradient[order] if name.startswith("experts.") else gradient
            for name, gradient in layer.items()
        }
        for layer in one.layers
    ]
    return replace(one, layers=layers, experts=sorted(one.experts))


def join_shards(name: str, parts: list[Tensor]) -> Tensor:
    """Shards of one expert's gradient as one."""
    if name == "experts.down":
        return torch.cat(parts, dim=1)
    halves = [part.chunk(2, dim=0) for part in parts]
    return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
