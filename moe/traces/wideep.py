"""Our own routing.npz, as a run with record_routing=true writes it (docs/run_record.md)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from moe.traces.base import MOE_LAYERS, CountTrace, Expected, RawRouting, RouterTrace
from moe.traces.files import Opened, one_line_errors
from moe.traces.finish import router_trace
from moe.traces.format import TraceFormat, has_keys
from moe.traces.rules import TraceError


def read(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """topk_ids [steps, L, tokens, K] become [L, steps x tokens, K], one step after the other."""
    source, arrays = str(opened.path), opened.content
    ids = arrays["topk_ids"]
    if ids.ndim != 4:
        raise TraceError(
            f"{source}: topk_ids have shape {list(ids.shape)}, they must be"
            " [steps, layers, tokens, K]"
        )
    header = _header(source, arrays)
    weights = arrays.get("topk_weights")
    if weights is not None and weights.shape != ids.shape:
        raise TraceError(
            f"{source}: topk_weights have shape {list(weights.shape)}, topk_ids"
            f" {list(ids.shape)}; they must be equal"
        )
    steps, num_layers = ids.shape[:2]
    if 0 in ids.shape:
        raise TraceError(f"{source}: topk_ids {list(ids.shape)} hold no choice")
    origin = header.get("source") or header.get("model")
    return router_trace(
        source,
        RawRouting(
            layers=_by_layer(ids),
            weights=None if weights is None else _by_layer(weights),
            layer_numbers=header.get("layer_numbers", range(num_layers)),
            layer_axis=MOE_LAYERS,
            num_experts=header.get("num_experts"),
            num_steps=steps,
            notes=(f"recorded from {origin}",) if origin else (),
        ),
        expected,
    )


def _by_layer(array: np.ndarray) -> list[np.ndarray]:
    return [np.concatenate(list(array[:, layer])) for layer in range(array.shape[1])]


def _header(source: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if "header" not in arrays:
        return {}
    with one_line_errors(source, "a header of JSON text"):
        header = json.loads(str(arrays["header"]))
    if not isinstance(header, dict):
        raise TraceError(f"{source}: header must be a JSON object")
    experts = header.get("num_experts")
    if experts is not None and (not isinstance(experts, int) or experts < 1):
        raise TraceError(f"{source}: num_experts={experts!r} of the header must be at least 1")
    return header


FORMATS = (
    TraceFormat(
        name="wideep",
        kind="npz",
        describes="routing.npz of a run with record_routing=true (topk_ids, topk_weights)",
        matches=lambda content: has_keys(content, "topk_ids"),
        read=read,
    ),
)
