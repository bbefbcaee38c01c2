"""Closed forms of one token: published values, enumeration, simulation."""

from itertools import combinations
from math import sqrt
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.analytic.fanout import (
    Constant,
    Copies,
    Distinct,
    copies_covariance,
    distinct_covariance,
    group_limited_pmf,
    miss_probability,
    two_tier_table,
)
from comm.analytic.nested import GroupHits, NestedHits, WeightedCopies


def even(num_experts: int, world_size: int) -> list[int]:
    """Experts of each rank, the first ones owning one more where it does not divide."""
    return [num_experts // world_size + (r < num_experts % world_size) for r in range(world_size)]


# E = 896, K = 16: (R, N), copies remote (sd), distinct ranks (sd), distinct remote (sd),
# remote nodes, two-hop inside the node, all-gather
K3 = [
    ((4, 2), (12.000, 1.717), (3.9617, 0.192), (2.9713, 0.167), 1.0000, 1.9808, 3),
    ((8, 2), (14.000, 1.312), (7.0736, 0.778), (6.1894, 0.746), 1.0000, 5.3052, 7),
    ((16, 2), (15.000, 0.960), (10.3541, 1.250), (9.7069, 1.263), 1.0000, 9.0598, 15),
    ((32, 4), (15.500, 0.690), (12.8293, 1.304), (12.4283, 1.355), 2.9713, 11.2256, 31),
    ((64, 8), (15.750, 0.492), (14.3619, 1.101), (14.1375, 1.161), 6.1894, 12.5667, 63),
]


@pytest.mark.parametrize(
    ("shape", "copies", "distinct", "remote", "nodes", "two_hop", "allgather"), K3
)
def test_reference_values_of_kimi_k3(
    shape: tuple[int, int],
    copies: tuple[float, float],
    distinct: tuple[float, float],
    remote: tuple[float, float],
    nodes: float,
    two_hop: float,
    allgather: int,
) -> None:
    world_size, num_nodes = shape
    sizes = even(896, world_size)
    for law, (mean, sd), digits in [
        (Copies(896 - sizes[0], 896, 16), copies, 5e-4),
        (Distinct.of(sizes, 896, 16), distinct, 5e-5),
        (Distinct.of(sizes[1:], 896, 16), remote, 5e-5),
    ]:
        assert law.mean == pytest.approx(mean, abs=digits)
        assert sqrt(law.variance) == pytest.approx(sd, abs=5e-4)
    other_nodes = Distinct.of([896 // num_nodes] * (num_nodes - 1), 896, 16)
    assert other_nodes.mean == pytest.approx(nodes, abs=5e-5)

    table = two_tier_table(sizes, num_nodes, 16)
    assert table["two_hop"].scale_out == pytest.approx(nodes, abs=5e-5)
    assert table["two_hop"].scale_up == pytest.approx(two_hop, abs=5e-5)
    for strategy, rows in [
        ("per_copy", copies[0]),
        ("rank_dedup", remote[0]),
        ("allgather", allgather),
    ]:
        tiers = table[strategy]
        assert tiers.scale_out + tiers.scale_up == pytest.approx(rows, abs=5e-4)


def test_reference_values_of_uneven_blocks_and_other_models() -> None:
    uneven = Distinct.of([13] * 32 + [12] * 40, 896, 16)
    assert uneven.mean == pytest.approx(14.5442, abs=5e-5)
    assert sqrt(uneven.variance) == pytest.approx(1.056, abs=5e-4)
    for world_size, mean in [(8, 5.2947), (16, 6.5233), (32, 7.2668), (64, 7.6758)]:
        law = Distinct.of(even(256, world_size), 256, 8)
        assert law.mean == pytest.approx(mean, abs=5e-5)
    assert float(miss_probability(896, 16, 448)) == pytest.approx(1.33e-5, abs=5e-8)


def test_every_convention_of_the_field() -> None:
    """T = 4096, K = 8, E = 256, R = 16, N = 2, rows of 7392 B: MB of each rank."""
    sizes = even(256, 16)
    table = two_tier_table(sizes, 2, 8)
    remote_nodes = Distinct.of([128], 256, 8).mean
    for rows, expected_MB in [
        (Copies(256, 256, 8).mean, 242.2),
        (Copies(240, 256, 8).mean, 227.1),
        (Distinct.of(sizes, 256, 8).mean, 197.5),
        (Distinct.of(sizes[1:], 256, 8).mean, 185.2),
        (table["two_hop"].scale_up, 172.8),
        (table["per_copy"].scale_out, 121.1),
        (table["rank_dedup"].scale_out, 98.8),
        (2 * remote_nodes, 60.3),
        (remote_nodes, 30.2),
        (table["allgather"].scale_out + table["allgather"].scale_up, 454.2),
        (table["allgather"].scale_out, 242.2),
    ]:
        assert rows * 4096 * 7392 / 1e6 == pytest.approx(expected_MB, abs=0.05)


def test_the_shortcuts_are_wrong_by_what_the_documentation_says() -> None:
    truth = Distinct.of(even(16, 8), 16, 8).mean
    assert 8 * (1 - (1 - 1 / 8) ** 8) / truth == pytest.approx(0.86, abs=0.005)
    truth = Distinct.of(even(896, 60), 896, 16).mean
    assert Distinct.of([14] * 60, 896, 16).mean / truth == pytest.approx(0.945, abs=0.0005)


def enumerate_rows(sizes: list[int], chosen_set: list[int], top_k: int) -> np.ndarray:
    """[subset, 2] (copies, distinct ranks) in a set of ranks, for every K-subset."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    rows = []
    for subset in combinations(range(len(owner)), top_k):
        inside = [rank for rank in owner[list(subset)] if rank in chosen_set]
        rows.append((len(inside), len(set(inside))))
    return np.array(rows)


@pytest.mark.parametrize(
    ("sizes", "chosen_set", "top_k"),
    [
        ([2] * 8, list(range(8)), 8),  # E = 16, K = 8, R = 8
        ([2] * 8, list(range(1, 8)), 8),
        ([3, 3, 2, 2], [1, 2, 3], 3),
        ([1, 4, 0, 2], [0, 1, 2], 5),  # a rank without experts, K above the experts of a rank
        ([2, 2, 1], [0, 2], 5),  # K = E: nothing is random
        ([1, 1, 1], [0, 1], 1),
        ([4], [0], 2),  # one rank
        ([1], [0], 1),
        ([2, 0, 3], [1], 2),  # a set that owns nothing
    ],
)
def test_enumeration(sizes: list[int], chosen_set: list[int], top_k: int) -> None:
    rows = enumerate_rows(sizes, chosen_set, top_k)
    inside = [sizes[rank] for rank in chosen_set]
    laws = (Copies(sum(inside), sum(sizes), top_k), Distinct.of(inside, sum(sizes), top_k))
    for law, column in zip(laws, rows.T, strict=True):
        assert law.mean == pytest.approx(column.mean(), rel=1e-12)
        assert law.variance == pytest.approx(column.var(), rel=1e-12, abs=1e-15)
        pmf = law.pmf()
        counted = np.bincount(column, minlength=len(pmf)) / len(column)
        np.testing.assert_allclose(pmf, counted, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("a", "b"), [([0], [1]), ([0, 3], [1, 2]), ([1], [0, 2, 3])])
def test_covariances_by_enumeration(a: list[int], b: list[int]) -> None:
    sizes, top_k = [3, 1, 4, 2], 4
    one, other = enumerate_rows(sizes, a, top_k), enumerate_rows(sizes, b, top_k)
    copies, distinct = (np.cov(one[:, i], other[:, i], ddof=0)[0, 1] for i in (0, 1))
    size_a, size_b = (sum(sizes[r] for r in ranks) for ranks in (a, b))
    assert copies_covariance(size_a, size_b, 10, top_k) == pytest.approx(copies, rel=1e-12)
    laws = [Distinct.of([sizes[r] for r in ranks], 10, top_k) for ranks in (a, b)]
    assert distinct_covariance(*laws) == pytest.approx(distinct, rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    split=st.integers(0, 12),
    data=st.data(),
)
def test_the_laws_agree_with_each_other(sizes: list[int], split: int, data: st.DataObject) -> None:
    num_experts = sum(sizes)
    top_k = data.draw(st.integers(1, num_experts))
    a, b = sizes[:split], sizes[split:]
    for make in (lambda s: Distinct.of(s, num_experts, top_k),
                 lambda s: Copies(sum(s), num_experts, top_k)):  # fmt: skip
        law, part, rest = make(sizes), make(a), make(b)
        for each in (law, part, rest):
            pmf = each.pmf()
            x = np.arange(len(pmf))
            assert pmf.sum() == pytest.approx(1, rel=1e-12)
            assert pmf @ x == pytest.approx(each.mean, rel=1e-12)
            assert pmf @ (x - each.mean) ** 2 == pytest.approx(each.variance, abs=1e-12)
        if isinstance(law, Distinct):
            covariance = distinct_covariance(part, rest)
        else:
            covariance = copies_covariance(sum(a), sum(b), num_experts, top_k)
        assert part.mean + rest.mean == pytest.approx(law.mean, rel=1e-12)
        both = part.variance + rest.variance + 2 * covariance
        assert both == pytest.approx(law.variance, abs=1e-12)
    assert Distinct.of(sizes, num_experts, top_k).mean <= top_k + 1e-12


def test_simulation_at_the_real_size() -> None:
    rng = np.random.default_rng(896)
    num_tokens, sizes = 4000, even(896, 72)
    ids = rng.random((num_tokens, 896)).argpartition(16, axis=1)[:, :16]
    owner = np.sort(np.repeat(np.arange(72), sizes)[ids], axis=1)
    distinct = 1 + (owner[:, 1:] != owner[:, :-1]).sum(axis=1)
    law = Distinct.of(sizes, 896, 16)
    assert abs(distinct.mean() - law.mean) < 4 * sqrt(law.variance / num_tokens)
    assert distinct.var() == pytest.approx(law.variance, rel=4 * sqrt(2 / num_tokens))
    chi_square = (np.bincount(distinct, minlength=17) - num_tokens * law.pmf()) ** 2
    likely = law.pmf() * num_tokens > 5
    assert (chi_square / (num_tokens * law.pmf() + 1e-300))[likely].sum() < 25


def test_group_limited_routing() -> None:
    """DeepSeek-V3's shape, groups ranked by their best expert; and min(M, D) token by token."""
    groups = np.arange(5)
    assert group_limited_pmf(256, 8, 8, 4) @ groups == pytest.approx(3.983, abs=5e-4)
    assert Distinct.of([32] * 8, 256, 8).mean == pytest.approx(5.295, abs=5e-4)

    rng = np.random.default_rng(3)
    scores = rng.random((300, 8, 32))
    kept = scores.max(axis=2).argsort(axis=1)[:, -4:]
    limited = np.full_like(scores, -1.0)
    np.put_along_axis(
        limited, kept[:, :, None], np.take_along_axis(scores, kept[:, :, None], axis=1), axis=1
    )
    for free_scores, limited_scores in zip(scores, limited, strict=True):
        free = len(set(free_scores.ravel().argsort()[-8:] // 32))
        hit = len(set(limited_scores.ravel().argsort()[-8:] // 32))
        assert hit == min(4, free)
    assert group_limited_pmf(256, 8, 8, 8) == pytest.approx(Distinct.of([32] * 8, 256, 8).pmf())
    assert group_limited_pmf(8, 6, 2, 2).sum() == pytest.approx(1)


# Nodes as (rows when hit, [(experts of a rank, rows when it is hit)]).
NESTED = [
    [(1, [(2, 0), (1, 1)]), (1, [(2, 0), (1, 1)]), (0, [(3, 1)])],  # two hops from the last node
    [(2, [(1, 1), (2, 3)]), (0, [(2, 0)]), (1, [(0, 1), (3, 0)])],
    [(1, [(4, 0), (4, 1)])],
    [(0, [(2, 2), (2, 1), (3, 0)])],
]


@pytest.mark.parametrize("nodes", NESTED)
@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_hits_of_ranks_and_nodes_by_enumeration(
    nodes: list[tuple[int, list[tuple[int, int]]]], top_k: int
) -> None:
    law = NestedHits(
        tuple((rows, tuple((size, r, 1) for size, r in ranks), 1) for rows, ranks in nodes), top_k
    )
    place = [(n, r) for n, (_, ranks) in enumerate(nodes)
             for r, (size, _) in enumerate(ranks) for _ in range(size)]  # fmt: skip
    counted = []
    for subset in combinations(place, top_k):
        ranks, hit_nodes = set(subset), {node for node, _ in subset}
        counted.append(
            sum(nodes[n][1][r][1] for n, r in ranks) + sum(nodes[n][0] for n in hit_nodes)
        )
    rows = np.array(counted)
    assert law.mean == pytest.approx(rows.mean(), rel=1e-12)
    assert law.variance == pytest.approx(rows.var(), rel=1e-12, abs=1e-15)
    pmf = law.pmf()
    np.testing.assert_allclose(
        pmf, np.bincount(rows, minlength=len(pmf)) / len(rows), rtol=1e-11, atol=0
    )


def test_nodes_and_ranks_alike_may_be_counted_together() -> None:
    apart = NestedHits(tuple((1, ((2, 0, 1), (2, 1, 1), (2, 1, 1)), 1) for _ in range(3)), 4)
    together = NestedHits(((1, ((2, 0, 1), (2, 1, 2)), 3),), 4)
    assert (apart.mean, apart.variance) == (together.mean, together.variance)
    np.testing.assert_allclose(apart.pmf(), together.pmf())
    flat = NestedHits(((0, ((2, 1, 9),), 1),), 4)
    assert flat.variance == pytest.approx(Distinct.of([2] * 9, 18, 4).variance, rel=1e-14)


@pytest.mark.parametrize("values", [((0, 3), (1, 2), (2, 2)), ((1, 7),), ((0, 4), (3, 3))])
@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_choices_of_several_rows(values: tuple[tuple[int, int], ...], top_k: int) -> None:
    brings = np.repeat([rows for rows, _ in values], [size for _, size in values])
    rows = np.array([sum(subset) for subset in combinations(brings.tolist(), top_k)])
    law = WeightedCopies(values, top_k)
    assert law.mean == pytest.approx(rows.mean(), rel=1e-12)
    assert law.variance == pytest.approx(rows.var(), rel=1e-12, abs=1e-15)
    counted = np.bincount(rows, minlength=len(law.pmf())) / len(rows)
    np.testing.assert_allclose(law.pmf(), counted, rtol=1e-11, atol=1e-300)


def test_rows_of_limited_groups() -> None:
    """DeepSeek-V3's shape: 3.983 of 8 groups, 7/8 of them remote; never "M groups at random"."""
    every = GroupHits(((1, 8),), 256, 8, 4)
    assert every.mean == pytest.approx(3.983, abs=5e-4)
    np.testing.assert_allclose(every.pmf(), group_limited_pmf(256, 8, 8, 4))
    remote = GroupHits(((0, 1), (1, 7)), 256, 8, 4)
    assert remote.mean == pytest.approx(every.mean * 7 / 8)
    assert remote.variance > every.variance
    inside = Distinct.of([32] * 4, 128, 8).mean
    assert inside == pytest.approx(3.629, abs=5e-4)  # M groups at random, then K inside: wrong
    assert GroupHits(((1, 1),), 8, 2, 1).variance == 0


@pytest.mark.parametrize(
    ("scores", "groups_hit"), [("uniform", 3.953), ("sigmoid", 3.965), ("four sigmoid", 3.932)]
)
def test_groups_ranked_by_two_experts_depend_on_the_scores(scores: str, groups_hit: float) -> None:
    rng, tokens = np.random.default_rng(31), 12_000
    if scores == "uniform":
        score = rng.random((tokens, 8, 32))
    else:
        scale = 4 if scores == "four sigmoid" else 1
        score = 1 / (1 + np.exp(-scale * rng.standard_normal((tokens, 8, 32))))
    best_two = np.partition(score, -2, axis=2)[:, :, -2:].sum(axis=2)
    allowed = best_two >= np.partition(best_two, -4, axis=1)[:, [-4]]
    limited = np.where(allowed[:, :, None], score, -1).reshape(tokens, 256)
    group = limited.argpartition(-8, axis=1)[:, -8:] // 32
    hit = (group[:, :, None] == np.arange(8)).any(axis=1).sum(axis=1)
    assert hit.mean() == pytest.approx(groups_hit, abs=4 * hit.std() / tokens**0.5 + 5e-4)


def test_constant_law() -> None:
    law = Constant(7)
    assert (law.mean, law.variance) == (7.0, 0.0)
    assert np.flatnonzero(law.pmf()).tolist() == [7]


def test_deterministic_laws_have_exactly_no_variance() -> None:
    assert Distinct.of([112] * 8, 896, 896).variance == 0.0
    assert Distinct.of([1] * 896, 896, 448).variance == 0.0
    assert Distinct.of([896], 896, 16).variance == 0.0
    assert Copies(896, 896, 16).variance == 0.0


def test_four_thousand_ranks_are_fast() -> None:
    started = perf_counter()
    law = Distinct.of([1] * 896 + [0] * 3200, 896, 16)
    assert (law.mean, law.variance) == (16.0, 0.0)
    law = Distinct.of([8] * 4096, 32768, 64)
    assert law.pmf().sum() == pytest.approx(1, rel=1e-12)
    assert 63 < law.mean < 64
    assert law.variance > 0
    assert perf_counter() - started < 1


def test_impossible_questions_are_refused() -> None:
    for ask, message in [
        (lambda: miss_probability(4, 5, 1), "top_k=5 .* num_experts=4"),
        (lambda: Copies(9, 8, 2), "blocks hold 9 experts"),
        (lambda: Distinct.of([4, 5], 8, 2), "blocks hold 9 experts"),
        (lambda: two_tier_table([2] * 6, 4, 2), "num_nodes=4 does not divide the 6 ranks"),
        (lambda: group_limited_pmf(10, 2, 4, 2), "num_expert_groups=4"),
        (lambda: group_limited_pmf(8, 5, 4, 2), "top_k=5 .* num_limited_groups=2"),
    ]:
        with pytest.raises(ValueError, match=message):
            ask()
