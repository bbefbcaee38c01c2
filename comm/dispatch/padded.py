"""A fixed number of rows for each (source, slot), as where shapes must be known beforehand.

    C = 2          slot 0   slot 1   slot 2        wanted 3, 1, 0: one dropped, three rows empty
    sent           t0 t4    t2 --    -- --

    token order --first C of each slot--> slots x C --all-to-all--> by source --compact--> experts
    token order <--weighted sum-- slots x C <--all-to-all-- by source <--spread-- expert-major

Counts go first, as they must for the experts to know which rows are filled; with them each source
says how many tokens it has, so that all ranks agree on C without asking again. The router's weights
stay at home.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from comm import permute
from comm.dispatch.all_to_all import AllToAll, AllToAllHandle
from comm.dispatch.base import DispatchResult, DispatchSetup
from comm.wire import WireFormat, pack


@dataclass(frozen=True)
class PaddedHandle(AllToAllHandle):
    """As AllToAllHandle, `choice` being what was kept, and

    capacity: C, rows of each (source, slot)
    place: int64 [N], where each choice lies among the rows sent
    sent_empty, received_empty: of the rows to and from each rank, those that hold nothing
    wanted, kept: bool [T, K], choices that name an expert, and those of them that reached it
    """

    capacity: int
    place: Tensor
    sent_empty: list[int]
    received_empty: list[int]
    wanted: Tensor
    kept: Tensor


class Padded(AllToAll):
    """C rows to each slot from each rank, filled or not; choices beyond them are dropped."""

    carries = (
        "hidden and scales, C rows for each (source rank, expert), empty ones as padding; counts"
        " for each expert and the number of tokens"
    )

    def __init__(self, setup: DispatchSetup) -> None:
        super().__init__(setup)
        check_capacity_factor(setup.options.capacity_factor)

    def _settled(self, result: DispatchResult[AllToAllHandle]) -> DispatchResult[AllToAllHandle]:
        handle = result.handle
        assert isinstance(handle, PaddedHandle)
        if not self.setup.options.renormalize:
            return result
        weights = renormalised(handle.weights, handle.wanted, handle.kept)
        return replace(result, handle=replace(handle, weights=weights))

    def _start_dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> Callable[[], DispatchResult[AllToAllHandle]]:
        setup, placement = self.setup, self.setup.placement
        position, wire = self._position("dispatch"), setup.wire_dispatch
        choice, rows_per_slot = permute.order_by_slot(slots, placement.num_slots)
        parts = wire.encode(hidden)
        tokens = pack(parts)

        counts = rows_per_slot.cpu().numpy()
        announced = setup.transport.announce(
            position,
            [np.append(counts[a:b], len(hidden)) for a, b in pairwise(placement.first_slot)],
            setup.num_local_slots + 1,
            tokens.shape[1],
            wire.code,
        )
        told = announced.wait()  # [R, local slots + 1]
        capacity = slot_capacity(
            setup.options.capacity_factor,
            int(told[:, -1].max()),
            setup.top_k,
            placement.num_experts,
        )
        first, place = permute.first_of_each_slot(rows_per_slot, capacity)
        rows_to, rows_from = np.minimum(counts, capacity), np.minimum(told[:, :-1], capacity)
        handle = self._handle(
            topk_weights, slots, choice.index_select(0, first), place, capacity, rows_to, rows_from
        )
        token = permute.token_of(handle.choice, setup.top_k)
        message = self._spread(tokens, token, place, sum(handle.sent_splits))
        rows = setup.transport.start_all_to_all(
            position, message, parts, handle.sent_splits, handle.received_splits, handle.sent_empty
        )

        def finish() -> DispatchResult[AllToAllHandle]:
            expert_rows = rows.wait().index_select(0, handle.from_received)
            return DispatchResult(
                wire.decode(expert_rows, setup.width, setup.dtype),
                torch.from_numpy(rows_from.sum(0)),
                handle,
                num_dropped=int((handle.wanted & ~handle.kept).sum()),
            )

        return finish

    def _handle(
        self,
        topk_weights: Tensor,
        slots: Tensor,
        choice: Tensor,
        place: Tensor,
        capacity: int,
        rows_to: np.ndarray,
        rows_from: np.ndarray,
    ) -> PaddedHandle:
        """choice: what was kept; rows_to: [S] and rows_from: [R, local slots], filled rows"""
        setup = self.setup
        sent_splits = setup.placement.slots_per_rank * capacity
        received_split = setup.num_local_slots * capacity
        filled = np.append(0, rows_to.cumsum())[setup.placement.first_slot]
        kept = torch.zeros(slots.numel(), dtype=torch.bool, device=slots.device)
        kept[choice] = True
        return PaddedHandle(
            choice=choice,
            from_received=permute.regroup_by_expert(rows_from, capacity).to(slots.device),
            sent_splits=sent_splits.tolist(),
            received_splits=[received_split] * setup.world_size,
            weights=topk_weights,
            capacity=capacity,
            place=place,
            sent_empty=(sent_splits - np.diff(filled)).tolist(),
            received_empty=(received_split - rows_from.sum(1)).tolist(),
            wanted=slots < setup.placement.num_slots,
            kept=kept.view(slots.shape),
        )

    def _spread(self, rows: Tensor, source: Tensor, place: Tensor, num_places: int) -> Tensor:
        """uint8 [num_places, b] in staging memory: rows[source[i]] at place[i], zeros elsewhere."""
        which = torch.full((num_places,), len(rows), dtype=torch.int64, device=rows.device)
        which[place] = source
        message = self.setup.transport.staging("sent", num_places, rows.shape[1])
        with_empty = torch.nn.functional.pad(rows, (0, 0, 0, 1))
        return torch.index_select(with_empty, 0, which, out=message)

    def _laid_out(self, rows: Tensor, handle: AllToAllHandle) -> tuple[Tensor, list[int] | None]:
        assert isinstance(handle, PaddedHandle)
        every = torch.arange(len(rows), device=rows.device)
        message = self._spread(rows, every, handle.place, sum(handle.sent_splits))
        return message, handle.sent_empty

    def _to_tokens(
        self,
        expert_rows: Tensor,
        phase: str,
        direction: str,
        wire: WireFormat,
        handle: AllToAllHandle,
    ) -> Callable[[], Tensor]:
        assert isinstance(handle, PaddedHandle)
        setup, parts = self.setup, wire.encode(expert_rows)
        every = torch.arange(len(expert_rows), device=expert_rows.device)
        places = handle.from_received
        returned = setup.transport.start_all_to_all(
            self._position(phase, direction),
            self._spread(pack(parts), every, places, sum(handle.received_splits)),
            parts,
            handle.received_splits,
            handle.sent_splits,
            handle.received_empty,
        )
        return lambda: wire.decode(
            returned.wait().index_select(0, handle.place), setup.width, setup.dtype
        )


def check_capacity_factor(capacity_factor: float) -> None:
    """Raises ValueError for a factor that leaves no capacity or has no end."""
    if not 0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor={capacity_factor} must be a number above 0")


def slot_capacity(capacity_factor: float, most_tokens: int, top_k: int, num_experts: int) -> int:
    """Rows of each (source, slot): the factor times an even share of the largest rank's choices,
    rounded up exactly as the factor is written (1.1 is 11/10); at least one where there is a token.
    """
    share = Fraction(str(capacity_factor)) * most_tokens * top_k / num_experts
    return max(math.ceil(share), 1) if most_tokens else 0


def renormalised(weights: Tensor, wanted: Tensor, kept: Tensor) -> Tensor:
    """Weights [T, K] of which those kept add up to what all wanted ones did; 0 for the others.

    A token that keeps nothing gets nothing. Differentiable, the scaling included.
    """
    whole = torch.where(wanted, weights, 0).sum(1, keepdim=True)
    left = torch.where(kept, weights, 0)
    total = left.sum(1, keepdim=True)
    some = total != 0  # where not, the quotient's gradient must not be formed either
    return left * torch.where(some, whole / torch.where(some, total, 1), 0)
