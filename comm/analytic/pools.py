"""Memory of a machine, pool by pool, and what follows: how many accelerators, when to offload.

Pools scale with different things and are never one number:

    routed        experts / ranks               rest          copies / ranks that share one
    cache         tokens of all sequences       state         sequences
    buffers       tokens of a step              reserve       memory

Legend: R ranks; all figures in bytes, of the fullest rank where ranks differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from comm.analytic.caches import Cache


@dataclass(frozen=True)
class Rank:
    """What one rank holds before any sequence comes, and its memory."""

    memory: float
    routed: float
    rest: float
    buffers: float
    activations: float
    reserve: float

    @property
    def fixed(self) -> float:
        return self.routed + self.rest + self.buffers + self.activations + self.reserve

    @property
    def left(self) -> float:
        """For caches and states; negative where the rank does not even hold its weights."""
        return self.memory - self.fixed


@dataclass(frozen=True)
class Offload:
    """Whether lower tiers are needed.

    verdict: "option", "host", "nvme" (which tier the missing bytes fit in) or "impossible"
    missing: bytes of a rank that its memory cannot hold
    seconds: to bring them from that tier once; None where its rate is not known
    """

    verdict: str
    missing: float
    seconds: float | None = None


def smallest(total_bytes: float, memory_bytes: float) -> int:
    """Accelerators whose memories together hold so many bytes, with nothing else in them."""
    return math.ceil(total_bytes / memory_bytes)


def smallest_fitting(rank_of: Callable[[int], Rank], step: int, most: int) -> int | None:
    """The least multiple of `step` ranks at which each rank holds what is fixed; None: none does.

    rank_of: the fullest rank of a group of so many
    """
    for ranks in range(step, most + 1, step):
        if rank_of(ranks).left >= 0:
            return ranks
    return None


def sequences_that_fit(left: float, cache: Cache, tokens: int) -> int:
    """Sequences of so many tokens in what is left of a rank; cache: its part of a sequence."""
    return max(0, math.floor(left / cache.sequence_bytes(tokens)))


def context_that_outgrows(num_bytes: float, cache: Cache, sequences: int) -> float:
    """Tokens of each of so many sequences at which they keep more than so many bytes; inf: never.

    0: their states alone do.
    """
    within = cache.tokens_within(num_bytes / sequences)
    if math.isinf(within):
        return within
    return within + 1 if num_bytes / sequences >= cache.constant_bytes else 0


def sequences_that_outgrow(num_bytes: float, cache: Cache, tokens: int) -> int:
    """Sequences of so many tokens that keep more than so many bytes."""
    return math.floor(num_bytes / cache.sequence_bytes(tokens)) + 1


def offload(
    missing: float,
    host_bytes: float | None,
    host_rate: float | None,
    nvme_bytes: float | None,
    nvme_rate: float | None,
) -> Offload:
    """Which lower tier takes what a rank's memory cannot hold: the first in which it fits.

    bytes, rates (bytes a second): of the tiers for each accelerator; None: not known, not used
    """
    if missing <= 0:
        return Offload("option", 0.0)
    below = missing
    for name, room, rate in (("host", host_bytes, host_rate), ("nvme", nvme_bytes, nvme_rate)):
        if room is not None and below <= room:
            return Offload(name, missing, below / rate if rate else None)
        below -= room or 0
    return Offload("impossible", missing)
