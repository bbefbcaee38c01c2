"""Traffic matrices for alltoallv_perf of nccl-tests: counted routing replayed by the vendor's tool.

Its matrix file has a line for each sender and nothing but numbers: cell [i][j] is what rank i sends
to rank j, in bytes, rounded down there to a multiple of 16. -b and -e must be equal, and at least
what the busiest rank sends or receives (nccl-tests, src/alltoallv.cu, matrix file mode).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comm.analytic.rows import PAYLOAD_KINDS
from comm.report.reading import Result
from comm.report.store import write_whole

ALIGNMENT = 16  # bytes
VARIABLE = "ALLTOALLV_PERF names the program"
HEAD = f"""#!/bin/sh
# Replays counted traffic by alltoallv_perf of nccl-tests, built with MPI=1: {VARIABLE}.
# The options are those of Open MPI; one rank for each GPU, ranks in the order of the run.
cd "$(dirname "$0")" || exit
"""


@dataclass(frozen=True)
class Selection:
    """Which exchanges: None takes all of an axis; kind None adds all kinds up.

    width: "run", bytes as counted; "full", the rows of the run at the unscaled model's width,
        forward and without counts messages
    """

    layer: int | None = None
    phase: str | None = None
    direction: str | None = None
    kind: str | None = None
    width: str = "run"


@dataclass(frozen=True)
class Matrix:
    """One exchange: its place in the run, and bytes int64 [R, R], row = sender."""

    layer: int
    direction: str
    phase: str
    bytes: np.ndarray

    @property
    def name(self) -> str:
        return f"layer{self.layer}.{self.direction}.{self.phase}.txt"

    @property
    def replayed(self) -> np.ndarray:
        """What alltoallv_perf makes of it: int64 [R, R]."""
        return self.bytes // ALIGNMENT * ALIGNMENT

    @property
    def buffer_bytes(self) -> int:
        """The least -b and -e: the most that one rank sends or receives."""
        return max(ALIGNMENT, *self.replayed.sum(axis=1), *self.replayed.sum(axis=0))


def matrices(result: Result, selection: Selection) -> Iterator[Matrix]:
    """Those chosen, in the order of the axes; exchanges without a byte are left out.

    Raises ValueError for a name that the result does not have, or where nothing is left.
    """
    axes, found = result.traffic, False
    for layer in _chosen("layer", selection.layer, axes.layers):
        for direction in _chosen("direction", selection.direction, axes.directions):
            for phase in _chosen("phase", selection.phase, axes.phases):
                place = {"layer": layer, "direction": direction, "phase": phase}
                cells = _cells(result, place, selection)
                if cells.any():
                    found = True
                    yield Matrix(**place, bytes=cells)
    if not found:
        raise ValueError(f"result={result.folder}: nothing was sent that was asked for")


def _cells(result: Result, place: Mapping[str, Any], selection: Selection) -> np.ndarray:
    """int64 [R, R]"""
    if selection.width == "run":
        return result.matrix(**place, kind=selection.kind)
    rows, full = result.row_matrix(**place), result.full_scale
    if full is None or place["direction"] != "forward" or place["phase"] not in full["phases"]:
        return np.zeros_like(rows)
    sizes = full["phases"][place["phase"]]["row_bytes"]
    kinds = _full_kinds(selection.kind, sizes)
    return rows * sum(sizes[kind] for kind in kinds)


def _full_kinds(chosen: str | None, sizes: Mapping[str, int]) -> list[str]:
    """The parts of a row that were asked for; none where this phase's rows have no such part."""
    if chosen in ("payload", "metadata"):
        return [kind for kind in sizes if (kind in PAYLOAD_KINDS) == (chosen == "payload")]
    return [kind for kind in sizes if chosen in (None, kind)]


def _chosen(name: str, chosen: Any, names: tuple[Any, ...]) -> tuple[Any, ...]:
    if chosen is None:
        return names
    if chosen not in names:
        raise ValueError(f"export.{name}={chosen}: this result has {', '.join(map(str, names))}")
    return (chosen,)


def write_replay(folder: Path, chosen: Sequence[Matrix]) -> None:
    """A file for each matrix, and replay.sh with the command that replays each."""
    folder.mkdir(parents=True, exist_ok=True)
    for matrix in chosen:
        write_matrix(folder / matrix.name, matrix.bytes)
    script = HEAD + "".join(f"{replay_command(matrix)}\n" for matrix in chosen)
    write_whole(folder / "replay.sh", lambda file: file.write(script.encode()))


def write_matrix(path: Path, matrix: np.ndarray) -> None:
    """int64 [R, R] as alltoallv_perf reads it."""
    text = "".join(" ".join(map(str, row)) + "\n" for row in matrix.tolist())
    write_whole(path, lambda file: file.write(text.encode()))


def read_matrix(path: Path) -> np.ndarray:
    """int64 [R, R] of such a file."""
    rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    return np.array([[int(value) for value in row] for row in rows], dtype=np.int64)


def replay_command(matrix: Matrix) -> str:
    """One GPU a rank; -a 3 reports the slowest rank's time, for ragged loads."""
    size = matrix.buffer_bytes
    return (
        f'mpirun -np {len(matrix.bytes)} -x NCCL_TESTS_ALLTOALLV_MATRIX_FILE="$PWD/{matrix.name}"'
        f' "${{ALLTOALLV_PERF:-alltoallv_perf}}" -b {size} -e {size} -a 3'
    )
