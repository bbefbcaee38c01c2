"""What every dispatcher is: two phases around the experts, and a frozen handle between them.

    hidden, topk_ids, topk_weights --dispatch--> expert_input, tokens_per_expert, handle
    expert_output, handle          --combine---> weighted sum of each token's experts

    DispatchSetup   what is known before the first token: ranks, experts, formats, widths
    Dispatcher      a strategy; keeps nothing between calls
    DispatchHandle  what combine must know of its dispatch; each strategy has its own
    Pending         a phase that has begun; the collective is in flight until `wait`

A strategy says in four steps how rows travel: two of the forward pass, each begun and finished
apart so that chunks overlap, and their two transposes. `comm.dispatch.autograd` strings them
together where gradients are wanted. Strategies know the transport, the placement and the wire;
`moe` knows only this file.

Legend: T tokens of this rank, K choices, W width, M rows for this rank's experts, R ranks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from comm import permute
from comm.meter import Position
from comm.placement import ExpertPlacement
from comm.transport import Transport
from comm.wire import WireFormat


@dataclass(frozen=True)
class DispatchOptions:
    """What only some strategies read.

    capacity_factor, renormalize: padded; deduplicate: one_sided
    """

    capacity_factor: float = 1.0
    renormalize: bool = False
    deduplicate: bool = False


@dataclass(frozen=True)
class DispatchSetup:
    """All that a dispatcher of one layer needs.

    transport: among the ranks that share the experts; `rank` and `world_size` are places in it
    width: values in a dispatched row (the latent width where the model has one)
    dtype: what the experts compute in; rows are handed over and taken back in it
    wire_backward: format of gradients on their way; those of the router's weights travel in fp32
    node_of_rank: the node of each of the transport's ranks, () for one node
    node_transport: among those of them that share this rank's node; two hops need it
    """

    transport: Transport
    placement: ExpertPlacement
    wire_dispatch: WireFormat
    wire_combine: WireFormat
    layer: int
    width: int
    top_k: int
    dtype: torch.dtype = torch.float32
    wire_backward: WireFormat | None = None
    node_of_rank: tuple[int, ...] = ()
    node_transport: Transport | None = None
    options: DispatchOptions = field(default_factory=DispatchOptions)

    @property
    def rank(self) -> int:
        return self.transport.group.rank

    @property
    def world_size(self) -> int:
        return self.transport.group.size

    @property
    def num_local_slots(self) -> int:
        return int(self.placement.slots_per_rank[self.rank])

    @property
    def gradients(self) -> WireFormat:
        """The format of gradients: that of combined rows where no other was named."""
        return self.wire_backward or self.wire_combine


class DispatchHandle(Protocol):
    """What combine needs of its dispatch; a frozen dataclass of the strategy.

    weights: fp32, the router's weights where combine applies them: the tokens' own [T, K] where
        they stayed at home, those that arrived with the rows where they travelled
    """

    @property
    def weights(self) -> Tensor: ...


Handle = TypeVar("Handle", bound=DispatchHandle)
Result = TypeVar("Result")


@dataclass(frozen=True)
class DispatchResult(Generic[Handle]):
    """What the experts of this rank receive.

    expert_input: [M, W] in the compute dtype, expert-major in slot order, compact; in inference
        mode it may lie in shared memory, and is valid until the combine of this dispatch
    tokens_per_expert: int64 [local slots] on the CPU; sums to M
    handle: goes back into combine, unchanged
    num_dropped: choices of this rank's tokens that found no room, where room is limited
    """

    expert_input: Tensor
    tokens_per_expert: Tensor
    handle: Handle
    num_dropped: int = 0


@dataclass(frozen=True)
class Combined:
    """output: [T, W]; answers: what the gradient of weights that stayed at home needs: the rows
    that came back, as the strategy ordered them; None where the weights travelled
    expert_output: [M, W], what was weighted in fact, where the experts' rows were but parts of it;
    None: the experts' rows themselves. It takes their place in the transpose."""

    output: Tensor
    answers: Tensor | None = None
    expert_output: Tensor | None = None


