"""Expected bytes of a run: reference values, simulation, and the algebra of deviations."""

from itertools import combinations
from math import sqrt
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from comm.analytic.fanout import Distinct, distinct_covariance
from comm.analytic.oracle import ExactTraffic, exact_traffic
from comm.analytic.rows import DISPATCHERS, KINDS, PHASES
from comm.analytic.traffic import SCOPES, ExpectedTraffic, expected_traffic
from comm.topology import Topology


def even(num_experts: int, world_size: int) -> list[int]:
    """Experts of each rank, the first ones owning one more where it does not divide."""
    return [num_experts // world_size + (r < num_experts % world_size) for r in range(world_size)]


def law(
    sizes: list[int],
    ranks_per_node: int | None = None,
    dispatcher: str = "rank_dedup",
    tokens: list[int] | None = None,
    num_layers: int = 1,
    **overrides: Any,
) -> ExpectedTraffic:
    """Kimi K3's law in BF16, one token a rank, unless said."""
    world_size = len(sizes)
    settings = {"top_k": 16, "num_steps": 1, "width": 3584}
    settings |= {"wire_dispatch": "bf16", "wire_combine": "bf16"}
    return expected_traffic(
        dispatcher,
        tokens or [1] * world_size,
        np.array([sizes] * num_layers),
        Topology.blocks(world_size, ranks_per_node or world_size).tiers(),
        **(settings | overrides),
    )


@pytest.mark.parametrize(
    ("world_size", "num_bytes"), [(8, 44366), (16, 69579), (32, 89086), (64, 101338), (72, 102805)]
)
def test_kimi_k3_bytes_of_a_token_and_layer(world_size: int, num_bytes: int) -> None:
    estimate = law(even(896, world_size)).of("remote", phases=["dispatch"], kinds=["hidden"])
    assert round(estimate.mean / world_size) == num_bytes


def test_sources_of_an_uneven_placement_differ() -> None:
    """EP72: a token on a rank with 13 experts leaves less often than one on a rank with 12."""
    sizes = even(896, 72)
    assert (sizes.count(13), sizes.count(12)) == (32, 40)
    bytes_of = []
    for source in range(72):
        tokens = [int(rank == source) for rank in range(72)]
        run = law(sizes, tokens=tokens)
        bytes_of.append(run.of("remote", phases=["dispatch"], kinds=["hidden"]).mean)
    assert (round(min(bytes_of)), round(max(bytes_of))) == (102_747, 102_851)
    assert bytes_of[0] == min(bytes_of)


def test_resolution_of_a_run() -> None:
    """3 sigma is 0.8 % of the mean at R = 8, 4 layers of 64 tokens a rank; 0.28 % with 512."""
    for tokens, share in [(64, 0.0080), (512, 0.0028)]:
        estimate = law([112] * 8, tokens=[tokens] * 8, num_layers=4).of("remote", kinds=["hidden"])
        assert 3 * estimate.std / estimate.mean == pytest.approx(share, abs=5e-5)


def test_enumeration_of_a_small_machine() -> None:
    """E = 6 on ranks of 3, 2, 1 experts in nodes {0, 2} and {1}: one token of each rank, K = 2."""
    sizes, tiers = [3, 2, 1], Topology((0, 1, 0)).tiers()
    owner = np.repeat(np.arange(3), sizes)
    destinations = [set(owner[list(subset)]) for subset in combinations(range(6), 2)]
    for scope, chosen in SCOPES.items():
        mean = variance = 0.0
        for source in range(3):
            inside = {dst for dst in range(3) if tiers[source, dst] in chosen}
            hits = np.array([len(inside & ranks) for ranks in destinations])
            mean, variance = mean + hits.mean(), variance + hits.var()
        run = expected_traffic(
            "rank_dedup", [1, 1, 1], np.array([sizes]), tiers, 2, 1, "fp32", "fp32", 5
        )
        s = run.scopes.index(scope)
        assert run.rows_mean[0, s] == pytest.approx(mean, rel=1e-12)
        assert run.rows_var[0, s] == pytest.approx(variance, rel=1e-12, abs=1e-15)


def uniform_run(rng: np.random.Generator, dispatcher: str, case: dict[str, Any]) -> ExactTraffic:
    """The exact traffic of one run whose ids are drawn uniformly, round-robin placement."""
    tokens, sizes = case["tokens"], case["sizes"]
    num_experts, world_size = sum(sizes), len(sizes)
    shape = (2, 2, sum(tokens))  # steps, layers, tokens
    ids = rng.random((*shape, num_experts)).argpartition(case["top_k"])[..., : case["top_k"]]
    owner = np.arange(num_experts) % world_size  # the first E mod R ranks own one more, scattered
    return exact_traffic(
        dispatcher,
        ids,
        np.repeat(np.arange(world_size), tokens),
        np.array([owner, owner]),
        np.array([sizes, sizes]),
        "mxfp8",
        "bf16",
        40,
    )


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    "case",
    [
        {"sizes": even(30, 8), "per_node": 4, "top_k": 6, "tokens": [0, 5, 3, 9, 1, 0, 7, 4]},
        {"sizes": even(7, 9), "per_node": 3, "top_k": 3, "tokens": [2] * 9},  # R > E
        {"sizes": [12], "per_node": 1, "top_k": 5, "tokens": [8]},
    ],
)
def test_simulated_runs_follow_the_law(dispatcher: str, case: dict[str, Any]) -> None:
    """Mean and variance of 250 runs, in every scope; the counts messages to the byte."""
    rng = np.random.default_rng(11)
    world_size, num_runs = len(case["sizes"]), 250
    tiers = Topology.blocks(world_size, case["per_node"]).tiers()
    run = law(
        case["sizes"],
        case["per_node"],
        dispatcher,
        [2 * tokens for tokens in case["tokens"]],
        num_layers=2,
        top_k=case["top_k"],
        num_steps=2,
        wire_dispatch="mxfp8",
        width=40,
    )
    seen = [uniform_run(rng, dispatcher, case) for _ in range(num_runs)]
    for scope, chosen in SCOPES.items():
        inside = np.isin(tiers, chosen)
        totals = np.array([exact.bytes[..., inside].sum() for exact in seen])
        estimate = run.of(scope)
        assert abs(totals.mean() - estimate.mean) <= 4.5 * estimate.std / sqrt(num_runs)
        assert totals.var() == pytest.approx(estimate.std**2, rel=4.5 * sqrt(2 / num_runs))
        counts = seen[0].bytes[:, :, KINDS.index("counts")][..., inside].sum()
        assert run.of(scope, kinds=["counts"]).mean == counts
        assert run.of(scope, kinds=["counts"]).std == 0


