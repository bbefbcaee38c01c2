"""What the tokens chose: the slot that serves each choice, who is admitted, and how often.

Recorded choices are read in batches of bounded size; nothing loops over tokens.

Legend: L layers, R ranks, E experts, K top_k, S slots of a lane, N nodes. -1 means no expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
from numpy.typing import NDArray

from comm.analytic.paths import Paths
from comm.analytic.run import IntArray, RunShape

# Choices handled at once: bounds the temporaries whatever the number of tokens.
_BATCH_CHOICES = 1 << 21

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Counts:
    """What one layer's choices come to, all steps together, seen inside the source's own lane.

    copies: [src, dst] (token, slot) choices; kept: [src, dst] those that were not dropped
    pairs: [src, dst] (token, rank) pairs, each once; node_hits: [src, N] (token, node) pairs
    active: [src] tokens with at least one choice
    """

    copies: NDArray[np.int64]
    kept: NDArray[np.int64]
    pairs: NDArray[np.int64]
    node_hits: NDArray[np.int64]
    active: NDArray[np.int64]


def capacity(run: RunShape) -> NDArray[np.int64]:
    """[chunks, R] rows that each rank has for each slot, with dispatcher=padded.

    capacity_factor x tokens x K / E, rounded up, the factor taken as it is written and the tokens
    being those of the busiest rank of the lane; at least 1 where there is a token, else 0.
    """
    factor = Fraction(str(run.capacity_factor)) * run.top_k / run.num_experts
    rows = np.zeros_like(run.tokens_per_chunk)
    for chunk, tokens in enumerate(run.tokens_per_chunk):
        for lane in run.lanes:
            busiest = max(int(tokens[rank]) for rank in lane)
            rows[chunk, list(lane)] = max(1, ceil(factor * busiest)) if busiest else 0
    return rows


def kept_choices(run: RunShape, topk_ids: IntArray, slots: IntArray | None = None) -> BoolArray:
    """bool [steps, L, tokens, K]: the choices that were computed.

    Arguments as for `exact_traffic`. Everything that chose an expert, but with dispatcher=padded
    only the first choices of each (source, slot), in the order of (token, k), up to the capacity.
    """
    check_routing(run, topk_ids, slots)
    kept = np.zeros(topk_ids.shape, bool)
    for layer in range(run.num_layers):
        for step, part, _, admitted in _batches(run, topk_ids, slots, layer):
            kept[step, layer, part] = admitted
    return kept


def count_layer(
    run: RunShape, paths: Paths, topk_ids: IntArray, slots: IntArray | None, layer: int
) -> Counts:
    """Count one layer; arguments as for `exact_traffic`."""
    size = paths.world_size
    copies, kept, pairs = (np.zeros((size, size), np.int64) for _ in range(3))
    node_hits, active = np.zeros((size, paths.num_nodes), np.int64), np.zeros(size, np.int64)
    for _, part, slot, admitted in _batches(run, topk_ids, slots, layer):
        source = run.token_rank[part]
        chosen = slot >= 0
        owner = _owner(run, paths, layer, source, slot)
        copies += _histogram(source, owner, chosen, size)
        if run.dispatcher == "padded":
            kept += _histogram(source, owner, admitted, size)
        pairs += _distinct(source, owner, size)
        node = np.where(chosen, paths.node[owner], -1)
        node_hits += _distinct(source, node, paths.num_nodes, size)
        active += np.bincount(source[chosen.any(axis=1)], minlength=size)
    return Counts(copies, kept if run.dispatcher == "padded" else copies, pairs, node_hits, active)


def served_ranks(
    run: RunShape, paths: Paths, topk_ids: IntArray, slots: IntArray | None, layer: int
) -> Iterator[NDArray[np.int64]]:
    """[n, K] global rank that serves each choice of n tokens, -1 for none, all steps in turn."""
    for _, part, slot, _ in _batches(run, topk_ids, slots, layer):
        yield _owner(run, paths, layer, run.token_rank[part], slot)


def _owner(
    run: RunShape, paths: Paths, layer: int, source: NDArray[np.int64], slot: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[n, K] global rank of each slot [n, K] in the lane of its token's rank [n]; -1 for none."""
    slot_rank = np.append(np.asarray(run.slot_rank[layer], np.int64), 0)  # slot -1 looks up this
    owner = paths.rank_at[paths.lane[source][:, None], slot_rank[slot]]
    return np.where(slot >= 0, owner, -1)


def check_routing(run: RunShape, topk_ids: IntArray, slots: IntArray | None) -> None:
    """Raises ValueError where the recorded arrays are not of this run."""
    shape = (run.num_steps, run.num_layers, sum(run.tokens_per_rank), run.top_k)
    for name, array in (("topk_ids", topk_ids), ("slots", slots)):
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, the run has (steps, layers, tokens, top_k) ="
                f" {shape}"
            )


