"""Whole runs of the uniform router, held to what routing without preference must give."""

from __future__ import annotations

from math import comb, sqrt

import numpy as np
import pytest
from emulate_runs import NODES, Runs, network
from law_runs import law_dispatchers, router_cases, runs_of_the_law
from run_configs import TO_ALL


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"), runs_of_the_law())


@pytest.mark.parametrize(
    ("ranks", "dispatcher"), [(ranks, name) for ranks in NODES for name in law_dispatchers(ranks)]
)
def test_uniform_routing_lies_within_four_deviations(runs, ranks, dispatcher):
    run = runs[f"law {ranks} {dispatcher}"]
    totals = run.record["totals"]
    scopes = [*totals["tiers"].values(), *totals["cells"]]
    scopes += [cell for entry in run.record["layers"] for cell in entry["cells"]]
    for scope in scopes:
        if scope["z"] is None:  # nothing is left to chance
            assert scope["measured_bytes"] == scope["expected_bytes"]
        else:
            assert abs(scope["z"]) < 4, scope
    assert any(scope["z"] for scope in scopes) == (dispatcher not in TO_ALL)
    assert run.states["exact"] == "EXACT" and run.states["expected"] in ("WITHIN", "EXACT")
    assert run.status == 0


def remote_ranks_hit(ranks=8, num_experts=896, top_k=16):
    """Mean and deviation of the remote ranks that a token reaches, by inclusion and exclusion."""
    own = num_experts // ranks

    def missed(blocks):
        return comb(num_experts - blocks * own, top_k) / comb(num_experts, top_k)

    others = ranks - 1
    mean = others * (1 - missed(1))
    variance = others * missed(1) + others * (others - 1) * missed(2) - (others * missed(1)) ** 2
    return mean, sqrt(variance)


def test_remote_rows_of_a_token_at_laptop_scale(runs):
    tokens = 8 * 64 * 4  # in all layers
    mean, deviation = remote_ranks_hit()
    assert round(mean, 4) == 6.1894 and round(deviation, 3) == 0.746
    copies = (14.0, sqrt(16 * (1 / 8) * (7 / 8) * (896 - 16) / 895))
    laws = {
        "rank_dedup": (mean, deviation),
        "two_hop": (mean, deviation),  # on one node
        "all_to_all": copies,
        "one_sided": copies,
        "deduplicated": (mean, deviation),
        "allgather": (7.0, 0.0),
        "hierarchical_allgather": (7.0, 0.0),
        "padded": (7 * 112 * 2 / 64, 0.0),  # room for 2 = 1.25 * 64 * 16 / 896 of each of 64 tokens
    }
    for dispatcher, (rows, deviation) in laws.items():
        run = runs[f"laptop {dispatcher}"]
        shape = run.record["manifest"]["shape"]
        assert (shape["num_experts"], shape["top_k"], shape["latent_size"]) == (896, 16, 128)
        for phase in ("dispatch", "combine"):
            counted = network(run.rows_per_token(phase))
            assert abs(counted - rows) <= 4 * deviation / sqrt(tokens), (dispatcher, counted)
        # payload alone, bf16: so many rows of 128 values of 2 B
        payload = run.record["totals"]["network_payload_bytes"]
        rows = round(2 * network(run.rows_per_token()) * tokens)
        assert payload + network_padding(run) == rows * 256
        assert (network_padding(run) > 0) == (dispatcher == "padded")


def network_padding(run):
    """Bytes of empty rows that left their rank."""
    cells = run.record["totals"]["cells"]
    padding = [cell for cell in cells if cell["kind"] == "padding" and cell["tier"] != "self"]
    return sum(cell["measured_bytes"] for cell in padding)