def test_deviations_add_over_phases_and_kinds_but_variances_over_layers() -> None:
    run = law([112] * 8, 4, num_layers=3)
    one = run.of("remote", layers=[0], phases=["dispatch"], kinds=["hidden"])
    both = run.of("remote", layers=[0], kinds=["hidden"])
    assert both.std == pytest.approx(2 * one.std)  # an independent sum would be 29 % low
    ids = run.of("remote", layers=[0], phases=["dispatch"], kinds=["ids", "weights", "hidden"])
    assert ids.std == pytest.approx(one.std * (7168 + 128) / 7168)
    every = run.of("remote", phases=["dispatch"], kinds=["hidden"])
    assert every.mean == pytest.approx(3 * one.mean)
    assert every.std == pytest.approx(sqrt(3) * one.std)


def test_remote_is_a_law_of_its_own() -> None:
    """Its variance is that of both tiers and their covariance, which is negative."""
    run = law([112] * 8, 4, tokens=[1] + [0] * 7)
    _, scale_up, scale_out, remote = run.rows_var[0]
    near, far = Distinct.of([112] * 3, 896, 16), Distinct.of([112] * 4, 896, 16)
    covariance = distinct_covariance(near, far)
    assert covariance < 0
    assert scale_up + scale_out + 2 * covariance == pytest.approx(remote, rel=1e-12)
    assert run.rows_mean[0, 3] == pytest.approx(run.rows_mean[0, 1:3].sum())


def test_any_layout_of_nodes_and_any_order_of_sizes() -> None:
    """Renaming the ranks, nodes with them, changes nothing but the order."""
    order = np.random.default_rng(5).permutation(12)
    sizes, tokens, nodes = np.array(even(30, 12)), np.arange(12), np.arange(12) // 4
    runs = [
        expected_traffic(
            "rank_dedup",
            tokens[permutation].tolist(),
            sizes[None, permutation],
            Topology(tuple(nodes[permutation].tolist())).tiers(),
            *(4, 1, "bf16", "bf16", 8),
        )
        for permutation in (np.arange(12), order)
    ]
    np.testing.assert_allclose(runs[0].rows_mean, runs[1].rows_mean, rtol=1e-12)
    np.testing.assert_allclose(runs[0].rows_var, runs[1].rows_var, rtol=1e-12)


