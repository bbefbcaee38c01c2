"""What the strategies share that send a token once to a rank, whatever it does there.

The row carries the token's ids and weights, so the receiver expands it to its own experts,
computes, and adds up in fp32 before one row goes back:

    token order --select--> rank-major --all-to-all--> by source --expand--> expert-major
                                                                                experts
    token order <---sum---- rank-major <--all-to-all-- by source <--reduce-- expert-major

Which token goes to which rank is all that a strategy adds (`_destinations`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comm import permute
from comm.dispatch.base import Combined, Dispatcher, DispatchResult
from comm.wire import Parts, as_bytes, pack, view_as


@dataclass(frozen=True)
class ByRankHandle:
    """destinations: bool [R, T], who was sent what
    sent_splits, received_splits: rows to and from each rank
    choice: int64 [M] flat (received row, k) of each local choice, ascending
    expert_row: int64 [M] expert-major row of each of them
    weights: fp32 [M] router weight of each of them
    first_choice: int64 [received rows], where each row's begin in these
    """

    destinations: Tensor
    sent_splits: list[int]
    received_splits: list[int]
    choice: Tensor
    expert_row: Tensor
    weights: Tensor
    first_choice: Tensor


class ByRank(Dispatcher[ByRankHandle]):
    """A row for each (token, destination rank), with ids and weights."""

    @abstractmethod
    def _destinations(self, slots: Tensor) -> Tensor:
        """bool [R, T]: which token is sent to which rank."""

    def _start_dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> Callable[[], DispatchResult[ByRankHandle]]:
        setup, transport = self.setup, self.setup.transport
        destinations = self._destinations(slots)
        parts = self._parts(hidden, slots, topk_weights)
        tokens = pack(parts)
        position = self._position("dispatch")

        rows_to = destinations.sum(1).cpu().numpy()
        announced = transport.announce(
            position, rows_to[:, None], 1, tokens.shape[1], setup.wire_dispatch.code
        )
        token = destinations.nonzero()[:, 1]
        message = transport.staging("sent", len(token), tokens.shape[1])
        torch.index_select(tokens, 0, token, out=message)

        sent_splits, received_splits = rows_to.tolist(), announced.wait().flatten().tolist()
        rows = transport.start_all_to_all(position, message, parts, sent_splits, received_splits)
        return lambda: self._expand(rows.wait(), destinations, sent_splits, received_splits)

    def _parts(self, hidden: Tensor, slots: Tensor, topk_weights: Tensor) -> Parts:
        """What a row is packed of, in order. Ids and weights come first: 8 K bytes keep aligned
        whatever follows, so that the receiver can view and need not copy."""
        return [
            ("ids", as_bytes(slots.to(torch.int32))),
            ("weights", as_bytes(topk_weights.float())),
            *self.setup.wire_dispatch.encode(hidden),
        ]

    def _expand(
        self,
        received: Tensor,
        destinations: Tensor,
        sent_splits: list[int],
        received_splits: list[int],
    ) -> DispatchResult[ByRankHandle]:
        setup = self.setup
        id_bytes = weight_bytes = 4 * setup.top_k
        ids, weights, payload = received.tensor_split([id_bytes, id_bytes + weight_bytes], dim=1)
        slots = view_as(ids, torch.int32).long()
        first_slot = int(setup.placement.first_slot[setup.rank])
        choice, local, first_choice = permute.local_choices(
            slots, first_slot, setup.num_local_slots
        )
        order = permute.stable_order(local, max(setup.num_local_slots, 1))
        rows = setup.wire_dispatch.decode(payload, setup.width, setup.dtype)
        row_of_choice = permute.token_of(choice, setup.top_k)
        expert_input = rows.index_select(0, row_of_choice.index_select(0, order))
        handle = ByRankHandle(
            destinations,
            sent_splits,
            received_splits,
            choice,
            permute.inverse(order),
            view_as(weights, torch.float32).flatten().index_select(0, choice),
            first_choice,
        )
        tokens_per_expert = torch.bincount(local, minlength=setup.num_local_slots).cpu()
        return DispatchResult(expert_input, tokens_per_expert, handle)

    def _start_combine(self, expert_output: Tensor, handle: ByRankHandle) -> Callable[[], Combined]:
        setup = self.setup
        reduced = permute.weighted_sum(
            expert_output, handle.expert_row, handle.first_choice, handle.weights
        )
        parts = setup.wire_combine.encode(reduced)
        returned = setup.transport.start_all_to_all(
            self._position("combine"),
            pack(parts),
            parts,
            handle.received_splits,
            handle.sent_splits,
        )

        def finish() -> Combined:
            partial = setup.wire_combine.decode(returned.wait(), setup.width, setup.dtype)
            rows = permute.rows_in_token_order(handle.destinations)
            return Combined(permute.weighted_sum(partial, *rows))

        return finish

    def _combine_backward(
        self, grad: Tensor, expert_output: Tensor, answers: Tensor | None, handle: ByRankHandle
    ) -> tuple[Tensor, Tensor]:
        setup = self.setup
        parts = setup.gradients.encode(grad)
        received = setup.transport.all_to_all(
            self._position("combine", "backward"),
            pack(parts).index_select(0, handle.destinations.nonzero()[:, 1]),
            parts,
            handle.sent_splits,
            handle.received_splits,
        )
        rows = setup.gradients.decode(received, setup.width, setup.dtype)
        return self._expand_gradients(rows, expert_output, handle)

    def _expand_gradients(
        self, rows: Tensor, expert_output: Tensor, handle: ByRankHandle
    ) -> tuple[Tensor, Tensor]:
        """Gradients [received rows, W] of the sums to those of their terms [M, W] and weights."""
        of_choice = rows.index_select(0, permute.token_of(handle.choice, self.setup.top_k)).float()
        grad_weights = (of_choice * expert_output.index_select(0, handle.expert_row)).sum(1)
        of_choice = (of_choice * handle.weights[:, None]).to(self.setup.dtype)
        grad_output = of_choice.index_select(0, permute.inverse(handle.expert_row))
        return grad_output, grad_weights

    def _dispatch_backward(
        self, grad: Tensor, grad_weights: Tensor, handle: ByRankHandle
    ) -> tuple[Tensor, Tensor]:
        setup = self.setup
        parts = self._reduced_gradients(grad, grad_weights, handle)
        returned = setup.transport.all_to_all(
            self._position("dispatch", "backward"),
            pack(parts),
            parts,
            handle.received_splits,
            handle.sent_splits,
        )
        weights, payload = returned.tensor_split([4 * setup.top_k], dim=1)
        rows = permute.rows_in_token_order(handle.destinations)
        hidden = setup.gradients.decode(payload, setup.width, setup.dtype)
        return (
            permute.weighted_sum(hidden, *rows),
            permute.weighted_sum(view_as(weights, torch.float32), *rows),
        )

    def _reduced_gradients(self, grad: Tensor, grad_weights: Tensor, handle: ByRankHandle) -> Parts:
        """Of each received row: the K gradients of its weights and the sum of its rows'."""
        by_row = grad_weights.new_zeros(len(handle.first_choice) * self.setup.top_k)
        by_row[handle.choice] = grad_weights
        reduced = permute.weighted_sum(grad, handle.expert_row, handle.first_choice)
        weights = by_row.view(len(handle.first_choice), self.setup.top_k)
        return [("weights", as_bytes(weights)), *self.setup.gradients.encode(reduced)]
