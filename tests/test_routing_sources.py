"""What every source promises, and what each of the product sources and workloads is."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from routing_samples import SYNTHETIC, chi_square_z, context, rows, source

from comm.analytic.law import GroupLimited, NoLaw, Uniform, Weighted
from moe.routing import SOURCES, build_source
from moe.routing.balanced import Balanced
from moe.routing.base import RoutingContext, RoutingSource
from moe.routing.product import HotRank
from moe.routing.weighted import inclusion
from moe.synthetic import topk_ids

RANDOM = tuple(name for name in SYNTHETIC if name not in ("balanced", "w0"))


@pytest.mark.parametrize("name", SOURCES)
def test_the_registry_names_sources(name: str) -> None:
    module, cls = SOURCES[name]
    assert issubclass(getattr(import_module(module), cls), RoutingSource)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="router='hot_rnak' is not one of .*mean 'hot_rank'"):
        source("hot_rnak")


def test_the_learned_router_chooses_in_the_layer() -> None:
    learned = source("learned")
    assert learned.choose(0, 0, 0, 5) is None
    assert isinstance(learned.law, NoLaw) and "learned" in learned.law.reason


def test_the_uniform_source_is_the_uniform_router() -> None:
    wanted = topk_ids(5, 1, 2, 0, 80, 24, 4)
    assert np.array_equal(rows("uniform", step=1, layer=2), wanted)
    assert source("uniform").law == Uniform()


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize(
    "run",
    [
        {},
        {"num_experts": 896, "top_k": 16, "tokens": (70, 0, 33)},
        {"num_experts": 6, "top_k": 6, "max_over_mean": 1.3333},  # K = E
        {"num_experts": 3, "top_k": 1, "tokens": (5,) * 7, "max_over_mean": 3},  # R > E
        {"num_experts": 8, "top_k": 4, "tokens": (9,), "by": "expert", "max_over_mean": 1.4},
    ],
    ids=["small", "k3", "all experts", "few experts", "one rank"],
)
def test_rows_are_distinct_and_any_cut_gives_the_same(name: str, run: dict) -> None:
    one, again = source(name, **run), source(name, **run)
    tokens, top_k = one.context.num_tokens, one.context.top_k
    whole = one.choose(1, 2, 0, tokens)
    ids = whole.topk_ids
    assert whole.topk_weights is None
    assert ids.dtype == np.int64 and ids.shape == (tokens, top_k)
    none = (ids == -1).all(axis=1)
    assert ids[~none].min() >= 0 and ids.max() < one.context.num_experts
    assert (np.diff(np.sort(ids[~none], axis=1), axis=1) > 0).all()
    cuts = [0, 0, 1, 3, tokens // 2, tokens]
    parts = [
        again.choose(1, 2, first, end - first).topk_ids
        for first, end in reversed(list(zip(cuts, cuts[1:], strict=False)))
    ]
    assert parts[-1].shape == (0, top_k)
    assert np.array_equal(ids, np.concatenate(parts[::-1]))


@pytest.mark.parametrize("name", SYNTHETIC)
def test_active_tokens_are_those_with_experts(name: str) -> None:
    one = source(name, tokens=(7, 0, 12, 5))
    ids = one.choose(0, 1, 0, 24).topk_ids
    active = (ids >= 0).all(axis=1)
    assert np.array_equal(active, (ids >= 0).any(axis=1))
    rank = np.repeat(np.arange(4), [7, 0, 12, 5])
    assert one.active_tokens(0, 1).tolist() == np.bincount(rank[active], minlength=4).tolist()


@pytest.mark.parametrize("name", RANDOM)
def test_seed_step_and_layer_all_matter(name: str) -> None:
    run = {"num_experts": 896, "top_k": 16, "tokens": (40, 40)}
    base = rows(name, **run)
    for other in (
        rows(name, seed=6, **run),
        rows(name, step=1, **run),
        rows(name, layer=1, **run),
        rows(name, step=2, **run),  # warm-up: beyond the measured steps
        rows(name, step=10**6, **run),
    ):
        differs = (base != other) & (base >= 0)
        assert differs.sum() > 0.3 * (base >= 0).sum()


@pytest.mark.parametrize("name", SYNTHETIC)
def test_ranks_matter_only_where_a_source_says_so(name: str) -> None:
    """Another number of ranks, another placement: the same experts for the same token."""
    run = {"num_experts": 24, "top_k": 4, "by": "expert"}
    four = source(name, tokens=(15,) * 4, **run)
    two = source(name, tokens=(50, 10), expert_rank=np.arange(24) % 2, **run)
    same = np.array_equal(four.choose(0, 1, 0, 60).topk_ids, two.choose(0, 1, 0, 60).topk_ids)
    assert same is not four.uses_ranks
    assert four.uses_ranks is (name in ("balanced", "hot_rank", "w0", "w2", "w4"))


def test_skew_by_rank_uses_ranks() -> None:
    assert source("skew").uses_ranks and not source("skew", by="expert").uses_ranks


@pytest.mark.parametrize("name", RANDOM)
def test_draws_follow_the_law(name: str) -> None:
    """Every expert, in every layer and step, is chosen as often as the law says."""
    run = {"num_experts": 24, "top_k": 4, "tokens": (10_000,)}
    if name == "skew":
        run |= {"by": "expert"}
    one = source(name, **run)
    law = one.law
    for step, layer in np.ndindex(2, 3):
        seen = np.bincount(one.choose(step, layer, 0, 10_000).topk_ids.ravel(), minlength=24)
        pi = np.full(24, 4 / 24)
        if isinstance(law, Weighted):
            assert law.variant.shape == (2, 3)
            pi = inclusion(law.weights[law.variant[step, layer]], 4)
        assert (seen[pi == 0] == 0).all()
        seen, pi = seen[pi > 0], pi[pi > 0]
        # markov: neighbours are positively correlated, by reuse for each step between them, less
        # what returns by chance; their variance is at most (1 + reuse) / (1 - reuse) = 1.84 fold
        spread = 1.84 if name == "markov" else 1.0
        z = (seen - 10_000 * pi) / np.sqrt(10_000 * pi * (1 - pi) * spread)
        # 24 x 6 x 14 = 2000 of them: P(some |z| > 4.9) is 0.2 %
        assert np.abs(z).max() < 4.9


def test_equal_weights_are_one_variant() -> None:
    assert source("hot_rank").law.weights.shape == (1, 24)
    assert source("zipf", order="id").law.weights.shape == (1, 24)
    assert source("zipf").law.weights.shape == (3, 24)
    assert source("w6", hot_count=2).law.variant.tolist() == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize("name", ["uniform", "w4"])
def test_uniform_laws(name: str) -> None:
    assert source(name).law == Uniform()


# --- product sources -------------------------------------------------------------------------


def weights(name: str, step: int = 0, layer: int = 0, **run: object) -> list[float]:
    return source(name, **run).weights(step, layer).tolist()


def test_zipf() -> None:
    run = {"num_experts": 4, "top_k": 2, "exponent": 2}
    falling = [1, 1 / 4, 1 / 9, 1 / 16]
    assert weights("zipf", order="id", **run) == pytest.approx(falling, rel=1e-7)
    drawn = [weights("zipf", layer=layer, **run) for layer in range(3)]
    assert all(sorted(one, reverse=True) == pytest.approx(falling, rel=1e-7) for one in drawn)
    assert len({tuple(one) for one in drawn}) > 1
    assert drawn[1] == weights("zipf", step=5, layer=1, **run)
    assert weights("zipf", exponent=0) == [1.0] * 24


def test_hot_rank() -> None:
    placement = np.arange(12) % 3
    assert (
        weights(
            "hot_rank", num_experts=12, expert_rank=placement, group_size=3, hot_rank=1, factor=5
        )
        == [1, 5, 1] * 4
    )
    by_layer = np.array([[0, 0, 1], [1, 0, 1], [0, 1, 0]])
    one = source("hot_rank", num_experts=3, top_k=1, expert_rank=by_layer, hot_rank=1)
    assert [one.weights(0, layer).tolist() for layer in range(3)] == [
        [1, 1, 8],
        [8, 1, 8],
        [1, 8, 1],
    ]
    assert SOURCES["w2"] == SOURCES["hot_rank"]


def test_hot_rank_must_hold_an_expert() -> None:
    with pytest.raises(ValueError, match=r"router.hot_rank=9: must be in 0 .. 3; nearest: 3"):
        source("hot_rank", hot_rank=9)
    two = np.array([[0] * 8 + [3] * 16, [0] * 8 + [3] * 16, [0] * 8 + [2] * 16])
    for rank in (1, 3):
        with pytest.raises(ValueError, match=f"hot_rank={rank}: must hold an .* nearest: 0"):
            source("hot_rank", hot_rank=rank, expert_rank=two)
    assert source("hot_rank", hot_rank=0, expert_rank=two).weights(0, 0)[:9].tolist() == [8] * 8 + [
        1
    ]


def test_hot_experts() -> None:
    assert weights("hot_experts", order="id", hot_count=3, factor=2) == [2] * 3 + [1] * 21
    drawn = [weights("hot_experts", layer=layer, hot_count=3, factor=2) for layer in range(3)]
    assert all(sorted(one) == [1] * 21 + [2] * 3 for one in drawn) and drawn[0] != drawn[1]
    assert sum(w > 1 for w in weights("hot_experts")) == 1  # a sixteenth of 24, rounded down
    assert sum(w > 1 for w in weights("hot_experts", num_experts=896)) == 56
    assert weights("hot_experts", hot_count=24) == [8] * 24
    with pytest.raises(ValueError, match="router.hot_count=25: must be in 1 .. 24; nearest: 24"):
        source("hot_experts", hot_count=25)


def test_hot_experts_can_fill_one_rank() -> None:
    ids = rows("hot_experts", order="id", hot_count=6, factor=1e6, tokens=(500,) * 4)
    assert (ids < 6).mean() > 0.999  # contiguous: the experts of rank 0


# --- workloads -------------------------------------------------------------------------------


def test_w0_is_balanced_and_w2_a_hot_rank() -> None:
    assert isinstance(source("w0"), Balanced) and isinstance(source("w2"), HotRank)


def test_w1_neighbours_and_w3_spread() -> None:
    run = {"num_experts": 10, "top_k": 2, "hot_count": 3, "factor": 4}
    assert weights("w1", step=3, layer=2, **run) == [4] * 3 + [1] * 7
    assert np.flatnonzero(np.array(weights("w3", step=3, layer=2, **run)) == 4).tolist() == [
        0,
        3,
        6,
    ]
    per_rank = np.array(weights("w3", num_experts=896, hot_count=100)).reshape(8, 112) > 1
    assert np.ptp(per_rank.sum(axis=1)) <= 1


def test_w4_later_ranks_have_fewer_tokens_with_experts() -> None:
    run = {"tokens": (8, 8, 0, 1, 9)}
    one = source("w4", **run)
    assert one.active_tokens(3, 1).tolist() == [8, 7, 0, 1, 2]  # 8*5/5 8*4/5 0 1*2/5 9*1/5, up
    ids = one.choose(0, 0, 0, 26).topk_ids
    active = (ids >= 0).all(axis=1)
    assert active.tolist() == [True] * 8 + [True] * 7 + [False] + [True] + [True] * 2 + [False] * 7
    assert np.array_equal(ids[active], rows("uniform", **run)[active])


def test_w5_a_quarter_is_never_chosen() -> None:
    assert weights("w5", num_experts=11, order="id") == [0, 0] + [1] * 9
    for layer in range(3):
        zero = np.flatnonzero(np.array(weights("w5", layer=layer)) == 0)
        assert len(zero) == 6 and not np.isin(rows("w5", layer=layer), zero).any()
    assert weights("w5") != weights("w5", layer=1)
    assert sum(w == 0 for w in weights("w5", num_experts=8, top_k=7)) == 1


def test_w6_moves_on_with_layer_and_step() -> None:
    def hot(step: int, layer: int) -> list[int]:
        run = {"num_experts": 10, "top_k": 2, "hot_count": 4}
        return np.flatnonzero(np.array(weights("w6", step, layer, **run)) == 8).tolist()

    assert [hot(0, 0), hot(0, 1), hot(1, 0), hot(1, 1), hot(1, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [4, 5, 6, 7],
        [0, 1, 8, 9],
        [0, 1, 2, 3],
    ]


def test_w7_bursts_once_in_four() -> None:
    run = {"layers": 6, "steps": 20, "num_experts": 896, "top_k": 16, "factor": 4}
    one = source("w7", **run)
    hot = np.array([one.weights(step, layer) for step, layer in np.ndindex(20, 6)])
    bursts = (hot > 1).any(axis=1)
    assert (bursts.reshape(30, 4).sum(axis=1) == 1).all()
    assert len(set(np.flatnonzero(bursts) % 4)) == 4
    assert set(np.unique(hot)) == {1.0, 32.0}
    assert ((hot > 1).sum(axis=1)[bursts] == 56).all()
    places = hot.argmax(axis=1)[bursts]
    assert (places % 56 == 0).all() and len(set(places)) > 5
    step, layer = divmod(int(np.flatnonzero(bursts)[0]), 6)
    ids = one.choose(step, layer, 0, 80).topk_ids
    met = (hot[step * 6 + layer][ids] > 1).any(axis=1)
    assert met.all()  # "nearly all tokens meet one hot set"


# --- group-limited ---------------------------------------------------------------------------


def grouped(score: str, tokens: int, experts: int = 256) -> np.ndarray:
    run = {"num_experts": experts, "top_k": 8, "tokens": (tokens,)}
    options = {"num_expert_groups": 8, "num_limited_groups": 4, "group_score": score}
    return rows("group_limited", **run, **options)


@pytest.mark.parametrize("score, mean", [("max", 3.983), ("top2_sum", 3.953)])
def test_group_limited_hits_as_many_groups_as_the_reference(score: str, mean: float) -> None:
    ids = grouped(score, 20_000) // 32
    hit = (ids[:, :, None] == np.arange(8)).any(axis=1).sum(axis=1)
    assert hit.max() == 4
    # mean is rounded to 3 places; sd of one token is below .22, so 3 sd of the mean are .0047
    assert abs(hit.mean() - mean) < 0.0005 + 3 * hit.std() / 20_000**0.5


@pytest.mark.parametrize("score", ["max", "top2_sum"])
@pytest.mark.parametrize("size", [2, 32])
def test_group_limited_equals_a_loop_over_tokens(score: str, size: int) -> None:
    from moe.philox import Purpose, words_per_item

    experts = 8 * size
    drawn = words_per_item(5, Purpose.GROUP_SCORES, 0, 0, 0, 40, experts)
    best = 1 if score == "max" else 2
    for row, ids in zip(drawn.tolist(), grouped(score, 40, experts).tolist(), strict=True):
        scores = [sorted(w >> 1 for w in row[g * size : (g + 1) * size]) for g in range(8)]
        ranked = [sum(group[-best:]) for group in scores]
        kept = sorted(range(8), key=ranked.__getitem__)[-4:]
        inside = (e for e in range(experts) if e // size in kept)
        wanted = sorted(inside, key=row.__getitem__)[-8:]
        assert sorted(wanted) == ids


def test_group_limited_takes_what_is_not_set_from_the_model() -> None:
    base = vars(context(num_experts=24, top_k=4)) | {
        "num_expert_groups": 6,
        "num_limited_groups": 2,
        "group_score": "top2_sum",
    }
    model = RoutingContext(**base)
    assert build_source("group_limited", model).law == GroupLimited(6, 2, "top2_sum")
    options = context(num_limited_groups=3, group_score="max").options
    mixed = RoutingContext(**base | {"options": options})
    assert build_source("group_limited", mixed).law == GroupLimited(6, 3, "max")
    assert source("group_limited").law == Uniform()  # a model without groups


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_expert_groups": 5}, "num_expert_groups=5: must divide num_experts=24; nearest: 4"),
        ({"num_expert_groups": 99}, "num_expert_groups=99: must divide .* nearest: 24"),
        (
            {"num_expert_groups": 12, "num_limited_groups": 1},
            "num_limited_groups=1: must lie in 2 .. 12, so that top_k=4 .* nearest: 2",
        ),
        (
            {"num_expert_groups": 6, "num_limited_groups": 7},
            "num_limited_groups=7: must lie in 1 .. 6, .*; nearest: 6",
        ),
        (
            {"num_expert_groups": 24, "num_limited_groups": 9, "group_score": "top2_sum"},
            "group_score=top2_sum: .* one expert; nearest: max",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        source("group_limited", **options)


def test_two_expert_groups_of_two_and_chi_square_over_sets() -> None:
    """E = 4 in pairs, the better pair alone, K = 2: each pair half of the time, no mixed set."""
    options = {"num_expert_groups": 2, "num_limited_groups": 1, "group_score": "top2_sum"}
    ids = rows("group_limited", num_experts=4, top_k=2, tokens=(10_000,), **options)
    assert set(map(tuple, ids.tolist())) == {(0, 1), (2, 3)}
    assert chi_square_z(np.bincount(ids[:, 0] // 2), [5000, 5000]) < 3.09
