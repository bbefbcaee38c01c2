"""TensorRT-LLM's expert statistics: a folder with meta_info.json and rank<r>.safetensors.

Keys are "<iteration>_<layer>". rank<r>.safetensors holds counts [E], rank<r>_raw.safetensors (where
there is one) ids [tokens, K]. A rank counts its own tokens; ranks are added up, or joined.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe.traces.base import ALL_LAYERS, CountTrace, Expected, RawRouting, RouterTrace
from moe.traces.files import Opened, load_json, load_safetensors
from moe.traces.finish import count_trace, router_trace
from moe.traces.format import TraceFormat, ordered
from moe.traces.rules import TraceError, as_counts, as_ids

COUNTS = re.compile(r"rank\d+\.safetensors")
RAW = re.compile(r"rank\d+_raw\.safetensors")


def read_counts(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    source, meta = str(opened.path), _meta(opened.path)
    iterations, layers, ranks = _load(opened.path, COUNTS)
    counts = np.zeros((len(iterations), len(layers), meta["num_experts"]), dtype=np.int64)
    for arrays in ranks:
        for (iteration, layer), array in arrays.items():
            if np.shape(array) != counts.shape[2:]:
                raise TraceError(
                    f"{source}: {iteration}_{layer} has shape {list(np.shape(array))}, meta_info"
                    f" says num_experts={meta['num_experts']}"
                )
            cell = iterations.index(iteration), layers.index(layer)
            counts[cell] += as_counts(source, array[None])[0, 0]
    return count_trace(
        source,
        counts,
        layers,
        ALL_LAYERS,
        expected,
        top_k=meta["num_experts_per_token"],
        notes=(f"{len(ranks)} rank files added up",),
    )


def read_raw(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """Token rows, iteration after iteration and, inside one, rank after rank."""
    source, meta = str(opened.path), _meta(opened.path)
    iterations, layers, ranks = _load(opened.path, RAW)
    wanted = [(rank, iteration) for iteration in iterations for rank in range(len(ranks))]
    rows = []
    for layer in layers:
        parts = [
            as_ids(source, f"{i}_{layer}", ranks[rank][i, layer])
            for rank, i in wanted
            if (i, layer) in ranks[rank]
        ]
        if len({part.shape[1] for part in parts}) > 1:
            raise TraceError(f"{source}: ids of layer {layer} differ in their number of columns")
        rows.append(np.concatenate(parts))
    trace = router_trace(
        source,
        RawRouting(
            layers=rows,
            layer_numbers=layers,
            layer_axis=ALL_LAYERS,
            num_experts=meta["num_experts"],
            notes=(f"{len(ranks)} rank files joined",),
        ),
        expected,
    )
    if trace.top_k != meta["num_experts_per_token"]:
        raise TraceError(
            f"{source}: ids have {trace.top_k} columns, meta_info says num_experts_per_token="
            f"{meta['num_experts_per_token']}"
        )
    return trace


def _meta(folder: Path) -> dict[str, int]:
    meta = load_json(folder / "meta_info.json")
    for name in ("num_experts", "num_experts_per_token"):
        value = meta.get(name) if isinstance(meta, dict) else None
        if not isinstance(value, int) or value < 1:
            raise TraceError(f"{folder}/meta_info.json: {name}={value!r} must be at least 1")
    return dict(meta)


def _load(
    folder: Path, pattern: re.Pattern[str]
) -> tuple[list[int], list[int], Sequence[Mapping[tuple[int, int], Any]]]:
    """Iterations, layers (both ascending) and each rank's arrays by (iteration, layer)."""
    names = ordered(f.name for f in folder.iterdir() if pattern.fullmatch(f.name))
    if not names:
        raise TraceError(f"{folder}: has meta_info.json but no {pattern.pattern}")
    ranks = []
    for name in names:
        arrays = {}
        for key, array in load_safetensors(folder / name).items():
            if not re.fullmatch(r"\d+_\d+", key):
                raise TraceError(f"{folder}/{name}: key {key!r} must be <iteration>_<layer>")
            iteration, layer = map(int, key.split("_"))
            arrays[iteration, layer] = array
        ranks.append(arrays)
    keys = {key for arrays in ranks for key in arrays}
    if not keys:
        raise TraceError(f"{folder}: its files hold no iteration; widen the range recorded")
    return sorted({i for i, _ in keys}), sorted({layer for _, layer in keys}), ranks


def has_raw(folder: Path) -> bool:
    return any(RAW.fullmatch(f.name) for f in folder.iterdir())


FORMATS = (
    TraceFormat(
        name="tensorrt_llm_raw",
        kind="trtllm",
        describes="TensorRT-LLM folder with rank<r>_raw.safetensors: ids [tokens, K]",
        matches=has_raw,
        read=read_raw,
    ),
    TraceFormat(
        name="tensorrt_llm",
        kind="trtllm",
        describes="TensorRT-LLM folder: meta_info.json and rank<r>.safetensors, counts [experts]",
        matches=lambda folder: True,
        read=read_counts,
    ),
)
