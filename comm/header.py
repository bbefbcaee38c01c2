"""What a counts message says of itself: four words that both sides must mean alike.

word    low 32 bits                 high 32 bits
0       layer                       MAGIC
1       phase, direction << 16      counts that follow
2       row bytes
3       wire format
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from comm.meter import ALL_PHASES, DIRECTIONS, Position

HEADER_WORDS = 4
MAGIC = 0x57455031  # "WEP1": another version of the protocol, or memory that nobody wrote
FIELDS = ("protocol", "layer", "direction", "phase", "counts", "row bytes", "wire format")
_LOW = 0xFFFFFFFF


class SplitMismatch(RuntimeError):
    """Two ranks do not mean the same message."""


def header(position: Position, row_bytes: int, wire_code: int, num_counts: int = 0) -> np.ndarray:
    """int64 [4]"""
    phase = ALL_PHASES.index(position.phase) | DIRECTIONS.index(position.direction) << 16
    return np.array(
        [MAGIC << 32 | position.layer, num_counts << 32 | phase, row_bytes, wire_code], np.int64
    )


def counting(num_counts: np.ndarray) -> np.ndarray:
    """What to add to a header that says 0 counts: num_counts int64 [n] -> int64 [n, 4]."""
    words = np.zeros((len(num_counts), HEADER_WORDS), np.int64)
    words[:, 1] = num_counts << 32
    return words


def check_headers(
    position: Position, sources: Sequence[int], rank: int, theirs: np.ndarray, mine: np.ndarray
) -> None:
    """Raise SplitMismatch where a rank means another message than this one.

    sources: global ranks of the headers; theirs: int64 [R, 4]; mine: int64 [4]
    """
    if theirs.tobytes() == mine.tobytes() * len(sources):
        return
    said, meant = _fields(theirs), _fields(mine[None])[0]
    source, field = np.argwhere(said != meant)[0].tolist()
    raise SplitMismatch(
        f"{position}: rank {sources[source]} announces {FIELDS[field]}"
        f" {_named(field, said[source, field])}, rank {rank} expects {_named(field, meant[field])}"
    )


def _fields(words: np.ndarray) -> np.ndarray:
    """int64 [R, 4] -> int64 [R, 7], FIELDS"""
    low, high = words & _LOW, words >> 32 & _LOW
    phase, direction = low[:, 1] & 0xFFFF, low[:, 1] >> 16
    columns = (high[:, 0], low[:, 0], direction, phase, high[:, 1], words[:, 2], words[:, 3])
    return np.stack(columns, axis=1)


def _named(field: int, value: int) -> str:
    """'640', 'combine'; a number that names no phase stays a number."""
    names = {"phase": ALL_PHASES, "direction": DIRECTIONS}.get(FIELDS[field], ())
    return names[value] if 0 <= value < len(names) else str(value)
