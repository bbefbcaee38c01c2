"""What a run is, once the ranks have met: shapes, nodes, owners and tokens, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from comm.placement import ExpertPlacement, build_placement
from comm.topology import Topology
from comm.world import World, gather_topology
from moe.model import ModelShape, scaled
from moe.settings import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Plan:
    """shape: the network as it runs; full_shape: as it was published
    tokens_per_rank: int64 [R]
    """

    config: Config
    shape: ModelShape
    full_shape: ModelShape
    topology: Topology
    placement: ExpertPlacement
    tokens_per_rank: np.ndarray

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.dtype]

    @property
    def num_layers(self) -> int:
        return self.shape.num_moe_layers

    @property
    def first_token(self) -> np.ndarray:
        """int64 [R], the global number of each rank's first token"""
        return np.cumsum(self.tokens_per_rank) - self.tokens_per_rank

    @property
    def token_rank(self) -> np.ndarray:
        """int64 [tokens], the rank of each global token"""
        return np.repeat(np.arange(len(self.tokens_per_rank)), self.tokens_per_rank)


def make_plan(config: Config, world: World) -> Plan:
    """A collective: the ranks tell each other their nodes."""
    topology = gather_topology(world, config.topology.ranks_per_node, config.topology.node_of_rank)
    shape = scaled(config.model, config.scale)
    return Plan(
        config=config,
        shape=shape,
        full_shape=config.model,
        topology=topology,
        placement=build_placement(config.placement.name, shape.num_experts, world.world_size),
        tokens_per_rank=np.asarray(config.tokens_per_rank, dtype=np.int64),
    )
