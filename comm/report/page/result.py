"""A finished result as the page needs it: the record, and the arrays beside it.

Axes: [L] layers, [D] directions, [P] phases, [K] kinds, [R] ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from comm.report.store import read_record
from comm.report.table_rows import phase_label
from comm.report.tally import phases_in_order


@dataclass(frozen=True)
class Phase:
    """One phase of one direction. place: its indices on the axes D and P"""

    direction: str
    name: str
    place: tuple[int, int]

    @property
    def label(self) -> str:
        return phase_label(self.direction, self.name)


@dataclass(frozen=True)
class Result:
    """record: run.json; arrays: traffic.npz, or of an older version only some of its names"""

    record: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(repr=False)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Result:
        """Raises ValueError for what is no result of this version."""
        folder = Path(folder)
        record = read_record(folder)
        file = (folder if folder.is_dir() else folder.parent) / "traffic.npz"
        try:
            with np.load(file) as saved:
                arrays = {name: saved[name] for name in saved.files}
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror or error}") from error
        return cls(record, arrays)

    @property
    def bytes(self) -> np.ndarray:
        """Counted: int64 [L, D, P, K, R, R]."""
        return self.arrays["bytes"]

    @cached_property
    def counted(self) -> np.ndarray:
        """All kinds together: int64 [L, D, P, R, R]."""
        return self.bytes.sum(axis=3)

    @cached_property
    def difference(self) -> np.ndarray | None:
        """Counted less predicted, of the shape of `counted`; None where it was not kept."""
        differing = self.arrays.get("differing")
        if differing is None:
            return None
        difference = np.zeros_like(self.counted)
        for *place, exact in differing.tolist():
            layer, direction, phase, _, src, dst = place
            difference[layer, direction, phase, src, dst] += self.bytes[tuple(place)] - exact
        return difference

    @cached_property
    def layers(self) -> list[int]:
        return self.arrays["layers"].tolist()

    @cached_property
    def phases(self) -> list[Phase]:
        """In the order in which they happen, forward first."""
        directions, names = (self.arrays[axis].tolist() for axis in ("directions", "phases"))
        return [
            Phase(direction, names[p], (d, p))
            for d, direction in enumerate(directions)
            for p in phases_in_order(direction, names)
        ]

    @cached_property
    def node_of_rank(self) -> np.ndarray:
        """int [R] numbered 0 ... N - 1 in the order of their first ranks."""
        nodes = self.record["manifest"]["node_of_rank"]
        order = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
        return np.array([order[node] for node in nodes])
