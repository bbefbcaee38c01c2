"""The rules that finish.py applies, one function each, on plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


LARGEST_SUM = 1 << 53  # of counts: any sum of them is exact in float64, too


class TraceError(ValueError):
    """A trace or placement file that cannot be used: file, value, rule, nearest valid choice."""


def as_ids(source: str, what: str, values: Any) -> Ids:
    """[tokens, K] in int64, from any integer type, before anything is computed with them.

    Leading axes are joined into one of tokens. Raises TraceError for other types and shapes.
    """
    array = _rectangular(source, what, values)
    if array.dtype.kind not in "iu":
        raise TraceError(
            f"{source}: ids of {what} are {array.dtype}, they must be integers; store them as int32"
        )
    if array.ndim < 2 or array.shape[-1] == 0:
        raise TraceError(
            f"{source}: ids of {what} have shape {list(array.shape)}, they must be [tokens, K]"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise TraceError(f"{source}: id {array.max()} of {what} exceeds int64; store int32")
    return array.reshape(-1, array.shape[-1]).astype(np.int64)


def as_weights(source: str, ids: Ids, values: Any) -> Weights:
    """float32 of the shape of `ids`. Raises TraceError for other shapes, nan and infinity."""
    array = _rectangular(source, "topk_weights", values)
    if array.dtype.kind not in "fiu":
        raise TraceError(f"{source}: topk_weights are {array.dtype}, they must be numbers")
    if array.size != ids.size or array.shape[-1:] != ids.shape[-1:]:
        raise TraceError(
            f"{source}: topk_weights have shape {list(array.shape)}, topk_ids {list(ids.shape)};"
            " they must be equal"
        )
    array = array.reshape(ids.shape).astype(np.float32)
    bad = ~np.isfinite(array) & (ids >= 0)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise TraceError(
            f"{source}: topk_weights[{row}, {column}] = {array[row, column]}, weights must be"
            " finite; record again, or leave the weights out"
        )
    return array


def as_counts(source: str, values: Any) -> NDArray[np.int64]:
    """[steps, L, E] in int64; [L, E] gets one step. Raises TraceError."""
    array = _rectangular(source, "counts", values)
    if array.dtype.kind not in "iu":
        raise TraceError(f"{source}: counts are {array.dtype}, they must be integers")
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or 0 in array.shape:
        raise TraceError(
            f"{source}: counts have shape {list(array.shape)}, they must be [layers, experts] or"
            " [steps, layers, experts]"
        )
    array = array.astype(np.int64)
    if array.min() < 0:
        raise TraceError(f"{source}: count {array.min()} must be at least 0")
    if array.sum(dtype=np.float64) > LARGEST_SUM:  # a sum of int64 would wrap unnoticed
        raise TraceError(
            f"{source}: counts as large as {array.max()} must sum to {LARGEST_SUM} at most; give"
            " those of fewer steps"
        )
    return array


def check_range(
    source: str,
    ids: Ids,
    num_experts: int | None,
    dtype: np.dtype[Any],
    layer_numbers: Sequence[int],
    skipped: int = 0,
) -> list[str]:
    """Refuse ids outside -1 .. E-1; notes about a wrapped uint8. Raises TraceError.

    dtype: what the file had, for a hint; layer_numbers, skipped: to say where in the file
    """
    low, high = int(ids.min()), int(ids.max())
    limit = np.inf if num_experts is None else num_experts
    if low < -1 or high >= limit:
        value = low if low < -1 else high
        layer, token, _ = np.argwhere(ids == value)[0].tolist()
        hint = "take a trace of this model"
        if dtype.kind == "u" and value == np.iinfo(dtype).max:
            hint = f"{value} is -1 wrapped in {dtype}: record ids as int32"
        top = (
            "at least "
            if num_experts is None
            else f"0 .. {num_experts - 1} ({num_experts} experts) or "
        )
        raise TraceError(
            f"{source}: id {value} of token row {token + skipped} in layer {layer_numbers[layer]}"
            f" must be {top}-1 (no expert); {hint}"
        )
    if num_experts is None:
        return [f"the number of experts is not known; the largest id is {high}"]
    if num_experts > 256 and 0 <= high <= 255:
        return [
            f"the model has {num_experts} experts and no id exceeds {high}: ids may have been"
            " stored as uint8 and wrapped"
        ]
    return []


def invalid_rows(
    ids: Ids, zeros_missing: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Rows that no router can have chosen: three disjoint masks [L, tokens].

    returns: rows of K zeros (only where such rows are known to be missing data), rows of one expert
        K times, other rows with an expert more than once; -1 may stand more than once
    """
    if ids.shape[2] == 1:
        none = np.zeros(ids.shape[:2], dtype=bool)
        return none, none, none
    same = (ids == ids[..., :1]).all(axis=2) & (ids[..., 0] >= 0)
    zeros = same & (ids[..., 0] == 0) if zeros_missing else np.zeros_like(same)
    ordered = np.sort(ids, axis=2)
    repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(axis=2)
    return zeros, same & ~zeros, repeated & ~same


