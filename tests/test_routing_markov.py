"""Chains of tokens: as much in common as asked for, and every token uniform by itself."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from routing_samples import chi_square_z, rows, source

from comm.analytic.law import Markov, Uniform
from moe.routing.draws import outside, uniform_sequences


def shared(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[n] experts in common of two [n, K]."""
    return (before[:, :, None] == after[:, None, :]).sum(axis=(1, 2))


def k3(**options: object) -> np.ndarray:
    return rows("markov", num_experts=896, top_k=16, tokens=(1000, 3000, 2400), **options)


@pytest.mark.parametrize("reuse, sequence", [(0.295, 64), (0.0, 64), (0.9, 7), (1.0, 5), (0.5, 1)])
def test_reuse_is_what_was_asked_for(reuse: float, sequence: int) -> None:
    ids = k3(reuse=reuse, sequence=sequence)
    begins = np.arange(1, len(ids)) % sequence == 0
    common = shared(ids[:-1], ids[1:])
    kept = common[~begins] / 16
    if len(kept):
        error = (reuse * (1 - reuse) / 16 / len(kept)) ** 0.5
        assert abs(kept.mean() - reuse) <= 3 * error
        # binomial, each expert on its own: the variance of a chi-square's worth of tokens
        spread = reuse * (1 - reuse) / 16
        assert abs(kept.var() - spread) <= 5 * spread * (2 / len(kept)) ** 0.5 + 1e-30
    if begins.any():  # a new chain: what two uniform sets share
        assert abs(common[begins].mean() / 16 - 16 / 896) < 0.02


def test_default_reuse_is_the_measured_one() -> None:
    assert source("markov").law == Markov(0.295, 64)
    assert source("markov", reuse=0.1, sequence=9).law == Markov(0.1, 9)


def test_what_leaves_comes_back_only_later() -> None:
    ids = k3(reuse=0.0, sequence=6400)
    assert shared(ids[:-1], ids[1:]).max() == 0
    # two tokens on, 16 of the 880 not in between, 16 of which were in the set
    assert abs(shared(ids[:-2], ids[2:]).mean() - 16 * 16 / 880) < 0.03


@pytest.mark.parametrize("experts, top_k", [(6, 2), (6, 3), (5, 1)])
@pytest.mark.parametrize("reuse", [0.0, 0.3, 0.8])
def test_every_place_of_a_chain_is_uniform_over_sets(
    experts: int, top_k: int, reuse: float
) -> None:
    sequence, chains = 5, 12_000
    ids = rows(
        "markov",
        num_experts=experts,
        top_k=top_k,
        reuse=reuse,
        sequence=sequence,
        tokens=(sequence * chains,),
    )
    codes = (1 << ids).sum(axis=1).reshape(chains, sequence)
    sets = [sum(1 << e for e in chosen) for chosen in combinations(range(experts), top_k)]
    for place in range(sequence):
        counts = [(codes[:, place] == one).sum() for one in sets]
        assert sum(counts) == chains
        # 45 of these tests, fixed seed
        assert chi_square_z(counts, [chains / len(sets)] * len(sets)) < 3.5


def test_transitions_are_those_of_the_law() -> None:
    """E = 5, K = 2: from one set to each other set, by how many experts they share."""
    reuse, chains = 0.4, 60_000
    run = {"num_experts": 5, "top_k": 2, "reuse": reuse, "sequence": 2}
    ids = rows("markov", **run, tokens=(2 * chains,))
    codes = (1 << ids).sum(axis=1).reshape(chains, 2)
    sets = [sum(1 << e for e in chosen) for chosen in combinations(range(5), 2)]
    seen, wanted = [], []
    for before in sets:
        for after in sets:
            common = (before & after).bit_count()
            # which of the two stay, then which of the C(3, number that left) sets enters
            stay = reuse**common * (1 - reuse) ** (2 - common)
            seen.append(((codes[:, 0] == before) & (codes[:, 1] == after)).sum())
            wanted.append(chains / len(sets) * stay / comb(3, 2 - common))
    assert sum(wanted) == pytest.approx(chains)
    assert chi_square_z(seen, wanted) < 3.09


def test_equals_a_loop_over_tokens() -> None:
    from moe.philox import Purpose, words_per_item

    one = source("markov", num_experts=9, top_k=3, reuse=0.5, sequence=7, tokens=(40,))
    words = words_per_item(5, Purpose.MARKOV_IDS, 2, 1, 0, 40, 6)
    wanted: list[list[int]] = []
    for token, row in enumerate(words):
        if token % 7 == 0:
            wanted.append(uniform_sequences(row[None, :3], 9)[0].tolist())
            continue
        last, others = wanted[-1], [e for e in range(9) if e not in wanted[-1]]
        fresh = uniform_sequences(row[None, :3], 6)[0]
        stays = [int(word) < 2**63 for word in row[3:]]
        wanted.append([last[k] if stays[k] else others[fresh[k]] for k in range(3)])
    assert one.choose(1, 2, 0, 40).topk_ids.tolist() == wanted
    for first, count in [(0, 7), (6, 1), (6, 2), (7, 0), (13, 27), (39, 1), (21, 5)]:
        part = one.choose(1, 2, first, count).topk_ids
        assert part.tolist() == wanted[first : first + count]


def test_outside_counts_past_the_set() -> None:
    assert outside(np.array([[4, 1]]), np.array([[0, 1, 2, 3]])).tolist() == [[0, 2, 3, 5]]
    assert outside(np.array([[0, 1, 2]]), np.array([[0, 1, 2]])).tolist() == [[3, 4, 5]]


def test_too_few_experts_to_replace_those_that_leave() -> None:
    with pytest.raises(ValueError, match="top_k=4: .* num_experts=7, .* nearest: 3"):
        source("markov", num_experts=7, top_k=4)
    everything = source("markov", num_experts=4, top_k=4)
    assert everything.law == Uniform()
    assert np.array_equal(
        np.sort(everything.choose(0, 0, 3, 5).topk_ids), np.tile(range(4), (5, 1))
    )
    least = source("markov", num_experts=8, top_k=4, reuse=0.0)
    ids = least.choose(0, 0, 0, 64).topk_ids  # each token has the half that the last one had not
    assert (np.sort(np.concatenate([ids[:-1], ids[1:]], axis=1)) == np.arange(8)).all()


@pytest.mark.parametrize("columns", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_any_columns_of_a_uniform_sequence_are_a_uniform_set(columns: tuple[int, ...]) -> None:
    from moe.philox import Purpose, words_per_item

    drawn = uniform_sequences(words_per_item(1, Purpose.MARKOV_IDS, 0, 0, 0, 30_000, 3), 6)
    codes = (1 << drawn[:, columns]).sum(axis=1)
    sets = [sum(1 << e for e in chosen) for chosen in combinations(range(6), len(columns))]
    counts = [(codes == one).sum() for one in sets]
    assert sum(counts) == 30_000
    assert chi_square_z(counts, [30_000 / len(sets)] * len(sets)) < 3.09
