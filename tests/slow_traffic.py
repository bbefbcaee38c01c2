"""The traffic of a run counted one message at a time: slow loops, written from the description.

Nothing here shares a line with `comm.analytic.oracle`; numbers of bytes are spelled out again.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np

from comm.analytic.run import RunShape

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8_block128": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}
BLOCKS = {"fp8_block128": (128, 4), "mxfp8": (32, 1), "mxfp4": (32, 1), "nvfp4": (16, 1)}
WHOLE_TOKENS = ("rank_dedup", "allgather", "two_hop", "hierarchical_allgather", "deduplicated")


class SlowTraffic:
    """bytes: (layer, direction, phase, kind, src, dst) -> bytes; rows: the same without kind

    dropped: (step, layer, token, k) that padded did not admit
    """

    def __init__(self, run: RunShape, topk_ids: np.ndarray, slots: np.ndarray) -> None:
        self.run, self.ids, self.slots = run, topk_ids, slots
        self.name = "deduplicated" if run.deduplicate else run.dispatcher
        self.bytes: Counter[tuple[Any, ...]] = Counter()
        self.rows: Counter[tuple[Any, ...]] = Counter()
        self.dropped: set[tuple[int, int, int, int]] = set()
        self.lane_of = {rank: lane for lane in run.lanes for rank in lane}
        size = run.expert_tp
        self.mates = {
            rank: [mate for mate in range(run.world_size) if mate // size == rank // size]
            for rank in range(run.world_size)
        }
        for layer in range(run.num_layers):
            for step in range(run.num_steps):
                for chunk in range(run.chunks):
                    self.one_chunk(step, layer, chunk)
                if run.training:
                    self.gradients(layer)
        for layer, _, src, dst in np.asarray(run.moves).tolist():
            self.bytes[layer, "forward", "rebalance", "expert_weights", src, dst] += (
                run.expert_bytes // run.expert_tp
            )
            self.rows[layer, "forward", "rebalance", src, dst] += 1

    def one_chunk(self, step: int, layer: int, chunk: int) -> None:
        run, first = self.run, 0
        tokens: dict[int, list[int]] = {}
        for rank, held in enumerate(run.tokens_per_rank):
            low, high = chunk * held // run.chunks, (chunk + 1) * held // run.chunks
            tokens[rank] = list(range(first + low, first + high))
            first += held
        admitted = self.admit(step, layer, tokens)
        shards = run.expert_tp if run.expert_tp_mode == "all" else 1
        for src in range(run.world_size):
            for shift in range(shards):
                self.dispatch(layer, src, shift, tokens, admitted[src])
            for mate in self.mates[src]:
                if run.expert_tp > 1:
                    self.shards(layer, src, mate, admitted)

    def admit(self, step, layer, tokens):
        """src -> one list of (slot) a token, those choices that are computed"""
        run, admitted = self.run, {}
        for src in range(run.world_size):
            filled: Counter[int] = Counter()
            admitted[src] = []
            for token in tokens[src]:
                mine = []
                for k in range(run.top_k):
                    slot = int(self.slots[step, layer, token, k])
                    if slot == -1:
                        continue
                    filled[slot] += 1
                    if run.dispatcher == "padded" and filled[slot] > self.room(src, tokens):
                        self.dropped.add((step, layer, token, k))
                    else:
                        mine.append(slot)
                admitted[src].append(mine)
        return admitted

    def room(self, src, tokens):
        run = self.run
        most = max(len(tokens[rank]) for rank in self.lane_of[src])
        if most == 0:
            return 0
        exact = Fraction(str(run.capacity_factor)) * most * run.top_k / run.num_experts
        return max(1, ceil(exact))

    def owner(self, layer, src, slot):
        """global rank of a slot in the lane of src"""
        return self.lane_of[src][int(self.run.slot_rank[layer][slot])]

    def slots_of(self, layer, rank):
        here = self.lane_of[rank].index(rank)
        return sum(int(position) == here for position in self.run.slot_rank[layer])

    def other(self, rank, shift):
        """the rank `shift` shards further in the shard group of `rank`"""
        mates = self.mates[rank]
        return mates[(mates.index(rank) + shift) % len(mates)]

    def dispatch(self, layer, src, shift, tokens, admitted):
        run, lane = self.run, self.lane_of[src]
        for dst in lane:
            e, to = self.slots_of(layer, dst), self.other(dst, shift)
            counts = {"all_to_all": e, "one_sided": e, "padded": e + 1}.get(self.name, 1)
            self.bytes[layer, "forward", "dispatch", "counts", src, to] += 32 + 8 * counts
            near = run.node_of_rank[src] == run.node_of_rank[dst]
            if near and run.dispatcher in ("two_hop", "hierarchical_allgather"):
                self.bytes[layer, "forward", "dispatch", "counts", src, to] += 40
            if self.name == "one_sided" and shift == 0:
                self.bytes[layer, "forward", "combine", "counts", dst, src] += 8 * e
            if self.name == "padded":
                full = sum(self.owner(layer, src, slot) == dst for row in admitted for slot in row)
                for row in range(e * self.room(src, tokens)):
                    self.one_row(layer, src, dst, shift, empty=row >= full)
        for chosen in admitted:
            if not chosen or self.name == "padded":
                continue
            owners = [self.owner(layer, src, slot) for slot in chosen]
            if "allgather" in self.name:
                owners = list(lane)
            elif self.name in WHOLE_TOKENS:
                owners = sorted(set(owners))
            if run.dispatcher not in ("two_hop", "hierarchical_allgather"):
                for dst in owners:
                    self.one_row(layer, src, dst, shift)
                continue
            for node in {run.node_of_rank[dst] for dst in owners}:
                proxy = self.proxy(src, node)
                self.one_row(layer, src, proxy, shift)
                for dst in owners:
                    if run.node_of_rank[dst] == node:
                        self.one_row(layer, proxy, dst, shift)

    def proxy(self, src, node):
        nodes, lane = self.run.node_of_rank, sorted(self.lane_of[src])
        if nodes[src] == node:
            return src
        at_home = [rank for rank in lane if nodes[rank] == nodes[src]]
        there = [rank for rank in lane if nodes[rank] == node]
        return there[at_home.index(src) % len(there)]

    def one_row(self, layer, src, dst, shift, empty=False):
        """a row and its answers; shift 0 is the lane of the source"""
        run, to = self.run, self.other(dst, shift)
        ids = weights = 0
        if self.name in WHOLE_TOKENS:
            ids = weights = 4 * run.top_k
        elif self.name == "one_sided":
            ids = 4
        self.send(layer, "forward", "dispatch", src, to, run.wire_dispatch, ids, weights, empty)
        if shift == 0:
            self.send(layer, "forward", "combine", to, src, run.wire_combine, empty=empty)
        if run.training:
            back = run.wire_backward
            if shift == 0:
                self.send(layer, "backward", "combine", src, to, back, empty=empty)
            self.send(layer, "backward", "dispatch", to, src, back, 0, weights, empty)

    def send(self, layer, direction, phase, src, dst, wire, ids=0, weights=0, empty=False):
        block, size = BLOCKS.get(wire, (1, 0))
        hidden, scales = ceil(self.run.width * BITS[wire] / 8), ceil(self.run.width / block) * size
        parts = {"hidden": hidden, "scales": scales, "ids": ids, "weights": weights}
        if empty:
            parts = {"padding": hidden + scales}
        for kind, num_bytes in parts.items():
            self.bytes[layer, direction, phase, kind, src, dst] += num_bytes
        self.rows[layer, direction, phase, src, dst] += 1

    def shards(self, layer, rank, mate, admitted):
        """the rows of the experts of `rank`, shared with one rank of its shard group"""
        run = self.run
        gathers = run.expert_tp_mode == "gather"
        if gathers:
            counts = 32 + 8 * self.slots_of(layer, rank)
            self.bytes[layer, "forward", "tp_gather", "counts", rank, mate] += counts
        if mate == rank:
            return
        for src in self.lane_of[rank]:
            for slot in [slot for chosen in admitted[src] for slot in chosen]:
                if self.owner(layer, src, slot) != rank:
                    continue
                if gathers:
                    self.send(layer, "forward", "tp_gather", rank, mate, run.wire_dispatch)
                self.send(layer, "forward", "tp_reduce", mate, rank, run.wire_combine)
                if run.training:
                    self.send(layer, "backward", "tp_reduce", rank, mate, run.wire_backward)
                    if gathers:
                        self.send(layer, "backward", "tp_gather", mate, rank, run.wire_backward)

    def gradients(self, layer):
        run = self.run
        size = run.world_size
        part = [len(part) for part in np.array_split(range(run.shared_values), size)]
        for src in range(size):
            for dst in range(size):
                both = 4 * (part[src] + part[dst])
                self.bytes[layer, "backward", "grad_sync", "gradients", src, dst] += both
                if src == dst or src % run.expert_tp != dst % run.expert_tp:
                    continue
                for _ in self.held(layer, src) & self.held(layer, dst):
                    self.bytes[layer, "backward", "grad_sync", "gradients", src, dst] += (
                        4 * run.expert_values // run.expert_tp
                    )

    def held(self, layer, rank):
        here = self.lane_of[rank].index(rank)
        experts = zip(self.run.physical_to_logical[layer], self.run.slot_rank[layer], strict=True)
        return {int(expert) for expert, position in experts if position == here}