def _batches(
    run: RunShape, topk_ids: IntArray, slots: IntArray | None, layer: int
) -> Iterator[tuple[int, slice, NDArray[np.int64], BoolArray]]:
    """(step, tokens, slot [n, K], admitted [n, K]) of one layer, tokens in order."""
    holder = np.asarray(run.physical_to_logical[layer], np.int64)
    only_slot = _only_slot(run, layer, holder) if slots is None else None
    stride = max(1, _BATCH_CHOICES // max(1, run.top_k))
    for step in range(run.num_steps):
        gate = _Gate(run, len(holder)) if run.dispatcher == "padded" else None
        for start in range(0, topk_ids.shape[2], stride):
            part = slice(start, start + stride)
            ids = topk_ids[step, layer, part].astype(np.int64)
            _check_ids(ids, run.num_experts)
            if only_slot is not None:
                slot = only_slot[ids]
            else:
                assert slots is not None
                slot = slots[step, layer, part].astype(np.int64)
            _check_slots((step, layer, start), ids, slot, holder)
            yield step, part, slot, slot >= 0 if gate is None else gate.admit(part, slot)


def _only_slot(run: RunShape, layer: int, holder: NDArray[np.int64]) -> NDArray[np.int64]:
    """[E + 1] slot of each expert, -1 where it has none; the last entry serves the id -1."""
    used = np.flatnonzero(holder >= 0)
    copies = np.bincount(holder[used], minlength=run.num_experts)
    if copies.size and copies.max() > 1:
        expert = int(copies.argmax())
        raise ValueError(
            f"layer {layer}: expert {expert} has {copies[expert]} slots, so the slots that served"
            " the choices must be given"
        )
    only = np.full(run.num_experts + 1, -1, np.int64)
    only[holder[used]] = used
    return only


def _check_ids(ids: NDArray[np.int64], num_experts: int) -> None:
    if ids.size and not -1 <= ids.min() <= ids.max() < num_experts:
        raise ValueError(
            f"topk_ids holds {ids.min()}..{ids.max()}, valid are 0..{num_experts - 1} and -1"
        )


def _check_slots(
    place: tuple[int, int, int],
    ids: NDArray[np.int64],
    slot: NDArray[np.int64],
    holder: NDArray[np.int64],
) -> None:
    """Each choice is served by one slot, which holds it; no choice by none.

    place: step, layer and first token
    """
    known = (slot >= -1) & (slot < len(holder))
    held = np.append(holder, -1)[np.where(known, slot, -1)]
    wrong = ~known | (held != ids) | ((slot >= 0) != (ids >= 0))
    if not wrong.any():
        return
    step, layer, start = place
    token, k = np.argwhere(wrong)[0].tolist()
    content = f"holds expert {held[token, k]}" if known[token, k] else "does not exist"
    if slot[token, k] == -1:
        content = "is none"
    raise ValueError(
        f"step {step}, layer {layer}, token {start + token}: expert {ids[token, k]} is served by"
        f" slot {slot[token, k]}, which {content}"
    )


class _Gate:
    """Admission of dispatcher=padded in one step of a layer: first come, first served."""

    def __init__(self, run: RunShape, num_slots: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity(run).ravel()  # [chunk * R + source]
        self.taken = np.zeros(len(self.capacity) * num_slots, np.int64)
        chunk = np.arange(run.chunks)
        chunk_of_token = [np.repeat(chunk, tokens) for tokens in run.tokens_per_chunk.T]
        self.queue = np.concatenate(chunk_of_token) * run.world_size + run.token_rank  # [tokens]

    def admit(self, part: slice, slot: NDArray[np.int64]) -> BoolArray:
        """bool [n, K]: the choices of the next n tokens that find a free row."""
        wanted = slot >= 0
        queue = np.broadcast_to(self.queue[part, None], slot.shape)[wanted]
        key = queue * self.num_slots + slot[wanted]
        # The turn of each choice among those of the same key: its place in a stable order.
        order = key.argsort(kind="stable")
        first = np.searchsorted(key[order], key[order], side="left")
        turn = np.empty_like(key)
        turn[order] = np.arange(len(key)) - first
        turn += self.taken[key]
        self.taken += np.bincount(key, minlength=len(self.taken))
        admitted = np.zeros(slot.shape, bool)
        admitted[wanted] = turn < self.capacity[queue]
        return admitted


def _histogram(
    source: NDArray[np.int64],
    column: NDArray[np.int64],
    counted: BoolArray,
    num_columns: int,
    num_rows: int | None = None,
) -> NDArray[np.int64]:
    """[rows, columns] how often `column` [n, K] occurs where it is counted, by source [n]."""
    num_rows = num_columns if num_rows is None else num_rows
    cell = (source[:, None] * num_columns + column)[counted]
    return np.bincount(cell, minlength=num_rows * num_columns).reshape(num_rows, num_columns)


def _distinct(
    source: NDArray[np.int64],
    column: NDArray[np.int64],
    num_columns: int,
    num_rows: int | None = None,
) -> NDArray[np.int64]:
    """As `_histogram`, but each value counts once a token, and -1 never."""
    column = np.sort(column, axis=1)
    counted = column >= 0
    counted[:, 1:] &= column[:, 1:] != column[:, :-1]  # the first of each run of equals
    return _histogram(source, column, counted, num_columns, num_rows)