def absent_columns(
    source: str, ids: Ids, values: Weights | None
) -> tuple[Ids, Weights | None, list[str]]:
    """Infer K: leave out the columns that are -1 in every row of every layer."""
    present = (ids != -1).any(axis=(0, 1))
    if not present.any():
        raise TraceError(f"{source}: every id is -1; record while requests are served")
    if present.all():
        return ids, values, []
    note = f"{present.sum()} of {len(present)} columns hold experts, the others are -1: K"
    values = None if values is None else values[..., present]
    return ids[..., present], values, [f"{note} = {present.sum()}"]


def leading_repeats(ids: Ids) -> int:
    """Token rows at the start that equal the first one in every layer; 0 if only it does."""
    equal = (ids == ids[:, :1]).all(axis=(0, 2)) & (ids[:, 0] >= 0).any()
    run = len(equal) if equal.all() else int(np.argmin(equal))
    return run if run > 1 else 0


def shorten(
    layers: Sequence[Ids], weights: Sequence[Weights] | None, layer_numbers: Sequence[int]
) -> tuple[list[Ids], list[Weights] | None, list[str]]:
    """Cut every layer to the tokens that all have, and give narrow rows -1 up to the widest."""
    tokens = [len(layer) for layer in layers]
    shortest, widest = min(tokens), max(layer.shape[1] for layer in layers)
    notes = []
    if max(tokens) > shortest:
        where = layer_numbers[tokens.index(shortest)]
        notes.append(
            f"layers differ in tokens, {shortest} (layer {where}) to {max(tokens)}: the first"
            f" {shortest} of each are used"
        )

    def even(array: NDArray[Any], fill: int) -> NDArray[Any]:
        return np.pad(
            array[:shortest], ((0, 0), (0, widest - array.shape[1])), constant_values=fill
        )

    ids = [even(layer, -1) for layer in layers]
    return ids, None if weights is None else [even(layer, 0) for layer in weights], notes


def to_logical(source: str, physical: Ids, physical_to_logical: Any) -> Ids:
    """Map ids [L, ..., K] of slots back to experts, layer by layer; -1 stays.

    physical_to_logical: [L, slots]
    """
    table = _rectangular(source, "physical_to_logical_map", physical_to_logical)
    if table.dtype.kind not in "iu" or table.ndim != 2 or len(table) != len(physical):
        raise TraceError(
            f"{source}: physical_to_logical_map is {table.dtype} {list(table.shape)}, it must be"
            f" integers [{len(physical)} layers, slots]"
        )
    table = table.astype(np.int64)
    if physical.size and (physical.min() < -1 or physical.max() >= table.shape[1]):
        worst = physical.min() if physical.min() < -1 else physical.max()
        raise TraceError(
            f"{source}: physical id {worst} must be one of the map's 0 .. {table.shape[1] - 1}"
            " slots or -1 (no expert)"
        )
    layer = np.arange(len(table)).reshape((-1,) + (1,) * (physical.ndim - 1))
    return np.where(physical < 0, -1, table[layer, physical])


def logical_counts(source: str, physical: Any, physical_to_logical: Any) -> NDArray[np.int64]:
    """Counts [steps, L, slots] added up by expert: [steps, L, E]. E is the map's largest id + 1."""
    counts = as_counts(source, physical)
    slots = np.broadcast_to(np.arange(counts.shape[2]), counts.shape[1:])
    experts = to_logical(source, slots, physical_to_logical)
    if np.shape(physical_to_logical)[1] != counts.shape[2]:
        raise TraceError(
            f"{source}: counts of {counts.shape[2]} slots, but physical_to_logical_map has"
            f" {np.shape(physical_to_logical)[1]}; they must be equal"
        )
    result = np.zeros((*counts.shape[:2], int(experts.max()) + 1), dtype=np.int64)
    for layer, slot in np.argwhere(experts >= 0).tolist():  # a slot may be empty
        result[:, layer, experts[layer, slot]] += counts[:, layer, slot]
    return result


def numbers(values: Sequence[int]) -> str:
    """A short text for a list of layer numbers: "1..26", "1, 13, 26"."""
    values = list(values)
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}..{values[-1]}"
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")


def _rectangular(source: str, what: str, values: Any) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise TraceError(
            f"{source}: {what} is no array: rows differ in length or hold other things than numbers"
        ) from error
    if array.dtype == object:
        raise TraceError(
            f"{source}: {what} is no array: rows differ in length or hold other things than numbers"
        )
    return array
