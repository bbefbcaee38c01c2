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
from dataclasses import dataclass

import torch
from torch import Tensor

from comm import permute
from comm.dispatch.base import Dispatcher, DispatchResult
from comm.wire import Parts, as_bytes, pack, view_as


@dataclass(frozen=True)
class ByRankHandle:
    """destinations: bool [R, T], who was sent what
    sent_splits, received_splits: rows to and from each rank
    expert_row: int64 [M] expert-major row of each local choice, choices in (received row, k) order
    weights: fp32 [M] router weight of each local choice, same order
    first_choice: int64 [received rows], where each row's begin in these
    """

    destinations: Tensor
    sent_splits: list[int]
    received_splits: list[int]
    expert_row: Tensor
    weights: Tensor
    first_choice: Tensor


class ByRank(Dispatcher[ByRankHandle]):
    """A row for each (token, destination rank), with ids and weights."""

    @abstractmethod
    def _destinations(self, slots: Tensor) -> Tensor:
        """bool [R, T]: which token is sent to which rank."""

    def _dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> DispatchResult[ByRankHandle]:
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
        received = transport.all_to_all(position, message, parts, sent_splits, received_splits)
        return self._expand(received, destinations, sent_splits, received_splits)

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
            permute.inverse(order),
            view_as(weights, torch.float32).flatten().index_select(0, choice),
            first_choice,
        )
        tokens_per_expert = torch.bincount(local, minlength=setup.num_local_slots).cpu()
        return DispatchResult(expert_input, tokens_per_expert, handle)

    def _combine(self, expert_output: Tensor, handle: ByRankHandle) -> Tensor:
        setup, transport = self.setup, self.setup.transport
        reduced = permute.weighted_sum(
            expert_output, handle.expert_row, handle.first_choice, handle.weights
        )
        parts = setup.wire_combine.encode(reduced)
        returned = transport.all_to_all(
            self._position("combine"),
            pack(parts),
            parts,
            handle.received_splits,
            handle.sent_splits,
        )
        partial = setup.wire_combine.decode(returned, setup.width, setup.dtype)
        return permute.weighted_sum(partial, *permute.rows_in_token_order(handle.destinations))
