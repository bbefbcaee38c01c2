"""Megatron-Core: the lists of router replay, and the router trace of JSON lines.

Replay: torch.save of a list over MoE routers of integer tensors [tokens, K].
Trace: lines {step, layer, rank, num_tokens, topk, top_indices: [tokens][K]}, one file a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe.traces.base import MOE_LAYERS, CountTrace, Expected, RawRouting, RouterTrace
from moe.traces.files import Opened
from moe.traces.finish import router_trace
from moe.traces.format import TraceFormat, first, has_keys, integer
from moe.traces.rules import TraceError, as_ids


def read_replay(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """Files of a folder are joined along the tokens, in the order of their names."""
    source = str(opened.path)
    files = list(opened.content.values())
    if any(not _is_list(content) or len(content) != len(files[0]) for content in files):
        raise TraceError(f"{source}: its files must be lists of the same number of tensors")
    layers = [
        np.concatenate([as_ids(source, f"router {n}", content[n]) for content in files])
        if len(files) > 1
        else files[0][n]
        for n in range(len(files[0]))
    ]
    _check_top_k(source, layers, range(len(layers)))
    return router_trace(source, RawRouting(layers, range(len(layers)), MOE_LAYERS), expected)


def read_lines(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """Token rows, step after step and, inside a step, rank after rank."""
    source = str(opened.path)
    layers: dict[int, list[tuple[tuple[int, int], np.ndarray]]] = {}
    for name, rows in opened.content.items():
        for number, row in enumerate(rows, start=1):
            where = f"{name}: row {number}"
            order = integer(source, where, row, "step"), integer(source, where, row, "rank")
            ids = _ids(source, where, row)
            layers.setdefault(integer(source, where, row, "layer"), []).append((order, ids))
    if not layers:
        raise TraceError(f"{source}: has no line; record while the model trains")
    numbers = sorted(layers)
    orders = [[order for order, _ in sorted(layers[n], key=lambda e: e[0])] for n in numbers]
    if any(order != orders[0] for order in orders):
        raise TraceError(
            f"{source}: layers differ in the steps and ranks they have lines for; give complete"
            " files of all ranks"
        )
    rows_of = [
        np.concatenate([ids for _, ids in sorted(layers[n], key=lambda e: e[0])]) for n in numbers
    ]
    _check_top_k(source, rows_of, numbers)
    return router_trace(source, RawRouting(rows_of, numbers, MOE_LAYERS), expected)


def _check_top_k(source: str, layers: Sequence[Any], layer_numbers: Sequence[int]) -> None:
    """Refuse layers of different K: a narrow one would pass for one whose choices were lost."""
    widths = [np.shape(layer)[-1] if np.ndim(layer) else 0 for layer in layers]
    for number, width in zip(layer_numbers, widths, strict=True):
        if width != widths[0]:
            raise TraceError(
                f"{source}: layer {layer_numbers[0]} has K = {widths[0]} experts a token, layer"
                f" {number} K = {width}; all layers of a run share one K: record one model"
            )


def _ids(source: str, where: str, row: Mapping[str, Any]) -> np.ndarray:
    """[tokens, K] of one line, held against its own num_tokens and topk."""
    if "top_indices" not in row:
        raise TraceError(f"{source}: {where}: has no top_indices")
    ids = as_ids(source, where, row["top_indices"])
    for name, size in (("num_tokens", ids.shape[0]), ("topk", ids.shape[1])):
        if name in row and row[name] != size:
            raise TraceError(
                f"{source}: {where}: {name}={row[name]}, but top_indices has {list(ids.shape)}"
            )
    return ids


def _is_list(content: Any) -> bool:
    return isinstance(content, list | tuple) and len(content) > 0


def _is_replay(content: Any) -> bool:
    """Arrays of two axes; any other list is somebody else's."""
    return _is_list(content) and all(getattr(layer, "ndim", 0) == 2 for layer in content)


FORMATS = (
    TraceFormat(
        name="megatron_replay",
        kind="torch",
        describes="Megatron-Core router replay: list over MoE layers of tensors [tokens, K]",
        matches=lambda content: _is_replay(first(content)),
        read=read_replay,
    ),
    TraceFormat(
        name="megatron_jsonl",
        kind="jsonl",
        describes="Megatron-Core router trace: JSON lines with step, layer, rank, top_indices",
        matches=lambda content: any(
            has_keys(row, "layer", "top_indices") for row in (first(content) or [])[:1]
        ),
        read=read_lines,
    ),
)
