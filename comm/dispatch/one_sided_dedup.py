"""One row for each (token, rank) through shared memory: with ids and weights, reduced before it is
answered, as in rank_dedup; but rows are taken from where their source laid them out.

    forth   source: rows for rank 0, rank 1, ... into its own region    ranks copy their run of it
    back    ranks: an answer to each row into the source's region,      source sums what lies in
            where that row was                                          its own region

Legend: as in `comm.dispatch.hop`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comm.dispatch.base import DispatchResult
from comm.dispatch.by_rank import ByRankHandle
from comm.dispatch.hop import Hop
from comm.dispatch.rank_dedup import RankDedup
from comm.dispatch.shared_round import SharedRound, letters
from comm.meter import Position
from comm.transport import Transport
from comm.wire import Parts, pack

ANY_FORMAT = -1  # after a dispatch the length of a row is all that a hop knows of its format


@dataclass(frozen=True)
class SharedHop(Hop):
    """starts: where the rows for this rank begin in each source's region"""

    starts: tuple[int, ...] = ()

    def forth(self, position: Position, rows: Tensor, parts: Parts) -> Tensor:
        round_ = SharedRound(self.transport, position, rows.shape[1], ANY_FORMAT).begin()
        index = self.destinations.nonzero()[:, 1]
        round_.lay_out_selected(rows, index, parts, np.array(self.sent_splits))
        round_.publish()
        round_.meet()
        return round_.take_runs(self.starts, self.received_splits)

    def start_back(self, position: Position, parts: Parts) -> Callable[[], Tensor]:
        packed = pack(parts)
        round_ = SharedRound(self.transport, position, packed.shape[1], ANY_FORMAT).begin()
        order = torch.arange(len(packed)).split(self.received_splits)
        round_.hand_back(packed, parts, self.starts, order)
        round_.publish()

        def finish() -> Tensor:
            round_.meet()
            return round_.take_own(np.array(self.sent_splits))

        return finish


def start_shared_hop(
    transport: Transport,
    position: Position,
    rows: Tensor,
    parts: Parts,
    destinations: Tensor,
    wire_code: int,
) -> Callable[[], tuple[Tensor, SharedHop]]:
    """As comm.dispatch.hop.start_hop, in one round of the window."""
    round_ = SharedRound(transport, position, rows.shape[1], wire_code).begin()
    rows_to = destinations.sum(1).numpy()
    round_.lay_out_selected(rows, destinations.nonzero()[:, 1], parts, rows_to)
    rank = transport.group.rank
    places = letters(np.arange(len(rows_to) + 1))
    round_.announce(rows_to.cumsum() - rows_to, rows_to, places)
    round_.publish()

    def finish() -> tuple[Tensor, SharedHop]:
        round_.meet()
        starts, lengths = (runs[:, 0].tolist() for runs in round_.hear_announced(rank, 1))
        hop = SharedHop(transport, destinations, rows_to.tolist(), lengths, tuple(starts))
        return round_.take_runs(starts, lengths), hop

    return finish


class OneSidedDedup(RankDedup):
    """At most min(K, R) rows a token, each taken by the rank that it is for."""

    carries = "hidden, scales, K ids and K weights, a row for each (token, rank); one count"

    def _start_dispatch(
        self, hidden: Tensor, slots: Tensor, topk_weights: Tensor
    ) -> Callable[[], DispatchResult[ByRankHandle]]:
        parts = self._parts(hidden, slots, topk_weights)
        pending = start_shared_hop(
            self.setup.transport,
            self._position("dispatch"),
            pack(parts),
            parts,
            self._destinations(slots),
            self.setup.wire_dispatch.code,
        )

        def finish() -> DispatchResult[ByRankHandle]:
            rows, hop = pending()
            return self._expand(rows, (hop,))

        return finish
