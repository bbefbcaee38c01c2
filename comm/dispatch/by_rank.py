"""What the strategies share that send a token once to a rank, whatever it does there.

The row carries the token's ids and weights, so the receiver expands it to its own experts,
computes, and adds up in fp32 before one row goes back:

    token order --hop--> received rows --expand--> expert-major
                                                     experts
    token order <--back- received rows <--reduce-- expert-major

Which roads a token takes, one after another, and which rows go where on each is all that a strategy
adds. Between two roads a row is passed on as it came, byte by byte; on the way back the answers to
it are added up in fp32 and go on as one. A phase begins with its first hop in flight; the others
happen where it is finished.

Legend: as in `comm.dispatch.base`; N rows received at the end of the last road.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from comm import permute
from comm.dispatch.base import Combined, Dispatcher, DispatchResult
from comm.dispatch.hop import Hop, start_hop
from comm.transport import Transport
from comm.wire import Parts, as_bytes, pack, view_as


class Road(NamedTuple):
    """One leg of a row's way.

    destinations: slots [rows, K] -> bool [ranks of the transport's group, rows]
    """

    transport: Transport
    destinations: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ByRankHandle:
    """hops: the roads as they were taken, the first one first
    choice: int64 [M] flat (received row, k) of each local choice, ascending
    expert_row: int64 [M] expert-major row of each of them
    weights: fp32 [M] router weight of each of them
    first_choice: int64 [N], where each received row's begin in these
    """

    hops: tuple[Hop, ...]
    choice: Tensor
    expert_row: Tensor
    weights: Tensor
    first_choice: Tensor


class ByRank(Dispatcher[ByRankHandle]):
    """A row for each (token, destination rank), with ids and weights."""

    @abstractmethod
    def _destinations(self, slots: Tensor) -> Tensor:
        """bool [R, T]: which token is sent to which rank, on the first road."""

    def _roads(self) -> list[Road]:
        return [Road(self.setup.transport, self._destinations)]

    def _start_dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> Callable[[], DispatchResult[ByRankHandle]]:
        position, code = self._position("dispatch"), self.setup.wire_dispatch.code
        parts = self._parts(hidden, slots, topk_weights)
        first, *others = self._roads()
        destinations = first.destinations(slots)
        pending = start_hop(first.transport, position, pack(parts), parts, destinations, code)

        def finish() -> DispatchResult[ByRankHandle]:
            rows, hop = pending()
            hops = [hop]
            for road in others:
                onward = road.destinations(self._slots_of(rows))
                rows, hop = start_hop(road.transport, position, rows, parts, onward, code)()
                hops.append(hop)
            return self._expand(rows, tuple(hops))

        return finish

    def _parts(self, hidden: Tensor, slots: Tensor, topk_weights: Tensor) -> Parts:
        """What a row is packed of, in order. Ids and weights come first: 8 K bytes keep aligned
        whatever follows, so that the receiver can view and need not copy."""
        return [
            ("ids", as_bytes(slots.to(torch.int32))),
            ("weights", as_bytes(topk_weights.float())),
            *self.setup.wire_dispatch.encode(hidden),
        ]

    def _slots_of(self, rows: Tensor) -> Tensor:
        """Slots int64 [rows, K] of packed rows."""
        return view_as(rows[:, : 4 * self.setup.top_k], torch.int32).long()

    def _expand(self, received: Tensor, hops: tuple[Hop, ...]) -> DispatchResult[ByRankHandle]:
        """Packed rows [N, b] to the experts' rows, a row for each local choice."""
        setup = self.setup
        id_bytes = weight_bytes = 4 * setup.top_k
        _, weights, payload = received.tensor_split([id_bytes, id_bytes + weight_bytes], dim=1)
        first_slot = int(setup.placement.first_slot[setup.rank])
        choice, local, first_choice = permute.local_choices(
            self._slots_of(received), first_slot, setup.num_local_slots
        )
        order = permute.stable_order(local, max(setup.num_local_slots, 1))
        rows = setup.wire_dispatch.decode(payload, setup.width, setup.dtype)
        row_of_choice = permute.token_of(choice, setup.top_k)
        expert_input = rows.index_select(0, row_of_choice.index_select(0, order))
        handle = ByRankHandle(
            hops,
            choice,
            permute.inverse(order),
            view_as(weights, torch.float32).flatten().index_select(0, choice),
            first_choice,
        )
        tokens_per_expert = torch.bincount(local, minlength=setup.num_local_slots).cpu()
        return DispatchResult(expert_input, tokens_per_expert, handle)

    def _start_combine(self, expert_output: Tensor, handle: ByRankHandle) -> Callable[[], Combined]:
        setup, position = self.setup, self._position("combine")
        reduced = permute.weighted_sum(
            expert_output, handle.expert_row, handle.first_choice, handle.weights
        )
        returned = handle.hops[-1].start_back(position, setup.wire_combine.encode(reduced))

        def finish() -> Combined:
            answers = returned()
            for hop, before in pairwise(reversed(handle.hops)):
                (sums,) = hop.sum_answers(
                    setup.wire_combine.decode(answers, setup.width, torch.float32)
                )
                answers = before.start_back(position, setup.wire_combine.encode(sums))()
            partial = setup.wire_combine.decode(answers, setup.width, setup.dtype)
            return Combined(*handle.hops[0].sum_answers(partial))

        return finish

    def _combine_backward(
        self, grad: Tensor, expert_output: Tensor, answers: Tensor | None, handle: ByRankHandle
    ) -> tuple[Tensor, Tensor]:
        setup, position = self.setup, self._position("combine", "backward")
        parts = setup.gradients.encode(grad)
        rows = pack(parts)
        for hop in handle.hops:
            rows = hop.forth(position, rows, parts)
        gradients = setup.gradients.decode(rows, setup.width, setup.dtype)
        return self._expand_gradients(gradients, expert_output, handle)

    def _expand_gradients(
        self, rows: Tensor, expert_output: Tensor, handle: ByRankHandle
    ) -> tuple[Tensor, Tensor]:
        """Gradients [N, W] of the sums to those of their terms [M, W] and weights."""
        of_choice = rows.index_select(0, permute.token_of(handle.choice, self.setup.top_k)).float()
        grad_weights = (of_choice * expert_output.index_select(0, handle.expert_row)).sum(1)
        of_choice = (of_choice * handle.weights[:, None]).to(self.setup.dtype)
        grad_output = of_choice.index_select(0, permute.inverse(handle.expert_row))
        return grad_output, grad_weights

    def _dispatch_backward(
        self, grad: Tensor, grad_weights: Tensor, handle: ByRankHandle
    ) -> tuple[Tensor, Tensor]:
        setup, position = self.setup, self._position("dispatch", "backward")
        weights, hidden = self._reduced_gradients(grad, grad_weights, handle)
        for hop in reversed(handle.hops):
            parts = [("weights", as_bytes(weights)), *setup.gradients.encode(hidden)]
            returned = hop.start_back(position, parts)()
            of_weights, payload = returned.tensor_split([4 * setup.top_k], dim=1)
            dtype = setup.dtype if hop is handle.hops[0] else torch.float32
            weights, hidden = hop.sum_answers(
                view_as(of_weights, torch.float32),
                setup.gradients.decode(payload, setup.width, dtype),
            )
        return hidden, weights

    def _reduced_gradients(
        self, grad: Tensor, grad_weights: Tensor, handle: ByRankHandle
    ) -> tuple[Tensor, Tensor]:
        """Of each received row: the gradients [N, K] of its weights, the sum [N, W] of those of its
        copies."""
        num_rows = len(handle.first_choice)
        by_row = grad_weights.new_zeros(num_rows * self.setup.top_k)
        by_row[handle.choice] = grad_weights
        reduced = permute.weighted_sum(grad, handle.expert_row, handle.first_choice)
        return by_row.view(num_rows, self.setup.top_k), reduced
