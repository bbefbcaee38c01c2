"""Loggers patched into vLLM: JSON lines, a header of type meta, then one of type route a choice.

{"type": "route", "req_id": .., "token_idx": .., "layer": .., "topk_ids": [K], "topk_weights": [K]}

A token is named by req_id and token_idx; names come back (profiling, decoding), so the n-th line of
a name in one layer belongs to its n-th line in another. Only tokens that every layer has are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from moe.traces.base import UNKNOWN_LAYERS, CountTrace, Expected, RawRouting, RouterTrace
from moe.traces.files import Opened
from moe.traces.finish import router_trace
from moe.traces.format import TraceFormat, first, integer
from moe.traces.rules import TraceError

Choice = tuple[list[int], list[float] | None]


def read(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    source = str(opened.path)
    layers: dict[int, dict[Any, Choice]] = {}
    meta: Mapping[str, Any] = {}
    seen: Counter[Any] = Counter()
    for name, rows in opened.content.items():
        for number, row in enumerate(rows, start=1):
            if row.get("type") == "meta":
                meta = row
            elif row.get("type") == "route":
                layer, choice = _choice(source, f"{name}: row {number}", row)
                token = (name, str(row.get("req_id")), row.get("token_idx"))
                occurrence = seen[layer, token]
                seen[layer, token] += 1
                layers.setdefault(layer, {})[*token, occurrence] = choice
    if not layers:
        raise TraceError(f"{source}: has no line of type route; record while requests are served")
    numbers = sorted(layers)
    tokens = [t for t in layers[numbers[0]] if all(t in layers[n] for n in numbers)]
    if not tokens:
        raise TraceError(f"{source}: no token has a line in every layer; log all layers of a token")
    most = max(map(len, layers.values()))
    notes = [f"{most - len(tokens)} of {most} tokens lack a layer and are left out"]
    weighted = all(layers[n][t][1] is not None for n in numbers for t in tokens)
    _check_meta(source, meta, layers)
    return router_trace(
        source,
        RawRouting(
            layers=[[layers[n][t][0] for t in tokens] for n in numbers],
            weights=[[layers[n][t][1] for t in tokens] for n in numbers] if weighted else None,
            layer_numbers=numbers,
            layer_axis=UNKNOWN_LAYERS,
            notes=tuple(notes if most > len(tokens) else ()),
        ),
        expected,
    )


def _choice(source: str, where: str, row: Mapping[str, Any]) -> tuple[int, Choice]:
    ids, weights = row.get("topk_ids"), row.get("topk_weights")
    if not isinstance(ids, list) or not ids:
        raise TraceError(f"{source}: {where}: topk_ids={ids!r} must be a list of ids")
    if weights is not None and (not isinstance(weights, list) or len(weights) != len(ids)):
        raise TraceError(
            f"{source}: {where}: topk_weights={weights!r} must be a list as long as topk_ids"
        )
    return integer(source, where, row, "layer"), (ids, weights)


def _check_meta(
    source: str, meta: Mapping[str, Any], layers: Mapping[int, Mapping[Any, Choice]]
) -> None:
    """The header's K must be that of the lines."""
    widths = {len(ids) for layer in layers.values() for ids, _ in layer.values()}
    if len(widths) > 1:
        raise TraceError(f"{source}: lines have {sorted(widths)} ids; they must have K each")
    top_k = meta.get("top_k")
    if top_k is not None and widths != {top_k}:
        raise TraceError(f"{source}: its header says top_k={top_k}, its lines have {widths.pop()}")


FORMATS = (
    TraceFormat(
        name="vllm_jsonl",
        kind="jsonl",
        describes="JSON lines of type route with layer, topk_ids, topk_weights, from vLLM loggers",
        matches=lambda content: any(
            row.get("type") in ("meta", "route") for row in (first(content) or [])[:2]
        ),
        read=read,
    ),
)
