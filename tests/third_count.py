"""The traffic of a whole run counted a third time, row by row, from the files that it left.

This file imports nothing of the analytic side and nothing of the measured side: it reads the
manifest and routing.npz, and knows the strategies only as docs/traffic_model.md tells them. Runs
without shards of experts; everything else.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8_block128": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}
SCALES = {"fp8_block128": (128, 4), "mxfp8": (32, 1), "mxfp4": (32, 1), "nvfp4": (16, 1)}
COPIES = ("all_to_all", "padded", "one_sided")  # a row for each expert; elsewhere a whole token


class ThirdCount:
    """bytes: (layer, direction, phase, kind, src, dst) -> bytes; rows: the same without the kind

    dropped: choices that found no room
    """

    def __init__(self, manifest, routing):
        self.manifest, self.config, self.shape = manifest, manifest["config"], manifest["shape"]
        self.world_size, self.nodes = manifest["world_size"], manifest["node_of_rank"]
        self.name = manifest["dispatcher"]
        if self.config["dispatcher"]["deduplicate"]:
            self.name = "deduplicated"
        self.training = self.config["mode"] == "training"
        self.width = self.shape["latent_size"] or self.shape["hidden_size"]
        self.group_size = self.config["ep_size"] or self.world_size
        self.slots = routing["slots"].tolist()  # [step][layer][token][k]
        self.position = routing["slot_rank"].tolist()  # [layer][slot], inside a group
        self.expert = routing["physical_to_logical_map"].tolist()
        self.bytes, self.rows, self.dropped = Counter(), Counter(), 0
        for layer in range(len(self.position)):
            for step in range(len(self.slots)):
                for chunk in range(self.config["chunks"]):
                    self.one_chunk(step, layer, chunk)
                if self.training:
                    self.gradients(layer)
            if manifest["placement"] == "balance":
                self.moved_experts(layer)

    def one_chunk(self, step, layer, chunk):
        chunks, first, mine = self.config["chunks"], 0, []
        for tokens in self.manifest["tokens_per_rank"]:
            begin, end = chunk * tokens // chunks, (chunk + 1) * tokens // chunks
            mine.append(self.slots[step][layer][first + begin : first + end])
            first += tokens
        for src in range(self.world_size):
            group = self.group_of(src)
            room = self.room(max(len(mine[rank]) for rank in group))
            self.announce(layer, src, group)
            if self.name == "padded":
                self.padded(layer, src, mine[src], room)
                continue
            for chosen in mine[src]:
                owners = [self.owner(layer, src, slot) for slot in chosen if slot >= 0]
                if owners:
                    self.token(layer, src, owners, group)

    def group_of(self, rank):
        first = rank - rank % self.group_size
        return range(first, first + self.group_size)

    def owner(self, layer, src, slot):
        return self.group_of(src)[self.position[layer][slot]]

    def slots_of(self, layer, rank):
        return self.position[layer].count(rank % self.group_size)

    def announce(self, layer, src, group):
        for dst in group:
            slots = self.slots_of(layer, dst)
            told = {"all_to_all": slots, "one_sided": slots, "padded": slots + 1}.get(self.name, 1)
            self.book(layer, "forward", "dispatch", "counts", src, dst, 32 + 8 * told)
            if self.two_hops and self.nodes[src] == self.nodes[dst]:
                self.book(layer, "forward", "dispatch", "counts", src, dst, 32 + 8)
            if self.name == "one_sided":
                self.book(layer, "forward", "combine", "counts", dst, src, 8 * slots)

    @property
    def two_hops(self):
        return self.name in ("two_hop", "hierarchical_allgather")

    def token(self, layer, src, owners, group):
        """the rows of one token of `src` whose experts live on `owners`, one for each expert"""
        if self.name in COPIES:
            for dst in owners:
                self.row(layer, src, dst)
            return
        ranks = set(group) if "allgather" in self.name else set(owners)
        if not self.two_hops:
            for dst in ranks:
                self.row(layer, src, dst)
            return
        for node in {self.nodes[rank] for rank in ranks}:
            proxy = self.proxy(src, node, group)
            self.row(layer, src, proxy)
            for dst in ranks:
                if self.nodes[dst] == node:
                    self.row(layer, proxy, dst)

    def proxy(self, src, node, group):
        if self.nodes[src] == node:
            return src
        mates = [rank for rank in group if self.nodes[rank] == self.nodes[src]]
        there = [rank for rank in group if self.nodes[rank] == node]
        return there[mates.index(src) % len(there)]

    def room(self, most_tokens):
        if not most_tokens:
            return 0
        factor = Fraction(str(self.config["dispatcher"]["capacity_factor"]))
        picks = factor * most_tokens * self.shape["top_k"]
        return max(1, ceil(picks / self.shape["num_experts"]))

    def padded(self, layer, src, tokens, room):
        wanted = Counter(slot for chosen in tokens for slot in chosen if slot >= 0)
        for slot in range(len(self.position[layer])):
            if self.position[layer][slot] < 0:  # this layer has fewer slots
                continue
            dst, filled = self.owner(layer, src, slot), min(wanted[slot], room)
            self.dropped += wanted[slot] - filled
            self.rows_between(layer, src, dst, filled)
            self.rows_between(layer, src, dst, room - filled, empty=True)

    def row(self, layer, src, dst):
        self.rows_between(layer, src, dst, 1)

    def rows_between(self, layer, src, dst, number, empty=False):
        """rows and what comes of them: their answers, and in training both ways again"""
        wire, top_k = self.manifest["wire"], self.shape["top_k"]
        weights = 0 if self.name in COPIES else 4 * top_k
        ids = 4 if self.name == "one_sided" else weights
        there, back, gradients = wire["dispatch"], wire["combine"], wire["backward"]
        lot = (number, empty)
        self.send(layer, "forward", "dispatch", src, dst, there, *lot, ids, weights)
        self.send(layer, "forward", "combine", dst, src, back, *lot)
        if self.training:
            self.send(layer, "backward", "combine", src, dst, gradients, *lot)
            self.send(layer, "backward", "dispatch", dst, src, gradients, *lot, 0, weights)

    def send(self, layer, direction, phase, src, dst, wire, number, empty, ids=0, weights=0):
        block, size = SCALES.get(wire, (1, 0))
        hidden, scales = ceil(self.width * BITS[wire] / 8), ceil(self.width / block) * size
        parts = {"hidden": hidden, "scales": scales, "ids": ids, "weights": weights}
        if empty:
            parts = {"padding": hidden + scales}
        for kind, size in parts.items():
            self.book(layer, direction, phase, kind, src, dst, number * size)
        self.rows[layer, direction, phase, src, dst] += number

    def book(self, *cell_and_size):
        *cell, size = cell_and_size
        if size:
            self.bytes[tuple(cell)] += size

    # -- what belongs to no token -----------------------------------------------------------------

    @property
    def expert_values(self):
        return 3 * self.width * self.shape["intermediate_size"]

    def moved_experts(self, layer):
        """from the block that an expert was in to every rank that has a slot of it now"""
        owner = []
        base, more = divmod(self.shape["num_experts"], self.group_size)
        for position in range(self.group_size):
            owner += [position] * (base + (position < more))
        size = {"fp32": 4, "bf16": 2, "fp16": 2}[self.manifest["dtype"]]
        for expert, position in zip(self.expert[layer], self.position[layer], strict=True):
            if position < 0 or owner[expert] == position:
                continue
            for first in range(0, self.world_size, self.group_size):
                pair = first + owner[expert], first + position
                self.rows[layer, "forward", "rebalance", *pair] += 1
                moved = self.expert_values * size
                self.book(layer, "forward", "rebalance", "expert_weights", *pair, moved)

    def gradients(self, layer):
        shape, ranks = self.shape, range(self.world_size)
        hidden, latent = shape["hidden_size"], shape["latent_size"] or 0
        values = (shape["num_experts"] + 3 * shape["shared_intermediate_size"]) * hidden
        values += 2 * hidden * latent + latent
        parts = [values // len(ranks) + (rank < values % len(ranks)) for rank in ranks]
        held = [self.held(layer, rank) for rank in ranks]
        for src in ranks:
            for dst in ranks:
                sent = parts[src] + parts[dst]
                if src != dst:
                    sent += len(held[src] & held[dst]) * self.expert_values
                self.book(layer, "backward", "grad_sync", "gradients", src, dst, 4 * sent)

    def held(self, layer, rank):
        here = rank % self.group_size
        pairs = zip(self.expert[layer], self.position[layer], strict=True)
        return {expert for expert, position in pairs if position == here}