def test_a_token_goes_to_a_node_once(runs):
    """R = 8 on two nodes: two hops against a row for each rank, between nodes and inside them.

    A token misses a node once in 75,000; nearly always all 2,048 go over, and one that does not is
    no finding: the verdict computes that chance exactly.
    """
    tokens, ranks_of_node, ranks = 8 * 64 * 4, 4, 8
    q = comb(784, 16) / comb(896, 16)  # a rank is missed
    missed = comb(448, 16) / comb(896, 16)  # a node is
    assert missed == pytest.approx(1.33e-5, rel=0.01)
    assert [round(n * (1 - q), 3) for n in (4, 3, 6)] == [3.537, 2.653, 5.305]
    two_hop, direct = (runs[f"two nodes {name}"] for name in ("two_hop", "rank_dedup"))
    for run in (two_hop, direct):
        assert run.record["manifest"]["node_of_rank"] == [0] * 4 + [1] * 4
        assert run.states["exact"] == "EXACT" and run.states["expected"] == "WITHIN"
        assert run.status == 0

    rows = two_hop.rows_per_token()
    assert rows["scale_out"] * tokens >= tokens - 1 and rows["scale_out"] <= 1
    near = ranks - 2  # neither the source nor the proxy needs a row inside its node
    assert rows["scale_up"] == pytest.approx(near * (1 - q), abs=error_of(q, near, tokens))
    rows = direct.rows_per_token()
    others = ranks_of_node - 1
    assert rows["scale_out"] == pytest.approx(4 * (1 - q), abs=error_of(q, 4, tokens))
    assert rows["scale_up"] == pytest.approx(others * (1 - q), abs=error_of(q, others, tokens))


def error_of(q, blocks, tokens):
    """Four deviations of a mean over tokens of how many of some ranks are hit; misses of two ranks
    shun each other, so that independent ones vary more."""
    return 4 * sqrt(blocks * q * (1 - q) / tokens)


@pytest.mark.parametrize("dispatcher", ["two_hop", "hierarchical_allgather"])
def test_nothing_crosses_the_same_boundary_twice(runs, dispatcher):
    """Each source sends its tokens over to one rank of the other node, at most one row each."""
    rows = runs[f"two nodes {dispatcher}"].traffic["rows"][:, 0, 0]  # [layer, src, dst]
    for src in range(8):
        over = rows[:, src, 4:] if src < 4 else rows[:, src, :4]  # [layer, dst in the other node]
        assert (over.sum(axis=1) <= 64).all() and over.sum() >= 4 * 64 - 1
        assert np.flatnonzero(over.sum(axis=0)).tolist() == [src % 4]


@pytest.mark.parametrize(("router", "dispatcher"), router_cases())
def test_other_routers_follow_their_laws(runs, router, dispatcher):
    run = runs[f"router {router} {dispatcher}"]
    (expected,) = [one for one in run.record["verdicts"] if one["name"] == "expected"]
    assert expected["state"] == ("EXACT" if dispatcher == "padded" else "WITHIN"), expected
    assert run.states["exact"] == "EXACT" and run.status == 0


def test_copies_and_distinct_ranks_are_told_apart(runs):
    """The same routing, 14 rows a token against 6.2: a figure names the strategy it is of."""
    per_copy, per_rank = runs["laptop all_to_all"].record, runs["laptop rank_dedup"].record
    assert per_copy["manifest"]["routing_sha256"] == per_rank["manifest"]["routing_sha256"]
    for record, rows_per_copy in ((per_copy, 1.0), (per_rank, remote_ranks_hit()[0] / 14)):
        factors = {factor["name"]: factor["value"] for factor in record["headline"]["factors"]}
        assert factors["rows_per_copy"] == pytest.approx(rows_per_copy, rel=0.02)
        assert factors["remote_share"] == pytest.approx(14 / 16, rel=0.02)
        assert factors["width"] == 0.5
        assert np.prod(list(factors.values())) == pytest.approx(record["headline"]["ratio"])


def test_the_width_on_the_wire_is_the_latent_one(runs):
    """K3 in BF16: 114,688 B for the 16 copies of a token, one way, not 229,376."""
    full = runs["laptop all_to_all"].record["full_scale"]
    assert full["headline_bytes"] == 229_376
    assert full["headline_at_payload_width_bytes"] == 114_688
    rows = full["phases"]["dispatch"]["rows"]
    assert sum(rows.values()) == pytest.approx(16)
    assert full["phases"]["dispatch"]["row_bytes"] == {"hidden": 7168}
    assert full["rounds"] == 184


def test_self_rows_are_not_network_rows(runs):
    """N = 2: counting the home node too would double the rows between nodes."""
    rows = runs["law 16 all_to_all"].rows_per_token()
    assert sum(rows.values()) == 16
    deviation = sqrt(16 / 4 / (16 * 48 * 2))
    assert rows["scale_out"] == pytest.approx(8, abs=4 * deviation)
    assert rows["self"] == pytest.approx(1, abs=4 * deviation)
