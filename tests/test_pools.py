"""Accelerators for a checkpoint, what outgrows what, and when lower tiers are needed."""

from __future__ import annotations

import math

import pytest

from comm.analytic.caches import Cache, linear_state_bytes
from comm.analytic.pools import (
    Rank,
    context_that_outgrows,
    offload,
    sequences_that_fit,
    sequences_that_outgrow,
    smallest,
    smallest_fitting,
)

GB, GIB = 1e9, 2**30
CHECKPOINT = 1_560_860_324_864
K3 = Cache(576, 16, 24, state_bytes=linear_state_bytes(69, 96, 128, 4, 32))


@pytest.mark.parametrize(
    "total, memory, number",
    [
        (1.4e12, 80 * GB, 18),
        (CHECKPOINT, 80 * GB, 20),
        (CHECKPOINT, 80 * GIB, 19),
        (1.5e12, 141 * GB, 11),
        (CHECKPOINT, 141 * GB, 12),
        (CHECKPOINT, 141 * GIB, 11),
        (1.5e12, 180 * GB, 9),
        (1.5e12, 288 * GB, 6),
        (64 * 80 * GB, 80 * GB, 64),  # filled to the last byte
    ],
)
def test_the_smallest_number_of_accelerators(total, memory, number):
    assert smallest(total, memory) == number


def rank_of(ranks: int) -> Rank:
    """100 bytes of experts spread, 10 of the rest copied, in memories of 40 of which 4 are kept."""
    return Rank(40, 100 / ranks, 10, 1, 0, 4)


def test_copies_and_reserve_need_more_accelerators_than_weights_alone():
    assert smallest(110, 40) == 3
    assert rank_of(4).left == 0 and rank_of(3).left < 0
    assert smallest_fitting(rank_of, 1, 100) == 4
    assert smallest_fitting(rank_of, 3, 100) == 6
    assert smallest_fitting(rank_of, 1, 3) is None
    assert smallest_fitting(rank_of, 1, 4) == 4  # `most` is among them


def test_a_rank_holds_all_that_is_fixed():
    assert Rank(100, 1, 2, 4, 8, 16).fixed == 31


def test_sequences_in_what_is_left():
    each = 131_072 * 27_648 + 449_372_160
    assert sequences_that_fit(10 * each, K3, 131_072) == 10
    assert sequences_that_fit(10 * each - 1, K3, 131_072) == 9
    assert sequences_that_fit(-5.0, K3, 131_072) == 0


def test_where_the_cache_outgrows():
    """One sequence would have to be 56 million tokens long to outweigh the checkpoint."""
    context = context_that_outgrows(CHECKPOINT, K3, 1)
    assert K3.sequence_bytes(context) > CHECKPOINT >= K3.sequence_bytes(context - 1)
    assert round(context / 1e6, 1) == 56.4
    of_eight = context_that_outgrows(CHECKPOINT, K3, 8)
    assert 8 * K3.sequence_bytes(of_eight) > CHECKPOINT >= 8 * K3.sequence_bytes(of_eight - 1)
    number = sequences_that_outgrow(CHECKPOINT, K3, 131_072)
    assert number * K3.sequence_bytes(131_072) > CHECKPOINT
    assert (number - 1) * K3.sequence_bytes(131_072) <= CHECKPOINT
    assert context_that_outgrows(CHECKPOINT, K3, 10_000) == 0  # states alone: 4.5 TB
    assert context_that_outgrows(1e9, Cache(8, 16, 0, 2, 128), 1) == math.inf


def test_which_tier_takes_what_does_not_fit():
    assert offload(0, 100, 10, 100, 1).verdict == "option"
    host = offload(50, 100, 10, 100, 1)
    assert (host.verdict, host.missing, host.seconds) == ("host", 50, 5)
    assert offload(100, 100, 10, 100, 1).verdict == "host"  # which is then full
    nvme = offload(150, 100, 10, 100, 5)
    assert (nvme.verdict, nvme.seconds) == ("nvme", 10)  # 50 below the host's 100
    assert offload(250, 100, 10, 100, 5).verdict == "impossible"
    assert offload(50, None, None, None, None).verdict == "impossible"
    assert offload(50, 100, None, None, None).seconds is None
