"""Placements of experts that other stacks (or a run of ours) wrote to a file.

Legend: R ranks, L MoE layers, E logical experts, S_l slots of layer l, rank-major.

    form                  what it holds                                        slots of a rank
    0/1 array             [R, L, E], 1 = that rank holds a replica; .npy(.xz), .npz    any number
    slot map              physical_to_logical_map [L, S]; .json, .pt, .npz             S / R
    our routing.npz       the same and slot_rank [L, S], -1 where a layer has fewer    any number
    TensorRT-LLM          .yaml: num_slots, initial_global_assignments {layer: ids}    num_slots / R
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.traces.files import Opened, one_line_errors, open_any
from moe.traces.format import first, has_keys
from moe.traces.rules import TraceError

MAP = "physical_to_logical_map"
ASSIGNMENTS = "initial_global_assignments"
FORMS = (
    "a 0/1 array [ranks, layers, experts] (.npy, .npy.xz, .npz), physical_to_logical_map"
    " [layers, slots] (.json, .pt, .npz), or TensorRT-LLM's YAML"
)
IntArray = NDArray[np.int64]
LayerPlacement = tuple[IntArray, IntArray]


def read_placement(
    path: str | Path,
    num_layers: int,
    num_experts: int,
    num_ranks: int,
    *,
    num_dense_layers: int = 0,
) -> tuple[LayerPlacement, ...]:
    """Read a placement that fits the model and the ranks.

    num_layers: MoE layers of the model
    num_dense_layers: a file of all layers may have so many more; its first ones are left out
    returns: for each MoE layer (physical_to_logical int64 [S_l], first_slot int64 [R + 1]); slots
        first_slot[r] .. first_slot[r + 1] belong to rank r
    raises: TraceError (a ValueError), one line
    """
    path = Path(path).expanduser()
    wanted = (num_layers, num_experts, num_ranks)
    if path.suffix in (".yaml", ".yml"):
        layers = _yaml(path, *wanted)
    else:
        opened = open_any(path)
        with one_line_errors(path, "a placement"):
            layers = _opened(opened, *wanted, num_dense_layers)
    for layer, (slots, first_slot) in enumerate(layers):
        _check_layer(f"{path}: layer {layer}", slots, first_slot, num_experts)
    return tuple(layers)


def _opened(
    opened: Opened, num_layers: int, num_experts: int, num_ranks: int, dense: int
) -> list[LayerPlacement]:
    source, content = str(opened.path), opened.content
    if opened.kind == "torch":
        content = first(content)
    if opened.kind == "npz" and not has_keys(content, MAP) and len(content) == 1:
        content = first(content)
    if isinstance(content, np.ndarray):
        return _from_zeros_and_ones(source, content, num_layers, num_experts, num_ranks)
    if not has_keys(content, MAP):
        raise TraceError(f"{source}: holds no placement; give {FORMS}")
    table = _integers(source, MAP, content[MAP])
    if table.ndim != 2 or len(table) not in (num_layers, num_layers + dense):
        raise TraceError(
            f"{source}: {MAP} has shape {list(table.shape)}, the model {num_layers} MoE layers"
            f" of {num_experts} experts; it must be [{num_layers}, slots]"
        )
    if "slot_rank" in content:
        ranks = _integers(source, "slot_rank", content["slot_rank"])
        _check_num_ranks(source, content.get("header"), ranks, num_ranks)
        return _from_slot_ranks(source, table, ranks, num_ranks)
    return _even(source, list(table[len(table) - num_layers :]), num_ranks)


def _check_num_ranks(source: str, header: Any, slot_rank: IntArray, num_ranks: int) -> None:
    """Refuse what was recorded on another number of ranks: some would hold nothing, unnoticed.

    header: JSON text, where there is one: a rank without a slot is in no array
    """
    said = {}
    if header is not None:
        with one_line_errors(source, "a header of JSON text"):
            said = json.loads(str(header))
    shards, ranks = (said.get(name) for name in ("expert_tp", "ep_size"))
    recorded = int(slot_rank.max(initial=-1)) + 1
    if isinstance(ranks, int) and isinstance(shards, int) and shards > 0:
        recorded = ranks // shards
    if recorded != num_ranks:
        raise TraceError(
            f"{source}: places experts on {recorded} ranks that dispatch to each other, this run"
            f" has {num_ranks}; run on {recorded}, or record again on {num_ranks}"
        )


def _from_zeros_and_ones(
    source: str, array: np.ndarray, num_layers: int, num_experts: int, num_ranks: int
) -> list[LayerPlacement]:
    """Slots of a rank are its experts in ascending order."""
    array = _integers(source, "the array", array)
    if array.shape != (num_ranks, num_layers, num_experts):
        raise TraceError(
            f"{source}: the array has shape {tuple(array.shape)} (ranks, layers, experts), the run"
            f" needs {(num_ranks, num_layers, num_experts)}; take the file of this model and number"
            " of ranks"
        )
    if not np.isin(array, (0, 1)).all():
        worst = array.max() if array.max() > 1 else array.min()
        raise TraceError(f"{source}: the array holds {worst}, it must hold 0 and 1 only")
    layers = []
    for layer in range(num_layers):
        ranks, experts = np.nonzero(array[:, layer])
        sizes = np.bincount(ranks, minlength=num_ranks)
        layers.append((experts.astype(np.int64), _first_slot(sizes)))
    return layers


def _from_slot_ranks(
    source: str, table: IntArray, slot_rank: IntArray, num_ranks: int
) -> list[LayerPlacement]:
    if slot_rank.shape != table.shape:
        raise TraceError(
            f"{source}: slot_rank has shape {list(slot_rank.shape)}, {MAP} {list(table.shape)};"
            " they must be equal"
        )
    layers = []
    for number, (row, ranks) in enumerate(zip(table, slot_rank, strict=True)):
        row, ranks = row[ranks >= 0], ranks[ranks >= 0]
        if len(ranks) and (ranks.max() >= num_ranks or (np.diff(ranks) < 0).any()):
            raise TraceError(
                f"{source}: slot_rank of layer {number} must ascend within 0 .. {num_ranks - 1}"
                f" ({num_ranks} ranks); its largest is {ranks.max()}"
            )
        layers.append((row, _first_slot(np.bincount(ranks, minlength=num_ranks))))
    return layers


def _even(source: str, rows: Sequence[IntArray], num_ranks: int) -> list[LayerPlacement]:
    """Slots of maps without ranks: every rank has the same number."""
    slots = len(rows[0])
    if slots % num_ranks:
        below = slots - slots % num_ranks
        raise TraceError(
            f"{source}: {slots} slots cannot be shared evenly by {num_ranks} ranks; nearest:"
            f" {below or num_ranks} or {below + num_ranks} slots"
        )
    sizes = np.full(num_ranks, slots // num_ranks)
    return [(row, _first_slot(sizes)) for row in rows]


def _yaml(path: Path, num_layers: int, num_experts: int, num_ranks: int) -> list[LayerPlacement]:
    import yaml

    with one_line_errors(path, "YAML"):
        try:
            content = yaml.load(
                path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            )
        except yaml.YAMLError as error:
            line = " ".join(str(error).split())
            raise TraceError(f"{path}: cannot be read as YAML: {line[:200]}") from error
    if not has_keys(content, "num_slots", ASSIGNMENTS) or not isinstance(
        content[ASSIGNMENTS], dict
    ):
        raise TraceError(f"{path}: must have num_slots and {ASSIGNMENTS}: {{layer: [slots]}}")
    by_layer, slots = content[ASSIGNMENTS], content["num_slots"]
    with one_line_errors(path, f"{ASSIGNMENTS} by layer number"):
        names = sorted(by_layer, key=int)
    rows = [_integers(str(path), f"layer {name}", by_layer[name]) for name in names]
    wrong = [name for name, row in zip(names, rows, strict=True) if row.shape != (slots,)]
    if wrong:
        raise TraceError(
            f"{path}: layer {wrong[0]} has {np.size(by_layer[wrong[0]])} slots, num_slots={slots}"
        )
    if len(rows) != num_layers:
        raise TraceError(
            f"{path}: has {len(rows)} layers of {slots} slots, the model {num_layers} MoE layers"
            f" of {num_experts} experts; take the file of this model"
        )
    return _even(str(path), rows, num_ranks)


def _check_layer(where: str, slots: IntArray, first_slot: IntArray, num_experts: int) -> None:
    """Every expert is there, no other is, and no rank holds one twice."""
    low, high = int(slots.min(initial=0)), int(slots.max(initial=0))
    if low < 0 or high >= num_experts:
        raise TraceError(
            f"{where}: expert {low if low < 0 else high} must lie in 0 .. {num_experts - 1}"
            f" ({num_experts} experts); take the file of this model"
        )
    missing = np.flatnonzero(np.bincount(slots, minlength=num_experts) == 0)
    if len(missing):
        raise TraceError(
            f"{where}: expert {missing[0]} is nowhere ({len(missing)} of {num_experts} missing);"
            " every expert needs a slot"
        )
    ranks = np.repeat(np.arange(len(first_slot) - 1), np.diff(first_slot))
    pairs, times = np.unique(ranks * num_experts + slots, return_counts=True)
    if (times > 1).any():
        rank, expert = divmod(int(pairs[times > 1][0]), num_experts)
        raise TraceError(
            f"{where}: rank {rank} holds expert {expert} {times.max()} times; replicas of an expert"
            " must be on different ranks"
        )


def _first_slot(sizes: NDArray[np.integer[Any]]) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _integers(source: str, what: str, values: Any) -> IntArray:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        array = np.asarray(None)
    if array.dtype.kind not in "iub":
        raise TraceError(
            f"{source}: {what} must be an array of integers, rows of equal length; it is"
            f" {array.dtype if array.dtype != object else 'no such array'}"
        )
    return array.astype(np.int64)
