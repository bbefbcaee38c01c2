"""A finished result as an object: any sum of its counted bytes, its matrices, its verdicts.

    result.bytes(phase="dispatch", tier="network")    int
    result.matrix(kind="payload", layer=0)            int64 [R, R], row = sender
    result.verdicts["exact"].state                    "EXACT"

What is not named is summed over. A name that the run does not have is a ValueError, not a zero.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from comm.analytic.rows import PAYLOAD_KINDS
from comm.report.store import read_record
from comm.report.tally import NETWORK
from comm.topology import TIER_NAMES, Topology

Choice = str | int | Iterable[str] | Iterable[int] | None  # one name, several, or all
AXES = ("layers", "directions", "phases", "kinds")


@dataclass(frozen=True)
class VerdictRead:
    """One verdict of a result: EXACT, WITHIN, OUTSIDE or NOT_AVAILABLE, and why."""

    name: str
    state: str
    measured: float | None
    predicted: float | None
    bound: float | None
    reason: str


@dataclass(frozen=True)
class SavedTraffic:
    """What traffic.npz holds: comm.meter.Traffic as far as a file needs it.

    bytes: int64 [layer, direction, phase, kind, src, dst]; rows: the same without kind
    """

    bytes: np.ndarray
    rows: np.ndarray
    layers: tuple[int, ...]
    directions: tuple[str, ...]
    phases: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> SavedTraffic:
        """Raises ValueError where the folder has no traffic.npz."""
        file = folder / "traffic.npz"
        if not file.is_file():
            raise ValueError(f"result={folder}: has no traffic.npz; its run did not finish")
        try:
            with np.load(file) as saved:
                axes = {name: tuple(saved[name].tolist()) for name in AXES}
                return cls(saved["bytes"], saved["rows"], **axes)
        except (ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from error


class Result:
    """A finished run, read from its folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises ValueError for a folder without the run.json of a finished run."""
        self.folder = Path(folder)
        self._record = read_record(self.folder)

    def __repr__(self) -> str:
        about = self._record["manifest"]
        return (
            f"<result of {about['model']}, {about['dispatcher']}, {about['world_size']} ranks:"
            f" status {self.status}, in {self.folder}>"
        )

    @property
    def status(self) -> int:
        """The exit status: 0 when nothing lies outside a prediction."""
        return self._record["status"]

    @cached_property
    def verdicts(self) -> dict[str, VerdictRead]:
        """By name: exact, conserved, expected, correctness, kernel and what else was judged."""
        return {one["name"]: VerdictRead(**one) for one in self._record["verdicts"]}

    @property
    def headline(self) -> dict[str, Any]:
        """The popular formula, what was counted, their ratio, and the factors in between."""
        return copy.deepcopy(self._record["headline"])

    @property
    def full_scale(self) -> dict[str, Any] | None:
        """One token on the unscaled model; None for a run without tokens."""
        return copy.deepcopy(self._record["full_scale"])

    @property
    def manifest(self) -> dict[str, Any]:
        """What ran, where and when."""
        return copy.deepcopy(self._record["manifest"])

    def to_dict(self) -> dict[str, Any]:
        """All of run.json; a copy."""
        return copy.deepcopy(self._record)

    @cached_property
    def traffic(self) -> SavedTraffic:
        return SavedTraffic.read(self.folder)

    @cached_property
    def tiers(self) -> np.ndarray:
        """LinkTier of every pair: int8 [R, R]."""
        return Topology(tuple(self._record["manifest"]["node_of_rank"])).tiers()

    def matrix(
        self,
        *,
        phase: Choice = None,
        tier: Choice = None,
        kind: Choice = None,
        layer: Choice = None,
        direction: Choice = None,
        src: Choice = None,
        dst: Choice = None,
    ) -> np.ndarray:
        """Bytes from each rank (row) to each (column), summed over the measured steps.

        tier: self, scale_up, scale_out, or network for the last two; other pairs are zero
        kind: one of the record's, or payload (hidden and scales) or metadata (all others)
        returns: int64 [R, R]
        """
        kinds = self._kinds(kind)
        cells = self._chosen(self.traffic.bytes, layer, direction, phase)[:, :, :, kinds]
        return np.where(self._pairs(tier, src, dst), cells.sum(axis=(0, 1, 2, 3)), 0)

    def bytes(self, **choice: Choice) -> int:
        """The sum of `matrix` with the same choices."""
        return int(self.matrix(**choice).sum())

    def row_matrix(
        self,
        *,
        phase: Choice = None,
        tier: Choice = None,
        layer: Choice = None,
        direction: Choice = None,
        src: Choice = None,
        dst: Choice = None,
    ) -> np.ndarray:
        """Rows from each rank to each, as `matrix`: int64 [R, R]. Rows have no kind."""
        cells = self._chosen(self.traffic.rows, layer, direction, phase)
        return np.where(self._pairs(tier, src, dst), cells.sum(axis=(0, 1, 2)), 0)

    def rows(self, **choice: Choice) -> int:
        """The sum of `row_matrix` with the same choices."""
        return int(self.row_matrix(**choice).sum())

    def _chosen(
        self, cells: np.ndarray, layer: Choice, direction: Choice, phase: Choice
    ) -> np.ndarray:
        """`cells` with its first three axes cut down to what was chosen."""
        axes = self.traffic
        for axis, (name, choice, names) in enumerate(
            (
                ("layer", layer, axes.layers),
                ("direction", direction, axes.directions),
                ("phase", phase, axes.phases),
            )
        ):
            cells = np.take(cells, _places(name, choice, names), axis)
        return cells

    def _kinds(self, kind: Choice) -> list[int]:
        kinds = self.traffic.kinds
        groups = {
            "payload": [one for one in kinds if one in PAYLOAD_KINDS],
            "metadata": [one for one in kinds if one not in PAYLOAD_KINDS],
        }
        return _places("kind", kind, kinds, groups)

    def _pairs(self, tier: Choice, src: Choice, dst: Choice) -> np.ndarray:
        """Which pairs were chosen: bool [R, R]."""
        network = {"network": [TIER_NAMES[one] for one in NETWORK]}
        chosen = np.isin(self.tiers, _places("tier", tier, TIER_NAMES, network))
        for name, choice, axis in (("src", src, 0), ("dst", dst, 1)):
            ranks = range(len(self.tiers))
            here = np.isin(np.arange(len(ranks)), _places(name, choice, ranks))
            chosen &= here[:, None] if axis == 0 else here[None, :]
        return chosen


def _places(
    name: str,
    choice: Choice,
    names: Sequence[Any],
    groups: Mapping[str, Sequence[Any]] | None = None,
) -> list[int]:
    """Where the chosen names stand on their axis, each once; all for None.

    Raises ValueError for a name that is neither there nor one of `groups`.
    """
    if choice is None:
        return list(range(len(names)))
    wanted = [choice] if isinstance(choice, str | int | np.integer) else list(choice)
    groups, places = groups or {}, {}
    for one in wanted:
        for member in groups.get(one, [one]):
            if member not in names:
                has = ", ".join(map(str, [*names, *groups]))
                raise ValueError(f"{name}={one}: this result has {has}")
            places[list(names).index(member)] = None
    return list(places)
