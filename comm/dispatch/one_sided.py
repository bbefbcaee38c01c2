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
from comm.dispatch.shared_round import ENTRY_BYTES, Letters, SharedRound, letters
from comm.meter import Position
from comm.wire import CastFormat, WireFormat, pack


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
    copies, copies_before: int64 [S] and [S + 1], how many each slot has, and slots before it
    starts, counts: int64 [R, e]: where among each source's copies those for each slot of this rank
        begin, and how many they are
    begins: int64 [R, e], where those begin among the expert-major rows
    weights: fp32 [T, K]
    lent: number under which the window lent out the memory of expert_input; 0: it did not
    """

    choice: Tensor
    copies: np.ndarray
    copies_before: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    begins: np.ndarray
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
        copies = rows_per_slot.numpy()
        before = sums_before(copies)
        ids = round_.lay_out_list(choice.numpy() // setup.top_k)
        round_.lay_out(setup.wire_dispatch, hidden, self._by_rank(before), ids)
        round_.announce(before[:-1], copies, self._letters)
        round_.publish()

        def finish() -> DispatchResult[OneSidedHandle]:
            round_.meet()
            starts, counts = round_.hear_announced(*self._own_slots)
            entries, begins = expert_major(starts + round_.list_firsts[:, None], counts)
            rows, lent = self._take(round_, round_.listed(entries))
            return DispatchResult(
                rows,
                torch.from_numpy(np.add.reduce(counts)),
                OneSidedHandle(choice, copies, before, starts, counts, begins, topk_weights, lent),
            )

        return finish

    def _take(self, round_: SharedRound, index: np.ndarray) -> tuple[Tensor, int]:
        """The rows as values, and their number where the window lent the memory: where the answers
        will lie, if nobody keeps the rows for backward and neither way anything is converted."""
        setup = self.setup
        if torch.is_inference_mode_enabled() and self._converts_nothing:
            return round_.take_to_answer(index, ENTRY_BYTES, setup.dtype)
        rows = round_.take(index, ENTRY_BYTES)
        return setup.wire_dispatch.decode(rows, setup.width, setup.dtype), 0

    @cached_property
    def _converts_nothing(self) -> bool:
        setup = self.setup
        wires = (setup.wire_dispatch, setup.wire_combine)
        return all(sums_in_place(wire, setup.dtype) for wire in wires)

    def _start_combine(
        self, expert_output: Tensor, handle: OneSidedHandle
    ) -> Callable[[], Combined]:
        setup, wire = self.setup, self.setup.wire_combine
        keep_answers = expert_output.requires_grad or handle.weights.requires_grad
        lies_there = setup.transport.window.is_lent(expert_output, handle.lent)
        round_ = self._round("combine", "forward", wire, "answers")
        if lies_there:
            round_.leave(expert_output, handle.counts.sum(1))
        else:
            round_.lay_out(wire, expert_output, handle.counts.sum(1))
        round_.tell(handle.begins.ravel(), self._slots_alike)
        round_.publish()

        def finish() -> Combined:
            round_.meet()
            index = self._answers_at(round_, handle)
            if keep_answers or not sums_in_place(wire, setup.dtype):
                answers = wire.decode(round_.take(index), setup.width, setup.dtype)
                return Combined(self._sum(answers, handle), answers)
            return Combined(self._sum_in_place(round_, handle, index))

        return finish

    def _answers_at(self, round_: SharedRound, handle: OneSidedHandle) -> np.ndarray:
        """Where in the table each copy's answer is: int32 [N]."""
        placement, rank = self.setup.placement, self.setup.rank
        if self._placed_evenly:
            slots = self._own_slots[1]
            begins_at = round_.hear_alike(slots * rank, slots).flatten()
        else:
            slots_of = placement.slots_per_rank
            begins_at = round_.hear(slots_of * rank, slots_of)
        begins_at += round_.firsts.take(placement.slot_rank)
        begins_at -= handle.copies_before[:-1]
        index = begins_at.astype(np.int32).repeat(handle.copies)
        index += np.arange(len(index), dtype=np.int32)
        return index

    def _sum_in_place(
        self, round_: SharedRound, handle: OneSidedHandle, index: np.ndarray
    ) -> Tensor:
        """Each token's answers added up where they lie, ascending k: [T, W]. Rows of 16 bits with
        weights of 16 bits, as each row of them is read but once."""
        round_.count_taken(index, rank_by_rank=True)
        row, first, valid = self._in_choice_order(handle, torch.from_numpy(index))
        table = round_.table_of(self.setup.dtype)
        weights = permute.of_rows(handle.weights, valid).to(table.dtype)
        return permute.weighted_sum(table, row, first, weights)

    def _to_experts(self, rows: Tensor, handle: OneSidedHandle) -> Tensor:
        setup, wire = self.setup, self.setup.gradients
        round_ = self._round("combine", "backward", wire)
        round_.lay_out(wire, rows, self._by_rank(handle.copies_before))
        round_.publish()
        round_.meet()
        index, _ = expert_major(handle.starts + round_.firsts[:, None], handle.counts)
        taken = round_.take(index)
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
        weights = permute.of_rows(handle.weights, valid) if weighted else None
        return permute.weighted_sum(rows, copy, first, weights)

    def _in_choice_order(
        self, handle: OneSidedHandle, numbers: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | slice]:
        tokens, top_k = handle.weights.shape
        return permute.rows_in_choice_order(handle.choice, tokens, top_k, numbers)

    def _round(
        self, phase: str, direction: str, wire: WireFormat, area: str = "rows"
    ) -> SharedRound:
        key = (phase, direction, wire.code)
        round_ = self._rounds.get(key)
        if round_ is None:
            width = self.setup.width
            row_bytes = wire.hidden_bytes(width) + wire.scale_bytes(width)
            position = Position(self.setup.layer, phase, direction)
            round_ = SharedRound(self.setup.transport, position, row_bytes, wire.code, area)
            self._rounds[key] = round_
        return round_.begin()

    @cached_property
    def _rounds(self) -> dict[tuple[str, str, int], SharedRound]:
        """What is the same in every call of a phase."""
        return {}

    @cached_property
    def _placed_evenly(self) -> bool:
        """Have all ranks as many slots?"""
        slots = self.setup.placement.slots_per_rank
        return bool((slots == slots[0]).all())

    @cached_property
    def _own_slots(self) -> tuple[int, int]:
        """The first of this rank, and how many it has."""
        first_slot = self.setup.placement.first_slot[self.setup.rank]
        return int(first_slot), self.setup.num_local_slots

    @cached_property
    def _slots_alike(self) -> np.ndarray:
        """This rank's slots, told to each: int64 [R]."""
        return np.full(self.setup.world_size, self.setup.num_local_slots)

    @cached_property
    def _letters(self) -> Letters:
        return letters(self.setup.placement.first_slot)

    def _by_rank(self, copies_before: np.ndarray) -> np.ndarray:
        """How many copies are for each rank: int64 [S + 1] -> [R]."""
        before = copies_before.take(self.setup.placement.first_slot)
        return before[1:] - before[:-1]


def sums_in_place(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Can rows be added up where they lie, because they are values of the compute type?"""
    return isinstance(wire, CastFormat) and wire.dtype == dtype


def sums_before(counts: np.ndarray) -> np.ndarray:
    """How many there are before each, and in all: int64 [S] -> [S + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=sums[1:])
    return sums


def expert_major(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the copies for this rank's experts lie: int64 [M], expert after expert, in each by
    source; and where each source's begin among them, int64 [R, e].

    starts, counts: int64 [R, e], of each run of copies, the place of the first and how many
    """
    runs = counts.T.ravel()
    ends = runs.cumsum()
    begins = ends - runs
    places = (starts.T.ravel() - begins).repeat(runs)
    places += np.arange(len(places))
    return places, begins.reshape(counts.T.shape).T
