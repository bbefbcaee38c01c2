"""What a run is, once the ranks have met: shapes, nodes, owners and tokens, equal on every rank.

world       R ranks
EP groups   ep_size consecutive ranks each; every group holds all experts
shards      inside a group, expert_tp consecutive ranks share each expert
lane        every expert_tp-th rank of a group: those among which a dispatcher works
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from comm.meter import ALL_PHASES, DIRECTIONS, PHASES
from comm.placement import PLACEMENTS, ExpertPlacement, build_placement, placement_from_slots
from comm.topology import Topology
from moe.model import ModelShape, scaled
from moe.placement_files import read_placement
from moe.routing import build_source
from moe.routing.base import RoutingContext, RoutingSource
from moe.settings import Config

if TYPE_CHECKING:  # a plan is also drawn where no torch is loaded, to see that it can be
    import torch

    from comm.world import World

Partition = tuple[tuple[int, ...], ...]  # of the world's ranks


@dataclass(frozen=True)
class Plan:
    """shape: the network as it runs; full_shape: as it was published
    placements: of each layer, over the positions of a lane; before a rebalance, if there is one
    tokens_per_rank: int64 [R]
    """

    config: Config
    shape: ModelShape
    full_shape: ModelShape
    topology: Topology
    placements: tuple[ExpertPlacement, ...]
    tokens_per_rank: np.ndarray

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.config.dtype)

    @property
    def num_layers(self) -> int:
        return self.shape.num_moe_layers

    @property
    def training(self) -> bool:
        return self.config.mode == "training"

    @property
    def rebalances(self) -> bool:
        """Do experts move between warm-up and measurement?"""
        return self.config.placement.name == "balance"

    @property
    def replicates(self) -> bool:
        """May an expert have more than one slot?"""
        return self.config.placement.name in ("balance", "file")

    @property
    def directions(self) -> tuple[str, ...]:
        """The ledger's axis of directions."""
        return DIRECTIONS if self.training else DIRECTIONS[:1]

    @property
    def phases(self) -> tuple[str, ...]:
        """The ledger's axis of phases: those that this run has."""
        sharded = self.config.expert_tp > 1
        present = {
            "tp_gather": sharded and self.config.expert_tp_mode == "gather",
            "tp_reduce": sharded,
            "rebalance": self.rebalances,
            "grad_sync": self.training,
        }
        return PHASES + tuple(phase for phase in ALL_PHASES if present.get(phase))

    @property
    def first_token(self) -> np.ndarray:
        """int64 [R], the global number of each rank's first token"""
        return np.cumsum(self.tokens_per_rank) - self.tokens_per_rank

    @property
    def token_rank(self) -> np.ndarray:
        """int64 [tokens], the rank of each global token"""
        return np.repeat(np.arange(len(self.tokens_per_rank)), self.tokens_per_rank)

    @cached_property
    def groups(self) -> Partition:
        """The expert-parallel groups."""
        size, ranks = self.config.group_size, range(self.topology.world_size)
        return tuple(tuple(ranks[first : first + size]) for first in ranks[::size])

    @cached_property
    def lanes(self) -> Partition:
        shards = self.config.expert_tp
        return tuple(group[shard::shards] for group in self.groups for shard in range(shards))

    @cached_property
    def shard_groups(self) -> Partition:
        """The ranks that share their experts' weights."""
        shards, ranks = self.config.expert_tp, range(self.topology.world_size)
        return tuple(tuple(ranks[first : first + shards]) for first in ranks[::shards])

    def lane_of(self, rank: int) -> tuple[int, ...]:
        return next(lane for lane in self.lanes if rank in lane)

    def nodes_of_lane(self, rank: int) -> tuple[int, ...]:
        """The node of each position of this rank's lane."""
        return tuple(self.topology.node_of_rank[other] for other in self.lane_of(rank))

    @cached_property
    def lane_nodes(self) -> Partition:
        """The ranks of each lane, node by node."""
        node = self.topology.node_of_rank
        return tuple(
            tuple(rank for rank in lane if node[rank] == one)
            for lane in self.lanes
            for one in dict.fromkeys(node[rank] for rank in lane)
        )

    @cached_property
    def routing(self) -> RoutingSource:
        """Who chooses the experts of each token."""
        shape, config = self.shape, self.config
        expert_rank = [
            placement.slot_rank[placement.logical_to_physical] for placement in self.placements
        ]
        context = RoutingContext(
            seed=config.seed,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_layers=self.num_layers,
            num_steps=config.steps,
            tokens_per_rank=tuple(self.tokens_per_rank.tolist()),
            expert_rank=np.stack(expert_rank),
            group_size=config.num_positions,
            num_expert_groups=shape.num_expert_groups,
            num_limited_groups=shape.num_limited_groups,
            group_score=shape.group_score,
            options=config.router,
        )
        try:
            return build_source(config.router.name, context)
        except ValueError as error:
            raise _about("router.path", config.router.path, error) from error

    @property
    def fingerprint(self) -> str:
        """What files said of this run: equal on all ranks, or they read different ones."""
        digest = hashlib.sha256()
        for placement in self.placements:
            digest.update(placement.physical_to_logical.tobytes())
            digest.update(placement.first_slot.tobytes())
        if self.config.router.path is not None:
            for layer in range(self.num_layers):
                choice = self.routing.choose(0, layer, 0, int(self.tokens_per_rank.sum()))
                for part in (choice and choice.topk_ids, choice and choice.topk_weights):
                    digest.update(b"" if part is None else part.tobytes())
        return digest.hexdigest()

    @property
    def weights_given(self) -> bool:
        """Do the weights come with the choices? Then the layers' routers have no say in them."""
        choice = self.routing.choose(0, 0, 0, 0)
        return choice is not None and choice.topk_weights is not None

    def placed(self, placements: tuple[ExpertPlacement, ...]) -> Plan:
        """The same run with experts elsewhere; who chooses them stays."""
        moved = replace(self, placements=placements)
        moved.__dict__["routing"] = self.routing
        return moved


