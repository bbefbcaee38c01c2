"""Buffers of the field's all-to-alls: the published formula, its inverse, a slot by slot count."""

from __future__ import annotations

import pytest

from comm.analytic.buffers import (
    activation_bytes,
    low_latency_bytes,
    low_latency_tokens,
    rank_major_bytes,
)


def test_deepep_low_latency_of_kimi_k3():
    """T = 128: 3.11 GiB; a message of 16 + 7,168 B there, 7,168 + 112 B back."""
    assert low_latency_bytes(896, 128, 3584) == 2 * (2 * 896 * 128 * 7280 + 896 * 4)
    assert round(low_latency_bytes(896, 128, 3584) / 2**30, 2) == 3.11


def test_the_wider_message_decides():
    """Of a width below 128 there are no scales, and the header makes dispatch the wider one."""
    assert low_latency_bytes(32, 4, 64) == 2 * (32 * 4 * 128 + 32 * 4 * 144 + 128)
    assert low_latency_bytes(1, 1, 64) == 2 * (144 + 144 + 128)


@pytest.mark.parametrize("experts, width", [(896, 3584), (256, 7168), (8, 4096)])
def test_the_largest_tokens_under_a_budget(experts, width):
    for tokens in (0, 1, 77, 1024):
        exact = low_latency_bytes(experts, tokens, width)
        assert low_latency_tokens(experts, width, exact) == tokens
        assert low_latency_tokens(experts, width, exact - 1) == max(0, tokens - 1)
    assert low_latency_tokens(experts, width, 0) == 0


def test_rank_major_slots():
    assert rank_major_bytes(64, 128, 7168) == 2 * sum(128 * 7168 for _ in range(64))


def test_activations_value_by_value():
    """One token of a toy: 3 x 8 hidden, 2 rows of 4 in, 4 out and twice 6 inside, 10 logits."""
    values = 3 * 8 + 2 * (4 + 6 + 6 + 4)
    assert activation_bytes(1, 8, 4, 6, 2, 10) == 2 * values + 4 * 10
    assert activation_bytes(5, 8, 4, 6, 2, 10) == 5 * activation_bytes(1, 8, 4, 6, 2, 10)
