"""One row for each (token, expert); the router's weights stay at home.

token order --sort by slot--> rank-major --all-to-all--> by source --regroup--> expert-major
                                                                                   experts
token order <--weighted sum-- rank-major <--all-to-all-- by source <--regroup-- expert-major
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comm import permute
from comm.dispatch.base import Dispatcher, DispatchResult


@dataclass(frozen=True)
class AllToAllHandle:
    """choice: int64 [N] flat (token, k) of each sent row, in slot order
    from_received: int64 [M] received row of each expert-major row
    sent_splits, received_splits: rows to and from each rank
    topk_weights: fp32 [T, K]
    valid: bool [T, K], choices that name an expert
    """

    choice: Tensor
    from_received: Tensor
    sent_splits: list[int]
    received_splits: list[int]
    topk_weights: Tensor
    valid: Tensor


class AllToAll(Dispatcher[AllToAllHandle]):
    """K rows a token, one for each expert, whichever rank it lives on."""

    carries = "hidden and scales, a row for each (token, expert); counts for each expert"

    def _dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> DispatchResult[AllToAllHandle]:
        setup, transport = self.setup, self.setup.transport
        choice, rows_per_slot = permute.order_by_slot(slots, setup.placement.num_slots)
        values, scales = setup.wire_dispatch.encode(hidden)
        row_bytes = values.shape[1] + scales.shape[1]
        position = self._position("dispatch")

        per_rank = rows_per_slot.cpu().split(setup.placement.slots_per_rank.tolist())
        rows_from = transport.exchange_counts(  # [R, local slots]
            position, per_rank, setup.num_local_slots, row_bytes, setup.wire_dispatch.code
        )
        sent_splits = [int(counts.sum()) for counts in per_rank]
        received_splits = rows_from.sum(1).tolist()

        tokens = torch.cat([values, scales], dim=1) if scales.shape[1] else values
        message = transport.staging("sent", len(choice), row_bytes)
        torch.index_select(tokens, 0, choice // setup.top_k, out=message)
        received = transport.all_to_all(
            position,
            message,
            [("hidden", values), ("scales", scales)],
            sent_splits,
            received_splits,
        )
        from_received = permute.regroup_by_expert(rows_from.to(received.device))
        rows = received.index_select(0, from_received)
        expert_input = setup.wire_dispatch.decode(
            rows[:, : values.shape[1]], rows[:, values.shape[1] :], setup.dtype
        )
        handle = AllToAllHandle(
            choice, from_received, sent_splits, received_splits, topk_weights, slots >= 0
        )
        return DispatchResult(expert_input, rows_from.sum(0), handle)

    def _combine(self, expert_output: Tensor, handle: AllToAllHandle) -> Tensor:
        setup, transport = self.setup, self.setup.transport
        values, scales = setup.wire_combine.encode(expert_output)
        rows = torch.cat([values, scales], dim=1) if scales.shape[1] else values
        message = transport.staging("sent", *rows.shape)
        torch.index_select(rows, 0, permute.inverse(handle.from_received), out=message)
        returned = transport.all_to_all(
            self._position("combine"),
            message,
            [("hidden", values), ("scales", scales)],
            handle.received_splits,
            handle.sent_splits,
        )
        outputs = setup.wire_combine.decode(
            returned[:, : values.shape[1]], returned[:, values.shape[1] :], setup.dtype
        )
        valid = handle.valid.flatten()
        row_of_choice = torch.zeros_like(handle.topk_weights, dtype=torch.int64).flatten()
        row_of_choice[handle.choice] = torch.arange(len(handle.choice), device=valid.device)
        return permute.weighted_sum(
            outputs, row_of_choice[valid], handle.valid.sum(1), handle.topk_weights.flatten()[valid]
        )
