"""One row for each (token, expert); the router's weights stay at home.

token order --sort by slot--> rank-major --all-to-all--> by source --regroup--> expert-major
                                                                                   experts
token order <--weighted sum-- rank-major <--all-to-all-- by source <--regroup-- expert-major
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from comm import permute
from comm.dispatch.at_home import WeightsAtHome
from comm.dispatch.base import Combined, DispatchResult
from comm.wire import WireFormat, pack


@dataclass(frozen=True)
class AllToAllHandle:
    """choice: int64 [N] flat (token, k) of each sent row, in slot order
    from_received: int64 [M] received row of each expert-major row
    sent_splits, received_splits: rows to and from each rank
    weights: fp32 [T, K]
    """

    choice: Tensor
    from_received: Tensor
    sent_splits: list[int]
    received_splits: list[int]
    weights: Tensor


class AllToAll(WeightsAtHome[AllToAllHandle]):
    """K rows a token, one for each expert, whichever rank it lives on."""

    carries = "hidden and scales, a row for each (token, expert); counts for each expert"

    def _start_dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> Callable[[], DispatchResult[AllToAllHandle]]:
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
        rows = transport.start_all_to_all(position, message, parts, sent_splits, received_splits)
        from_received = permute.regroup_by_expert(rows_from).to(hidden.device)
        handle = AllToAllHandle(choice, from_received, sent_splits, received_splits, topk_weights)

        def finish() -> DispatchResult[AllToAllHandle]:
            expert_rows = rows.wait().index_select(0, from_received)
            return DispatchResult(
                setup.wire_dispatch.decode(expert_rows, setup.width, setup.dtype),
                torch.from_numpy(rows_from.sum(0)),
                handle,
            )

        return finish

    def _start_combine(
        self, expert_output: Tensor, handle: AllToAllHandle
    ) -> Callable[[], Combined]:
        setup = self.setup
        returned = self._to_tokens(expert_output, "combine", "forward", setup.wire_combine, handle)

        def finish() -> Combined:
            answers = returned()
            row, first_row, valid = permute.rows_in_choice_order(
                handle.choice, len(handle.weights), setup.top_k
            )
            weights = permute.of_rows(handle.weights, valid)
            return Combined(permute.weighted_sum(answers, row, first_row, weights), answers)

        return finish

    def _dispatch_backward(
        self, grad: Tensor, grad_weights: Tensor, handle: AllToAllHandle
    ) -> tuple[Tensor, Tensor]:
        rows = self._to_tokens(grad, "dispatch", "backward", self.setup.gradients, handle)()
        row, first_row, _ = permute.rows_in_choice_order(
            handle.choice, len(handle.weights), self.setup.top_k
        )
        return permute.weighted_sum(rows, row, first_row), grad_weights

    def _to_experts(self, rows: Tensor, handle: AllToAllHandle) -> Tensor:
        setup, parts = self.setup, self.setup.gradients.encode(rows)
        message, empty_rows = self._laid_out(pack(parts), handle)
        received = setup.transport.all_to_all(
            self._position("combine", "backward"),
            message,
            parts,
            handle.sent_splits,
            handle.received_splits,
            empty_rows,
        )
        expert_rows = received.index_select(0, handle.from_received)
        return setup.gradients.decode(expert_rows, setup.width, setup.dtype)

    def _laid_out(self, rows: Tensor, handle: AllToAllHandle) -> tuple[Tensor, list[int] | None]:
        """Rows uint8 [N, b] in the order of `choice` as the message to the experts, and how many
        rows of it to each rank are empty."""
        return rows, None

    def _to_tokens(
        self,
        expert_rows: Tensor,
        phase: str,
        direction: str,
        wire: WireFormat,
        handle: AllToAllHandle,
    ) -> Callable[[], Tensor]:
        """Expert-major rows [M, W] on their way to where they came from: rows [N, W] there, in the
        order of `choice`, in staging memory."""
        setup, transport = self.setup, self.setup.transport
        parts = wire.encode(expert_rows)
        rows = pack(parts)
        message = transport.staging("sent", *rows.shape)
        torch.index_select(rows, 0, permute.inverse(handle.from_received), out=message)
        returned = transport.start_all_to_all(
            self._position(phase, direction),
            message,
            parts,
            handle.received_splits,
            handle.sent_splits,
        )
        return lambda: wire.decode(returned.wait(), setup.width, setup.dtype)
