"""vLLM's expert balancer: its load window and map, saved together in an .npz.

expert_load_window: [W, L, slots] of all ranks; physical_to_logical_map: [L, slots]. A rank has the
window of its own slots only, so those of all ranks must be put side by side before they are saved
([W, L, slots of a rank] of each, or all of them as [R, W, L, slots of a rank]).
"""

from __future__ import annotations

import numpy as np

from moe.traces.base import MOE_LAYERS, CountTrace, Expected, RouterTrace
from moe.traces.files import Opened
from moe.traces.finish import count_trace
from moe.traces.format import TraceFormat, has_keys
from moe.traces.rules import TraceError, logical_counts

WINDOW, MAP = "expert_load_window", "physical_to_logical_map"


def read(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    source = str(opened.path)
    if not has_keys(opened.content, WINDOW, MAP):
        raise TraceError(f"{source}: must hold {WINDOW} and {MAP}")
    window, table = opened.content[WINDOW], opened.content[MAP]
    if window.ndim == 4:  # [R, W, L, slots of a rank] -> [W, L, R x slots of a rank]
        window = np.concatenate(list(window), axis=2)
    if table.ndim != 2 or window.ndim != 3 or window.shape[1:] != table.shape:
        hint = "it must be [steps, layers, slots] with the map's layers and slots"
        if window.ndim == 3 and table.ndim == 2 and window.shape[2] < table.shape[1]:
            hint = (
                f"it holds {window.shape[2]} of {table.shape[1]} slots: put the windows of all"
                " ranks side by side"
            )
        raise TraceError(
            f"{source}: {WINDOW} has shape {list(window.shape)}, {MAP} {list(table.shape)}; {hint}"
        )
    return count_trace(
        source,
        logical_counts(source, window, table),
        range(len(table)),
        MOE_LAYERS,
        expected,
        logical=False,
        whole_tokens=False,
        notes=(f"physical slots mapped to experts by {MAP}",),
    )


FORMATS = (
    TraceFormat(
        name="vllm_eplb",
        kind="npz",
        describes="vLLM balancer state: expert_load_window and physical_to_logical_map in an .npz",
        matches=lambda content: has_keys(content, WINDOW, MAP),
        read=read,
    ),
)
