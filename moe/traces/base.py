"""What a trace is, and the rules that every reader ends with.

Legend: L layers, K = top_k, E experts, -1 = no expert. Readers hand their arrays to `router_trace`
or `count_trace`, which widen, check, mark and describe; what was found goes into `notes`.

    file --> files.py (opened, never a foreign traceback) --> one reader a format
         --> base.py (rules) --> RouterTrace | CountTrace
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.traces.rules import (
    TraceError,
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

ALL_LAYERS = "all layers"
MOE_LAYERS = "MoE layers only"
UNKNOWN_LAYERS = "not said"
WARM_UP_SUSPECT = 64  # this many equal rows at the start are no accident


@dataclass(frozen=True)
class Expected:
    """What the model says about a trace; None: nothing is known.

    skip_rows: token rows (or steps of counts) to leave out at the start, a wish of the user
    """

    num_experts: int | None = None
    top_k: int | None = None
    num_layers: int | None = None
    skip_rows: int = 0


@dataclass(frozen=True)
class RouterTrace:
    """Who chose what, in the order of the tokens.

    topk_ids: int64 [L, tokens, K] logical experts, -1 none; no expert twice in a row
    topk_weights: float32 of the same shape, 0 where there is no expert, or None if not recorded
    num_experts: E, or None where neither the file nor the model says it
    layer_numbers: [L] the file's own number of each layer kept
    layer_axis: what the file counts: ALL_LAYERS, MOE_LAYERS or UNKNOWN_LAYERS
    logical: whether the file itself had logical ids (physical ones were mapped back)
    num_steps: the tokens are those of this many steps, one step after the other
    notes: what was found and what was done about it, a sentence each
    """

    topk_ids: NDArray[np.int64]
    topk_weights: NDArray[np.float32] | None
    num_experts: int | None
    layer_numbers: tuple[int, ...]
    layer_axis: str
    logical: bool
    source: str
    num_steps: int = 1
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.topk_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[2]


@dataclass(frozen=True)
class CountTrace:
    """How often each logical expert was chosen.

    step_counts: int64 [steps, L, E]; counts: [L, E], their sum
    top_k: experts of a token, or None where neither the file nor the model says it
    The rest as in RouterTrace.
    """

    step_counts: NDArray[np.int64]
    top_k: int | None
    layer_numbers: tuple[int, ...]
    layer_axis: str
    logical: bool
    source: str
    notes: tuple[str, ...] = ()
    counts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", self.step_counts.sum(axis=0))

    @property
    def num_layers(self) -> int:
        return self.step_counts.shape[1]

    @property
    def num_experts(self) -> int:
        return self.step_counts.shape[2]


@dataclass(frozen=True)
class RawRouting:
    """What a reader found, before any rule.

    layers: for each layer [tokens_l, K], of any integer type
    weights: of the same shapes, or None
    columns_hold_k: False where the file may have more columns than K, those left over all -1
    zeros_missing: a row of K zeros was never written
    """

    layers: Sequence[Any]
    layer_numbers: Sequence[int]
    layer_axis: str
    weights: Sequence[Any] | None = None
    num_experts: int | None = None
    logical: bool = True
    num_steps: int = 1
    columns_hold_k: bool = True
    zeros_missing: bool = False
    notes: tuple[str, ...] = ()


def router_trace(source: str, raw: RawRouting, expected: Expected) -> RouterTrace:
    """Apply the rules. Raises TraceError, one line: file, value, rule, nearest valid choice."""
    if not raw.layers:
        raise TraceError(f"{source}: holds no layer; a trace needs at least one")
    notes = list(raw.notes)
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
    notes += cut
    ids = np.stack(layers)
    values = None if weights is None else np.stack(weights)
    if not raw.columns_hold_k:
        ids, values, dropped = absent_columns(source, ids, values)
        notes += dropped
    ids, values, skipped = _skip(source, ids, values, expected)
    notes += skipped
    num_experts = _agreed(source, "num_experts", raw.num_experts, expected.num_experts)
    if expected.top_k is not None and ids.shape[2] != expected.top_k:
        raise TraceError(
            f"{source}: has {ids.shape[2]} experts a token, the model top_k={expected.top_k};"
            f" take a trace of this model, or a model with top_k={ids.shape[2]}"
        )
    notes += check_range(source, ids, num_experts, _widest(raw.layers))
    ids, values, found = _blank_invalid(ids, values, raw.zeros_missing)
    notes += found
    keep = (ids >= 0).any(axis=(1, 2))
    kept = _kept_layers(source, keep, raw.layer_numbers, expected)
    if not keep.all():
        notes.append(f"{(~keep).sum()} of {len(keep)} layers hold no choice and are left out")
        ids, values = ids[keep], None if values is None else values[keep]
    return RouterTrace(
        topk_ids=ids,
        topk_weights=values,
        num_experts=num_experts,
        layer_numbers=kept,
        layer_axis=raw.layer_axis,
        logical=raw.logical,
        source=source,
        num_steps=raw.num_steps if ids.shape[1] % raw.num_steps == 0 else 1,
        notes=tuple(notes),
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
    notes: Sequence[str] = (),
) -> CountTrace:
    """Apply the rules to counts [steps, L, E]. Raises TraceError.

    whole_tokens: every token has all its K choices in the file, so that sums are multiples of K;
        where they need not be, another sum makes a note instead of an error
    """
    counts = as_counts(source, step_counts)
    found = list(notes)
    filled = counts.any(axis=(1, 2))
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
    keep = counts.any(axis=(0, 2))
    kept = _kept_layers(source, keep, layer_numbers, expected)
    if not keep.all():
        found.append(f"{(~keep).sum()} of {len(keep)} layers have no counts and are left out")
        counts = counts[:, keep]
    if top_k is not None:
        found += _multiples(source, counts, top_k, kept, whole_tokens)
    return CountTrace(counts, top_k, kept, layer_axis, logical, source, tuple(found))


def _skip(
    source: str, ids: NDArray[np.int64], values: NDArray[np.float32] | None, expected: Expected
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None, list[str]]:
    """Leave out the rows the user asked to; say where a start looks like profiling."""
    skip, tokens = expected.skip_rows, ids.shape[1]
    if tokens == 0:
        raise TraceError(f"{source}: holds no token; a trace needs at least one")
    if not 0 <= skip < tokens:
        raise TraceError(
            f"{source}: skip_rows={skip} must lie in 0 .. {tokens - 1} of its {tokens} token rows"
        )
    notes = [f"{skip} of {tokens} token rows at the start skipped as asked"] if skip else []
    ids = ids[:, skip:]
    repeats = leading_repeats(ids)
    if repeats >= WARM_UP_SUSPECT:
        notes.append(
            f"the first {repeats} token rows name the same experts, as profiling does;"
            f" skip_rows={skip + repeats} leaves them out"
        )
    return ids, None if values is None else values[:, skip:], notes


def _blank_invalid(
    ids: NDArray[np.int64], values: NDArray[np.float32] | None, zeros_missing: bool
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None, list[str]]:
    """Make rows that no router can have chosen into rows without experts, and count them."""
    zeros, equal, twice = invalid_rows(ids, zeros_missing)
    notes = []
    for rows, what in (
        (zeros, "rows of zeros were never written"),
        (equal, "rows name one expert in every column"),
        (twice, "rows name an expert twice"),
    ):
        if count := int(rows.sum()):
            notes.append(f"{count} of {rows.size} {what}: treated as missing (-1)")
    if zeros_missing and ids.shape[2] == 1:
        notes.append("K = 1: a row that was never written cannot be told from expert 0")
    bad = zeros | equal | twice
    if bad.any():
        ids = np.where(bad[..., None], -1, ids)
    partial = int(((ids < 0).any(axis=2) & (ids >= 0).any(axis=2)).sum())
    if partial:
        notes.append(f"{partial} of {bad.size} rows name fewer than K experts")
    if values is not None:
        values = np.where(ids >= 0, values, np.float32(0))
    return ids, values, notes


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


def _widest(layers: Sequence[Any]) -> np.dtype[Any]:
    """Type of the ids as the file has them, for hints."""
    return np.result_type(*{np.asarray(layer).dtype for layer in layers})


def _multiples(
    source: str,
    counts: NDArray[np.int64],
    top_k: int,
    layer_numbers: Sequence[int],
    whole_tokens: bool,
) -> list[str]:
    sums = counts.sum(axis=2)
    wrong = np.argwhere(sums % top_k)
    if not len(wrong):
        return []
    step, layer = wrong[0].tolist()
    what = (
        f"counts of layer {layer_numbers[layer]} in step {step} sum to {sums[step, layer]}, no"
        f" multiple of top_k={top_k} ({len(wrong)} of {sums.size} sums)"
    )
    if whole_tokens:
        raise TraceError(
            f"{source}: {what}; take the model's top_k, or format=sglang_stat_approx for counts"
            " that are rounded"
        )
    return [what]
