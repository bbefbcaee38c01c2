"""Weighted sets are drawn exactly: against enumeration, fractions and a loop over one token."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import combinations
from math import comb, prod

import numpy as np
import pytest
from routing_samples import chi_square_z

from moe.philox import Purpose, words_per_item
from moe.routing import weighted
from moe.routing.draws import scaled, seeded_order, uniform_subsets
from moe.routing.weighted import inclusion, rounded, weighted_subsets
from moe.synthetic import topk_ids

CASES = [  # weights, K
    ([1, 1, 1, 1, 1, 1], 3),
    ([1, 2, 3, 0.5, 0, 4], 3),
    ([1000, 1, 1, 1, 0.001, 1], 3),
    ([3, 1, 2], 2),
    ([1, 5, 1, 1], 1),
    ([0.25, 4, 1, 1, 2, 8], 5),
]


def words(count: int, top_k: int, seed: int = 2) -> np.ndarray:
    return words_per_item(seed, Purpose.WEIGHTED_IDS, 0, 0, 0, count, top_k)


def chances(weights: list[float], top_k: int) -> dict[tuple[int, ...], Fraction]:
    """Every set of top_k experts and its chance, by enumeration."""
    exact = [Fraction(weight) for weight in weights]
    products = {
        chosen: prod(exact[e] for e in chosen)
        for chosen in combinations(range(len(weights)), top_k)
    }
    return {chosen: part / sum(products.values()) for chosen, part in products.items()}


@pytest.mark.parametrize("weights, top_k", CASES)
def test_sets_are_as_likely_as_their_products(weights: list[float], top_k: int) -> None:
    count = 60_000
    drawn = np.sort(weighted_subsets(np.array(weights, float), words(count, top_k)), axis=1)
    codes = (1 << drawn).sum(axis=1)
    seen, wanted, rare = [], [], [0, 0.0]
    for chosen, chance in chances(weights, top_k).items():
        number = (codes == sum(1 << e for e in chosen)).sum()
        if chance == 0:
            assert number == 0
        elif chance * count < 10:  # too few for a chi-square: together
            rare = [rare[0] + number, rare[1] + float(chance * count)]
        else:
            seen.append(number)
            wanted.append(float(chance * count))
    if rare[1] >= 10:
        seen, wanted = [*seen, rare[0]], [*wanted, rare[1]]
    assert len(seen) > 1 and sum(seen) + rare[0] * (rare[1] < 10) == count
    # fixed seed: passes or fails for good; with 60,000 rows a law that is 5 % off has a z above 5
    assert chi_square_z(seen, wanted) < 3.09


def test_the_chi_square_sees_the_softmax_law() -> None:
    """Plackett-Luce, as from Gumbel noise, is another law than this one: it must be told apart."""
    generator = np.random.default_rng(0)
    weights = np.array([1, 2, 3, 0.5, 1, 4])
    noisy = np.log(weights) + generator.gumbel(size=(60_000, 6))
    codes = (1 << np.argsort(-noisy, axis=1)[:, :3]).sum(axis=1)
    law = chances(weights.tolist(), 3)
    seen = [(codes == sum(1 << e for e in chosen)).sum() for chosen in law]
    assert chi_square_z(seen, [float(chance * 60_000) for chance in law.values()]) > 10


@pytest.mark.parametrize("weights, top_k", CASES)
def test_equals_a_loop_over_experts(weights: list[float], top_k: int) -> None:
    """One token at a time, in fractions: leave an expert out while all that remain would do."""
    exact = [Fraction(weight) for weight in weights]
    order = sorted((e for e in range(len(exact)) if exact[e]), key=lambda e: -exact[e])

    def sums(tail: list[int], size: int) -> Fraction:
        return sum((prod(exact[e] for e in one) for one in combinations(tail, size)), Fraction(0))

    def loop(row: list[int]) -> list[int]:
        chosen, tail = [], list(order)
        for size, word in zip(range(top_k, 0, -1), row, strict=True):
            limit = Fraction(word >> 11, 2**53) * sums(tail, size)
            while sums(tail[1:], size) > limit:
                tail.pop(0)
            chosen.append(tail.pop(0))
        return chosen

    drawn = words(60, top_k)
    wanted = [loop([int(word) for word in row]) for row in drawn]
    assert weighted_subsets(np.array(weights, float), drawn).tolist() == wanted


def test_golden_rows() -> None:
    falling = rounded(np.arange(1.0, 897) ** -1.0)
    # whatever changes these changes the routes of recorded runs
    assert weighted_subsets(falling, words(1, 16, seed=0))[0].tolist() == GOLDEN


GOLDEN = [0, 1, 4, 7, 19, 23, 33, 41, 43, 56, 152, 174, 232, 457, 553, 744]


@pytest.mark.parametrize(
    "weights",
    [
        np.ones(896),
        np.repeat([1e6, 1.0], [448, 448]),
        np.geomspace(1, 1e-6, 896),
        np.full(300, 1e-6),
    ],
)
@pytest.mark.parametrize("top_k", [1, 16, 100])
def test_the_table_holds_numbers_that_a_double_cannot(weights: np.ndarray, top_k: int) -> None:
    order = np.sort(weights)[::-1]
    exact = [Fraction(0)] * top_k
    exact.insert(0, Fraction(1))
    for weight in (Fraction(float(one)) for one in order[::-1][:150]):
        exact = [1, *(exact[k] + weight * exact[k - 1] for k in range(1, top_k + 1))]
    number = weighted._tail_table(order.tobytes(), top_k)[top_k, 150]
    reached = Fraction(float(number.imag)) * Fraction(2) ** int(number.real)
    assert abs(reached / exact[top_k] - 1) < 1e-12


def test_the_table_of_weights_that_are_far_apart() -> None:
    weights = np.geomspace(1e90, 1e-90, 13)
    exact = [Fraction(1), *[Fraction(0)] * 7]
    table = weighted._tail_table(weights.tobytes(), 7)
    for column, weight in enumerate(weights[::-1].tolist(), start=1):
        exact = [Fraction(1), *(exact[k] + Fraction(weight) * exact[k - 1] for k in range(1, 8))]
        for number, wanted in zip(table[:, column].tolist(), exact, strict=True):
            if wanted == 0:
                assert number.imag == 0 and number.real < -(10**9)
                continue
            reached = Fraction(number.imag) * Fraction(2) ** int(number.real)
            assert abs(reached - wanted) <= wanted * Fraction(1, 10**14)


def test_896_ones_have_1e34_sets() -> None:
    table = weighted._tail_table(np.ones(896).tobytes(), 896)
    for size in (16, 448, 896):
        number = table[size, 896]
        reached = Fraction(float(number.imag)) * Fraction(2) ** int(number.real)
        assert abs(reached / comb(896, size) - 1) < 1e-12


@pytest.mark.parametrize("word", [0, 2**11 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("top_k", [1, 16, 896])
def test_the_most_extreme_words_draw_distinct_experts(word: int, top_k: int) -> None:
    for weights in (np.ones(896), rounded(np.geomspace(1e6, 1, 896)), np.geomspace(1, 1e-250, 896)):
        drawn = weighted_subsets(weights, np.full((3, top_k), word, dtype=np.uint64))
        assert all(len(set(row)) == top_k for row in drawn.tolist())
        assert drawn.min() >= 0 and drawn.max() < 896
        if word < 2**11:  # a draw of 0 leaves out all that it can
            lightest = np.argsort(-weights, kind="stable")[896 - top_k :]
            assert drawn.tolist() == [lightest.tolist()] * 3


def test_borders() -> None:
    assert weighted_subsets(np.ones(5), words(0, 3)).shape == (0, 3)
    everything = weighted_subsets(np.array([1e-6, 1, 1e6, 2]), words(9, 4))
    assert np.array_equal(np.sort(everything, axis=1), np.tile(np.arange(4), (9, 1)))
    two_of_three = weighted_subsets(np.array([0, 5, 0, 1, 0.0]), words(9, 2))
    assert np.array_equal(np.sort(two_of_three, axis=1), np.tile([1, 3], (9, 1)))
    with pytest.raises(ValueError, match="top_k=3: only 2 experts .* nearest: 2"):
        weighted_subsets(np.array([0, 5, 0, 1.0]), words(1, 3))
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="finite and at least 0"):
            weighted_subsets(np.array([1, bad, 1]), words(1, 1))


@pytest.mark.parametrize("weights, top_k", CASES)
def test_inclusion_equals_enumeration(weights: list[float], top_k: int) -> None:
    wanted = [0.0] * len(weights)
    for chosen, chance in chances(weights, top_k).items():
        for expert in chosen:
            wanted[expert] += float(chance)
    assert inclusion(np.array(weights, float), top_k) == pytest.approx(wanted, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("top_k", [1, 16, 300, 895, 896])
def test_inclusion_of_many_experts(top_k: int) -> None:
    assert inclusion(np.full(896, 7.0), top_k) == pytest.approx(np.full(896, top_k / 896))
    wide = rounded(np.geomspace(1e6, 1, 896))
    reached = inclusion(wide, top_k)
    assert reached.sum() == pytest.approx(top_k, rel=1e-9)
    assert (np.diff(reached) <= 1e-12).all() and reached.min() > 0 and reached.max() <= 1 + 1e-12


def test_draws_of_many_experts_have_the_inclusion_chances() -> None:
    weights, count = rounded(np.arange(1.0, 897) ** -1.0), 40_000
    pi = inclusion(weights, 16)
    seen = np.bincount(weighted_subsets(weights, words(count, 16)).ravel(), minlength=896)
    z = (seen - count * pi) / np.sqrt(count * pi * (1 - pi))
    # 896 of them: P(some |z| > 4.5) is 0.6 %; the squares, mean 1, sd sqrt(2/896), within 4 sd
    assert np.abs(z).max() < 4.5
    assert abs((z**2).mean() - 1) < 4 * (2 / 896) ** 0.5


def test_rounding_hides_the_last_bits() -> None:
    raw = np.arange(1.0, 897) ** -1.3
    for other in (np.nextafter(raw, 0), np.nextafter(raw, 9), raw * (1 + 4e-16)):
        assert np.array_equal(rounded(other), rounded(raw))
    assert np.abs(rounded(raw) / raw - 1).max() < 2**-24
    assert rounded(np.array([0.0, 1.0, 8.0, 1e6])).tolist() == [0.0, 1.0, 8.0, 1e6]
    mantissa, _ = np.frexp(rounded(raw))
    assert np.array_equal(mantissa * 2**24, np.rint(mantissa * 2**24))


def test_an_order_for_each_layer_costs_no_new_table() -> None:
    weights = rounded(np.arange(1.0, 41) ** -1.0)
    weighted._tail_table.cache_clear()
    plain = weighted_subsets(weights, words(50, 4))
    for layer in range(5):
        order = seeded_order(1, layer, 40)
        moved = np.empty(40)
        moved[order] = weights
        assert np.array_equal(weighted_subsets(moved, words(50, 4)), order[plain])
    assert weighted._tail_table.cache_info().misses == 1


def test_a_layer_costs_little() -> None:
    weights = rounded(np.geomspace(1, 1e-6, 896))

    def seconds(fresh: bool) -> float:
        if fresh:
            weighted._tail_table.cache_clear()
        start = time.process_time()
        weighted_subsets(weights, words(512, 16))
        return time.process_time() - start

    assert min(seconds(fresh=True) for _ in range(5)) < 0.06
    assert min(seconds(fresh=False) for _ in range(5)) < 0.01


def floyd(row: list[int], bound: int) -> list[int]:
    """Distinct numbers below `bound`, one for each word, in plain Python."""
    chosen: list[int] = []
    for largest, word in enumerate(row, start=bound - len(row)):
        number = word * (largest + 1) >> 64
        chosen.append(largest if number in chosen else number)
    return chosen


def test_uniform_draws_equal_those_of_the_uniform_router() -> None:
    drawn = words_per_item(3, Purpose.TOPK_IDS, 1, 2, 7, 100, 5)
    assert np.array_equal(uniform_subsets(drawn, 30), topk_ids(3, 2, 1, 7, 100, 30, 5))
    assert uniform_subsets(drawn, 30).tolist() == [floyd(row, 30) for row in drawn.tolist()]
    numbers = [0, 1, 2**32, 2**63 + 12345, 2**64 - 1]
    for bound in (1, 7, 2**31 - 1):
        reached = scaled(np.array(numbers, dtype=np.uint64), bound).tolist()
        assert reached == [number * bound >> 64 for number in numbers]


def test_orders_are_permutations_that_belong_to_a_layer() -> None:
    first, again, other = (seeded_order(4, layer, 896) for layer in (2, 2, 3))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert np.array_equal(np.sort(first), np.arange(896))
    assert not np.array_equal(first, seeded_order(5, 2, 896))
