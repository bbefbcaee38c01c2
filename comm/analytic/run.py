"""What the analytic side knows of a run before the first token: plain values, no code of the run.

Legend: R ranks, L layers, E logical experts, S physical slots of a lane, K top_k, I inner width.
A *lane* is the set of ranks among which a dispatcher works: an expert-parallel group or, where each
expert is sharded over `expert_tp` ranks, every expert_tp-th rank of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


@dataclass(frozen=True)
class RunShape:
    """A run, as far as its traffic depends on it.

    tokens_per_rank: [R] tokens of each rank in one step
    node_of_rank: [R] any numbering
    physical_to_logical: for each layer [S_l], the logical expert in each slot
    slot_rank: for each layer [S_l], the lane position that holds each slot, ascending
    ep_size: ranks of an expert-parallel group, consecutive; divides R
    expert_tp: ranks that share an expert, consecutive inside a group; divides ep_size
    expert_tp_mode: "gather" (dispatched to one, gathered inside) or "all" (dispatched to all)
    replica_choice: "round_robin", "random" or "nearest", where an expert has several slots
    deduplicate: one_sided sends a row for each (token, rank) instead of each (token, expert)
    expert_values: parameters of one routed expert (3 W I)
    expert_unit: parameters that stay together when an expert is sharded (3 W)
    expert_bytes: bytes of one expert's weights in the compute dtype
    shared_values: parameters of one layer that every rank holds
    rebalances: experts are placed anew after warm-up, even if none has to move
    moves: [n, 4] (layer, expert, source rank, destination rank) of experts moved by a rebalance
    """

    dispatcher: str
    tokens_per_rank: tuple[int, ...]
    node_of_rank: tuple[int, ...]
    physical_to_logical: tuple[IntArray, ...]
    slot_rank: tuple[IntArray, ...]
    num_experts: int
    top_k: int
    width: int
    num_steps: int = 1
    wire_dispatch: str = "bf16"
    wire_combine: str = "bf16"
    wire_backward: str = "bf16"
    training: bool = False
    chunks: int = 1
    ep_size: int | None = None
    expert_tp: int = 1
    expert_tp_mode: str = "gather"
    replica_choice: str = "round_robin"
    deduplicate: bool = False
    capacity_factor: float = 1.0
    expert_values: int = 0
    expert_unit: int = 1
    expert_bytes: int = 0
    shared_values: int = 0
    rebalances: bool = False
    moves: IntArray = field(default_factory=lambda: np.zeros((0, 4), np.int64))

    @property
    def world_size(self) -> int:
        return len(self.tokens_per_rank)

    @property
    def num_layers(self) -> int:
        return len(self.slot_rank)

    @property
    def group_size(self) -> int:
        """Ranks of an expert-parallel group."""
        return self.world_size if self.ep_size is None else self.ep_size

    @cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks of every lane, in lane order; each rank is in exactly one."""
        size, shards = self.group_size, self.expert_tp
        return tuple(
            tuple(range(first + shard, first + size, shards))
            for first in range(0, self.world_size, size)
            for shard in range(shards)
        )

    @cached_property
    def token_rank(self) -> NDArray[np.int64]:
        """[tokens] global rank that holds each token, tokens in global order."""
        return np.repeat(np.arange(self.world_size), self.tokens_per_rank)

    @cached_property
    def tokens_per_chunk(self) -> NDArray[np.int64]:
        """[chunks, R] tokens of each rank in each chunk of a step."""
        tokens = np.array(self.tokens_per_rank, np.int64)
        bounds = np.arange(self.chunks + 1)[:, None] * tokens // self.chunks
        return np.diff(bounds, axis=0)

    @property
    def shifts(self) -> int:
        """Dispatches of one chunk: to the own lane or, one after the other, to all of the group."""
        return self.expert_tp if self.expert_tp_mode == "all" else 1

    @property
    def directions(self) -> tuple[str, ...]:
        return ("forward", "backward") if self.training else ("forward",)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that this run has, in the order of the ledger's axis."""
        present = {
            "dispatch": True,
            "combine": True,
            "tp_gather": self.expert_tp > 1 and self.expert_tp_mode == "gather",
            "tp_reduce": self.expert_tp > 1,
            "rebalance": self.rebalances or len(self.moves) > 0,
            "grad_sync": self.training,
        }
        return tuple(phase for phase, there in present.items() if there)