class Pending(Generic[Result]):
    """A phase that has begun: `wait` finishes it, once."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish = finish

    def wait(self) -> Result:
        return self._finish()


class Dispatcher(ABC, Generic[Handle]):
    """A strategy for one layer. Subclasses say in `carries` what goes on the wire."""

    carries: ClassVar[str]

    def __init__(self, setup: DispatchSetup) -> None:
        self.setup = setup
        self._meter = setup.transport.meter
        self._on_gpu = setup.transport.world.device.type == "cuda"
        self._positions: dict[tuple[str, str], Position] = {}

    def dispatch(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        slots: Tensor | None = None,
    ) -> DispatchResult[Handle]:
        """Send each token to the ranks of its experts.

        hidden: [T, W]
        topk_ids: int64 [T, K] logical experts, distinct in a row; -1 means no expert
        topk_weights: fp32 [T, K]
        slots: int64 [T, K] the physical slot of each choice where replicas leave one, S for no
            expert; None: the first slot of each expert
        Raises ValueError for a wrong shape or an expert that does not exist.
        """
        return self.dispatch_async(hidden, topk_ids, topk_weights, slots).wait()

    def dispatch_async(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        slots: Tensor | None = None,
    ) -> Pending[DispatchResult[Handle]]:
        """Begin a dispatch; under autograd it is done at once. Arguments as for `dispatch`."""
        self._check_shapes(hidden, topk_ids, topk_weights)
        if slots is None:
            slots = self._slots(topk_ids)
        else:
            permute.check_topk_ids(topk_ids, self.setup.placement.num_experts)
        if torch.is_grad_enabled() and (hidden.requires_grad or topk_weights.requires_grad):
            from comm.dispatch.autograd import dispatch_with_grad

            return Pending(
                lambda: self._settled(dispatch_with_grad(self, hidden, slots, topk_weights))
            )
        pending = self.timed("dispatch", lambda: self._start_dispatch(hidden, slots, topk_weights))
        return Pending(lambda: self._settled(pending.wait()))

    def combine(self, expert_output: Tensor, handle: Handle) -> Tensor:
        """Bring the experts' rows [M, W] back: [T, W], zeros for a token without experts."""
        return self.combine_async(expert_output, handle).wait()

    def combine_async(self, expert_output: Tensor, handle: Handle) -> Pending[Tensor]:
        """Begin a combine; under autograd it is done at once.

        Raises ValueError for rows with a gradient that the dispatched rows cannot take on: ranks
        without experts would not know of it, and the others would wait for them in backward.
        """
        if torch.is_grad_enabled() and (
            expert_output.requires_grad or handle.weights.requires_grad
        ):
            from comm.dispatch.autograd import combine_with_grad

            if not handle.weights.requires_grad:
                raise ValueError(
                    "expert_output requires grad, and what was dispatched does not: on every rank,"
                    " hidden or topk_weights must require grad, or torch.no_grad() be around both"
                )
            return Pending(lambda: combine_with_grad(self, expert_output, handle))
        pending = self.timed("combine", lambda: self._start_combine(expert_output, handle))
        return Pending(lambda: pending.wait().output)

    @abstractmethod
    def _start_dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> Callable[[], DispatchResult[Handle]]:
        """As `dispatch`, with physical slots [T, K]; slot S is none. Puts the rows in flight and
        returns what finishes the phase."""

    def _settled(self, result: DispatchResult[Handle]) -> DispatchResult[Handle]:
        """The result as it leaves `dispatch`: what changes here changes between the two nodes of
        the graph, so that autograd follows it by itself."""
        return result

    @abstractmethod
    def _start_combine(self, expert_output: Tensor, handle: Handle) -> Callable[[], Combined]:
        """As `combine`; puts the rows in flight and returns what finishes the phase."""

    @abstractmethod
    def _combine_backward(
        self, grad: Tensor, expert_output: Tensor, answers: Tensor | None, handle: Handle
    ) -> tuple[Tensor, Tensor]:
        """The transpose of combine: gradients go the way of the dispatched rows.

        grad: [T, W] of the output; expert_output: [M, W] and answers, as of the forward pass
        returns: the gradients of expert_output [M, W] and of handle.weights
        """

    @abstractmethod
    def _dispatch_backward(
        self, grad: Tensor, grad_weights: Tensor, handle: Handle
    ) -> tuple[Tensor, Tensor]:
        """The transpose of dispatch: gradients go the way of the combined rows.

        grad: [M, W] of expert_input; grad_weights: of handle.weights
        returns: the gradients of hidden [T, W] and of topk_weights [T, K]
        """

    def timed(
        self,
        phase: str,
        start: Callable[[], Callable[[], Result]],
        direction: str = "forward",
    ) -> Pending[Result]:
        """Start a phase now and book, when it is finished, the time spent inside it: what passes
        between the two, while rows travel beneath other work, is not counted."""
        meter, position = self._meter, self._position(phase, direction)
        meter.phase_began(position)
        started = time.perf_counter()
        finish = start()
        spent = time.perf_counter() - started

        def wait() -> Result:
            resumed = time.perf_counter()
            result = finish()
            if self._on_gpu:
                torch.cuda.synchronize()  # a phase has ended when its rows are there
            meter.phase_ended(position, spent + time.perf_counter() - resumed)
            return result

        return Pending(wait)

    def _position(self, phase: str, direction: str = "forward") -> Position:
        position = self._positions.get((phase, direction))
        if position is None:
            position = Position(self.setup.layer, phase, direction)
            self._positions[phase, direction] = position
        return position

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
        """The first slot of each expert: int64 [T, K]. Raises ValueError for one that is none."""
        if topk_ids.dtype != torch.int64 or topk_ids.device.type != "cpu":
            permute.check_topk_ids(topk_ids, self.setup.placement.num_experts)
            entry = (topk_ids + 1).flatten()
            return self._logical_to_physical.index_select(0, entry).view(topk_ids.shape)
        ids, num_experts = topk_ids.numpy(), self.setup.placement.num_experts
        # Of those without a sign, where what is negative comes out above all others.
        highest = np.maximum.reduce(ids.view(np.uint64), axis=None, initial=0)
        if highest < num_experts and self._numbers_agree:
            return topk_ids
        entry = ids + 1
        if highest >= num_experts and entry.view(np.uint64).max() > num_experts:
            permute.check_topk_ids(topk_ids, num_experts)
        return torch.from_numpy(self._logical_to_physical.numpy().take(entry, mode="clip"))

    @cached_property
    def _numbers_agree(self) -> bool:
        """Has each expert the number of its slot?"""
        slots = self.setup.placement.logical_to_physical
        return bool((slots == np.arange(len(slots))).all())

    def _check_shapes(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        setup, shape = self.setup, hidden.shape
        choices = (shape[0] if shape else 0, setup.top_k)
        if (
            shape == (choices[0], setup.width)
            and topk_ids.shape == choices
            and topk_weights.shape == choices
        ):
            return
        wanted = {"hidden": (choices[0], setup.width)} | {
            name: choices for name in ("topk_ids", "topk_weights")
        }
        given = {"hidden": hidden, "topk_ids": topk_ids, "topk_weights": topk_weights}
        for name, shape in wanted.items():
            if tuple(given[name].shape) != shape:
                raise ValueError(f"{name} is {tuple(given[name].shape)}, must be {shape}")