def test_layers_may_be_placed_differently() -> None:
    tiers = Topology.blocks(2, 2).tiers()
    slots = np.array([[4, 4], [6, 2]])
    both = expected_traffic("all_to_all", [3, 0], slots, tiers, 2, 1, "bf16", "bf16", 8)
    assert both.of("remote", layers=[0], phases=["dispatch"], kinds=["hidden"]).mean == 3 * 16
    assert both.of("remote", layers=[1], phases=["dispatch"], kinds=["hidden"]).mean == 3 * 8
    assert both.of("self", layers=[1], kinds=["counts"]).mean == 2 * 32 + 8 * 8
    assert both.of("remote", layers=[0], kinds=["counts"]).mean == 2 * 32 + 8 * 8


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_nothing_to_send(dispatcher: str) -> None:
    run = law([8, 0], dispatcher=dispatcher, tokens=[0, 0], top_k=2)
    assert run.of("remote").std == 0
    assert run.of("remote").mean == run.of("remote", kinds=["counts"]).mean > 0
    alone = law([8], dispatcher=dispatcher, tokens=[5], top_k=8)  # R = 1, K = E
    assert alone.of("remote").mean == alone.of("self").std == 0
    rows = {"all_to_all": 40, "rank_dedup": 5, "allgather": 5}[dispatcher]
    assert alone.rows_mean[0].tolist() == [rows, 0, 0, 0]


def test_each_phase_has_its_own_format() -> None:
    run = law([4, 4], wire_dispatch="mxfp8", wire_combine="fp32", width=40, top_k=2)
    assert run.bytes_per_row.tolist() == [[40, 2, 8, 8, 0, 0], [160, 0, 0, 0, 0, 0]]
    assert (run.phases, run.kinds) == (PHASES, KINDS)


def test_counts_on_ragged_nodes() -> None:
    slots, tiers = [1, 2, 3, 4], Topology((0, 1, 0, 0)).tiers()
    run = expected_traffic("all_to_all", [0] * 4, np.array([slots]), tiers, 2, 3, "bf16", "bf16", 8)
    for scope, chosen in SCOPES.items():
        pairs = [(src, dst) for src in range(4) for dst in range(4) if tiers[src, dst] in chosen]
        assert run.of(scope).mean == sum(3 * (32 + 8 * slots[dst]) for _, dst in pairs)


def test_fixed_part_and_names() -> None:
    run = law([112] * 8, 4, "all_to_all", num_steps=3)
    counts = run.fixed_bytes[0, PHASES.index("dispatch"), KINDS.index("counts")]
    assert counts.tolist() == [3 * pairs * (32 + 112 * 8) for pairs in (8, 24, 32, 56)]
    assert run.fixed_bytes.sum() == counts.sum()
    assert run.of("remote", phases=["combine"], kinds=["counts"]).mean == 0
    with pytest.raises(ValueError, match="dispatcher='two'"):
        law([1], dispatcher="two")
    with pytest.raises(ValueError, match="top_k=16"):
        law([4, 4])


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_million_tokens_on_each_of_a_thousand_ranks(dispatcher: str) -> None:
    started = perf_counter()
    run = law(even(896, 1024), 8, dispatcher, [1_000_000] * 1024, num_layers=92)
    estimate = run.of("remote")
    rows = {"all_to_all": 16 * 1023 / 1024, "rank_dedup": 16 * 1023 / 1024, "allgather": 1023}
    total = rows[dispatcher] * 92 * 1024e6
    assert run.rows_mean[:, 3].sum() == pytest.approx(total, rel=1e-12)
    assert estimate.mean > 2.0**53 > 0 and np.isfinite(estimate.std)
    assert perf_counter() - started < 2


def test_four_thousand_ranks_are_fast() -> None:
    sizes: NDArray[np.int64] = np.array([even(896, 4096)])
    tiers = Topology.blocks(4096, 8).tiers()
    started = perf_counter()
    expected_traffic("rank_dedup", [64] * 4096, sizes, tiers, 16, 1, "bf16", "bf16", 3584)
    assert perf_counter() - started < 3  # about half a second on an idle core
