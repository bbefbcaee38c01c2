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
from comm.wire import CastFormat, Parts, WireFormat, as_bytes, view_as


class SharedRound:
    """A phase of one rank. A round that began must meet before the next one of its transport.

    row_bytes: of a row in a region; wire_code: what the header calls its format
    """

    def __init__(
        self, transport: Transport, position: Position, row_bytes: int, wire_code: int
    ) -> None:
        self.position, self.row_bytes, self._wire_code = position, row_bytes, wire_code
        self._window, self._meter = transport.window, transport.meter
        self._ranks = np.array(transport.group.ranks)
        self._place = transport.group.rank
        self._window.begin()

    @property
    def header(self) -> np.ndarray:
        """int64 [4] comm.transport.HEADER_FIELDS, as of a counts message."""
        position = self.position
        phase = ALL_PHASES.index(position.phase)
        return np.array([position.layer, phase, self.row_bytes, self._wire_code])

    @property
    def stride(self) -> int:
        """Row number of the first row of rank 1, of rank 2 less that of rank 1, and so on."""
        return self._window.stride("rows", self.row_bytes)

    @property
    def table(self) -> Tensor:
        """Every rank's rows: uint8 [R * stride, row_bytes]. What is read in it is not counted."""
        return self._window.table("rows", self.row_bytes)

    def tell(self, words: np.ndarray, lengths: np.ndarray) -> None:
        """Lay out a counts message for each rank, one after another: int64 words, lengths [R]."""
        packed = torch.from_numpy(words).view(-1, 1).view(torch.uint8)
        self._window.put("words", [("counts", packed)])
        self._meter.put(self.position, [("counts", packed)], lengths, self._ranks)

    def hear(self, starts: np.ndarray, lengths: np.ndarray) -> list[np.ndarray] | np.ndarray:
        """Take each rank's message to this one: lengths [R] words from starts [R] on in all that it
        has told. An array [R, n] where all have the same place, else a list."""
        table = self._window.words("words", np.int64)
        self._meter.taken(self.position, 8, lengths, self._ranks)
        if (starts == starts[0]).all() and (lengths == lengths[0]).all():
            return table[:, starts[0] : starts[0] + lengths[0]].copy()
        return [
            told[start : start + length].copy()
            for told, start, length in zip(table, starts, lengths, strict=True)
        ]

    def announce(self, starts: np.ndarray, lengths: np.ndarray, bounds: np.ndarray) -> None:
        """Tell each rank where its runs of rows begin and how long they are; starts, lengths:
        int64 [runs], of which bounds[r] to bounds[r + 1] are rank r's.

        A message is the header and a word for each run, of two halves.
        """
        assert lengths.sum() < 1 << 31, "places of rows are told in 32 bits"
        header_words, runs = len(self.header), np.diff(bounds)
        headers_at = bounds[:-1] + header_words * np.arange(len(runs))
        words = np.empty(len(starts) + header_words * len(runs), np.int64)
        words[headers_at[:, None] + np.arange(header_words)] = self.header
        place = np.arange(len(runs)).repeat(runs)
        halves = np.stack([starts, lengths], axis=1).astype(np.int32)
        words[np.arange(len(starts)) + header_words * (place + 1)] = halves.view(np.int64).ravel()
        self.tell(words, header_words + runs)

    def hear_announced(self, first_run: int, num_runs: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of each rank, about its runs for this one: starts, lengths, int64 [R, num_runs].
        Raises SplitMismatch.

        first_run: `bounds` of this rank, the same on all
        """
        size, header_words = len(self._ranks), len(self.header)
        start, length = header_words * self._place + first_run, header_words + num_runs
        heard = self.hear(np.full(size, start), np.full(size, length))
        self._check(heard[:, :header_words], self.header)
        halves = np.ascontiguousarray(heard[:, header_words:]).view(np.int32)
        halves = halves.reshape(size, num_runs, 2).astype(np.int64)
        return halves[..., 0], halves[..., 1]

    def lay_out(
        self, wire: WireFormat, values: Tensor, rows_to: np.ndarray, listed: Parts = ()
    ) -> None:
        """Values [N, W] into this rank's region, to be taken as often as `rows_to` says.

        rows_to: takings by each rank, int64 [R]; listed: what each of them adds to the row
        """
        if isinstance(wire, CastFormat):  # in one pass, whatever the type of the values
            room = self._window.room("rows", len(values), self.row_bytes, self._place)
            if values.dtype == wire.dtype:  # numpy copies with memcpy, a tenth faster than torch
                np.copyto(room.numpy(), as_bytes(values).numpy())
            else:
                view_as(room, wire.dtype).copy_(values)
            parts = [("hidden", room)]
        else:
            parts = wire.encode(values)
            self._window.put("rows", parts)
        self._meter.put(self.position, [*listed, *parts], rows_to, self._ranks)

    def lay_out_selected(
        self, packed: Tensor, index: Tensor, parts: Parts, rows_to: np.ndarray
    ) -> None:
        """Rows packed[index] into this rank's region, to be taken once each.

        parts: what `packed` is packed of, by kind and width
        """
        room = self._window.room("rows", len(index), self.row_bytes, self._place)
        torch.index_select(packed, 0, index, out=room)
        self._meter.put(self.position, parts, rows_to, self._ranks)

    def lay_out_list(self, ids: Tensor) -> Parts:
        """int32 [N], which of its rows this rank means, in the order in which they are taken."""
        parts = [("ids", ids[:, None].view(torch.uint8))]
        self._window.put("ids", parts)
        return parts

    def hand_back(
        self, packed: Tensor, parts: Parts, starts: Sequence[int], order: Sequence[Tensor]
    ) -> None:
        """Put rows where each rank wants them, in its own region.

        parts: what `packed` is packed of; starts: the place of the first row for each rank there
        order: for each rank, int64 [n], which of the rows it gets, one after another
        """
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
        self._check(self._window.meet(), self._tag)

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

    def take_runs(self, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Copy a run of rows of each rank, from `starts` on in its region: uint8 [N, row_bytes]."""
        self._meter.taken(self.position, self.row_bytes, lengths, self._ranks)
        table, firsts = self.table, np.array(starts) + np.arange(len(starts)) * self.stride
        return torch.cat(
            [table[at : at + n] for at, n in zip(firsts.tolist(), lengths, strict=True)]
        )

    def take_own(self, rows_from: np.ndarray) -> Tensor:
        """What the others handed back to this rank: uint8 [N, row_bytes], where it lies, valid
        until the next round; rows_from: int64 [R], how many are whose."""
        self._meter.taken(self.position, self.row_bytes, rows_from, self._ranks)
        first = self._place * self.stride
        return self.table[first : first + int(rows_from.sum())]

    def count_taken(self, index: Tensor) -> None:
        """Book rows of the table that this rank reads where they are."""
        if self._meter.enabled:
            rows_from = self._by_rank(index.numpy() // self.stride)
            self._meter.taken(self.position, self.row_bytes, rows_from, self._ranks)

    def _check(self, theirs: np.ndarray, mine: np.ndarray) -> None:
        ranks = self._ranks.tolist()
        check_headers(self.position, ranks, ranks[self._place], theirs, mine)

    def _by_rank(self, places: np.ndarray) -> np.ndarray:
        return np.bincount(places, minlength=len(self._ranks))
