"""Writes traces in forms that other tools and `read_trace` take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe.traces.base import CountTrace, RouterTrace
from moe.traces.rules import TraceError


def write_routing_npz(path: str | Path, trace: RouterTrace, model: str = "") -> None:
    """Our routing.npz without what belongs to a placement: replayed by router=replay.

    Ids are int32, the steps of the trace are kept. The file's own layer numbers go into the header.
    """
    header = {
        "model": model,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "source": trace.source,
        "layer_numbers": list(trace.layer_numbers),
    }
    arrays: dict[str, Any] = {"topk_ids": _by_step(trace, trace.topk_ids.astype(np.int32))}
    if trace.topk_weights is not None:
        arrays["topk_weights"] = _by_step(trace, trace.topk_weights)
    _fresh(path)
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **arrays, header=np.asarray(json.dumps(header)))


def write_logical_count(path: str | Path, trace: CountTrace) -> None:
    """JSON {"logical_count": [L][E]}, which SGLang's --init-expert-location takes, too."""
    _fresh(path)
    Path(path).write_text(json.dumps({"logical_count": trace.counts.tolist()}), encoding="utf-8")


def write_routed_experts(path: str | Path, trace: RouterTrace) -> None:
    """vLLM's array [tokens, layers, K] as .npy, int32. A row without experts becomes zeros.

    Raises TraceError where only some of a row's experts are missing: the array cannot say so.
    """
    absent = trace.topk_ids < 0
    if (absent.any(axis=2) & ~absent.all(axis=2)).any():
        raise TraceError(f"{path}: rows with fewer than K experts have no place in this format")
    _fresh(path)
    ids = np.where(absent, 0, trace.topk_ids).astype(np.int32)
    with Path(path).open("wb") as file:
        np.save(file, np.ascontiguousarray(ids.swapaxes(0, 1)))


def _by_step(trace: RouterTrace, array: np.ndarray) -> np.ndarray:
    """[L, steps x tokens, K] -> [steps, L, tokens, K]"""
    layers, _, top_k = array.shape
    return array.reshape(layers, trace.num_steps, -1, top_k).swapaxes(0, 1)


def _fresh(path: str | Path) -> None:
    if Path(path).exists():
        raise TraceError(f"{path}: exists already; choose another name")
