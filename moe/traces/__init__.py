"""Recorded routing and load of other stacks and of our own: one file a format, one registry.

read_trace("routing.npz") -> RouterTrace (who chose what) or CountTrace (how often)
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe.traces import (
    esft,
    megatron,
    sglang_csv,
    sglang_records,
    sglang_stat,
    tensorrt_llm,
    vllm_eplb,
    vllm_jsonl,
    vllm_routed_experts,
    wideep,
)
from moe.traces.base import CountTrace, Expected, RouterTrace
from moe.traces.files import Opened, one_line_errors, open_any
from moe.traces.format import TraceFormat
from moe.traces.rules import TraceError

__all__ = ["FORMATS", "CountTrace", "RouterTrace", "TraceError", "read_trace"]

# Order decides where several match: the more particular one first.
FORMATS: dict[str, TraceFormat] = {
    one.name: one
    for module in (
        wideep,
        sglang_stat,
        sglang_records,
        sglang_csv,
        vllm_eplb,
        vllm_routed_experts,
        vllm_jsonl,
        tensorrt_llm,
        megatron,
        esft,
    )
    for one in module.FORMATS
}


def read_trace(
    path: str | Path,
    format: str = "auto",
    *,
    num_experts: int | None = None,
    top_k: int | None = None,
    num_layers: int | None = None,
    skip_rows: int = 0,
) -> RouterTrace | CountTrace:
    """Read a trace.

    format: a name of FORMATS, or "auto": chosen by what the file holds
    num_experts, top_k, num_layers: the model's; a file that disagrees is refused
    skip_rows: token rows of each layer (steps, for counts) to leave out at the start, e.g. warm-up
    raises: TraceError (a ValueError), one line
    """
    if format != "auto" and format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TraceError(f"format={format!r} is not one of auto, {', '.join(FORMATS)}{hint}")
    if isinstance(skip_rows, bool) or not isinstance(skip_rows, int) or skip_rows < 0:
        raise TraceError(f"skip_rows={skip_rows!r} must be a whole number of at least 0")
    opened = open_any(path)
    chosen = _detected(opened) if format == "auto" else FORMATS[format]
    if chosen.kind != opened.kind:
        raise TraceError(
            f"{path}: is of kind {opened.kind}, format={format} reads {chosen.kind};"
            f" nearest: {_nearest(opened)}"
        )
    with one_line_errors(path, chosen.name):
        trace = chosen.read(opened, Expected(num_experts, top_k, num_layers, skip_rows))
    how = "format found by content" if format == "auto" else "format as asked"
    return replace(trace, notes=(f"{how}: {chosen.name}", *trace.notes))


def _detected(opened: Opened) -> TraceFormat:
    for one in FORMATS.values():
        if one.kind == opened.kind and one.matches(opened.content):
            return one
    # Those of the same kind of file come first: one of them was probably meant.
    ordered = sorted(FORMATS.values(), key=lambda one: one.kind != opened.kind)
    known = "; ".join(f"{one.name}: {one.describes}" for one in ordered)
    raise TraceError(
        f"{opened.path}: is of kind {opened.kind}, but holds no known trace"
        f" ({_contents(opened.content)}). Formats, those of its kind first: {known}"
    )


def _contents(content: Any) -> str:
    """What there is instead, briefly."""
    while isinstance(content, list | tuple | Mapping) and len(content) == 1:
        inner = next(iter(content.values() if isinstance(content, Mapping) else content))
        if not isinstance(inner, list | tuple | Mapping):
            break
        content = inner
    if isinstance(content, Mapping):
        names = [str(name) for name in content]
        more = ", ..." if len(names) > 6 else ""
        return f"it holds {', '.join(name[:40] for name in names[:6])}{more}"[:300]
    if isinstance(content, np.ndarray):
        return f"it holds an array of {content.dtype}, {list(content.shape)}"
    size = f" of {len(content)}" if hasattr(content, "__len__") else ""
    return f"it holds a {type(content).__name__}{size}"


def _nearest(opened: Opened) -> str:
    names = [one.name for one in FORMATS.values() if one.kind == opened.kind]
    return f"format=auto, or {', '.join(names)}"
