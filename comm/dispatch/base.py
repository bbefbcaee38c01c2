"""What every dispatcher is: two phases around the experts, and a frozen handle between them.

    hidden, topk_ids, topk_weights --dispatch--> expert_input, tokens_per_expert, handle
    expert_output, handle          --combine---> weighted sum of each token's experts

    DispatchSetup   what is known before the first token: ranks, experts, formats, widths
    Dispatcher      a strategy; keeps nothing between calls
    DispatchHandle  what combine must know of its dispatch; each strategy has its own

Strategies know the transport, the placement and the wire; `moe` knows only this file.

Legend: T tokens of this rank, K choices, W width, M rows for this rank's experts, R ranks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from comm.meter import Position
from comm.placement import ExpertPlacement
from comm.transport import Transport
from comm.wire import WireFormat


@dataclass(frozen=True)
class DispatchSetup:
    """All that a dispatcher of one layer needs.

    width: values in a dispatched row (the latent width where the model has one)
    dtype: what the experts compute in; rows are handed over and taken back in it
    """

    transport: Transport
    placement: ExpertPlacement
    wire_dispatch: WireFormat
    wire_combine: WireFormat
    layer: int
    width: int
    top_k: int
    dtype: torch.dtype = torch.float32

    @property
    def rank(self) -> int:
        return self.transport.world.rank

    @property
    def world_size(self) -> int:
        return self.transport.world.world_size

    @property
    def num_local_slots(self) -> int:
        return int(self.placement.slots_per_rank[self.rank])


Handle = TypeVar("Handle")


@dataclass(frozen=True)
class DispatchResult(Generic[Handle]):
    """What the experts of this rank receive.

    expert_input: [M, W] in the compute dtype, expert-major in slot order, compact
    tokens_per_expert: int64 [local slots] on the CPU; sums to M
    handle: goes back into combine, unchanged
    """

    expert_input: Tensor
    tokens_per_expert: Tensor
    handle: Handle


class Dispatcher(ABC, Generic[Handle]):
    """A strategy for one layer. Subclasses say in `carries` what goes on the wire."""

    carries: ClassVar[str]

    def __init__(self, setup: DispatchSetup) -> None:
        self.setup = setup

    def dispatch(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> DispatchResult[Handle]:
        """Send each token to the ranks of its experts.

        hidden: [T, W]
        topk_ids: int64 [T, K] logical experts, distinct in a row; -1 means no expert
        topk_weights: fp32 [T, K]
        Raises ValueError for a wrong shape or an expert that does not exist.
        """
        self._check(hidden, topk_ids, topk_weights)
        started = time.perf_counter()
        result = self._dispatch(hidden, self._slots(topk_ids), topk_weights)
        self._ended("dispatch", started)
        return result

    def combine(self, expert_output: Tensor, handle: Handle) -> Tensor:
        """Bring the experts' rows [M, W] back: [T, W], zeros for a token without experts."""
        started = time.perf_counter()
        combined = self._combine(expert_output, handle)
        self._ended("combine", started)
        return combined

    @abstractmethod
    def _dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> DispatchResult[Handle]:
        """As `dispatch`, with physical slots [T, K] instead of logical ids; slot S is none."""

    @abstractmethod
    def _combine(self, expert_output: Tensor, handle: Handle) -> Tensor: ...

    def _position(self, phase: str) -> Position:
        return Position(self.setup.layer, phase)

    def _ended(self, phase: str, started: float) -> None:
        if self.setup.transport.world.device.type == "cuda":
            torch.cuda.synchronize()  # a phase has ended when its rows are there
        self.setup.transport.meter.phase_ended(self._position(phase), time.perf_counter() - started)

    @cached_property
    def _logical_to_physical(self) -> Tensor:
        # Entry 0 is for -1 (no expert), which has slot S; entry e + 1 for expert e.
        placement = self.setup.placement
        slots = np.append(placement.num_slots, placement.logical_to_physical)
        return torch.from_numpy(slots).to(self.setup.transport.world.device)

    @cached_property
    def _slot_rank(self) -> Tensor:
        ranks = np.append(self.setup.placement.slot_rank, self.setup.world_size)
        return torch.from_numpy(ranks).to(self.setup.transport.world.device)

    def _slots(self, topk_ids: Tensor) -> Tensor:
        slots = self._logical_to_physical.index_select(0, (topk_ids + 1).flatten())
        return slots.view(topk_ids.shape)

    def _check(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        setup = self.setup
        tokens = len(hidden)
        wanted = {"hidden": (tokens, setup.width)} | {
            name: (tokens, setup.top_k) for name in ("topk_ids", "topk_weights")
        }
        given = {"hidden": hidden, "topk_ids": topk_ids, "topk_weights": topk_weights}
        for name, shape in wanted.items():
            if tuple(given[name].shape) != shape:
                raise ValueError(f"{name} is {tuple(given[name].shape)}, must be {shape}")
        if topk_ids.dtype != torch.int64:  # a narrower type may already have wrapped
            raise ValueError(f"topk_ids is {topk_ids.dtype}, must be torch.int64")
        if not tokens:
            return
        low, high = (int(bound) for bound in torch.aminmax(topk_ids))
        if low < -1 or high >= setup.placement.num_experts:
            raise ValueError(
                f"topk_ids span {low}..{high}; experts are 0..{setup.placement.num_experts - 1},"
                " and -1 means no expert"
            )
