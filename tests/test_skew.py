"""The general formula: enumeration, the uniform closed forms, simulation, extremes."""

from itertools import combinations
from math import sqrt
from time import process_time

import numpy as np
import pytest
from law_simulation import even
from numpy.typing import NDArray

from comm.analytic.fanout import Copies, Distinct
from comm.analytic.nested import NestedHits, WeightedCopies
from comm.analytic.skew import (
    Picks,
    SkewedHits,
    chances,
    inclusion,
    max_over_mean,
    served_once,
    skewed_rows,
)

WEIGHTS = np.array([0.4, 7.0, 1.0, 300.0, 0.0, 1.0, 2e-3, 5.0, 1.0])
HOMES = np.array([0, 0, 1, 1, 1, 2, 3, 3, 3])
NODE_OF = np.array([0, 1, 0, 1])
# Expert 1 on ranks 0 and 2, expert 3 on three ranks: shares, not owners.
SHARED = served_once(HOMES, 4)
SHARED[1] = [0.5, 0, 0.5, 0]
SHARED[3] = [0.25, 0.5, 0, 0.25]
PATTERNS = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0], [1, 0, 2, 1, 0, 3], [0] * 6])


def outcomes(
    weights: NDArray[np.float64], share: NDArray[np.float64], top_k: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """(probability, copies [n, G], blocks hit [n, G + N]) of every way to choose and to serve."""
    found = []
    for subset in combinations(range(len(weights)), top_k):
        ways = [(np.prod(weights[list(subset)]), np.zeros(share.shape[1], np.int64))]
        for expert in subset:
            grown = []
            for p, copies in ways:
                for rank in np.flatnonzero(share[expert]):
                    more = copies.copy()
                    more[rank] += 1
                    grown.append((p * share[expert, rank], more))
            ways = grown
        found += ways
    p = np.array([p for p, _ in found])
    copies = np.array([copies for _, copies in found])
    hit = np.concatenate([copies, copies @ np.eye(2, dtype=np.int64)[NODE_OF]], axis=1) > 0
    return p / p.sum(), copies, hit.astype(np.int64)


@pytest.mark.parametrize("share", [served_once(HOMES, 4), SHARED], ids=["one rank", "shared"])
@pytest.mark.parametrize("top_k", [1, 3, 8])  # 8: all that may be chosen
def test_enumeration(share: NDArray[np.float64], top_k: int) -> None:
    p, copies, hit = outcomes(WEIGHTS, share, top_k)
    picks = Picks(WEIGHTS, share, NODE_OF, top_k)
    for blocks, (mean, covariance) in [
        (copies, picks.copies),
        (1 - hit, picks.misses),
    ]:
        np.testing.assert_allclose(mean, p @ blocks, rtol=1e-10, atol=1e-14)
        truth = (blocks * p[:, None]).T @ blocks - np.outer(p @ blocks, p @ blocks)
        np.testing.assert_allclose(covariance, truth, rtol=1e-9, atol=1e-13)
    for kind, blocks in [("copies", copies), ("hits", hit)]:
        for law, pattern in zip(skewed_rows(picks, kind, PATTERNS), PATTERNS, strict=True):
            rows = blocks @ pattern[: blocks.shape[1]]
            mean = p @ rows
            assert law.mean == pytest.approx(mean, rel=1e-10)
            assert law.variance == pytest.approx(p @ (rows - mean) ** 2, rel=1e-9, abs=1e-12)
            if isinstance(law, SkewedHits) and not law.has_pmf:
                assert share is SHARED and np.count_nonzero(pattern) > 1
                with pytest.raises(ValueError, match="no distribution"):
                    law.pmf()
                continue
            pmf = law.pmf()
            counted = np.bincount(rows, p, minlength=len(pmf))
            np.testing.assert_allclose(pmf, counted, rtol=1e-9, atol=1e-14)


def test_inclusion_by_enumeration() -> None:
    p, _, _ = outcomes(WEIGHTS, served_once(HOMES, 4), 3)
    chosen = [[e in subset for e in range(9)] for subset in combinations(range(9), 3)]
    np.testing.assert_allclose(inclusion(WEIGHTS, 3), p @ np.array(chosen), rtol=1e-10)
    assert inclusion(WEIGHTS, 8).tolist() == pytest.approx([1, 1, 1, 1, 0, 1, 1, 1, 1])
    assert inclusion(WEIGHTS, 0).tolist() == [0.0] * 9


@pytest.mark.parametrize("world_size", [8, 60, 72])
def test_weights_of_one_are_uniform_routing(world_size: int) -> None:
    sizes, per_node = even(896, world_size), world_size // 4
    node_of = np.arange(world_size) // per_node
    picks = Picks(np.ones(896), served_once(np.repeat(np.arange(world_size), sizes), world_size),
                  node_of, 16)  # fmt: skip
    pattern = np.zeros((2, world_size + 4), np.int64)
    pattern[0, 1:world_size] = 1
    pattern[1, :world_size] = np.arange(world_size) % per_node > 0
    pattern[1, world_size:] = 1
    remote, hops = skewed_rows(picks, "hits", pattern)
    truth = Distinct.of(sizes[1:], 896, 16)
    nodes = []
    for node in range(4):
        members = np.flatnonzero(node_of == node)
        ranks = tuple((sizes[r], int(pattern[1, r]), 1) for r in members)
        nodes.append((1, ranks, 1))
    for law, closed in [(remote, truth), (hops, NestedHits(tuple(nodes), 16))]:
        assert law.mean == pytest.approx(closed.mean, rel=1e-10)
        assert law.variance == pytest.approx(closed.variance, rel=1e-10)
        pmf, exact = law.pmf(), closed.pmf()
        np.testing.assert_allclose(pmf[: len(exact)], exact[: len(pmf)], rtol=1e-9, atol=1e-15)
    (copies,) = skewed_rows(picks, "copies", pattern[:1])
    closed_copies = Copies(896 - sizes[0], 896, 16)
    assert copies.mean == pytest.approx(closed_copies.mean, rel=1e-10)
    assert copies.variance == pytest.approx(closed_copies.variance, rel=1e-10)
    np.testing.assert_allclose(copies.pmf(), closed_copies.pmf(), rtol=1e-9, atol=1e-15)
    assert WeightedCopies(((0, sizes[0]), (1, 896 - sizes[0])), 16).pmf() == pytest.approx(
        closed_copies.pmf()
    )


def test_replicas_at_the_real_size_by_simulation() -> None:
    """E = 896, 32 of them on two of 8 ranks, weights over three decades."""
    rng = np.random.default_rng(4)
    weights = 10 ** rng.uniform(0, 3, 896)
    share = served_once(np.arange(896) % 8, 8)
    hot = weights.argsort()[-32:]
    share[hot, hot % 8] = share[hot, (hot + 3) % 8] = 0.5
    picks, tokens = Picks(weights, share, np.zeros(8, np.int64), 16), 20_000
    # Sets of 16 by their law: independent tosses, kept when exactly 16 show heads.
    chance, kept = chances(weights, 16), []
    while len(kept) < tokens:
        tosses = rng.random((20_000, 896)) < chance
        kept += list(tosses[tosses.sum(axis=1) == 16])
    chosen = np.array(kept[:tokens])
    second = rng.random(chosen.shape) < 0.5
    copies = np.zeros((tokens, 8), np.int64)
    for rank in range(8):
        whole, half = share[:, rank] == 1, share[:, rank] == 0.5
        first = np.zeros(896, bool)
        first[hot] = hot % 8 == rank
        mine = whole | (half & (second == first))
        copies[:, rank] = (chosen & mine).sum(axis=1)
    for mean, covariance, rows in [
        (*picks.copies, copies),
        (1 - picks.misses[0][:8], picks.misses[1][:8, :8], copies > 0),
    ]:
        seen, spread = rows.mean(axis=0), np.cov(rows.T, ddof=0)
        assert (np.abs(seen - mean) <= 4.5 * np.sqrt(covariance.diagonal() / tokens)).all()
        scale = np.sqrt(np.outer(covariance.diagonal(), covariance.diagonal()))
        assert (np.abs(spread - covariance) <= 6 * scale / sqrt(tokens)).all()
    busiest = copies.mean(axis=0).max() / 2
    assert max_over_mean(weights, share, 16) == pytest.approx(busiest, rel=0.02)


@pytest.mark.parametrize("decades", [0, 6, 300])
def test_no_overflow_and_no_underflow(decades: int) -> None:
    rng = np.random.default_rng(9)
    weights = 10.0 ** rng.uniform(-decades / 2, decades / 2, 896)
    chosen = inclusion(weights, 16)
    assert chosen.sum() == pytest.approx(16, rel=1e-10)
    assert (np.diff(chosen[weights.argsort()]) >= -1e-12).all()  # heavier, oftener
    np.testing.assert_allclose(inclusion(weights * 1e5, 16), chosen, rtol=1e-9)
    picks = Picks(weights, served_once(np.arange(896) % 72, 72), np.arange(72) // 8, 16)
    started = process_time()
    missed, covariance = picks.misses
    copies, _ = picks.copies
    assert process_time() - started < 4  # a tenth of it on an idle core
    assert copies.sum() == pytest.approx(16, rel=1e-9)
    assert np.isfinite(covariance).all() and (covariance.diagonal() >= -1e-12).all()
    assert ((missed >= 0) & (missed <= 1 + 1e-12)).all()


def test_a_law_without_freedom_has_exactly_no_variance() -> None:
    picks = Picks(WEIGHTS, SHARED, NODE_OF, 3)
    (every,) = skewed_rows(picks, "copies", np.array([[1, 1, 1, 1, 0, 0]]))
    assert (every.mean, every.variance) == (3.0, 0.0)
    one_rank = Picks(WEIGHTS, np.ones((9, 1)), np.zeros(1, np.int64), 3)
    (hit,) = skewed_rows(one_rank, "hits", np.array([[1, 1]]))
    assert (hit.mean, hit.variance) == (2.0, 0.0)


def test_impossible_weights_are_refused() -> None:
    for weights, message in [
        (np.array([1.0, 0.0]), "top_k=2 experts cannot be chosen from 1 of positive weight"),
        (np.array([1.0, -1.0, 1.0]), "at least 0"),
        (np.array([1.0, np.nan, 1.0]), "finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            chances(weights, 2)
