"""Whole runs of the uniform router, held to what routing without preference must give."""

from __future__ import annotations

from math import comb, sqrt

import numpy as np
import pytest
from emulate_runs import NODES, Runs, law_dispatchers, network, runs_of_the_law


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
    assert any(scope["z"] for scope in scopes) == (dispatcher != "allgather")
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
    laws = {
        "rank_dedup": (mean, deviation),
        "all_to_all": (14.0, sqrt(16 * (1 / 8) * (7 / 8) * (896 - 16) / 895)),
        "allgather": (7.0, 0.0),
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
        assert payload == round(2 * network(run.rows_per_token()) * tokens) * 256


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
