"""SGLang's expert distribution recorder, modes stat and stat_approx: counts summed over ranks.

A .pt file {rank, logical_count: [steps, L, E], ...}, or JSON {"logical_count": [L][E]}. L counts
all layers, those of dense ones are zero; so are the steps that a buffer did not fill.
"""

from __future__ import annotations

from moe.traces.base import ALL_LAYERS, CountTrace, Expected, RouterTrace
from moe.traces.files import Opened
from moe.traces.finish import count_trace
from moe.traces.format import TraceFormat, first, has_keys
from moe.traces.rules import TraceError, as_counts


def _read(opened: Opened, expected: Expected, exact: bool) -> RouterTrace | CountTrace:
    source = str(opened.path)
    content = opened.content
    if opened.kind == "torch":
        if len(content) > 1:
            raise TraceError(
                f"{source}: holds {len(content)} .pt files; counts are summed over ranks already,"
                f" give one of them, e.g. {opened.path / next(iter(content))}"
            )
        content = first(content)
    if not has_keys(content, "logical_count"):
        raise TraceError(f"{source}: has no logical_count; give the file of mode stat")
    counts = as_counts(source, content["logical_count"])
    remedy = "take the model's top_k"
    if opened.kind == "torch":
        remedy += ", or format=sglang_stat_approx for counts that a kernel rounded up"
    return count_trace(
        source,
        counts,
        range(counts.shape[1]),
        ALL_LAYERS,
        expected,
        whole_tokens=exact,
        remedy=remedy,
    )


def read_exact(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    return _read(opened, expected, exact=True)


def read_approx(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """Counts that were rounded up for a kernel: their sums need not be multiples of K."""
    return _read(opened, expected, exact=False)


FORMATS = (
    TraceFormat(
        name="sglang_stat",
        kind="torch",
        describes="SGLang recorder, mode stat: logical_count [steps, layers, experts] in a .pt",
        matches=lambda content: has_keys(first(content), "logical_count"),
        read=read_exact,
    ),
    TraceFormat(
        name="sglang_stat_json",
        kind="json",
        describes='JSON {"logical_count": [layers][experts]}',
        matches=lambda content: has_keys(content, "logical_count"),
        read=read_exact,
    ),
    TraceFormat(
        name="sglang_stat_approx",
        kind="torch",
        describes="the same in mode stat_approx, whose counts are rounded (never chosen by itself)",
        matches=lambda content: False,
        read=read_approx,
    ),
)
