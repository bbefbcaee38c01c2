"""events.rank<r>.jsonl: what a rank sent, a line for each phase as it ends.

Every line is handed to the system at once, so that a killed run keeps what it had; a line that does
not fit on the disk is taken back.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from comm.report.store import CannotWrite
from comm.report.tally import by_tier
from comm.topology import TIER_NAMES


class EventLog:
    """The event log of one rank, open for the length of the run."""

    def __init__(
        self, folder: Path, rank: int, tiers: Sequence[int] | np.ndarray, kinds: Sequence[str]
    ) -> None:
        """tiers: [R] LinkTier from this rank to each destination."""
        self._tiers = np.asarray(tiers)
        self._kinds = tuple(kinds)
        path = folder / f"events.rank{rank}.jsonl"
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise CannotWrite(path, error) from error

    def append(
        self,
        *,
        step: int,
        layer: int,
        phase: str,
        rows: np.ndarray,
        sent: np.ndarray,
        seconds: float,
        direction: str = "forward",
    ) -> None:
        """rows: [dst] rows sent; sent: [kind, dst] bytes sent; kinds with none are left out."""
        kinds = {
            kind: dict(zip(TIER_NAMES, tiers, strict=True))
            for kind, tiers in zip(self._kinds, by_tier(sent, self._tiers).tolist(), strict=True)
            if any(tiers)
        }
        event = {
            "step": step,
            "layer": layer,
            "direction": direction,
            "phase": phase,
            "rows": dict(zip(TIER_NAMES, by_tier(rows, self._tiers).tolist(), strict=True)),
            "bytes": kinds,
            "seconds": float(seconds),
            "ended_seconds": time.time(),
        }
        self._write(json.dumps(event).encode() + b"\n")

    def fileno(self) -> int:
        return self._file.fileno()

    def _write(self, line: bytes) -> None:
        """All of it or nothing."""
        start, left = self._file.tell(), line
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            if len(left) < len(line):
                os.truncate(self._file.fileno(), start)
            raise CannotWrite(self._file.name, error) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
