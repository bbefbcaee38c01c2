"""Counts what is handed to the collectives, byte by byte, on the rank that sends.

The meter sees the parts of a message (values, scales, ids, ...) and the message itself, and insists
that they agree; it knows no formula for what a row *should* weigh. That is `comm.analytic`'s job,
which shares no code with this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # the names of the axes are wanted where torch is not
    from torch import Tensor

DIRECTIONS = ("forward", "backward")
# Every phase there is, in the order that a message's header names them by number. A run's ledger
# has the first two, and of the others those that it needs: the arrays are large.
ALL_PHASES = ("dispatch", "combine", "tp_gather", "tp_reduce", "rebalance", "grad_sync")
PHASES = ALL_PHASES[:2]
KINDS = (
    *("hidden", "scales", "ids", "weights", "counts", "padding"),
    *("expert_weights", "gradients"),
)
KINDS_WITHOUT_ROWS = ("counts", "gradients")  # words and values: no token travels in them
EVERY_RANK = slice(None)


@dataclass(frozen=True)
class Position:
    """Where in the run a message belongs."""

    layer: int
    phase: str
    direction: str = "forward"

    def __str__(self) -> str:
        return f"layer {self.layer}, {self.direction} {self.phase}"


@dataclass(frozen=True)
class Traffic:
    """The counted bytes of all ranks together.

    bytes: int64 [layer, direction, phase, kind, src, dst], as the senders counted them
    rows: int64 [layer, direction, phase, src, dst]; none of KINDS_WITHOUT_ROWS
    received: int64 [layer, direction, phase, src, dst], bytes as the receivers counted them
    seconds: float64 [rank, layer, direction, phase], time spent inside the phase
    collectives: how many collectives one rank took part in
    """

    bytes: np.ndarray
    rows: np.ndarray
    received: np.ndarray
    seconds: np.ndarray
    collectives: int
    directions: tuple[str, ...] = DIRECTIONS
    phases: tuple[str, ...] = PHASES
    kinds: tuple[str, ...] = KINDS

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(len(self.bytes)))

    @classmethod
    def assemble(cls, meters: Sequence[TrafficMeter]) -> Traffic:
        """One meter a rank, in rank order. A rank's own row is a source's row of the whole."""
        return cls(
            bytes=np.stack([meter.sent for meter in meters], axis=4),
            rows=np.stack([meter.rows for meter in meters], axis=3),
            received=np.stack([meter.received for meter in meters], axis=4),
            seconds=np.stack([meter.seconds for meter in meters]),
            collectives=max(meter.collectives for meter in meters),
            directions=meters[0].directions,
            phases=meters[0].phases,
        )


@dataclass
class TrafficMeter:
    """One rank's row of the ledger. `enabled` is off during warm-up.

    directions, phases: the names of the axes; a message of another place is a mistake
    carried: what went over the connections of each group of ranks, by comm.world.RankGroup.number:
        int64 [2, dst], bytes and messages; what shared memory carries is not in it
    """

    num_layers: int
    world_size: int
    directions: tuple[str, ...] = DIRECTIONS
    phases: tuple[str, ...] = PHASES
    enabled: bool = True
    on_phase: Callable[[Position, float], None] | None = None
    on_begin: Callable[[Position], None] | None = None
    collectives: int = 0
    sent: np.ndarray = field(init=False)  # int64 [layer, direction, phase, kind, dst]
    rows: np.ndarray = field(init=False)  # int64 [layer, direction, phase, dst]
    received: np.ndarray = field(init=False)  # int64 [layer, direction, phase, src]
    seconds: np.ndarray = field(init=False)  # float64 [layer, direction, phase]
    carried: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = (self.num_layers, len(self.directions), len(self.phases))
        self.sent = np.zeros((*places, len(KINDS), self.world_size), dtype=np.int64)
        self.rows = np.zeros((*places, self.world_size), dtype=np.int64)
        self.received = np.zeros((*places, self.world_size), dtype=np.int64)
        self.seconds = np.zeros(places)
        self._pages: dict[Position, dict[str, np.ndarray]] = {}
        self._last: Position | None = None
        self._last_page: dict[str, np.ndarray] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_pages": {}, "_last": None, "_last_page": {}}  # views

    def _page(self, position: Position) -> dict[str, np.ndarray]:
        """Of a place the row of each kind, of `rows` and of `received`: int64 [R], found once."""
        if position is self._last:
            return self._last_page
        page = self._pages.get(position)
        if page is None:
            place = self.place(position)
            page = dict(zip(KINDS, self.sent[place], strict=True))
            page |= {"rows": self.rows[place], "received": self.received[place]}
            self._pages[position] = page
        self._last, self._last_page = position, page
        return page

    def place(self, position: Position) -> tuple[int, int, int]:
        """Where in the arrays a message is booked."""
        return (
            position.layer,
            self.directions.index(position.direction),
            self.phases.index(position.phase),
        )

    def record(
        self,
        position: Position,
        message: Tensor,
        parts: Sequence[tuple[str, Tensor]],
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        ranks: np.ndarray | slice = EVERY_RANK,
        empty_rows: Sequence[int] | None = None,
        group: int = 0,
    ) -> None:
        """Count one message.

        message: uint8 [N, b], the very tensor that the collective is given
        parts: (kind, uint8 [*, b_kind]): what was packed into a row of it; the b_kind sum to b
        input_splits, output_splits: rows to and from each rank of the group
        ranks: the global ranks that these are
        empty_rows: how many of the rows to each rank hold nothing; their bytes are padding
        group: number of the group of ranks whose connections carry it
        """
        if not self.enabled:
            return
        row_bytes = message.shape[1] * message.element_size()
        kind_bytes = [0] * len(KINDS)
        for kind, part in parts:
            kind_bytes[KINDS.index(kind)] += part.shape[1] * part.element_size()
        assert sum(kind_bytes) == row_bytes, (
            f"{position}: the parts {dict(zip(KINDS, kind_bytes, strict=True))} do not sum to the"
            f" {row_bytes} B of a row"
        )
        assert sum(input_splits) == len(message), (
            f"{position}: splits {input_splits} against {len(message)} rows"
        )
        place, rows = self.place(position), np.array(input_splits)
        sent = np.multiply.outer(kind_bytes, rows)
        if empty_rows is not None:
            sent -= np.multiply.outer(kind_bytes, np.array(empty_rows))
            sent[KINDS.index("padding")] += np.array(empty_rows) * row_bytes
        self.sent[place][:, ranks] += sent
        carried = self.carried.setdefault(group, np.zeros((2, self.world_size), np.int64))
        carried[:, ranks] += np.stack([sent.sum(axis=0), np.ones_like(rows)])
        self.received[place][ranks] += np.array(output_splits) * row_bytes
        if parts[0][0] not in KINDS_WITHOUT_ROWS:
            self.rows[place][ranks] += rows
        self.collectives += 1

    def put(
        self,
        position: Position,
        parts: Sequence[tuple[str, Tensor | np.ndarray]],
        rows_to: Sequence[int] | np.ndarray,
        ranks: np.ndarray | slice = EVERY_RANK,
    ) -> None:
        """Count rows that this rank lays out in shared memory; each taker counts them by `taken`.

        parts: as for `record`; a row that several take, or one several times, is laid out once
        rows_to: rows for each rank of the group
        """
        if not self.enabled:
            return
        page, rows = self._page(position), np.asarray(rows_to)
        for kind, part in parts:
            _add(page[kind], ranks, part.shape[1] * part.itemsize * rows)
        if parts[0][0] not in KINDS_WITHOUT_ROWS:
            _add(page["rows"], ranks, rows)

    def taken(
        self,
        position: Position,
        row_bytes: int,
        rows_from: Sequence[int] | np.ndarray,
        ranks: np.ndarray | slice = EVERY_RANK,
    ) -> None:
        """Count rows that this rank takes out of shared memory, from each rank of the group."""
        if self.enabled:
            _add(self._page(position)["received"], ranks, row_bytes * np.asarray(rows_from))

    def phase_began(self, position: Position) -> None:
        """Tell whoever listens where this rank is, in the warm-up too."""
        if self.on_begin is not None:
            self.on_begin(position)

    def phase_ended(self, position: Position, seconds: float) -> None:
        """Book the time that a phase took on this rank, and tell whoever listens."""
        if not self.enabled:
            return
        self.seconds[self.place(position)] += seconds
        if self.on_phase is not None:
            self.on_phase(position, seconds)


def _add(cells: np.ndarray, ranks: np.ndarray | slice, numbers: np.ndarray) -> None:
    """cells[ranks] += numbers, at once where all are meant."""
    if ranks is EVERY_RANK:
        cells += numbers
    else:
        cells[ranks] += numbers
