"""vLLM's --enable-return-routed-experts: an array [tokens - 1, layers, K] of logical ids.

Saved as .npy, or in an .npz under routed_experts (or as its only array). The last token of a
request is not in it. Its buffer starts at 0, so a row of K zeros is data that was never written;
layers without experts stay so throughout and are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe.traces.base import ALL_LAYERS, CountTrace, Expected, RawRouting, RouterTrace
from moe.traces.files import Opened
from moe.traces.finish import router_trace
from moe.traces.format import TraceFormat
from moe.traces.rules import TraceError

KEY = "routed_experts"


def read(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    source = str(opened.path)
    ids = opened.content if opened.kind == "npy" else _array(source, opened.content)
    if ids.ndim != 3 or 0 in ids.shape:
        raise TraceError(
            f"{source}: {KEY} has shape {list(ids.shape)}, it must be [tokens, layers, K]"
        )
    if ids.shape[2] > 2 and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() <= 1:
        raise TraceError(
            f"{source}: an array {list(ids.shape)} of zeros and ones is no trace; where it is a"
            " placement [ranks, layers, experts], give it as placement.path"
        )
    return router_trace(
        source,
        RawRouting(
            layers=[ids[:, layer] for layer in range(ids.shape[1])],
            layer_numbers=range(ids.shape[1]),
            layer_axis=ALL_LAYERS,
            zeros_missing=True,
        ),
        expected,
    )


def _array(source: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    if KEY in arrays:
        return arrays[KEY]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise TraceError(f"{source}: holds {', '.join(arrays)} and no {KEY}; name the array so")


def _is_ids(array: Any) -> bool:
    return bool(array.ndim == 3)


FORMATS = (
    TraceFormat(
        name="vllm_routed_experts",
        kind="npy",
        describes="vLLM --enable-return-routed-experts: array [tokens, layers, K] in a .npy",
        matches=_is_ids,
        read=read,
    ),
    TraceFormat(
        name="vllm_routed_experts_npz",
        kind="npz",
        describes="the same in an .npz, named routed_experts or alone in it",
        matches=lambda content: (
            KEY in content or (len(content) == 1 and _is_ids(next(iter(content.values()))))
        ),
        read=read,
    ),
)
