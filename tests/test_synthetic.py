"""Uniform ids are uniform, without replacement, and the same on any number of ranks."""

from __future__ import annotations

import time
from itertools import combinations

import numpy as np
import pytest

from moe.routing.draws import scaled
from moe.synthetic import token_hidden, topk_ids


def test_golden_ids() -> None:
    # the docstring's example, and a row of the default run's shape
    two = topk_ids(seed=0, step=0, layer=0, first_token=0, num_tokens=2, num_experts=896, top_k=4)
    assert two.tolist() == [[10, 215, 99, 505], [448, 248, 847, 883]]
    row = topk_ids(7, 3, 2, 1000, 1, 896, 16)[0].tolist()
    assert row == [168, 428, 19, 177, 877, 813, 305, 750, 779, 515, 215, 571, 178, 423, 650, 554]


def floyd(draws: list[int], num_experts: int) -> list[int]:
    """The textbook's loop, one token at a time, for 64-bit draws."""
    chosen: list[int] = []
    for largest, word in zip(range(num_experts - len(draws), num_experts), draws, strict=True):
        candidate = word * (largest + 1) >> 64
        chosen.append(largest if candidate in chosen else candidate)
    return chosen


def test_equals_floyds_loop() -> None:
    from moe.philox import Purpose, words_per_item

    words = words_per_item(5, Purpose.TOPK_IDS, 1, 2, 30, 200, 7)
    wanted = [floyd([int(word) for word in row], 9) for row in words]
    assert topk_ids(5, 2, 1, 30, 200, 9, 7).tolist() == wanted


@pytest.mark.parametrize("num_experts, top_k", [(5, 2), (6, 3), (7, 1), (5, 4), (8, 6)])
def test_every_set_is_equally_likely(num_experts: int, top_k: int) -> None:
    rows = topk_ids(11, 0, 0, 0, 60_000, num_experts, top_k)
    codes = (1 << np.sort(rows, axis=1)).sum(axis=1)
    counts = [
        (codes == sum(1 << e for e in subset)).sum()
        for subset in combinations(range(num_experts), top_k)
    ]
    assert sum(counts) == len(rows)
    # fixed seed: passes or fails for good; a law that is 5 % off gives a p of 1e-8 and less
    assert chi_square_z(counts) < 3.09  # p > 1e-3


def chi_square_z(counts: list[int]) -> float:
    """Normal deviate of the chi-square of equal chances, by Wilson and Hilferty's cube root."""
    mean, freedom = sum(counts) / len(counts), len(counts) - 1
    chi_square = sum((count - mean) ** 2 / mean for count in counts)
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def test_the_chi_square_sees_a_law_that_is_a_little_off() -> None:
    assert abs(chi_square_z([10_000 + d for d in (100, -100, 50, -50, 0)])) < 1
    assert chi_square_z([10_500, 10_500, 9_500, 9_500, 10_000]) > 5


def test_ids_are_distinct_and_in_range() -> None:
    rows = topk_ids(0, 0, 0, 0, 20_000, 896, 16)  # drawn with replacement, 12.6 % of rows repeat
    assert rows.dtype == np.int64 and rows.flags.c_contiguous
    assert rows.min() == 0 and rows.max() == 895
    assert (np.diff(np.sort(rows, axis=1), axis=1) > 0).all()


def test_any_split_of_the_tokens_gives_the_same_rows() -> None:
    whole = topk_ids(1, 2, 3, 0, 100, 896, 16)
    parts = [topk_ids(1, 2, 3, first, size, 896, 16) for first, size in [(0, 1), (1, 0), (1, 99)]]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_seed_step_and_layer_all_matter(argument: int) -> None:
    base = [1, 2, 3]
    other = list(base)
    other[argument] += 1
    assert (topk_ids(*base, 0, 64, 896, 16) != topk_ids(*other, 0, 64, 896, 16)).mean() > 0.9


def test_borders() -> None:
    assert topk_ids(0, 0, 0, 0, 0, 896, 16).shape == (0, 16)
    assert topk_ids(0, 0, 0, 0, 3, 1, 1).tolist() == [[0], [0], [0]]
    assert np.array_equal(np.sort(topk_ids(0, 0, 0, 0, 9, 12, 12)), np.tile(np.arange(12), (9, 1)))
    with pytest.raises(ValueError, match="top_k=9 must lie in 1 .. num_experts=8"):
        topk_ids(0, 0, 0, 0, 1, 8, 9)


@pytest.mark.parametrize("bound", [1, 2, 3, 896, 2**31 - 1])
def test_scaling_is_exact_where_the_value_steps(bound: int) -> None:
    steps = [-(-value * 2**64 // bound) for value in range(1, bound, max(1, bound // 9))]
    words = [0, 2**32 - 1, 2**64 - 1, *steps, *(step - 1 for step in steps)]
    found = scaled(np.array(words, dtype=np.uint64), bound)
    assert found.tolist() == [word * bound >> 64 for word in words]


def test_a_step_costs_little() -> None:
    def seconds() -> float:
        start = time.process_time()
        topk_ids(0, 0, 0, 0, 1024, 896, 16)
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 0.005


def test_hidden_is_standard_and_belongs_to_the_token() -> None:
    whole = token_hidden(3, 1, 50, 400, 37)
    assert whole.dtype == np.float32 and whole.shape == (400, 37)
    assert np.array_equal(whole[10:12], token_hidden(3, 1, 60, 2, 37))
    assert abs(whole.mean()) < 0.03 and abs(whole.std() - 1) < 0.02
    assert np.abs(np.corrcoef(whole, rowvar=False) - np.eye(37)).max() < 0.25
    assert token_hidden(3, 1, 0, 0, 37).shape == (0, 37)
    assert not np.array_equal(whole, token_hidden(3, 2, 50, 400, 37))


def test_hidden_golden() -> None:
    assert token_hidden(0, 0, 0, 1, 3)[0].tolist() == pytest.approx(
        [-1.126166, 0.931173, -1.298536], abs=1e-6
    )
