"""Expected bytes of a run: reference values, simulation, and the algebra of deviations."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import sqrt
from time import process_time
from typing import Any

import numpy as np
import pytest
from law_simulation import SCOPES, even, run_shape, simulate, tiers_of

from comm.analytic.fanout import Distinct, distinct_covariance
from comm.analytic.law import GroupLimited, Law, Markov, NoLaw, Uniform, Weighted
from comm.analytic.rows import DISPATCHERS, KINDS
from comm.analytic.run import RunShape
from comm.analytic.traffic import ExpectedTraffic, expected_traffic

DISPATCH = {"phases": ["dispatch"], "kinds": ["hidden"]}


def expect(run: RunShape, law: Law | None = None, active: Any = None) -> ExpectedTraffic:
    """The law of a run that has one."""
    expected = expected_traffic(run, law or Uniform(), active)
    assert isinstance(expected, ExpectedTraffic), expected
    return expected


def kimi_k3(
    world_size: int,
    num_nodes: int = 1,
    dispatcher: str = "rank_dedup",
    tokens: Sequence[int] | None = None,
    **settings: Any,
) -> RunShape:
    """Kimi K3 in BF16, one token a rank, unless said."""
    nodes = np.arange(world_size) * num_nodes // world_size
    sizes = settings.pop("sizes", even(896, world_size))
    settings = {"width": 3584, **settings}
    return run_shape(dispatcher, tokens or [1] * world_size, nodes, sizes, 16, **settings)


# (R, N), rows of a token: remote nodes, two-hop inside the node
TWO_HOPS = [
    ((4, 2), 1.0000, 1.9808),
    ((8, 2), 1.0000, 5.3052),
    ((16, 2), 1.0000, 9.0598),
    ((32, 4), 2.9713, 11.2256),
    ((64, 8), 6.1894, 12.5667),
]


@pytest.mark.parametrize(("shape", "between", "inside"), TWO_HOPS)
def test_reference_values_of_two_hops(
    shape: tuple[int, int], between: float, inside: float
) -> None:
    world_size, num_nodes = shape
    flow = expect(kimi_k3(world_size, num_nodes, "two_hop")).flows[0]
    own, scale_up, scale_out, remote = flow.rows_mean[0] / world_size
    assert scale_out == pytest.approx(between, abs=5e-5)
    assert scale_up == pytest.approx(inside, abs=5e-5)
    assert remote == pytest.approx(scale_up + scale_out)
    # To itself: the first hop into its own node, and the last hop of every proxy that is hit.
    ranks = Distinct.of(even(896, world_size), 896, 16).mean
    hit_nodes = Distinct.of(even(896, num_nodes), 896, 16).mean
    assert own == pytest.approx(hit_nodes / num_nodes + ranks * num_nodes / world_size)


@pytest.mark.parametrize(
    ("world_size", "num_bytes"), [(8, 44366), (16, 69579), (32, 89086), (64, 101338), (72, 102805)]
)
def test_kimi_k3_bytes_of_a_token_and_layer(world_size: int, num_bytes: int) -> None:
    estimate = expect(kimi_k3(world_size)).of("remote", **DISPATCH)
    assert round(estimate.mean / world_size) == num_bytes


def test_sources_of_an_uneven_placement_differ() -> None:
    """EP72: a token on a rank with 13 experts leaves less often than one on a rank with 12."""
    sizes = even(896, 72)
    assert (sizes.count(13), sizes.count(12)) == (32, 40)
    bytes_of = []
    for source in range(0, 72, 5):
        run = kimi_k3(72, tokens=[int(rank == source) for rank in range(72)])
        bytes_of.append(expect(run).of("remote", **DISPATCH).mean)
    assert (round(min(bytes_of)), round(max(bytes_of))) == (102_747, 102_851)
    assert bytes_of[0] == min(bytes_of)


def test_resolution_of_a_run() -> None:
    """3 sigma is 0.8 % of the mean at R = 8, 4 layers of 64 tokens a rank; 0.28 % with 512."""
    for tokens, share in [(64, 0.0080), (512, 0.0028)]:
        run = kimi_k3(8, tokens=[tokens] * 8, num_layers=4)
        estimate = expect(run).of("remote", kinds=["hidden"])
        assert 3 * estimate.std / estimate.mean == pytest.approx(share, abs=5e-5)


def test_enumeration_of_a_small_machine() -> None:
    """E = 6 on ranks of 3, 2, 1 experts in nodes {0, 2} and {1}: one token of each rank, K = 2."""
    run = run_shape("rank_dedup", [1, 1, 1], (0, 1, 0), [3, 2, 1], 2)
    owner, tiers = np.repeat(np.arange(3), [3, 2, 1]), tiers_of(run)
    destinations = [set(owner[list(subset)]) for subset in combinations(range(6), 2)]
    flow = expect(run).flows[0]
    for s, chosen in enumerate(SCOPES.values()):
        mean = variance = 0.0
        for source in range(3):
            inside = {dst for dst in range(3) if tiers[source, dst] in chosen}
            hits = np.array([len(inside & ranks) for ranks in destinations])
            mean, variance = mean + hits.mean(), variance + hits.var()
        assert flow.rows_mean[0, s] == pytest.approx(mean, rel=1e-12)
        assert flow.rows_var[0, s] == pytest.approx(variance, rel=1e-12, abs=1e-15)


UNIFORM = Uniform()
SKEWED = Weighted(
    np.array([[1, 5, 0.2, 3, 1, 1, 1, 9, 0.1], [1, 1, 1, 1, 20, 1, 1, 1, 1]]),
    np.array([[0, 1], [1, 1]]),
)
TOKENS, NODES = [3, 5, 0, 4, 2, 6], [0, 1, 0, 1, 1, 0]  # cyclic and uneven
EIGHT, MIXED = [3, 5, 0, 4, 2, 6, 3, 2], [0, 0, 1, 1, 1, 0, 0, 1]
REPLICAS = [(0, 3), (4, 1), (4, 2)]  # two slots of expert 0, three of expert 4


def cases() -> dict[str, tuple[RunShape, Law]]:
    """Small runs of every kind."""
    found: dict[str, tuple[RunShape, Law]] = {}
    for name in DISPATCHERS:
        full = {"num_layers": 2, "num_steps": 2, "training": True, "wire_dispatch": "mxfp8"}
        found[name] = (run_shape(name, TOKENS, NODES, even(13, 6), 3, chunks=2, **full), UNIFORM)
        groups = run_shape(name, EIGHT, MIXED, even(9, 4), 3, ep_size=4)
        found[f"{name} groups"] = groups, UNIFORM
        shards = {"expert_tp": 2, "training": True}
        found[f"{name} shards"] = run_shape(name, EIGHT, MIXED, even(9, 4), 3, **shards), UNIFORM
        if name not in ("two_hop", "hierarchical_allgather"):
            every = replace(groups, expert_tp=2, expert_tp_mode="all", training=True, ep_size=8)
            found[f"{name} to all shards"] = every, UNIFORM
    found["deduplicated"] = (
        run_shape("one_sided", TOKENS, NODES, even(13, 6), 3, deduplicate=True),
        UNIFORM,
    )
    found["ragged nodes"] = (
        run_shape("two_hop", [4] * 7, [0, 2, 2, 0, 1, 2, 2], even(13, 7), 3),
        UNIFORM,
    )
    for name in ("all_to_all", "rank_dedup", "two_hop", "padded"):
        shape = {"num_layers": 2, "num_steps": 2}
        plain = run_shape(name, TOKENS[:4], [0, 0, 1, 0], even(9, 4), 3, **shape)
        found[f"{name} skewed"] = plain, SKEWED
        for choice in ("random", "round_robin", "nearest"):
            shared = run_shape(
                name, TOKENS[:4], [0, 0, 1, 0], even(9, 4), 3,
                replicas=REPLICAS, replica_choice=choice, **shape,
            )  # fmt: skip
            found[f"{name} {choice}"] = shared, UNIFORM
            if choice != "random":
                continue
            found[f"{name} {choice} skewed"] = shared, SKEWED
    for name in ("rank_dedup", "two_hop"):
        one_group_each = run_shape(name, [4] * 4, [0, 1, 2, 3], even(16, 4), 4)
        found[f"{name} limited"] = one_group_each, GroupLimited(4, 2, "max")
    for name in ("all_to_all", "rank_dedup", "two_hop"):
        chains = run_shape(name, [4, 5, 0, 6, 3], [0, 0, 1, 1, 0], even(13, 5), 3, num_steps=2)
        found[f"{name} chains"] = chains, Markov(0.8, 7)
        crossing = run_shape(name, [4, 5, 2, 6], [0, 1, 1, 1], even(13, 2), 3, ep_size=2)
        found[f"{name} chains across groups"] = crossing, Markov(0.9, 100)
    return found


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_simulated_runs_follow_the_law(name: str) -> None:
    """Mean and variance of 120 runs in every scope, phase and direction; constants to the byte."""
    run, law = CASES[name]
    check_against_simulation(run, law)


def check_against_simulation(run: RunShape, law: Law, active: Any = None) -> None:
    rng, num_runs = np.random.default_rng(11), 120
    expected, tiers = expect(run, law, active), tiers_of(run)
    seen = [simulate(rng, run, law, active) for _ in range(num_runs)]
    insides = [np.isin(tiers, chosen) for chosen in SCOPES.values()]
    totals = np.array([[e.bytes[..., i].sum(axis=-1) for i in insides] for e in seen])
    places = [seen[0].phases.index(phase) for phase in expected.phases]
    totals = totals[:, :, :, :, places]  # [run, scope, L, D, P, kind]
    assert expected.directions == seen[0].directions
    bounded = np.array([flow.bounded for flow in expected.flows]).any()
    for s, scope in enumerate(expected.scopes):
        for d, direction in enumerate(expected.directions):
            for p, phase in enumerate(expected.phases):
                for kind in [None, *KINDS[:6]]:
                    kinds = slice(None) if kind is None else [KINDS.index(kind)]
                    counted = totals[:, s, :, d, p][..., kinds].sum(axis=(1, 2))
                    named = None if kind is None else [kind]
                    estimate = expected.of(scope, None, [phase], named, [direction])
                    if estimate.std == 0:
                        assert set(counted.tolist()) == {estimate.mean}
                        continue
                    z = (counted.mean() - estimate.mean) / estimate.std * sqrt(num_runs)
                    assert abs(z) <= 4.5, (scope, direction, phase, kind, z)
                    ratio = counted.var() / estimate.std**2
                    assert ratio <= 1 + 4.5 * sqrt(2 / num_runs)
                    assert bounded or ratio >= 1 - 4.5 * sqrt(2 / num_runs)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "rank_dedup", "two_hop", "padded"])
def test_tokens_without_experts(dispatcher: str) -> None:
    active = np.array([[[3, 2, 0, 1]], [[0, 5, 0, 2]]])
    run = run_shape(dispatcher, TOKENS[:4], [0, 0, 1, 0], even(9, 4), 3, num_steps=2)
    check_against_simulation(run, Uniform(), active)
    every = np.broadcast_to(np.array(TOKENS[:4]), active.shape)
    assert expect(run, active=every).of("remote") == expect(run).of("remote")
    with pytest.raises(ValueError, match=r"active_tokens has shape \(1, 4\), .* \(2, 1, 4\)"):
        expected_traffic(run, Uniform(), active[0])


def test_deviations_add_over_phases_and_kinds_but_variances_over_layers() -> None:
    run = expect(kimi_k3(8, 2, num_layers=3))
    one = run.of("remote", layers=[0], **DISPATCH)
    both = run.of("remote", layers=[0], kinds=["hidden"])
    assert both.std == pytest.approx(2 * one.std)  # an independent sum would be 29 % low
    ids = run.of("remote", layers=[0], phases=["dispatch"], kinds=["ids", "weights", "hidden"])
    assert ids.std == pytest.approx(one.std * (7168 + 128) / 7168)
    every = run.of("remote", **DISPATCH)
    assert every.mean == pytest.approx(3 * one.mean)
    assert every.std == pytest.approx(sqrt(3) * one.std)
    training = expect(kimi_k3(8, 2, training=True))
    back = training.of("remote", kinds=["hidden"], directions=["backward"])
    assert training.of("remote", kinds=["hidden"]).std == pytest.approx(2 * back.std)
    assert training.of("remote", kinds=["ids"], directions=["backward"]).mean == 0


def test_deviations_of_different_flows_are_added() -> None:
    run = expect(run_shape("rank_dedup", [4] * 4, [0, 0, 1, 0], [4, 4], 3, expert_tp=2))
    assert [flow.name for flow in run.flows] == ["rows", "rows of shards"]
    moe, shards = ["dispatch", "combine"], ["tp_gather", "tp_reduce"]
    for scope in ("scale_up", "scale_out", "remote"):
        parts = [run.of(scope, phases=phases).std for phases in (moe, shards)]
        assert parts[0] > 0 and (parts[1] > 0) == (scope != "remote")
        assert run.of(scope).std == pytest.approx(sum(parts))
    # K copies a token, each to the one other shard, which is always remote.
    assert run.of("remote", phases=shards).std == 0


def test_remote_is_a_law_of_its_own() -> None:
    """Its variance is that of both tiers and their covariance, which is negative."""
    run = expect(kimi_k3(8, 2, tokens=[1] + [0] * 7))
    _, scale_up, scale_out, remote = run.flows[0].rows_var[0]
    near, far = Distinct.of([112] * 3, 896, 16), Distinct.of([112] * 4, 896, 16)
    covariance = distinct_covariance(near, far)
    assert covariance < 0
    assert scale_up + scale_out + 2 * covariance == pytest.approx(remote, rel=1e-12)
    assert run.flows[0].rows_mean[0, 3] == pytest.approx(run.flows[0].rows_mean[0, 1:3].sum())


@pytest.mark.parametrize("law", [Uniform(), Weighted(np.ones((1, 30)), np.zeros((1, 1), int))])
@pytest.mark.parametrize("dispatcher", ["rank_dedup", "all_to_all"])
def test_any_layout_of_nodes_and_any_order_of_sizes(dispatcher: str, law: Law) -> None:
    """Renaming the ranks, nodes with them, changes nothing but the order."""
    order = np.random.default_rng(5).permutation(12)
    sizes, tokens, nodes = np.array(even(30, 12)), np.arange(12), np.arange(12) // 4
    flows = [
        expect(run_shape(dispatcher, tokens[p].tolist(), nodes[p].tolist(), sizes[p], 4), law)
        for p in (np.arange(12), order)
    ]
    one, other = (expected.flows[0] for expected in flows)
    np.testing.assert_allclose(one.rows_mean, other.rows_mean, rtol=1e-12)
    np.testing.assert_allclose(one.rows_var, other.rows_var, rtol=1e-12)


def test_layers_may_be_placed_differently() -> None:
    both = expect(run_shape("all_to_all", [3, 0], (0, 0), [[4, 4], [6, 2]], 2))
    assert both.of("remote", layers=[0], **DISPATCH).mean == 3 * 16
    assert both.of("remote", layers=[1], **DISPATCH).mean == 3 * 8
    assert both.of("self", layers=[1], kinds=["counts"]).mean == 2 * 32 + 8 * 8
    assert both.of("remote", layers=[0], kinds=["counts"]).mean == 2 * 32 + 8 * 8


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_nothing_to_send(dispatcher: str) -> None:
    run = expect(run_shape(dispatcher, [0, 0], (0, 0), [8, 0], 2))
    assert run.of("remote").std == 0
    assert run.of("remote").mean == run.of("remote", kinds=["counts"]).mean > 0
    alone = expect(run_shape(dispatcher, [5], (0,), [8], 8))  # R = 1, K = E
    assert alone.of("remote").mean == alone.of("self").std == 0
    rows = {"all_to_all": 40, "one_sided": 40, "padded": 40}.get(dispatcher, 5)
    hops = 2 if dispatcher in ("two_hop", "hierarchical_allgather") else 1
    assert alone.of("self", **DISPATCH).mean == rows * hops * 16


def test_each_phase_has_its_own_format() -> None:
    formats = {"wire_dispatch": "mxfp8", "wire_combine": "fp32", "wire_backward": "fp16"}
    run = expect(run_shape("rank_dedup", [1, 1], (0, 0), [4, 4], 2, width=40, **formats))
    assert run.flows[0].bytes_per_row[0, :, :6].tolist() == [
        [40, 2, 8, 8, 0, 0],
        [160, 0, 0, 0, 0, 0],
    ]
    run = expect(
        run_shape("rank_dedup", [1, 1], (0, 0), [4, 4], 2, width=40, training=True, **formats)
    )
    assert run.flows[0].bytes_per_row[1, :, :4].tolist() == [[80, 0, 0, 8], [80, 0, 0, 0]]


def test_padding_takes_what_payload_leaves() -> None:
    run = expect(run_shape("padded", [6, 2], (0, 1), [4, 4], 2, width=8))
    room = 2  # ceil(6 x 2 / 8) rows for each of 4 slots, from each of 2 sources
    whole = run.of("scale_out", phases=["combine"])
    assert (whole.mean, whole.std) == (room * 4 * 2 * 16, 0.0)
    hidden, padding = (
        run.of("scale_out", phases=["combine"], kinds=[kind]) for kind in ("hidden", "padding")
    )
    assert hidden.mean + padding.mean == pytest.approx(whole.mean)
    assert hidden.std == padding.std > 0
    assert hidden.mean < 8 * 16  # of 8 choices that leave, some find no row


def test_what_has_no_law_says_why() -> None:
    plain = run_shape("rank_dedup", [4] * 4, [0, 0, 1, 1], even(16, 4), 4)
    many = [(e, (e + c) % 4) for e in range(8) for c in range(1, e + 1)]
    crowded = run_shape("rank_dedup", [4] * 4, [0] * 4, even(16, 4), 4, replicas=many)
    shared = run_shape("rank_dedup", [4] * 4, [0] * 4, even(16, 4), 4, replicas=[(0, 3)])
    some = np.full((1, 1, 4), 3)
    for run, law, active, words in [
        (plain, NoLaw("it replays a trace"), None, "it replays a trace"),
        (plain, GroupLimited(4, 2, "top2_sum"), None, "group_score=top2_sum"),
        (plain, GroupLimited(8, 4, "max"), None, "owns exactly one expert group"),
        (replace(plain, dispatcher="two_hop"), GroupLimited(4, 2, "max"), None, "two hops"),
        (replace(plain, dispatcher="all_to_all"), GroupLimited(4, 2, "max"), None, "none for cop"),
        (crowded, Uniform(), None, "repeat only after 840 tokens"),
        (shared, Uniform(), some, "only where every token chooses experts"),
        (shared, Markov(0.5, 8), None, "one slot for each expert"),
        (plain, Markov(0.5, 8), some, "experts for every token"),
        (replace(plain, top_k=9), Markov(0.5, 8), None, "cannot all be replaced"),
        (replace(plain, dispatcher="padded"), Markov(0.5, 8), None, "correlated choices"),
    ]:
        found = expected_traffic(run, law, active)
        assert isinstance(found, NoLaw) and words in found.reason, (words, found)
    for constant in ("allgather", "hierarchical_allgather"):
        run = replace(plain, dispatcher=constant)
        assert expect(run, GroupLimited(4, 2, "top2_sum")).of("remote").std == 0
    no_limit = expect(plain, GroupLimited(4, 4, "top2_sum"))
    assert no_limit.of("remote") == expect(plain).of("remote")


def test_names_that_no_law_is_about() -> None:
    run = expect(run_shape("rank_dedup", [4] * 2, [0, 0], [4, 4], 3, training=True))
    assert run.phases == ("dispatch", "combine")
    assert run.of("remote", kinds=["gradients", "expert_weights"]).mean == 0
    for ask in ({"phases": ["grad_sync"]}, {"kinds": ["odd"]}, {"directions": ["up"]}):
        with pytest.raises(KeyError, match="is not among the"):
            run.of("remote", **ask)
    with pytest.raises(KeyError, match="'network' is not among the scopes"):
        run.of("network")
    with pytest.raises(ValueError, match="dispatcher='two'"):
        expected_traffic(run_shape("two", [1], [0], [4], 1), Uniform())
    with pytest.raises(ValueError, match="top_k=16"):
        expected_traffic(run_shape("rank_dedup", [1, 1], [0, 0], [4, 4], 16), Uniform())


@pytest.mark.parametrize("dispatcher", ["all_to_all", "rank_dedup", "allgather", "two_hop"])
def test_a_million_tokens_on_each_of_a_thousand_ranks(dispatcher: str) -> None:
    tokens = [1_000_000] * 1024
    started = process_time()
    run = expect(kimi_k3(1024, 128, dispatcher, tokens, num_layers=92))
    estimate = run.of("remote")
    if dispatcher != "two_hop":
        rows = 1023 if dispatcher == "allgather" else 16 * 1023 / 1024
        total = rows * 92 * 1024e6
        assert run.flows[0].rows_mean[:, 3].sum() == pytest.approx(total, rel=1e-12)
    assert estimate.mean > 2.0**53 and np.isfinite(estimate.std)
    assert process_time() - started < 12  # seconds of a core


def test_four_thousand_ranks_are_fast() -> None:
    run = kimi_k3(4096, 512, tokens=[64] * 4096)
    started = process_time()
    expect(run)
    assert process_time() - started < 12  # seconds of a core


def test_skewed_rows_of_72_ranks_are_fast() -> None:
    law = Weighted(10 ** np.random.default_rng(0).uniform(0, 6, (1, 896)), np.zeros((1, 1), int))
    run = kimi_k3(72, 9, "two_hop", tokens=[1_000_000] * 72)
    started = process_time()
    expected = expect(run, law)
    assert np.isfinite(expected.flows[0].rows_var).all()
    assert process_time() - started < 8  # seconds of a core
