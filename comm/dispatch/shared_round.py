"""One round of the ranks' shared window, counted: lay out, publish, meet, take.

What a rank lays out for another is booked by the rank that lays it out, when it does; what a rank
takes is booked by the taker, from the very index that it takes rows with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from comm.meter import ALL_PHASES, DIRECTIONS, Position
from comm.transport import Transport, check_headers
from comm.wire import CastFormat, Parts, WireFormat, view_as


class SharedRound:
    """A phase of one rank. A round that began must meet before the next one of its transport.

    wire: what rows are laid out in; row_bytes: of such a row, with all that travels in it
    """

    def __init__(
        self, transport: Transport, position: Position, wire: WireFormat, row_bytes: int
    ) -> None:
        self.position, self.wire, self.row_bytes = position, wire, row_bytes
        self._window, self._meter = transport.window, transport.meter
        self._ranks = np.array(transport.group.ranks)
        self._place = transport.group.rank
        self._window.begin()

    @property
    def header(self) -> np.ndarray:
        """int64 [4] comm.transport.HEADER_FIELDS, as of a counts message."""
        position = self.position
        phase = ALL_PHASES.index(position.phase)
        return np.array([position.layer, phase, self.row_bytes, self.wire.code])

    @property
    def stride(self) -> int:
        """Row number of the first row of rank 1, of rank 2 less that of rank 1, and so on."""
        return self._window.stride("rows", self.row_bytes)

    @property
    def table(self) -> Tensor:
        """Every rank's rows: uint8 [R * stride, row_bytes]. What is read in it is not counted."""
        return self._window.table("rows", self.row_bytes)

    def tell(self, words: Sequence[np.ndarray]) -> None:
        """Lay out a counts message for each rank: int64 [n_dst] each."""
        packed = torch.from_numpy(np.concatenate(words)).view(-1, 1).view(torch.uint8)
        self._window.put("words", [("counts", packed)])
        lengths = [len(message) for message in words]
        self._meter.put(self.position, [("counts", packed)], lengths, self._ranks)

    def hear(self, starts: Sequence[int], lengths: Sequence[int]) -> list[np.ndarray]:
        """Take each rank's counts message, `lengths` words from `starts` on in all it has told."""
        table = self._window.words("words", np.int64)
        self._meter.taken(self.position, 8, lengths, self._ranks)
        return [
            told[start : start + length].copy()
            for told, start, length in zip(table, starts, lengths, strict=True)
        ]

    def lay_out(self, parts: Parts, listed: Parts, rows_to: np.ndarray) -> None:
        """Rows of several parts into this rank's region, to be taken as often as `rows_to` says.

        parts: what a row is made of; listed: what each taking adds, not part of the row
        rows_to: takings by each rank, int64 [R]
        """
        self._window.put("rows", parts)
        self._meter.put(self.position, [*listed, *parts], rows_to, self._ranks)

    def lay_out_values(self, values: Tensor, rows_to: np.ndarray, listed: Parts = ()) -> None:
        """The same with values [N, W] in the round's format: one copy, whatever their type."""
        if not isinstance(self.wire, CastFormat):
            return self.lay_out(self.wire.encode(values), list(listed), rows_to)
        room = self._window.room("rows", len(values), self.row_bytes, self._place)
        view_as(room, self.wire.dtype).copy_(values)
        self._meter.put(self.position, [*listed, ("hidden", room)], rows_to, self._ranks)
        return None

    def lay_out_list(self, ids: Tensor) -> Parts:
        """int32 [N], which of its rows this rank means, in the order in which they are taken."""
        parts = [("ids", ids[:, None].view(torch.uint8))]
        self._window.put("ids", parts)
        return parts

    def hand_back(self, parts: Parts, starts: Sequence[int], order: Sequence[Tensor]) -> None:
        """Put rows where each rank wants them, in its own region.

        starts: the place in its region of the first row for each rank
        order: for each rank, int64 [n], which of the rows it gets, one after another
        """
        packed = parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts], dim=1)
        for place, (start, index) in enumerate(zip(starts, order, strict=True)):
            room = self._window.room("rows", len(index), self.row_bytes, place, start)
            torch.index_select(packed, 0, index, out=room)
        rows_to = np.array([len(index) for index in order])
        self._meter.put(self.position, parts, rows_to, self._ranks)

    def publish(self) -> None:
        """What this rank lays out is there."""
        tag = self.header
        tag[1] += len(ALL_PHASES) * DIRECTIONS.index(self.position.direction)
        self._window.publish(tag)
        self._tag = tag

    def meet(self) -> None:
        """Wait for the others. Raises RankLost; SplitMismatch where they are in another phase."""
        ranks = self._ranks.tolist()
        tags = self._window.meet()
        check_headers(self.position, ranks, ranks[self._place], tags, self._tag)

    def listed(self, at: np.ndarray, takes_from: np.ndarray) -> np.ndarray:
        """Take entries of the lists: int32 [M].

        at: int64 [M], of each the place in its rank's list; takes_from: int64 [M], that rank
        """
        lists = self._window.words("ids", np.int32)
        self._meter.taken(self.position, 4, self._by_rank(takes_from), self._ranks)
        return lists.ravel()[at + takes_from * lists.shape[1]]

    def take(self, index: Tensor) -> Tensor:
        """Copy rows of the table: uint8 [len(index), row_bytes]."""
        self.count_taken(index)
        return self.table.index_select(0, index)

    def take_own(self, num_rows: int, rows_from: np.ndarray) -> Tensor:
        """What the others handed back to this rank: uint8 [num_rows, row_bytes], valid until the
        next round; rows_from: int64 [R], whose they are."""
        assert num_rows == rows_from.sum(), f"{num_rows} rows of {rows_from.tolist()}"
        self._meter.taken(self.position, self.row_bytes, rows_from, self._ranks)
        first = self._place * self.stride
        return self.table[first : first + num_rows]

    def count_taken(self, index: Tensor) -> None:
        """Book rows of the table that this rank reads where they are."""
        if self._meter.enabled:
            rows_from = self._by_rank(index.numpy() // self.stride)
            self._meter.taken(self.position, self.row_bytes, rows_from, self._ranks)

    def _by_rank(self, places: np.ndarray) -> np.ndarray:
        return np.bincount(places, minlength=len(self._ranks))
