"""Weights of Kimi K3 against its published files; reads against a draw, token by token."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from comm.analytic.weights import Format, Weights, slots_of, touched_experts

K3 = Weights(
    expert=33_030_144,
    num_experts=896,
    layers=92,
    matrices=57_179_884_544 - 2 * 1_174_405_120 - 590_872_576 - 4_021_248,
    plain=2 * 1_174_405_120 + 590_872_576 + 4_021_248,
    single=11_122_432,
    lookup=1_174_405_120,
    expert_format=Format(4, 8, 32),
    matrix_format=Format(16),
)


def test_the_checkpoint_to_the_byte():
    """The index of the released files says 1,560,860,324,864 B."""
    assert K3.parameters == 2_779_931_837_184
    assert K3.packed_bytes == 1_361_370_415_104
    assert K3.scales_bytes == 85_085_650_944
    assert K3.rest_bytes == 114_404_258_816
    assert K3.stored_bytes == 1_560_860_324_864
    assert K3.expert_bytes == 17_547_264


def test_floors_of_the_same_parameters():
    assert round(K3.parameters / 2 / 1e12, 2) == 1.39
    assert round(2 * K3.parameters / 1e12, 2) == 5.56
    nvfp4 = replace(K3, expert_format=Format(4, 8, 16))
    assert round(nvfp4.stored_bytes / 1e9, 1) == 1645.9  # as another release has it


def test_bytes_read_in_a_step():
    """Without the 2.35 GB table: 138 GB at 1 token, 306 at 8, 746 at 32, 1.41 TB at 128, 1.56."""
    assert round(K3.lookup * 2 / 1e9, 2) == 2.35
    read = {tokens: K3.read_bytes(tokens, 16) / 1e9 for tokens in (1, 8, 32, 128, 512, 10**6)}
    assert [round(read[tokens]) for tokens in (1, 8, 32)] == [138, 306, 746]
    assert [round(read[tokens] / 1e3, 2) for tokens in (128, 512, 10**6)] == [1.41, 1.56, 1.56]
    assert K3.read_bytes(0, 16) == K3.rest_bytes - 2 * K3.lookup


def test_touched_experts_by_enumeration():
    """Every pair of choices of 2 of 5 experts."""
    choices = list(combinations(range(5), 2))
    sizes = [len({*one, *other}) for one in choices for other in choices]
    assert touched_experts(5, 2, 2) == pytest.approx(sum(sizes) / len(sizes))
    assert touched_experts(5, 5, 1) == 5 and touched_experts(5, 5, 0) == 0


def test_64_tokens_touch_613_of_896_experts():
    assert round(touched_experts(896, 16, 64)) == 613
    rng = random.Random(1)
    drawn = [len({e for _ in range(64) for e in rng.sample(range(896), 16)}) for _ in range(60)]
    assert sum(drawn) / 60 == pytest.approx(touched_experts(896, 16, 64), abs=6)


def test_what_a_rank_holds():
    """EP64: 14 experts a layer and a copy of the rest; two ranks that share a copy have half."""
    assert K3.routed_on_rank(14) == 92 * 14 * 17_547_264
    assert K3.rest_on_rank(1) == K3.rest_bytes == 2 * K3.rest_on_rank(2)
    padded = replace(K3, overhead=0.1)
    assert padded.routed_on_rank(14) == pytest.approx(1.1 * K3.routed_on_rank(14))
    assert padded.rest_on_rank(1) == pytest.approx(1.1 * K3.rest_on_rank(1))
    assert padded.stored_bytes == K3.stored_bytes


def test_slots_that_do_not_divide():
    uneven = slots_of(896, 0, 72)
    assert (uneven.count(13), uneven.count(12)) == (32, 40) and sum(uneven) == 896
    assert slots_of(896, 40, 72) == (13,) * 72
    assert slots_of(256, 32, 32) == (9,) * 32
    assert slots_of(5, 2, 3) == (3, 2, 2)  # the first ranks have more
