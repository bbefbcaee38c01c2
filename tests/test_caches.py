"""Caches and states of Kimi K3, of the same model without its hybrid, and of windowed models."""

from __future__ import annotations

import math

import pytest

from comm.analytic.caches import (
    Cache,
    break_even_tokens,
    linear_state_bytes,
    multi_head_values,
    saved_share,
)

STATE = linear_state_bytes(69, 96, 128, 4, 32)
K3 = Cache(values=512 + 64, bits=16, full_layers=24, state_bytes=STATE)


def test_kimi_k3():
    assert K3.token_bytes == 27_648
    assert Cache(576, 8, 24).token_bytes == 13_824
    assert STATE == 69 * (96 * 128 * 128 * 4 + 9 * 96 * 128 * 2) == 449_372_160
    assert linear_state_bytes(69, 96, 128, 4, 16) == 232_316_928


def test_the_same_model_without_its_hybrid():
    assert Cache(576, 16, 93).token_bytes == 107_136
    assert Cache(multi_head_values(96, 192, 128), 16, 93).token_bytes == 5_713_920
    assert Cache(multi_head_values(96, 128, 128), 16, 93).token_bytes == 4_571_136


def test_the_hybrid_keeps_more_of_a_short_sequence():
    even = break_even_tokens(K3, 69)
    assert math.floor(even) == 5_653
    all_mla = Cache(576, 16, 93)
    assert K3.sequence_bytes(5_653) > all_mla.sequence_bytes(5_653)
    assert K3.sequence_bytes(5_654) < all_mla.sequence_bytes(5_654)
    assert break_even_tokens(all_mla, 0) == math.inf


@pytest.mark.parametrize(
    "tokens, saved", [(2**20, 0.738), (2**17, 0.71), (2**15, 0.61), (2**13, 0.23), (2**12, -0.28)]
)
def test_the_share_that_the_hybrid_saves(tokens, saved):
    digits = 3 if tokens == 2**20 else 2
    assert round(saved_share(K3, 69, tokens), digits) == saved


def test_windows_keep_their_last_tokens():
    """gpt-oss-120b: 18 layers keep everything, 18 the last 128; 8 heads of 64, key and value."""
    oss = Cache(2 * 8 * 64, 16, 18, window_layers=18, window=128)
    assert oss.token_bytes == 18 * 2048
    assert oss.cache_bytes(100) == 36 * 100 * 2048
    assert oss.cache_bytes(1000) == (18 * 1000 + 18 * 128) * 2048


@pytest.mark.parametrize("cache", [K3, Cache(1024, 16, 18, 18, 128), Cache(1024, 16, 0, 4, 128)])
@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 40_000])
def test_the_longest_sequence_within_its_own_bytes(cache, tokens):
    within = cache.tokens_within(cache.sequence_bytes(tokens))
    if cache.full_layers == 0 and tokens >= 128:
        assert within == math.inf
    else:
        assert within == tokens


def test_a_sequence_may_hold_several_slots_but_moves_one():
    several = Cache(576, 16, 24, state_bytes=STATE, slots=5)
    assert several.constant_bytes == 5 * STATE
    assert several.sequence_bytes(8192) == 8192 * 27_648 + 5 * STATE
    assert several.transfer_bytes(8192) == K3.transfer_bytes(8192) == 8192 * 27_648 + STATE
    assert several.tokens_within(4 * STATE) == 0


def test_states_alone_fit_into_their_own_bytes_at_any_length():
    states = Cache(576, 16, 0, state_bytes=STATE)
    assert states.tokens_within(STATE) == math.inf
    assert states.tokens_within(STATE - 1) == 0
