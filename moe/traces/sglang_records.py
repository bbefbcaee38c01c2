"""SGLang's recorder, modes per_pass and per_token: a record a forward pass, one file a rank.

{records: [{forward_pass_id, rank, gatherer_key, global_physical_count: [L, slots],
            topk_ids_of_layer: [L, tokens, 8] (per_token only)}],
 last_physical_to_logical_map: [L, slots]}

Ids and counts are physical: they are mapped back with the map of the end of the recording. Each
rank counts its own tokens, so the files of a folder are added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe.traces.base import ALL_LAYERS, CountTrace, Expected, RawRouting, RouterTrace
from moe.traces.files import Opened
from moe.traces.finish import count_trace, router_trace
from moe.traces.format import TraceFormat, first, has_keys, integer
from moe.traces.rules import TraceError, as_counts, logical_counts, to_logical

MAP = "last_physical_to_logical_map"
IDS = "topk_ids_of_layer"
MAP_NOTE = f"physical ids mapped to experts by {MAP}: an earlier placement, if any, is not known"


def read_passes(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """Counts of the ranks' files added up, one step a forward pass."""
    source = str(opened.path)
    table, records = _records(opened)
    steps: dict[int, np.ndarray] = {}
    for _, record in records:
        counts = as_counts(source, _field(source, record, "global_physical_count"))[0]
        step = record["forward_pass_id"]
        if step in steps and steps[step].shape != counts.shape:
            raise TraceError(f"{source}: records of pass {step} differ in shape")
        steps[step] = steps.get(step, 0) + counts
    if len({counts.shape for counts in steps.values()}) > 1:
        raise TraceError(f"{source}: records differ in the shape of global_physical_count")
    physical = np.stack([steps[step] for step in sorted(steps)])
    return count_trace(
        source,
        logical_counts(source, physical, table),
        range(physical.shape[1]),
        ALL_LAYERS,
        expected,
        logical=False,
        notes=(MAP_NOTE,),
    )


def read_tokens(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """Token rows, pass after pass and, inside a pass, rank after rank."""
    source = str(opened.path)
    table, records = _records(opened)
    parts = []
    for _, record in records:
        ids = np.asarray(_field(source, record, IDS))
        if ids.ndim != 3 or ids.dtype.kind not in "iu":
            raise TraceError(
                f"{source}: {IDS} is {ids.dtype} {list(ids.shape)}, it must be integers"
                " [layers, tokens, K]"
            )
        parts.append(to_logical(source, ids.astype(np.int64), table))
    if len({(part.shape[0], part.shape[2]) for part in parts}) > 1:
        raise TraceError(f"{source}: records differ in the layers or columns of {IDS}")
    ids = np.concatenate(parts, axis=1)
    return router_trace(
        source,
        RawRouting(
            layers=list(ids),
            layer_numbers=range(len(ids)),
            layer_axis=ALL_LAYERS,
            num_experts=int(np.max(np.asarray(table))) + 1,
            logical=False,
            columns_hold_k=False,
            notes=(MAP_NOTE, f"{len(parts)} records of {len(opened.content)} rank files"),
        ),
        expected,
    )


def _records(opened: Opened) -> tuple[Any, list[tuple[tuple[int, int], Mapping[str, Any]]]]:
    """The map, and the records of all files ordered by pass and rank."""
    source = str(opened.path)
    table = None
    records: list[tuple[tuple[int, int], Mapping[str, Any]]] = []
    for name, content in opened.content.items():
        if not has_keys(content, "records"):
            raise TraceError(f"{source}: {name} has no records; give files of one mode only")
        if content.get(MAP) is None:
            raise TraceError(
                f"{source}: {name} has no {MAP}, and its ids are physical: they cannot be mapped"
                " back to experts; record again, or use mode stat"
            )
        if table is not None and not np.array_equal(np.asarray(table), np.asarray(content[MAP])):
            raise TraceError(f"{source}: {name} has another {MAP} than the files before it")
        table = content[MAP]
        for record in content["records"]:
            where = f"a record of {name}"
            if not isinstance(record, Mapping):
                raise TraceError(f"{source}: {where} must be a dictionary")
            step = integer(source, where, record, "forward_pass_id")
            records.append(((step, integer(source, where, record, "rank")), record))
    if not records:
        raise TraceError(f"{source}: holds no record; record while requests are served")
    return table, sorted(records, key=lambda entry: entry[0])


def _field(source: str, record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise TraceError(f"{source}: a record has no {key}")
    return record[key]


def _is_records(content: Any) -> bool:
    return has_keys(first(content), "records")


def _has_ids(content: Any) -> bool:
    records = first(content)["records"] if _is_records(content) else []
    return bool(records) and has_keys(records[0], IDS)


FORMATS = (
    TraceFormat(
        name="sglang_per_token",
        kind="torch",
        describes="SGLang recorder, mode per_token: topk_ids_of_layer, physical, one .pt a rank",
        matches=_has_ids,
        read=read_tokens,
    ),
    TraceFormat(
        name="sglang_per_pass",
        kind="torch",
        describes="SGLang recorder, mode per_pass: global_physical_count, one .pt a rank",
        matches=_is_records,
        read=read_passes,
    ),
)
