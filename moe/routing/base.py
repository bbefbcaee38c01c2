"""What a routing source is told about a run, and what it answers.

Legend: R ranks of the world, T tokens of a rank, E logical experts, K = top_k, L MoE layers. Global
token numbers count the tokens of rank 0 first, then those of rank 1, and begin at 0 in every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from comm.analytic.law import Law
from moe.routing.options import RouterOptions

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RoutingContext:
    """A run, as far as the choice of experts can depend on it.

    num_steps: measured steps; warm-up step i has the number num_steps + i
    tokens_per_rank: [R] tokens of each rank in a step
    expert_rank: int64 [L, E] the position, inside an expert-parallel group, of the rank that holds
        the first slot of each expert
    group_size: ranks of an expert-parallel group
    num_expert_groups, num_limited_groups, group_score: the model's own limits
    """

    seed: int
    num_experts: int
    top_k: int
    num_layers: int
    num_steps: int
    tokens_per_rank: tuple[int, ...]
    expert_rank: IntArray
    group_size: int
    num_expert_groups: int = 1
    num_limited_groups: int = 1
    group_score: str = "max"
    options: RouterOptions = field(default_factory=RouterOptions)

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k={self.top_k}: must lie in 1 .. num_experts={self.num_experts};"
                f" nearest: {min(max(self.top_k, 1), self.num_experts)}"
            )
        wanted = (self.num_layers, self.num_experts)
        if self.expert_rank.shape != wanted:
            raise ValueError(f"expert_rank has shape {self.expert_rank.shape}: must be {wanted}")
        positions = self.expert_rank
        if positions.size and not 0 <= positions.min() <= positions.max() < self.group_size:
            raise ValueError(f"expert_rank must lie in 0 .. group_size-1={self.group_size - 1}")

    @property
    def world_size(self) -> int:
        return len(self.tokens_per_rank)

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks in a step."""
        return sum(self.tokens_per_rank)


@dataclass(frozen=True, eq=False)
class Choice:
    """The experts of consecutive tokens.

    topk_ids: int64 [T, K] logical experts, distinct in a row; -1 = none
    topk_weights: float32 [T, K], or None: the layer's own router scores of the chosen experts
    """

    topk_ids: IntArray
    topk_weights: NDArray[np.float32] | None = None


class RoutingSource(ABC):
    """Chooses the experts of every token of a run.

    A source is a function of its context: two that were built alike, on whatever ranks, answer
    alike, and a range of tokens may be asked for in any pieces and in any order.
    """

    # whether the answer depends on which rank holds which expert or token; a source without it
    # chooses the same experts for a token on 1 rank and on 224
    uses_ranks: bool = False
    # what a reader of the results should know about where the choices come from, a line each
    notes: tuple[str, ...] = ()

    def __init__(self, context: RoutingContext) -> None:
        """Raises ValueError where the options and the run do not go together."""
        self.context = context

    @abstractmethod
    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> Choice | None:
        """The experts of tokens first_token .. first_token + num_tokens - 1 of a step.

        step: any number >= 0; those from context.num_steps on belong to warm-up
        returns: None where the layer's own, learned router chooses
        """

    @property
    @abstractmethod
    def law(self) -> Law:
        """What the choices follow, for a prediction of averages over the measured steps."""

    def active_tokens(self, step: int, layer: int) -> IntArray:
        """[R] how many tokens of each rank choose any expert at all."""
        return np.array(self.context.tokens_per_rank, dtype=np.int64)
