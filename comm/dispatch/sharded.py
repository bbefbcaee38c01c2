"""Experts whose weights are spread over several ranks: every row meets all shards of its expert.

    EP group, n = 2 shards                        lane 0    lane 1
    shard group 0: the two halves of experts a b  rank 0    rank 1
    shard group 1: the two halves of experts c d  rank 2    rank 3

A dispatcher brings a token to its experts inside the token's own lane. The rest is here:

    gather   own lane's rows --tp_gather--> the other shards
    all      the token is dispatched n times, once into each lane, own lane first

    rows of all lanes, expert-major --shards of experts--> parts --tp_reduce--> own rows, summed

and the strategy of the lane combines. Backward is the transpose: gradients of the sums go from home
to the other shards, gradients of the rows come back to home (gather), or go to the tokens along
every one of the n dispatches (all).

Legend: n shards, G places in a lane, e experts of a shard group, M_t rows of lane t, M their sum,
W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comm import permute
from comm.dispatch.base import (
    Combined,
    Dispatcher,
    DispatchResult,
    DispatchSetup,
    Pending,
    Result,
)
from comm.dispatch.shifted import ShiftedTransport
from comm.transport import Transport
from comm.wire import WireFormat, pack


@dataclass(frozen=True)
class ShardedHandle:
    """inner, shifted: handles of the lane's dispatch and of those into the other lanes
    rows: M_t of each lane, in order of lanes
    from_lanes: int64 [M], the place among rows ordered by lane of each expert-major row
    weights: as the lane's strategy has them
    """

    inner: Any
    shifted: tuple[Any, ...]
    rows: list[int]
    from_lanes: Tensor
    weights: Tensor


class Sharded(Dispatcher[ShardedHandle]):
    """A lane's dispatcher, and the exchange of its rows between the shards of its experts.

    inner: works in this rank's lane
    shards: among the ranks of this rank's shard group, in order of lanes
    shifted: mode all: dispatchers of the same strategy into the lanes 1 .. n - 1 further on, over
        ShiftedTransports; none: mode gather
    """

    carries = "what the lane's strategy carries; expert rows and partial outputs between shards"

    def __init__(
        self, inner: Dispatcher, shards: Transport, shifted: Sequence[Dispatcher] = ()
    ) -> None:
        super().__init__(inner.setup)
        assert len(shifted) in (0, shards.group.size - 1), (len(shifted), shards.group.size)
        assert shards.group.size > 1, "one shard is the whole expert"
        self.inner, self.shards, self.shifted = inner, shards, tuple(shifted)
        self.lane, self.num_shards = shards.group.rank, shards.group.size

    def timed(
        self,
        phase: str,
        start: Callable[[], Callable[[], Result]],
        direction: str = "forward",
    ) -> Pending[Result]:
        """Start a phase now; its parts have phases of their own, and each is booked by itself."""
        return Pending(start())

    def _start_dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> Callable[[], DispatchResult[ShardedHandle]]:
        def start() -> Callable[[], list[DispatchResult]]:
            finish = [
                dispatcher._start_dispatch(hidden, slots, topk_weights)
                for dispatcher in (self.inner, *self.shifted)
            ]
            return lambda: [one() for one in finish]

        pending = self.inner.timed("dispatch", start)

        def finish() -> DispatchResult[ShardedHandle]:
            results = pending.wait()
            if self.shifted:
                rows_from, by_lane = self._dispatched(results)
            else:
                rows_from, by_lane = self._gathered(results[0])
            from_lanes = permute.regroup_by_expert(rows_from).to(by_lane.device)
            handle = ShardedHandle(
                inner=results[0].handle,
                shifted=tuple(result.handle for result in results[1:]),
                rows=rows_from.sum(1).tolist(),
                from_lanes=from_lanes,
                weights=results[0].handle.weights,
            )
            return replace(
                results[0],
                expert_input=by_lane.index_select(0, from_lanes),
                tokens_per_expert=torch.from_numpy(rows_from.sum(0)),
                handle=handle,
            )

        return finish

    def _settled(self, result: DispatchResult[ShardedHandle]) -> DispatchResult[ShardedHandle]:
        """As the lane's strategy settles it."""
        handle = result.handle
        settled = self.inner._settled(replace(result, handle=self._lane_handle(handle)))
        return replace(result, handle=replace(handle, weights=settled.handle.weights))

    def _dispatched(self, results: list[DispatchResult]) -> tuple[np.ndarray, Tensor]:
        """As `_gathered`, of the lanes' rows that came by n dispatches."""
        # What I received at shift s was sent s lanes before mine.
        of_lane = [results[(self.lane - lane) % self.num_shards] for lane in range(self.num_shards)]
        counts = np.stack([result.tokens_per_expert.numpy() for result in of_lane])
        return counts, torch.cat([result.expert_input for result in of_lane])

    def _gathered(self, own: DispatchResult) -> tuple[np.ndarray, Tensor]:
        """Rows for each expert from each lane, int64 [n, e], and the rows [M, W] by lane."""
        counts = own.tokens_per_expert.numpy()
        wire = self.setup.wire_dispatch

        def start() -> Callable[[], tuple[np.ndarray, Tensor]]:
            row_bytes = wire.hidden_bytes(self.setup.width) + wire.scale_bytes(self.setup.width)
            rows_from = self.shards.announce(
                self._position("tp_gather"),
                [counts] * self.num_shards,
                len(counts),
                row_bytes,
                wire.code,
            ).wait()
            shared = self._start_share(
                "tp_gather", "forward", wire, own.expert_input, rows_from.sum(1).tolist()
            )
            return lambda: (rows_from, shared())

        return self.inner.timed("tp_gather", start).wait()

    def _start_combine(
        self, expert_output: Tensor, handle: ShardedHandle
    ) -> Callable[[], Combined]:
        wire, rows = self.setup.wire_combine, self._by_lane(expert_output, handle)
        reduced = self.inner.timed(
            "tp_reduce", lambda: self._start_sum("tp_reduce", "forward", wire, rows, handle.rows)
        )

        def finish() -> Combined:
            summed, lane = reduced.wait(), self._lane_handle(handle)
            pending = self.inner.timed("combine", lambda: self.inner._start_combine(summed, lane))
            return replace(pending.wait(), expert_output=summed)

        return finish

    def _combine_backward(
        self, grad: Tensor, expert_output: Tensor, answers: Tensor | None, handle: ShardedHandle
    ) -> tuple[Tensor, Tensor]:
        inner, lane = self.inner, self._lane_handle(handle)
        of_rows, grad_weights = inner.timed(
            "combine",
            lambda: lambda: inner._combine_backward(grad, expert_output, answers, lane),
            "backward",
        ).wait()
        wire = self.setup.gradients
        by_lane = inner.timed(
            "tp_reduce",
            lambda: self._start_share("tp_reduce", "backward", wire, of_rows, handle.rows),
            "backward",
        ).wait()
        return by_lane.index_select(0, handle.from_lanes), grad_weights

    def _dispatch_backward(
        self, grad: Tensor, grad_weights: Tensor, handle: ShardedHandle
    ) -> tuple[Tensor, Tensor]:
        inner, rows = self.inner, self._by_lane(grad, handle)
        if self.shifted:
            return inner.timed(
                "dispatch",
                lambda: lambda: self._shifted_backward(rows, grad_weights, handle),
                "backward",
            ).wait()
        wire = self.setup.gradients
        summed = inner.timed(
            "tp_gather",
            lambda: self._start_sum("tp_gather", "backward", wire, rows, handle.rows),
            "backward",
        ).wait()
        return inner.timed(
            "dispatch",
            lambda: (
                lambda: inner._dispatch_backward(summed, grad_weights, self._lane_handle(handle))
            ),
            "backward",
        ).wait()

    def _shifted_backward(
        self, rows: Tensor, grad_weights: Tensor, handle: ShardedHandle
    ) -> tuple[Tensor, Tensor]:
        """Gradients [M, W] by lane, each along the dispatch that its row came by."""
        of_lane = rows.split(handle.rows)
        hidden, of_weights = self.inner._dispatch_backward(
            of_lane[self.lane], grad_weights, self._lane_handle(handle)
        )
        total = hidden.float()
        for shift, (dispatcher, of_shift) in enumerate(
            zip(self.shifted, handle.shifted, strict=True), 1
        ):
            source = (self.lane - shift) % self.num_shards
            # The weights are applied at home alone: those that came along here were not used.
            unused = torch.zeros_like(of_shift.weights)
            total = total + dispatcher._dispatch_backward(of_lane[source], unused, of_shift)[0]
        return total.to(hidden.dtype), of_weights

    def _lane_handle(self, handle: ShardedHandle) -> Any:
        return replace(handle.inner, weights=handle.weights)

    def _by_lane(self, rows: Tensor, handle: ShardedHandle) -> Tensor:
        """Expert-major rows [M, W] lane after lane."""
        return rows.index_select(0, permute.inverse(handle.from_lanes))

    def _start_share(
        self, phase: str, direction: str, wire: WireFormat, own: Tensor, rows: list[int]
    ) -> Callable[[], Tensor]:
        """Own lane's rows [M_t, W] to every other shard: rows [M, W] by lane, own as they are."""
        parts = wire.encode(own)
        others = [0 if lane == self.lane else count for lane, count in enumerate(rows)]
        sent = [0 if lane == self.lane else len(own) for lane in range(self.num_shards)]
        pending = self.shards.start_all_to_all(
            self._position(phase, direction),
            pack(parts).repeat(self.num_shards - 1, 1),
            parts,
            sent,
            others,
        )

        def finish() -> Tensor:
            arrived = wire.decode(pending.wait(), self.setup.width, self.setup.dtype).split(others)
            return torch.cat([*arrived[: self.lane], own, *arrived[self.lane + 1 :]])

        return finish

    def _start_sum(
        self, phase: str, direction: str, wire: WireFormat, by_lane: Tensor, rows: list[int]
    ) -> Callable[[], Tensor]:
        """Each lane's rows of [M, W] to its own rank, to be added up there in fp32 in order of
        shards: [M_t, W]."""
        of_lane = by_lane.split(rows)
        others = torch.cat([*of_lane[: self.lane], *of_lane[self.lane + 1 :]])
        parts = wire.encode(others)
        own = rows[self.lane]
        pending = self.shards.start_all_to_all(
            self._position(phase, direction),
            pack(parts),
            parts,
            [0 if lane == self.lane else count for lane, count in enumerate(rows)],
            [0 if lane == self.lane else own for lane in range(self.num_shards)],
        )

        def finish() -> Tensor:
            arrived = wire.decode(pending.wait(), self.setup.width, torch.float32)
            terms = list(arrived.split(own)) if own else []
            terms.insert(self.lane, of_lane[self.lane].float())
            total = torch.zeros_like(terms[0])
            for term in terms:
                total += term
            return total.to(self.setup.dtype)

        return finish


def build_sharded(
    build: Callable[[DispatchSetup], Dispatcher],
    setup: DispatchSetup,
    shards: Transport,
    group: Transport | None = None,
) -> Sharded:
    """A strategy among sharded experts.

    build: makes the strategy's dispatcher; setup: its setup in this rank's lane
    shards: among the ranks of this rank's shard group
    group: among all ranks of the expert-parallel group, for mode all; None: mode gather
    """
    num_shards = shards.group.size
    shifts = range(1, num_shards) if group is not None else ()
    return Sharded(
        build(setup),
        shards,
        [
            build(replace(setup, transport=ShiftedTransport(group, num_shards, shift)))
            for shift in shifts
            if group is not None
        ],
    )
