"""Bytes of a request of Kimi K3: the transfer of its cache beside its all-to-all."""

from __future__ import annotations

import pytest

from comm.analytic.caches import Cache, linear_state_bytes
from comm.analytic.fanout import miss_probability
from comm.analytic.request import regimes, token_bytes

K3 = Cache(576, 16, 24, state_bytes=linear_state_bytes(69, 96, 128, 4, 32))
MXFP8, BF16 = 3696, 7168
EP64 = 63 * (1 - float(miss_probability(896, 16, 14)))


def test_a_token_at_ep64():
    assert round(EP64, 4) == 14.1375
    assert round(token_bytes(EP64, MXFP8, BF16, 92) / 1e6, 2) == 14.13
    assert round(128 * token_bytes(EP64, MXFP8, BF16, 92) / 1e9, 3) == 1.809


@pytest.mark.parametrize("rows, gigabytes", [(EP64, 130), (16, 147)])
def test_8k_in_1k_out(rows, gigabytes):
    """0.68 GB of cache against 130 to 147 GB of all-to-all: 0.5 %; in one instance nothing."""
    alone, apart = regimes(K3, 8192, 0, 1024, token_bytes(rows, MXFP8, BF16, 92))
    assert (alone.transfer, alone.share) == (0, 0)
    assert round(apart.transfer / 1e9, 2) == 0.68
    assert round(apart.all_to_all / 1e9) == gigabytes
    assert round(100 * apart.share, 1) == 0.5


def test_a_remote_prefix_of_400k_tokens():
    """4K new tokens: 17 % of the bytes are cache; served from two instances, it moves twice."""
    each = token_bytes(EP64, MXFP8, BF16, 92)
    alone, apart, prefix, both = regimes(K3, 404_000, 400_000, 0, each)
    assert round(100 * prefix.share) == 17
    assert prefix.transfer == 400_000 * 27_648 + 449_372_160
    assert both.transfer == prefix.transfer + apart.transfer
    assert {way.all_to_all for way in (alone, apart, prefix, both)} == {4000 * each}
    assert alone.share == 0


def test_nothing_moved_is_no_share():
    assert regimes(K3, 0, 0, 0, 5.0)[0].share == 0
