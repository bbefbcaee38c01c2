"""Rows of each rank: their sums are those of the whole traffic, their variances those of draws.

tests/test_predict_figures.py follows single rows from rank to rank.
"""

from itertools import combinations
from math import prod

import numpy as np
import pytest

from comm.topology import TIER_NAMES
from moe.config import compose
from moe.prediction import predict

TINY = ("model.num_experts=9", "model.top_k=2", "ranks=4", "tokens=[3,1,0,2]", "layers=2")
NODES = "topology.node_of_rank=[0,1,0,1]"
OWNER, NODE, TOKENS = [0, 0, 0, 1, 1, 2, 2, 3, 3], (0, 1, 0, 1), (3, 1, 0, 2)
PAIRS = list(combinations(range(9), 2))


def predicted(*words: str):
    return predict(compose(["job=predict", *TINY, NODES, *words]))


@pytest.mark.parametrize(
    "words",
    [
        ["dispatcher=all_to_all"],
        ["dispatcher=rank_dedup", "steps=3"],
        ["dispatcher=two_hop"],
        ["dispatcher=hierarchical_allgather"],
        ["dispatcher=rank_dedup", "router=hot_experts"],
        ["dispatcher=all_to_all", "ep_size=2"],
        ["dispatcher=all_to_all", "expert_tp=2"],
        ["dispatcher=rank_dedup", "expert_tp=2", "expert_tp_mode=all"],
        ["dispatcher=two_hop", "expert_tp=2", "steps=2"],
        ["dispatcher=rank_dedup", "mode=training"],
    ],
    ids=" ".join,
)
def test_all_ranks_together_send_the_expected_traffic(words):
    prediction = predicted(*words)
    traffic = prediction.traffic
    seen = set()
    for flow in traffic.flows:
        for phase in flow.phases(traffic.phases):
            seen.add(phase)
            for layer, rows in enumerate(prediction.rows):
                for tier, name in enumerate(TIER_NAMES):
                    wanted = flow.rows_mean[layer, traffic.scopes.index(name)]
                    assert rows[phase].sent[tier].sum() == pytest.approx(wanted), (phase, name)
                    assert rows[phase].received[tier].sum() == pytest.approx(wanted)
    assert seen == set(traffic.phases)


@pytest.mark.parametrize("steps", [1, 2])
def test_padded_ranks_send_their_whole_buffers(steps):
    prediction = predicted("dispatcher=padded", f"steps={steps}", "layers=1")
    row = 2 * prediction.run.width  # bf16, empty or not
    kinds = ("hidden", "scales", "padding")
    for tier, name in enumerate(TIER_NAMES):
        bytes_sent = prediction.rows[0]["dispatch"].sent[tier].sum() * row
        wanted = prediction.traffic.of(name, phases=("dispatch",), kinds=kinds).mean
        assert bytes_sent == pytest.approx(wanted) and wanted > 0


def spread(values, chances) -> float:
    values, chances = np.array(values, float), np.array(chances)
    return float((values**2 * chances).sum() - (values * chances).sum() ** 2)


def received(dispatcher: str, chances) -> np.ndarray:
    """[tier, R] variance of the rows that a rank receives, each pair of experts in turn."""
    found = np.zeros((3, 4))
    for source, tokens in enumerate(TOKENS):
        for rank in range(4):
            rows = [sum(OWNER[expert] == rank for expert in pair) for pair in PAIRS]
            if dispatcher == "rank_dedup":
                rows = [min(one, 1) for one in rows]
            tier = 0 if source == rank else 1 if NODE[source] == NODE[rank] else 2
            found[tier, rank] += tokens * spread(rows, chances)
    return found


@pytest.mark.parametrize("dispatcher", ["all_to_all", "rank_dedup"])
def test_variances_of_a_rank_are_those_of_its_tokens(dispatcher):
    prediction = predicted(f"dispatcher={dispatcher}", "layers=1")
    wanted = received(dispatcher, [1 / len(PAIRS)] * len(PAIRS))
    assert prediction.rows[0]["dispatch"].variance == pytest.approx(wanted, abs=1e-12)


def test_variances_under_weights_are_exact_for_hits_and_bounded_for_copies():
    hits = predicted("dispatcher=rank_dedup", "router=hot_experts", "layers=1")
    weights = hits.law.weights[0]
    drawn = np.array([prod(weights[list(pair)]) for pair in PAIRS])
    wanted = received("rank_dedup", drawn / drawn.sum())
    assert hits.rows[0]["dispatch"].variance == pytest.approx(wanted, abs=1e-12)
    copies = predicted("dispatcher=all_to_all", "router=hot_experts", "layers=1")
    bound, true = copies.rows[0]["dispatch"].variance, received("all_to_all", drawn / drawn.sum())
    assert (bound >= true - 1e-12).all() and (bound[true > 0] <= 1.3 * true[true > 0]).all()


def test_a_proxy_receives_what_its_node_needs():
    """Between nodes: rows of each source to the rank of the other node with its own local index."""
    prediction = predicted("dispatcher=two_hop", "layers=1")
    wanted = np.zeros(4)
    for source, tokens in enumerate(TOKENS):
        other = 1 - NODE[source]
        hit = [any(NODE[OWNER[expert]] == other for expert in pair) for pair in PAIRS]
        wanted[(source // 2) * 2 + other] += tokens * spread(hit, [1 / len(PAIRS)] * len(PAIRS))
    assert prediction.rows[0]["dispatch"].variance[2] == pytest.approx(wanted, abs=1e-12)


def test_shards_pass_rows_on_to_their_mates():
    """Two shards on ranks 0 and 1, two on 2 and 3: each row goes on to the one mate, and back."""
    words = ("dispatcher=all_to_all", "expert_tp=2", "layers=1", "tokens=[3,1,0,1]")
    rows = predicted(*words).rows[0]
    gathered, reduced = rows["tp_gather"], rows["tp_reduce"]
    assert gathered.sent.sum() == pytest.approx(2 * 5)  # every choice once
    assert gathered.received[2] == pytest.approx(gathered.sent[2][[1, 0, 3, 2]])
    assert gathered.sent[2][0] != gathered.sent[2][1]
    assert reduced.sent == pytest.approx(gathered.received)
    assert reduced.received == pytest.approx(gathered.sent)
    assert np.isnan(gathered.variance).all()
