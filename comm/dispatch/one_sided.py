"""Rows through memory that all ranks share: who needs a row takes it, and no collective moves any.

    dispatch   token order --encode--> own region     experts pull <--token numbers-- by slot
    combine    expert-major --encode--> own region    tokens pull and sum <--where rows begin--
    backward   combine: gradients of rows in slot order, pulled by the experts like the rows;
               dispatch: the experts put theirs into the token's rank's own region, in that order

A token's row is laid out once, whoever takes it and however often. One index over the table of all
regions brings rows straight into expert-major order; one more brings the answers to their token and
adds them up, ascending k.

In inference mode, and where rows are values of the compute type on all their way, experts get their
rows in memory that the coming combine reads: if their output lies there too, it is not laid out
again. So `expert_input` is valid until the combine of its dispatch, or until another dispatch.

Legend: T tokens, K choices, N copies of this rank's tokens, M rows for its experts, S slots,
R ranks, e slots of this rank, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from comm import permute
from comm.barrier import refusal
from comm.dispatch.at_home import WeightsAtHome
from comm.dispatch.base import Combined, Dispatcher, DispatchResult, DispatchSetup
from comm.dispatch.shared_round import Letters, SharedRound, letters
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
    """slots: int64 [T, K], S for none
    choice: int64 [N] flat (token, k) of each copy, in slot order
    copies_before: int64 [S + 1], how many of them slots before each have
    starts, counts: int64 [R, e]: where among each source's copies those for each slot of this rank
        begin, and how many they are
    weights: fp32 [T, K]
    lent: number under which the window lent out the memory of expert_input; 0: it did not
    """

    slots: Tensor
    choice: Tensor
    copies_before: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    weights: Tensor
    lent: int = 0


class OneSided(WeightsAtHome[OneSidedHandle]):
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
        before = sums_before(copies_of)
        ids = round_.lay_out_list(permute.token_of(choice, setup.top_k))
        round_.lay_out(setup.wire_dispatch, hidden, self._by_rank(before), ids)
        round_.announce(before[:-1], copies_of, self._letters)
        round_.publish()

        def finish() -> DispatchResult[OneSidedHandle]:
            round_.meet()
            first_slot = int(setup.placement.first_slot[setup.rank])
            starts, counts = round_.hear_announced(first_slot, setup.num_local_slots)
            token = round_.listed(expert_major(starts, counts, round_.list_stride))
            round_.lends = self._lends()
            rows = round_.take(torch.from_numpy(token + source_rows(counts, round_.stride)))
            return DispatchResult(
                setup.wire_dispatch.decode(rows, setup.width, setup.dtype),
                torch.from_numpy(counts.sum(0)),
                OneSidedHandle(slots, choice, before, starts, counts, topk_weights, round_.lent),
            )

        return finish

    def _lends(self) -> bool:
        """May expert_input lie where the answers will? Nobody keeps it for backward, and neither
        way is there anything to convert."""
        setup, wires = self.setup, (self.setup.wire_dispatch, self.setup.wire_combine)
        return torch.is_inference_mode_enabled() and all(
            sums_in_place(wire, setup.dtype) for wire in wires
        )

    def _start_combine(
        self, expert_output: Tensor, handle: OneSidedHandle
    ) -> Callable[[], Combined]:
        setup, wire = self.setup, self.setup.wire_combine
        keep_answers = expert_output.requires_grad or handle.weights.requires_grad
        setup.transport.window.refuse_outdated(expert_output, handle.lent)
        round_ = self._round("combine", "forward", wire, "answers")
        round_.lay_out(wire, expert_output, handle.counts.sum(1))
        round_.tell(begins(handle.counts).ravel(), np.full(setup.world_size, setup.num_local_slots))
        round_.publish()

        def finish() -> Combined:
            round_.meet()
            shift = torch.from_numpy(self._shift_of_slot(handle, round_))
            if keep_answers or not sums_in_place(wire, setup.dtype):
                slot = handle.slots.flatten().index_select(0, handle.choice)
                index = torch.arange(len(slot)) + shift.index_select(0, slot)
                answers = wire.decode(round_.take(index), setup.width, setup.dtype)
                return Combined(self._sum(answers, handle), answers)
            return Combined(self._sum_in_place(round_, handle, shift))

        return finish

    def _shift_of_slot(self, handle: OneSidedHandle, round_: SharedRound) -> np.ndarray:
        """How far on from a copy's number is that of its answer in the table: int64 [S]."""
        placement = self.setup.placement
        slots = placement.slots_per_rank
        begin = np.concatenate(round_.hear(slots * self.setup.rank, slots))
        return begin + placement.slot_rank * round_.stride - handle.copies_before[:-1]

    def _sum_in_place(self, round_: SharedRound, handle: OneSidedHandle, shift: Tensor) -> Tensor:
        """Each token's answers added up where they lie, ascending k: [T, W]."""
        copy, first, valid = self._in_choice_order(handle)
        index = copy + shift.index_select(0, handle.slots.flatten()[valid])
        round_.count_taken(index)
        table = view_as(round_.table, self.setup.dtype)
        return permute.weighted_sum(table, index, first, handle.weights.flatten()[valid])

    def _to_experts(self, rows: Tensor, handle: OneSidedHandle) -> Tensor:
        setup, wire = self.setup, self.setup.gradients
        round_ = self._round("combine", "backward", wire)
        round_.lay_out(wire, rows, self._by_rank(handle.copies_before))
        round_.publish()
        round_.meet()
        index = expert_major(handle.starts, handle.counts, round_.stride)
        taken = round_.take(torch.from_numpy(index))
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
        rows = round_.take_own(self._by_rank(handle.copies_before))
        rows = wire.decode(rows, setup.width, setup.dtype)
        return self._sum(rows, handle, weighted=False), grad_weights

    def _sum(self, rows: Tensor, handle: OneSidedHandle, weighted: bool = True) -> Tensor:
        """Each token's rows added up, ascending k: [T, W]; rows: [N, W], in the copies' order."""
        copy, first, valid = self._in_choice_order(handle)
        weights = handle.weights.flatten()[valid] if weighted else None
        return permute.weighted_sum(rows, copy, first, weights)

    def _in_choice_order(self, handle: OneSidedHandle) -> tuple[Tensor, Tensor, Tensor | slice]:
        tokens = len(handle.weights)
        return permute.rows_in_choice_order(handle.choice, tokens, self.setup.top_k)

    def _round(
        self, phase: str, direction: str, wire: WireFormat, area: str = "rows"
    ) -> SharedRound:
        width = self.setup.width
        row_bytes = wire.hidden_bytes(width) + wire.scale_bytes(width)
        position = Position(self.setup.layer, phase, direction)
        return SharedRound(self.setup.transport, position, row_bytes, wire.code, area)

    @cached_property
    def _letters(self) -> Letters:
        return letters(self.setup.placement.first_slot)

    def _by_rank(self, copies_before: np.ndarray) -> np.ndarray:
        """How many copies are for each rank: int64 [S + 1] -> [R]."""
        return np.diff(copies_before[self.setup.placement.first_slot])


