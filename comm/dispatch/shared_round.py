"""One round of the ranks' shared window, counted: lay out, publish, meet, take.

What a rank lays out for another is booked by the rank that lays it out, when it does; what a rank
takes is booked by the taker, from the very index that it takes rows with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comm.header import HEADER_WORDS, check_headers, counting, header
from comm.meter import EVERY_RANK, Position
from comm.transport import Transport
from comm.wire import CastFormat, Parts, WireFormat, as_bytes

WORD_BYTES = 8  # of a counts message
ENTRY_BYTES = 4  # of a list: the number of a row in the table


@dataclass(frozen=True)
class Letters:
    """Where things lie in one counts message for each rank, one after another.

    headers: int64 [R, 4] of the header's words; runs: int64 [S] of each run's word
    lengths: int64 [R] words; counting: int64 [R, 4], how many runs follow, to be added to a header
    """

    headers: np.ndarray
    runs: np.ndarray
    lengths: np.ndarray
    counting: np.ndarray


def letters(bounds: np.ndarray) -> Letters:
    """bounds: int64 [R + 1]; runs bounds[r] to bounds[r + 1] are told to rank r."""
    runs, places = np.diff(bounds), np.arange(len(bounds) - 1)
    headers_at = bounds[:-1] + HEADER_WORDS * places
    runs_at = np.arange(bounds[-1]) + HEADER_WORDS * (places + 1).repeat(runs)
    headers_at = headers_at[:, None] + np.arange(HEADER_WORDS)
    return Letters(headers_at, runs_at, runs + HEADER_WORDS, counting(runs))


class SharedRound:
    """A phase of one rank. A round that began must meet before the next one of its transport.

    row_bytes: of a row in a region; wire_code: what the header calls its format
    area: of the window, that rows lie in
    header: int64 [4] as of a counts message without its number of counts
    stride: rows from one rank's first row to the next one's
    firsts, list_firsts: int64 [R], each rank's first row in the table, and its first entry in the
        lists of all ranks
    """

    def __init__(
        self,
        transport: Transport,
        position: Position,
        row_bytes: int,
        wire_code: int,
        area: str = "rows",
    ) -> None:
        self.position, self.row_bytes, self._area = position, row_bytes, area
        self._window, self._meter = transport.window, transport.meter
        self._group = transport.group
        whole = self._group.size == self._meter.world_size
        self._ranks = EVERY_RANK if whole else np.array(self._group.ranks)
        self._place, self._size = self._group.rank, self._group.size
        self.header = header(position, row_bytes, wire_code)
        self.stride = self._window.stride(area, row_bytes)
        self._edges = np.arange(self._size + 1, dtype=np.int32)
        places, self._ones = np.arange(self._size), np.ones(self._size, np.int64)
        self.firsts = self.stride * places
        self._first = self.stride * self._place
        self.list_firsts = self._window.stride("ids", ENTRY_BYTES) * places
        areas = (("words", WORD_BYTES), ("ids", ENTRY_BYTES), (area, row_bytes))
        self._copies = [[self._window.rows_of(copy, *one) for one in areas] for copy in (0, 1)]

    def begin(self) -> SharedRound:
        """The same phase once more."""
        self._words, self._lists, self._rows = self._copies[self._window.begin()]
        return self

    @property
    def table(self) -> Tensor:
        """Every rank's rows: uint8 [R * stride, row_bytes]. What is read in it is not counted."""
        return self._window.table(self._area, self.row_bytes)

    def table_of(self, dtype: torch.dtype) -> Tensor:
        """The same as values: [R * stride, W]."""
        return self._rows.as_type(dtype)

    def tell(self, words: np.ndarray, lengths: np.ndarray) -> None:
        """Lay out a counts message for each rank, one after another: int64 words, lengths [R]."""
        self._words.own_words(len(words))[:] = words
        self._tell(words, lengths)

    def hear(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Take each rank's message to this one: lengths [R] words from starts [R] on in all that it
        has told, one after another, int64 [sum(lengths)]."""
        self._meter.taken(self.position, WORD_BYTES, lengths, self._ranks)
        parts = zip(self._words.words, starts.tolist(), (starts + lengths).tolist(), strict=True)
        return np.concatenate([words[start:end] for words, start, end in parts])

    def hear_alike(self, start: int, length: int) -> np.ndarray:
        """The same where all messages are in the same place: int64 [R, length]."""
        self._meter.taken(self.position, WORD_BYTES * length, self._ones, self._ranks)
        return self._words.words[:, start : start + length]

    def announce(self, starts: np.ndarray, lengths: np.ndarray, places: Letters) -> None:
        """Tell each rank where its runs of rows begin and how long they are; starts, lengths:
        int64 [runs], all ranks' one after another.

        A message is the header and a word for each run, of two halves.
        """
        assert not len(starts) or starts[-1] + lengths[-1] < 1 << 31, "rows are told in 32 bits"
        words = self._words.own_words(len(starts) + places.headers.size)
        words[places.headers] = self.header + places.counting
        words[places.runs] = lengths << 32 | starts
        self._tell(words, places.lengths)

    def _tell(self, words: np.ndarray, lengths: np.ndarray) -> None:
        self._meter.put(self.position, [("counts", words[:, None])], lengths, self._ranks)

    def hear_announced(self, first_run: int, num_runs: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of each rank, about its runs for this one: starts, lengths, int64 [R, num_runs].
        Raises SplitMismatch.

        first_run: `bounds` of this rank, the same on all
        """
        start, length = HEADER_WORDS * self._place + first_run, HEADER_WORDS + num_runs
        heard = self.hear_alike(start, length)
        expected = self.header.copy()
        expected[1] += num_runs << 32
        self._check(heard[:, :HEADER_WORDS], expected)
        runs = heard.T[HEADER_WORDS:].copy()  # an expert's together: the order that is wanted next
        return (runs & 0xFFFFFFFF).T, (runs >> 32).T

    def lay_out(
        self,
        wire: WireFormat,
        values: Tensor,
        rows_to: np.ndarray,
        listed: Sequence[tuple[str, np.ndarray]] = (),
    ) -> None:
        """Values [N, W] into this rank's region, to be taken as often as `rows_to` says.

        rows_to: takings by each rank, int64 [R]; listed: what each of them adds to the row
        """
        if isinstance(wire, CastFormat):  # in one pass, whatever the type of the values
            room = self._rows.own_room(values.shape[0])
            if values.dtype == wire.dtype:  # numpy copies with memcpy, a tenth faster than torch
                room[:] = as_bytes(values).numpy()
            else:
                torch.from_numpy(room).view(wire.dtype).copy_(values)
            parts = [("hidden", room)]
        else:
            parts = wire.encode(values)
            self._window.put(self._area, parts)
        self._meter.put(self.position, [*listed, *parts], rows_to, self._ranks)

    def leave(self, values: Tensor, rows_to: np.ndarray) -> None:
        """The same of values in memory that was lent to hold them: there they are."""
        self._meter.put(self.position, [("hidden", values)], rows_to, self._ranks)

    def lay_out_selected(
        self, packed: Tensor, index: Tensor, parts: Parts, rows_to: np.ndarray
    ) -> None:
        """Rows packed[index] into this rank's region, to be taken once each.

        parts: what `packed` is packed of, by kind and width
        """
        room = self._window.room(self._area, len(index), self.row_bytes, self._place)
        torch.index_select(packed, 0, index, out=room)
        self._meter.put(self.position, parts, rows_to, self._ranks)

    def lay_out_list(self, rows: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """int64 [N], which of its rows this rank means, in the order in which they are taken: their
        numbers in the table, in 32 bits each."""
        room = self._lists.own_words(len(rows))
        room[:] = rows
        room += self._first
        return [("ids", room[:, None])]

    def hand_back(
        self, packed: Tensor, parts: Parts, starts: Sequence[int], order: Sequence[Tensor]
    ) -> None:
        """Put rows where each rank wants them, in its own region.

        parts: what `packed` is packed of; starts: the place of the first row for each rank there
        order: for each rank, int64 [n], which of the rows it gets, one after another
        """
        for place, (start, index) in enumerate(zip(starts, order, strict=True)):
            room = self._window.room(self._area, len(index), self.row_bytes, place, start)
            torch.index_select(packed, 0, index, out=room)
        rows_to = np.array([len(index) for index in order])
        self._meter.put(self.position, parts, rows_to, self._ranks)

    def publish(self) -> None:
        """What this rank lays out is there."""
        self._window.publish(self.header)

    def meet(self) -> None:
        """Wait for the others. Raises RankLost; SplitMismatch where they are in another phase."""
        self._check(self._window.meet(), self.header)

    def listed(self, at: np.ndarray) -> np.ndarray:
        """Entries of the lists: int32 [M], counted with the rows that they name; at: int64 [M]"""
        return self._lists.words.ravel().take(at)

    def take(self, index: np.ndarray, entry_bytes: int = 0) -> Tensor:
        """Copy rows of the table: uint8 [len(index), row_bytes].

        entry_bytes: of the list's entry that named each row
        """
        self.count_taken(index, entry_bytes)
        return self.table.index_select(0, torch.from_numpy(index))

    def take_to_answer(
        self, index: np.ndarray, entry_bytes: int, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        """Copy rows of the table into memory that the next round will find them in, if it lays out
        answers: the rows as values, and what comm.shm.Window.is_lent wants to hear of them."""
        self.count_taken(index, entry_bytes)
        room, rows, lent = self._window.lend("answers", len(index), self.row_bytes, dtype)
        # "clip", since numpy otherwise fills a copy of `out` first, to leave it whole on an error.
        self._rows.array.take(index, 0, room, "clip")
        return rows, lent

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

    def count_taken(
        self, index: np.ndarray, entry_bytes: int = 0, rank_by_rank: bool = False
    ) -> None:
        """Book rows of the table that this rank reads where they are.

        rank_by_rank: all of rank 0 come first, then all of rank 1, ...
        """
        if not self._meter.enabled:
            return
        rank = index >> self.stride.bit_length() - 1
        if rank_by_rank:
            ends = rank.searchsorted(self._edges)
            rows_from = ends[1:] - ends[:-1]
        else:
            rows_from = np.bincount(rank, minlength=self._size)
        self._meter.taken(self.position, self.row_bytes + entry_bytes, rows_from, self._ranks)

    def _check(self, theirs: np.ndarray, mine: np.ndarray) -> None:
        ranks = self._group.ranks
        check_headers(self.position, ranks, ranks[self._place], theirs, mine)
