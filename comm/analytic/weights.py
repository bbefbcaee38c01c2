"""Bytes of a model's weights: as stored, as held by a rank, as read in a step.

    routed    experts, in blocks that share a scale; spread over the ranks of a group
    rest      everything else, copied to each rank or shared by a few: matrices in a format of their
              own, 16-bit tables and norms, some values in 32 bits

Weights are a floor, not a file: format, scales, rest, copies, redundant experts and overhead are
arguments, so that anyone builds their own. Legend: E experts, K top_k, B tokens of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PLAIN_BYTES, SINGLE_BYTES = 2, 4  # bf16, fp32


@dataclass(frozen=True)
class Format:
    """Bits of a weight, and of the scale that each `block` of weights shares; 0: no scales."""

    bits: float
    scale_bits: float = 0
    block: int = 1

    @property
    def bits_per_weight(self) -> float:
        return self.bits + self.scale_bits / self.block

    def packed_bytes(self, count: int) -> float:
        return count * self.bits / 8

    def scales_bytes(self, count: int) -> float:
        return count / self.block * self.scale_bits / 8


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters, and how they are stored.

    expert: parameters of one expert; num_experts, layers: how many there are
    matrices, plain, single: parameters of the rest, in matrix_format, in 16 and in 32 bits
    lookup: those of `plain` of which a step reads a row a token, the input table
    overhead: share added to everything that is held, for padding and unpacked copies
    """

    expert: int
    num_experts: int
    layers: int
    matrices: int
    plain: int
    single: int
    lookup: int
    expert_format: Format
    matrix_format: Format
    overhead: float = 0.0

    @property
    def parameters(self) -> int:
        return self.routed + self.matrices + self.plain + self.single

    @property
    def routed(self) -> int:
        return self.layers * self.num_experts * self.expert

    @property
    def expert_bytes(self) -> float:
        """One expert of one layer, with its scales."""
        return self.expert * self.expert_format.bits_per_weight / 8

    @property
    def packed_bytes(self) -> float:
        """Routed experts without their scales."""
        return self.expert_format.packed_bytes(self.routed)

    @property
    def scales_bytes(self) -> float:
        return self.expert_format.scales_bytes(self.routed)

    @property
    def rest_bytes(self) -> float:
        matrices = self.matrices * self.matrix_format.bits_per_weight / 8
        return matrices + self.plain * PLAIN_BYTES + self.single * SINGLE_BYTES

    @property
    def stored_bytes(self) -> float:
        """One copy of everything, as published."""
        return self.packed_bytes + self.scales_bytes + self.rest_bytes

    def routed_on_rank(self, slots: int) -> float:
        """What a rank holds with so many experts in each layer."""
        return self.layers * slots * self.expert_bytes * (1 + self.overhead)

    def rest_on_rank(self, shards: int) -> float:
        """What a rank holds of the rest, where so many ranks share a copy."""
        return self.rest_bytes / shards * (1 + self.overhead)

    def read_bytes(self, tokens: int, top_k: int) -> float:
        """Expected bytes that a step reads, in all: experts that are touched, and the rest once.

        Without the input table, of which a token reads one row.
        """
        touched = touched_experts(self.num_experts, top_k, tokens)
        rest = self.rest_bytes - self.lookup * PLAIN_BYTES
        return rest + self.layers * touched * self.expert_bytes


def touched_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Expected number of different experts that so many tokens choose, under uniform routing.

    A token draws K distinct ones and leaves a given expert out with probability 1 - K/E, tokens are
    independent, and expectations add: E (1 - (1 - K/E)^B), exactly.
    """
    if top_k == num_experts:
        return float(num_experts if tokens else 0)
    return -num_experts * math.expm1(tokens * math.log1p(-top_k / num_experts))


def slots_of(num_experts: int, redundant: int, ranks: int) -> tuple[int, ...]:
    """[R] expert slots of each rank: the first ranks have one more where they do not divide."""
    each, more = divmod(num_experts + redundant, ranks)
    return (each + 1,) * more + (each,) * (ranks - more)