def torch_dtype(name: str) -> torch.dtype:
    """One of moe.settings.DTYPES as torch has it."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def make_plan(config: Config, world: World) -> Plan:
    """A collective: the ranks tell each other their nodes."""
    from comm.world import gather_topology

    topology = gather_topology(world, config.topology.ranks_per_node, config.topology.node_of_rank)
    return plan_on(config, topology)


def plan_on(config: Config, topology: Topology) -> Plan:
    """The plan of a run whose nodes are known. Raises ValueError for a file that does not fit."""
    shape = scaled(config.model, config.scale)
    return Plan(
        config=config,
        shape=shape,
        full_shape=config.model,
        topology=topology,
        placements=_placements(config, shape),
        tokens_per_rank=np.asarray(config.tokens_per_rank, dtype=np.int64),
    )


def _placements(config: Config, shape: ModelShape) -> tuple[ExpertPlacement, ...]:
    """Of each layer, before a rebalance."""
    wanted, positions = config.placement, config.num_positions
    if wanted.name == "file":
        assert wanted.path is not None  # validated
        layers = _read_placement(config, shape, wanted.path)
        return tuple(
            placement_from_slots("file", shape.num_experts, *slots)
            for slots in layers[: shape.num_moe_layers]
        )
    name = wanted.name if wanted.name in PLACEMENTS else "contiguous"
    return (build_placement(name, shape.num_experts, positions),) * shape.num_moe_layers


def _read_placement(
    config: Config, shape: ModelShape, path: str
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Of all the model's layers, of which a run takes the first, or of those that are run."""
    model = config.model
    try:
        return read_placement(
            path,
            model.num_moe_layers,
            model.num_experts,
            config.num_positions,
            num_dense_layers=model.num_dense_layers,
        )
    except ValueError as error:
        try:
            return read_placement(
                path, shape.num_moe_layers, model.num_experts, config.num_positions
            )
        except ValueError:
            raise _about("placement.path", path, error) from None


def _about(name: str, path: str | None, error: ValueError) -> ValueError:
    """The same refusal, the key before the file that it speaks of."""
    spoken_of = path is not None and str(error).startswith(path)
    return ValueError(f"{name}={error}") if spoken_of else error
