"""Rows through memory that all ranks share: who needs a row takes it, and no collective moves any.

    dispatch   token order --encode--> own region     experts pull <--token numbers-- by slot
    combine    expert-major --encode--> own region    tokens pull and sum <--where rows begin--
    backward   combine: gradients of rows in slot order, pulled by the experts like the rows;
               dispatch: the experts put theirs into the token's rank's own region, in that order

A token's row is laid out once, whoever takes it and however often. One index over the table of all
regions brings rows straight into expert-major order; one more brings the answers to their token and
adds them up, ascending k.

Legend: T tokens, K choices, N copies of this rank's tokens, M rows for its experts, S slots,
R ranks, e slots of this rank, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comm import permute
from comm.barrier import refusal
from comm.dispatch.base import Combined, Dispatcher, DispatchResult, DispatchSetup
from comm.dispatch.shared_round import SharedRound
from comm.meter import Position
from comm.wire import CastFormat, WireFormat, pack, view_as


def one_sided(setup: DispatchSetup) -> Dispatcher:
    """One row for each (token, expert), or for each (token, rank) where the setup says so.

    Raises ValueError where ranks cannot share memory, as far as one of them can tell.
    """
    if (reason := refusal()) is not None:
        raise ValueError(f"dispatcher=one_sided: {reason}; use another dispatcher")
    device = setup.transport.world.device.type
    if device != "cpu":
        raise ValueError(
            f"dispatcher=one_sided shares memory of the host: use device=cpu, not {device}"
        )
    if not setup.options.deduplicate:
        return OneSided(setup)
    from comm.dispatch.one_sided_dedup import OneSidedDedup

    return OneSidedDedup(setup)


@dataclass(frozen=True)
class OneSidedHandle:
    """choice: int64 [N] flat (token, k) of each copy, in slot order
    copies_of: int64 [S], how many of them each slot has
    starts, counts: int64 [R, e]: where among each source's copies those for each slot of this rank
        begin, and how many they are
    weights: fp32 [T, K]
    """

    choice: Tensor
    copies_of: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    weights: Tensor


class OneSided(Dispatcher[OneSidedHandle]):
    """K copies of a token, each taken by the rank of its expert."""

    carries = (
        "hidden, scales and the number of the token, a row for each (token, expert); where each"
        " expert's begin and how many they are, and on the way back where they begin"
    )

    def _start_dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> Callable[[], DispatchResult[OneSidedHandle]]:
        setup = self.setup
        round_ = self._round("dispatch", "forward", setup.wire_dispatch)
        choice, rows_per_slot = permute.order_by_slot(slots, setup.placement.num_slots)
        copies_of = rows_per_slot.numpy()
        token = permute.token_of(choice, setup.top_k).to(torch.int32)
        ids = round_.lay_out_list(token)
        round_.lay_out(setup.wire_dispatch, hidden, self._by_rank(copies_of), ids)
        bounds = setup.placement.first_slot
        round_.announce(copies_of.cumsum() - copies_of, copies_of, bounds)
        round_.publish()
        first_slot = int(bounds[setup.rank])

        def finish() -> DispatchResult[OneSidedHandle]:
            round_.meet()
            starts, counts = round_.hear_announced(first_slot, setup.num_local_slots)
            at, source = expert_major(starts, counts)
            index = torch.from_numpy(round_.listed(at, source) + source * round_.stride)
            rows = round_.take(index)
            return DispatchResult(
                setup.wire_dispatch.decode(rows, setup.width, setup.dtype),
                torch.from_numpy(counts.sum(0)),
                OneSidedHandle(choice, copies_of, starts, counts, topk_weights),
            )

        return finish

    def _start_combine(
        self, expert_output: Tensor, handle: OneSidedHandle
    ) -> Callable[[], Combined]:
        setup, wire = self.setup, self.setup.wire_combine
        keep_answers = expert_output.requires_grad or handle.weights.requires_grad
        round_ = self._round("combine", "forward", wire)
        round_.lay_out(wire, expert_output, handle.counts.sum(1))
        round_.tell(begins(handle.counts).ravel(), np.full(setup.world_size, setup.num_local_slots))
        round_.publish()

        def finish() -> Combined:
            round_.meet()
            index = self._answers_to(handle, round_)
            if keep_answers or not sums_in_place(wire, setup.dtype):
                answers = wire.decode(round_.take(index), setup.width, setup.dtype)
                return Combined(self._sum(answers, handle), answers)
            round_.count_taken(index)
            table = view_as(round_.table, setup.dtype)
            return Combined(self._sum(table, handle, index))

        return finish

    def _answers_to(self, handle: OneSidedHandle, round_: SharedRound) -> Tensor:
        """Row numbers in the table of the answers to this rank's copies: int64 [N]."""
        setup, placement = self.setup, self.setup.placement
        slots = placement.slots_per_rank
        begin = np.concatenate(round_.hear(slots * setup.rank, slots))
        copies_of = handle.copies_of
        begin = begin + placement.slot_rank * round_.stride - (copies_of.cumsum() - copies_of)
        return torch.from_numpy(np.arange(copies_of.sum()) + begin.repeat(copies_of))

    def _combine_backward(
        self, grad: Tensor, expert_output: Tensor, answers: Tensor | None, handle: OneSidedHandle
    ) -> tuple[Tensor, Tensor]:
        assert answers is not None
        rows = grad.index_select(0, permute.token_of(handle.choice, self.setup.top_k)).float()
        grad_weights = torch.zeros_like(handle.weights).flatten()
        grad_weights[handle.choice] = (rows * answers.float()).sum(1)
        weights = handle.weights.flatten().index_select(0, handle.choice)
        grad_output = self._to_experts((rows * weights[:, None]).to(self.setup.dtype), handle)
        return grad_output, grad_weights.view_as(handle.weights)

    def _to_experts(self, rows: Tensor, handle: OneSidedHandle) -> Tensor:
        """Gradients [N, W] in the order of `choice` to those of the expert-major rows [M, W]."""
        setup, wire = self.setup, self.setup.gradients
        round_ = self._round("combine", "backward", wire)
        round_.lay_out(wire, rows, self._by_rank(handle.copies_of))
        round_.publish()
        round_.meet()
        at, source = expert_major(handle.starts, handle.counts)
        taken = round_.take(torch.from_numpy(at + source * round_.stride))
        return wire.decode(taken, setup.width, setup.dtype)

    def _dispatch_backward(
        self, grad: Tensor, grad_weights: Tensor, handle: OneSidedHandle
    ) -> tuple[Tensor, Tensor]:
        setup, wire = self.setup, self.setup.gradients
        round_ = self._round("dispatch", "backward", wire)
        by_source = permute.inverse(permute.regroup_by_expert(handle.counts))
        # A rank's slots follow one another, and so do a source's copies for them.
        starts = handle.starts[:, 0] if handle.starts.shape[1] else np.zeros(setup.world_size, int)
        order = by_source.split(handle.counts.sum(1).tolist())
        parts = wire.encode(grad)
        round_.hand_back(pack(parts), parts, starts.tolist(), order)
        round_.publish()
        round_.meet()
        rows = round_.take_own(self._by_rank(handle.copies_of))
        rows = wire.decode(rows, setup.width, setup.dtype)
        return self._sum(rows, handle, weighted=False), grad_weights

    def _sum(
        self,
        rows: Tensor,
        handle: OneSidedHandle,
        index: Tensor | None = None,
        weighted: bool = True,
    ) -> Tensor:
        """Each token's rows added up, ascending k: [T, W].

        rows: [*, W], of which `index` [N] are those of the copies; None: all of them, in order
        """
        row, first_row, valid = permute.rows_in_choice_order(
            handle.choice, len(handle.weights), self.setup.top_k
        )
        row = row if index is None else index.index_select(0, row)
        weights = handle.weights.flatten()[valid] if weighted else None
        return permute.weighted_sum(rows, row, first_row, weights)

    def _round(self, phase: str, direction: str, wire: WireFormat) -> SharedRound:
        width = self.setup.width
        row_bytes = wire.hidden_bytes(width) + wire.scale_bytes(width)
        position = Position(self.setup.layer, phase, direction)
        return SharedRound(self.setup.transport, position, row_bytes, wire.code)

    def _by_rank(self, of_slot: np.ndarray) -> np.ndarray:
        """Sum over each rank's slots: int64 [S] -> [R]."""
        return np.diff(np.append(0, of_slot.cumsum())[self.setup.placement.first_slot])


def sums_in_place(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Can rows be added up where they lie, because they are values of the compute type?"""
    return isinstance(wire, CastFormat) and wire.dtype == dtype


def expert_major(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows of this rank's experts come from: int64 [M] each, the place among the source's
    copies and the source, expert after expert, in each by source.

    starts, counts: int64 [R, e], of each run of copies
    """
    runs = counts.T.ravel()
    wanted_at = runs.cumsum() - runs
    at = np.arange(runs.sum()) + (starts.T.ravel() - wanted_at).repeat(runs)
    return at, np.tile(np.arange(len(counts)), counts.shape[1]).repeat(runs)


def begins(counts: np.ndarray) -> np.ndarray:
    """Where each source's rows begin among the expert-major rows: counts, int64 [R, e] alike."""
    runs = counts.T.ravel()
    return (runs.cumsum() - runs).reshape(counts.T.shape).T
