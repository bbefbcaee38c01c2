"""SGLang's older counts: CSV with the header layer_id,expert_id,count, one file a rank.

Rows of zeros are left out, so the number of experts is the model's, or the largest id + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe.traces.base import ALL_LAYERS, CountTrace, Expected, RouterTrace
from moe.traces.files import Opened
from moe.traces.finish import count_trace
from moe.traces.format import TraceFormat, first
from moe.traces.rules import TraceError

HEADER = ["layer_id", "expert_id", "count"]


def read(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """Counts of all files added up, in one step."""
    source = str(opened.path)
    cells = np.array(_cells(source, opened.content), dtype=np.int64)
    if not len(cells):
        raise TraceError(f"{source}: has no row under its header; record while requests are served")
    low = cells.min(axis=0)
    if low.min() < 0:
        name = HEADER[int(low.argmin())]
        raise TraceError(f"{source}: {name}={low.min()} must be at least 0")
    num_experts = expected.num_experts or int(cells[:, 1].max()) + 1
    if cells[:, 1].max() >= num_experts:
        raise TraceError(
            f"{source}: expert_id={cells[:, 1].max()} must lie in 0 .. {num_experts - 1}"
            f" ({num_experts} experts); take a trace of this model"
        )
    layers = np.unique(cells[:, 0])
    counts = np.zeros((1, len(layers), num_experts), dtype=np.int64)
    np.add.at(counts[0], (np.searchsorted(layers, cells[:, 0]), cells[:, 1]), cells[:, 2])
    notes = [f"{len(opened.content)} rank files added up; ids taken as logical"]
    if expected.num_experts is None:
        notes.append(f"num_experts taken as the largest expert_id + 1 = {num_experts}")
    return count_trace(
        source, counts, layers.tolist(), ALL_LAYERS, expected, whole_tokens=False, notes=notes
    )


def _cells(source: str, files: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """(layer, expert, count) of every row of every file."""
    cells = []
    for name, rows in files.items():
        if not rows or [field.strip() for field in rows[0]] != HEADER:
            raise TraceError(f"{source}: {name} must begin with {','.join(HEADER)}")
        for number, row in enumerate(rows[1:], start=2):
            if not row:
                continue
            try:
                layer, expert, count = map(int, row)
            except ValueError:
                raise TraceError(
                    f"{source}: {name}: line {number} is {','.join(row)!r}, it must be three whole"
                    " numbers"
                ) from None
            cells.append((layer, expert, count))
    return cells


def _is_counts(content: Any) -> bool:
    rows = first(content)
    return bool(rows) and [field.strip() for field in rows[0]] == HEADER


FORMATS = (
    TraceFormat(
        name="sglang_csv",
        kind="csv",
        describes="SGLang's older CSV layer_id,expert_id,count, one file a rank",
        matches=_is_counts,
        read=read,
    ),
)
