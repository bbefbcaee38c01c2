"""What every reader ends with: the rules applied, what was found put into notes.

Legend: L layers, K = top_k, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.traces.base import MOE_LAYERS, CountTrace, Expected, RawRouting, RouterTrace
from moe.traces.rules import (
    Ids,
    TraceError,
    Weights,
    absent_columns,
    as_counts,
    as_ids,
    as_weights,
    check_range,
    invalid_rows,
    leading_repeats,
    numbers,
    shorten,
)

Mask = NDArray[np.bool_]
WARM_UP_SUSPECT = 64  # this many equal rows at the start are no accident


@dataclass
class _Rows:
    """ids: [L, tokens, K]; weights: the same shape or None; notes: so far"""

    source: str
    ids: Ids
    weights: Weights | None
    notes: list[str] = field(default_factory=list)

    def select(self, index: Any) -> None:
        """Keep a part of the rows."""
        self.ids = self.ids[index]
        self.weights = None if self.weights is None else self.weights[index]


def router_trace(source: str, raw: RawRouting, expected: Expected) -> RouterTrace:
    """Apply the rules. Raises TraceError, one line: file, value, rule, nearest valid choice."""
    rows = _stacked(source, raw)
    if not raw.columns_hold_k:
        rows.ids, rows.weights, dropped = absent_columns(source, rows.ids, rows.weights)
        rows.notes += dropped
    _skip(rows, expected)
    num_experts = _agreed(source, "num_experts", raw.num_experts, expected.num_experts)
    if expected.top_k is not None and rows.ids.shape[2] != expected.top_k:
        raise TraceError(
            f"{source}: has {rows.ids.shape[2]} experts a token, the model top_k={expected.top_k};"
            f" take a trace of this model, or a model with top_k={rows.ids.shape[2]}"
        )
    widest = np.result_type(*{np.asarray(layer).dtype for layer in raw.layers})
    rows.notes += check_range(
        source, rows.ids, num_experts, widest, raw.layer_numbers, expected.skip_rows
    )
    _blank_invalid(rows, raw.zeros_missing)
    keep = _used(rows.ids >= 0, (1, 2), raw.layer_axis)
    kept = _kept_layers(source, keep, raw.layer_numbers, expected)
    if not keep.all():
        rows.notes.append(f"{(~keep).sum()} of {len(keep)} layers hold no choice and are left out")
        rows.select(keep)
    whole = not expected.skip_rows and rows.ids.shape[1] % raw.num_steps == 0
    return RouterTrace(
        topk_ids=rows.ids,
        topk_weights=rows.weights,
        num_experts=num_experts,
        layer_numbers=kept,
        layer_axis=raw.layer_axis,
        logical=raw.logical,
        source=source,
        num_steps=raw.num_steps if whole else 1,
        notes=tuple(rows.notes),
    )


def count_trace(
    source: str,
    step_counts: Any,
    layer_numbers: Sequence[int],
    layer_axis: str,
    expected: Expected,
    *,
    top_k: int | None = None,
    logical: bool = True,
    whole_tokens: bool = True,
    remedy: str = "take the model's top_k",
    notes: Sequence[str] = (),
) -> CountTrace:
    """Apply the rules to counts [steps, L, E]. Raises TraceError.

    whole_tokens: every token has all its K choices in the file, so that sums are multiples of K;
        where they need not be, another sum makes a note instead of an error
    remedy: what to do about such an error
    """
    counts = as_counts(source, step_counts)
    found = list(notes)
    filled: Mask = np.asarray(counts.any(axis=(1, 2)))
    if not filled.any():
        raise TraceError(f"{source}: every count is 0; record while requests are served")
    if not filled.all():
        found.append(f"{(~filled).sum()} of {len(filled)} steps are empty and are left out")
        counts = counts[filled]
    if expected.skip_rows:
        if not 0 < expected.skip_rows < len(counts):
            raise TraceError(
                f"{source}: skip_rows={expected.skip_rows} must lie in 0 .. {len(counts) - 1}"
                f" of its {len(counts)} steps"
            )
        counts = counts[expected.skip_rows :]
        found.append(f"{expected.skip_rows} steps at the start skipped as asked")
    _agreed(source, "num_experts", counts.shape[2], expected.num_experts)
    top_k = _agreed(source, "top_k", top_k, expected.top_k)
    keep = _used(counts > 0, (0, 2), layer_axis)
    kept = _kept_layers(source, keep, layer_numbers, expected)
    if not keep.all():
        found.append(f"{(~keep).sum()} of {len(keep)} layers have no counts and are left out")
        counts = counts[:, keep]
    if top_k is not None:
        found += _multiples(source, counts, top_k, kept, remedy if whole_tokens else None)
    return CountTrace(counts, top_k, kept, layer_axis, logical, source, tuple(found))


def _used(chosen: Mask, axes: tuple[int, int], layer_axis: str) -> Mask:
    """[L] layers to keep: dense ones hold nothing, and are there only if all layers are counted."""
    used: Mask = np.asarray(chosen.any(axis=axes))
    return used | (layer_axis == MOE_LAYERS) if used.any() else used


def _stacked(source: str, raw: RawRouting) -> _Rows:
    """All layers in one array, in int64."""
    if not raw.layers:
        raise TraceError(f"{source}: holds no layer; a trace needs at least one")
    layers = [
        as_ids(source, f"layer {number}", layer)
        for number, layer in zip(raw.layer_numbers, raw.layers, strict=True)
    ]
    weights = None
    if raw.weights is not None:
        weights = [
            as_weights(source, ids, layer) for ids, layer in zip(layers, raw.weights, strict=True)
        ]
    layers, weights, cut = shorten(layers, weights, raw.layer_numbers)
    values = None if weights is None else np.stack(weights)
    return _Rows(source, np.stack(layers), values, [*raw.notes, *cut])


def _skip(rows: _Rows, expected: Expected) -> None:
    """Leave out the rows the user asked to; say where a start looks like profiling."""
    skip, tokens = expected.skip_rows, rows.ids.shape[1]
    if tokens == 0:
        raise TraceError(f"{rows.source}: holds no token; a trace needs at least one")
    if not 0 <= skip < tokens:
        raise TraceError(
            f"{rows.source}: skip_rows={skip} must lie in 0 .. {tokens - 1} of its {tokens} token"
            " rows"
        )
    if skip:
        rows.notes.append(f"{skip} of {tokens} token rows at the start skipped as asked")
        rows.select(np.s_[:, skip:])
    repeats = leading_repeats(rows.ids)
    if repeats >= WARM_UP_SUSPECT:
        way = f"skip_rows={skip + repeats} leaves them out"
        rows.notes.append(
            f"the first {repeats} token rows name the same experts, as profiling does;"
            f" {way if skip + repeats < tokens else 'there are no others'}"
        )


def _blank_invalid(rows: _Rows, zeros_missing: bool) -> None:
    """Make rows that no router can have chosen into rows without experts, and count them."""
    zeros, equal, twice = invalid_rows(rows.ids, zeros_missing)
    for masked, what in (
        (zeros, "rows of zeros were never written"),
        (equal, "rows name one expert in every column"),
        (twice, "rows name an expert twice"),
    ):
        if count := int(masked.sum()):
            rows.notes.append(f"{count} of {masked.size} {what}: treated as missing (-1)")
    if zeros_missing and rows.ids.shape[2] == 1:
        rows.notes.append("K = 1: a row that was never written cannot be told from expert 0")
    bad = zeros | equal | twice
    if bad.any():
        rows.ids = np.where(bad[..., None], -1, rows.ids)
    absent = rows.ids < 0
    if partial := int((absent.any(axis=2) & ~absent.all(axis=2)).sum()):
        rows.notes.append(f"{partial} of {bad.size} rows name fewer than K experts")
    if rows.weights is not None:
        rows.weights = np.where(absent, np.float32(0), rows.weights)


def _kept_layers(
    source: str, keep: NDArray[np.bool_], layer_numbers: Sequence[int], expected: Expected
) -> tuple[int, ...]:
    kept = tuple(int(n) for n, yes in zip(layer_numbers, keep, strict=True) if yes)
    if not kept:
        raise TraceError(f"{source}: no layer holds a choice; record while requests are served")
    if expected.num_layers is not None and len(kept) != expected.num_layers:
        raise TraceError(
            f"{source}: has {len(kept)} MoE layers ({numbers(kept)}), the model"
            f" num_layers={expected.num_layers}; take a trace of this model"
        )
    return kept


def _agreed(source: str, name: str, found: int | None, expected: int | None) -> int | None:
    if found is not None and expected is not None and found != expected:
        raise TraceError(
            f"{source}: has {name}={found}, the model {name}={expected}; take a trace of this"
            f" model, or a model with {name}={found}"
        )
    return expected if found is None else found


def _multiples(
    source: str,
    counts: NDArray[np.int64],
    top_k: int,
    layer_numbers: Sequence[int],
    remedy: str | None,
) -> list[str]:
    """Refuse sums that are no multiples of K, or only note them where there is no remedy."""
    sums = counts.sum(axis=2)
    wrong = np.argwhere(sums % top_k)
    if not len(wrong):
        return []
    step, layer = wrong[0].tolist()
    what = (
        f"counts of layer {layer_numbers[layer]} in step {step} sum to {sums[step, layer]}, no"
        f" multiple of top_k={top_k} ({len(wrong)} of {sums.size} sums)"
    )
    if remedy:
        raise TraceError(f"{source}: {what}; {remedy}")
    return [what]
