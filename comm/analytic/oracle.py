"""Exact traffic: the bytes of every (layer, direction, phase, kind, source, destination).

Inputs are the recorded choices and who owns what, nothing else. The worked example, also a test:
two ranks, four experts (0, 1 on rank 0; 2, 3 on rank 1), one token on rank 0 that chose {1, 2, 3}:

    rows to rank        0  1
    all_to_all          1  2      one for each (token, slot); one_sided too, unless deduplicated
    rank_dedup          1  1      one for each (token, rank)
    allgather           1  1      one for each token, to every rank of the lane
    two_hop, one node   2  1      to itself as its own proxy, from there to rank 0 and rank 1
    padded              2  2      with room for one row in each slot

What one layer's choices come to (`choices`) is turned into rows along paths (`paths`), rows into
bytes (`rows`); `sync` adds what no token causes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from comm.analytic.choices import Counts, capacity, check_routing, count_layer
from comm.analytic.paths import TWO_HOPS, Paths, shard_mates, shifted, slots_on_rank
from comm.analytic.rows import KINDS, PAYLOAD_KINDS, counts_bytes, row_bytes, whole_tokens
from comm.analytic.run import IntArray, RunShape
from comm.analytic.sync import expert_gradients, moved_experts, shared_gradients

Cells = NDArray[np.int64]  # [src, dst]


@dataclass(frozen=True)
class ExactTraffic:
    """Bytes and rows that a run must have moved, summed over its steps; ranks are global.

    bytes: [L, direction, phase, kind, src, dst] int64
    rows: [L, direction, phase, src, dst] int64; empty rows count, rows of two hops count twice
    copies: [L, src, dst] choices served by dst in the source's own lane, dropped ones included
    deliveries: [L, src, dst] rows of forward dispatch by where their token started and where its
        experts are: without first hops and empty rows
    """

    bytes: NDArray[np.int64]
    rows: NDArray[np.int64]
    copies: NDArray[np.int64]
    deliveries: NDArray[np.int64]
    directions: tuple[str, ...]
    phases: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS


def exact_traffic(run: RunShape, topk_ids: IntArray, slots: IntArray | None = None) -> ExactTraffic:
    """Count a whole run.

    topk_ids: [steps, L, tokens, K] logical experts chosen by each token, -1 for none
    slots: [steps, L, tokens, K] the physical slot that served each choice, -1 for none; may be
        left out where no expert has two

    Raises ValueError for a run that contradicts itself, for arrays of another run, and where a slot
    does not hold the expert that was chosen.
    """
    paths = Paths.of(run)
    check_routing(run, topk_ids, slots)
    ledger = _Ledger(run)
    size = run.world_size
    copies, deliveries = (np.zeros((run.num_layers, size, size), np.int64) for _ in range(2))
    moved, shared = moved_experts(run), shared_gradients(run)
    for layer in range(run.num_layers):
        counts = count_layer(run, paths, topk_ids, slots, layer)
        for flow in _flows(run, paths, counts, layer):
            ledger.add_rows(layer, flow)
        _announce(ledger, run, paths, layer)
        if "rebalance" in run.phases:
            ledger.rows[(layer, *ledger.place("forward", "rebalance"))] += moved[layer]
            weight = run.expert_bytes // run.expert_tp
            ledger.add(layer, "forward", "rebalance", "expert_weights", moved[layer] * weight)
        if run.training:
            gradients = shared + expert_gradients(run, paths, layer)
            ledger.add(layer, "backward", "grad_sync", "gradients", run.num_steps * gradients)
        copies[layer] = counts.copies
        deliveries[layer] = _spread(run, _delivered(run, paths, counts))
    return ExactTraffic(ledger.bytes, ledger.rows, copies, deliveries, run.directions, run.phases)


def count_copies(run: RunShape, topk_ids: IntArray, slots: IntArray | None = None) -> Cells:
    """[L, src, dst] `ExactTraffic.copies` alone; arguments as for `exact_traffic`."""
    paths = Paths.of(run)
    check_routing(run, topk_ids, slots)
    layers = range(run.num_layers)
    return np.stack([count_layer(run, paths, topk_ids, slots, layer).copies for layer in layers])


@dataclass(frozen=True)
class _Flow:
    """Rows [src, dst] of one direction and phase of a layer; `useful` are those with a token."""

    direction: str
    phase: str
    rows: Cells
    useful: Cells


@dataclass
class _Ledger:
    """The arrays of ExactTraffic while they fill up."""

    run: RunShape
    bytes: NDArray[np.int64] = field(init=False)
    rows: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        run, pair = self.run, (self.run.world_size, self.run.world_size)
        places = (run.num_layers, len(run.directions), len(run.phases))
        self.bytes = np.zeros((*places, len(KINDS), *pair), np.int64)
        self.rows = np.zeros((*places, *pair), np.int64)

    def place(self, direction: str, phase: str) -> tuple[int, int]:
        return self.run.directions.index(direction), self.run.phases.index(phase)

    def add(self, layer: int, direction: str, phase: str, kind: str, cells: Cells) -> None:
        self.bytes[(layer, *self.place(direction, phase), KINDS.index(kind))] += cells

    def add_rows(self, layer: int, flow: _Flow) -> None:
        run, where = self.run, (flow.direction, flow.phase)
        self.rows[(layer, *self.place(*where))] += flow.rows
        wire = run.wire_dispatch if flow.phase in ("dispatch", "tp_gather") else run.wire_combine
        row = row_bytes(
            run.dispatcher,
            flow.phase,
            run.wire_backward if flow.direction == "backward" else wire,
            run.width,
            run.top_k,
            direction=flow.direction,
            deduplicate=run.deduplicate,
        )
        for kind, size in row.items():
            if size:
                self.add(layer, *where, kind, flow.useful * size)
        if run.dispatcher == "padded":
            empty = sum(row[kind] for kind in PAYLOAD_KINDS)
            self.add(layer, *where, "padding", (flow.rows - flow.useful) * empty)


def _flows(run: RunShape, paths: Paths, counts: Counts, layer: int) -> Iterator[_Flow]:
    """Every movement of rows in one layer, all steps together.

    Backward, what was answered is asked for again and what was asked for is answered.
    """
    home = _dispatched(run, paths, counts, layer)
    useful = counts.kept if run.dispatcher == "padded" else home
    spread, spread_useful = _spread(run, home), _spread(run, useful)
    yield _Flow("forward", "dispatch", spread, spread_useful)
    yield _Flow("forward", "combine", home.T, useful.T)
    if run.training:
        yield _Flow("backward", "combine", home, useful)
        yield _Flow("backward", "dispatch", spread.T, spread_useful.T)
    if run.expert_tp == 1:
        return
    # The rows of a rank's experts, one for each (token, slot), to each rank that shares them.
    fan = np.where(shard_mates(run), counts.kept.sum(axis=0)[:, None], 0)
    gathers = "tp_gather" in run.phases
    if gathers:
        yield _Flow("forward", "tp_gather", fan, fan)
    yield _Flow("forward", "tp_reduce", fan.T, fan.T)
    if run.training:
        yield _Flow("backward", "tp_reduce", fan, fan)
        if gathers:
            yield _Flow("backward", "tp_gather", fan.T, fan.T)


def _delivered(run: RunShape, paths: Paths, counts: Counts) -> Cells:
    """(token, destination) rows that the strategy is about, inside the lane and without hops."""
    if run.dispatcher in ("allgather", "hierarchical_allgather"):
        return np.where(paths.same_lane, counts.active[:, None], 0)
    return counts.pairs if whole_tokens(run.dispatcher, run.deduplicate) else counts.kept


def _dispatched(run: RunShape, paths: Paths, counts: Counts, layer: int) -> Cells:
    """Rows of a dispatch that stays inside the lane: with hops, and with empty rows."""
    delivered = _delivered(run, paths, counts)
    if run.dispatcher == "padded":
        room = run.num_steps * capacity(run).sum(axis=0)  # [src] rows for each slot
        return np.where(paths.same_lane, room[:, None] * slots_on_rank(run, paths, layer), 0)
    if run.dispatcher in TWO_HOPS:
        everywhere = run.dispatcher == "hierarchical_allgather"
        hits = np.where(paths.proxy >= 0, counts.active[:, None], 0)
        return paths.hops(hits if everywhere else counts.node_hits, delivered)
    return delivered


def _spread(run: RunShape, cells: Cells) -> Cells:
    """Cells of the own lane, and the same again for each other lane that is dispatched to."""
    total = cells
    for shift in range(1, run.shifts):
        total = total + shifted(run, cells, shift)
    return total


def _announce(ledger: _Ledger, run: RunShape, paths: Paths, layer: int) -> None:
    """The counts messages of one layer, all steps and chunks together."""
    times = run.num_steps * run.chunks
    slots = slots_on_rank(run, paths, layer)
    itself = np.eye(run.world_size, dtype=bool)

    def messages(phase: str, pairs: NDArray[np.bool_]) -> Cells:
        """To the rank that holds the slots, among the given pairs."""
        of_dst = [
            counts_bytes(run.dispatcher, int(n), phase=phase, deduplicate=run.deduplicate)
            for n in slots
        ]
        return times * np.where(pairs, np.array(of_dst, np.int64), 0)

    asked = _spread(run, messages("dispatch", paths.same_lane))
    if run.dispatcher in TWO_HOPS:
        asked = asked + messages("dispatch", paths.same_lane & paths.same_node)
    ledger.add(layer, "forward", "dispatch", "counts", asked)
    ledger.add(layer, "forward", "combine", "counts", messages("combine", paths.same_lane).T)
    if "tp_gather" in run.phases:
        gathered = messages("tp_gather", shard_mates(run) | itself)
        ledger.add(layer, "forward", "tp_gather", "counts", gathered)
