"""One row for each (token, expert); the router's weights stay at home.

token order --sort by slot--> rank-major --all-to-all--> by source --regroup--> expert-major
                                                                                   experts
token order <--weighted sum-- rank-major <--all-to-all-- by source <--regroup-- expert-major
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from comm import permute
from comm.dispatch.base import Dispatcher, DispatchResult
from comm.wire import pack


@dataclass(frozen=True)
class AllToAllHandle:
    """choice: int64 [N] flat (token, k) of each sent row, in slot order
    from_received: int64 [M] received row of each expert-major row
    sent_splits, received_splits: rows to and from each rank
    topk_weights: fp32 [T, K]
    """

    choice: Tensor
    from_received: Tensor
    sent_splits: list[int]
    received_splits: list[int]
    topk_weights: Tensor


class AllToAll(Dispatcher[AllToAllHandle]):
    """K rows a token, one for each expert, whichever rank it lives on."""

    carries = "hidden and scales, a row for each (token, expert); counts for each expert"

    def _dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> DispatchResult[AllToAllHandle]:
        setup, transport = self.setup, self.setup.transport
        position = self._position("dispatch")
        choice, rows_per_slot = permute.order_by_slot(slots, setup.placement.num_slots)
        parts = setup.wire_dispatch.encode(hidden)
        tokens = pack(parts)

        first = setup.placement.first_slot
        counts = rows_per_slot.cpu().numpy()
        rows_to = [counts[start:end] for start, end in pairwise(first.tolist())]
        announced = transport.announce(
            position, rows_to, setup.num_local_slots, tokens.shape[1], setup.wire_dispatch.code
        )
        message = transport.staging("sent", len(choice), tokens.shape[1])
        torch.index_select(tokens, 0, permute.token_of(choice, setup.top_k), out=message)

        rows_from = announced.wait()  # [R, local slots]
        sent_splits = np.diff(np.append(0, counts.cumsum())[first]).tolist()
        received_splits = rows_from.sum(1).tolist()
        received = transport.all_to_all(position, message, parts, sent_splits, received_splits)
        from_received = permute.regroup_by_expert(rows_from).to(received.device)
        rows = received.index_select(0, from_received)
        return DispatchResult(
            setup.wire_dispatch.decode(rows, setup.width, setup.dtype),
            torch.from_numpy(rows_from.sum(0)),
            AllToAllHandle(choice, from_received, sent_splits, received_splits, topk_weights),
        )

    def _combine(self, expert_output: Tensor, handle: AllToAllHandle) -> Tensor:
        setup, transport = self.setup, self.setup.transport
        parts = setup.wire_combine.encode(expert_output)
        rows = pack(parts)
        message = transport.staging("sent", *rows.shape)
        torch.index_select(rows, 0, permute.inverse(handle.from_received), out=message)
        returned = transport.all_to_all(
            self._position("combine"), message, parts, handle.received_splits, handle.sent_splits
        )
        outputs = setup.wire_combine.decode(returned, setup.width, setup.dtype)
        row, first_row, valid = permute.rows_in_choice_order(
            handle.choice, len(handle.topk_weights), setup.top_k
        )
        return permute.weighted_sum(outputs, row, first_row, handle.topk_weights.flatten()[valid])