def sums_in_place(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Can rows be added up where they lie, because they are values of the compute type?"""
    return isinstance(wire, CastFormat) and wire.dtype == dtype


def sums_before(counts: np.ndarray) -> np.ndarray:
    """How many there are before each, and in all: int64 [S] -> [S + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=sums[1:])
    return sums


def expert_major(starts: np.ndarray, counts: np.ndarray, stride: int) -> np.ndarray:
    """Where the copies for this rank's experts lie: int64 [M] source * stride + place, expert after
    expert, in each by source.

    starts, counts: int64 [R, e], of each run of copies, the place of the first and how many
    """
    runs = counts.T.ravel()
    wanted_at = runs.cumsum() - runs
    begins_at = (starts + stride * np.arange(len(starts))[:, None]).T.ravel()
    return np.arange(runs.sum()) + (begins_at - wanted_at).repeat(runs)


def source_rows(counts: np.ndarray, stride: int) -> np.ndarray:
    """source * stride of each copy, in the same order: int64 [M]; counts: int64 [R, e]"""
    firsts = stride * np.arange(len(counts))[None]
    return firsts.repeat(counts.shape[1], axis=0).ravel().repeat(counts.T.ravel())


def begins(counts: np.ndarray) -> np.ndarray:
    """Where each source's rows begin among the expert-major rows: counts, int64 [R, e] alike."""
    runs = counts.T.ravel()
    return (runs.cumsum() - runs).reshape(counts.T.shape).T
