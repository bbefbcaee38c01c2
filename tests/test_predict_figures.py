"""Figures of predictions, beside arithmetic made here: traffic_model.md 6, facts.md 5 and 6."""

from __future__ import annotations

from itertools import combinations
from math import comb, exp, lgamma, log, prod, sqrt
from time import process_time

import numpy as np
import pytest

from moe.config import compose
from moe.prediction import predict

JUDGED = ("ep_size=64", "tokens=128", "wire.dispatch=mxfp8")
MXFP8, BF16 = 3584 + 3584 // 32, 2 * 3584  # bytes of a row of Kimi K3's latent


def figures(*words):
    return predict(compose(["job=predict", *words])).as_dict()


def hit(experts, size=896, top_k=16):
    """Chance that a token chooses at least one of so many experts."""
    return 1 - comb(size - experts, top_k) / comb(size, top_k)


@pytest.fixture(scope="module")
def judged():
    return figures(*JUDGED)


def test_kimi_k3_on_64_ranks(judged):
    """1.809 GB of payload a rank and step, 1.830 with 8 B for each of 16 choices; 184 rounds."""
    rows = 63 * hit(14)
    payload = 92 * 128 * rows * (MXFP8 + BF16)
    assert judged["rounds"] == 2 * 92 == 184
    assert judged["rows_per_token"] == pytest.approx(rows)
    assert judged["payload_bytes_per_rank_step"] == pytest.approx(payload)
    assert round(payload / 1e9, 3) == 1.809
    counts = 92 * 63 * 40  # a header of 32 B and one number for each other rank
    named = payload + 92 * 128 * rows * 16 * 8
    assert round(named / 1e9, 3) == 1.830
    assert judged["network_bytes_per_rank_step"] == pytest.approx(named + counts)
    assert judged["payload_bytes_per_token_layer"] == pytest.approx(rows * (MXFP8 + BF16))
    assert judged["payload_bytes_per_rank_layer"] == pytest.approx(payload / 92)
    assert judged["headline_bytes_per_rank_step"] == 2 * 92 * 128 * 16 * 7168 * 2
    assert judged["messages_per_rank_step"] == 184 * 63
    assert judged["mean_message_bytes"] == pytest.approx(named / (184 * 63))


def test_its_deviation(judged):
    """A hit of a rank varies; dispatch and combine move the same rows, so deviations add."""
    q, both = 1 - hit(14), comb(868, 16) / comb(896, 16)
    variance = 63 * q * (1 - q) + 63 * 62 * (both - q * q)
    assert sqrt(variance) == pytest.approx(1.161, abs=1e-3)  # traffic_model.md
    all_tokens = 92 * 64 * 128
    deviation = sqrt(all_tokens * variance) * (MXFP8 + BF16) / 64
    assert judged["payload_std_per_rank_step"] == pytest.approx(deviation)


def test_its_time_on_a_rack_is_latency(judged):
    times = {one["phase"]: one for one in judged["times"]}
    rows = 128 * 63 * hit(14)
    for phase, row, us, reached, floor in (
        ("dispatch", MXFP8, 7.4, 11.4, 27.8),
        ("combine", BF16, 14.4, 20.6, 32.6),
    ):
        one = times[phase]
        assert one["nominal_us"]["scale_up"] == pytest.approx(rows * row / 900e9 * 1e6)
        assert round(one["nominal_us"]["scale_up"], 1) == us
        assert round(one["measured_us"]["scale_up"], 1) == reached
        assert (one["latency_us"], one["bound"]) == (floor, "latency")
        # bytes grow with tokens: 479 and 290 tokens a rank weigh as much as the floor
        assert one["tokens_at_bandwidth"] == pytest.approx(128 * floor / one["bytes_us"])
    assert judged["bound"] == "latency" and judged["layer_us"] == pytest.approx(27.8 + 32.6)
    assert judged["step_us"] == pytest.approx(92 * 60.4)
    assert judged["tokens_per_s"] == pytest.approx(64 * 128 / (92 * 60.4e-6))


def test_its_time_with_nodes_of_eight_is_bandwidth():
    """50 GB/s cards: 56 ranks on other nodes, each hit with the chance of 14 experts."""
    outside = 128 * 56 * hit(14)
    us = [outside * row / 50e9 * 1e6 for row in (MXFP8, BF16)]
    assert [round(one, 1) for one in us] == [118.9, 230.6]
    boxes = figures(*JUDGED, "hardware=h100_sxm")
    assert [one["bytes_us"] for one in boxes["times"]] == pytest.approx(us)
    assert (boxes["bound"], boxes["binding_tier"]) == ("bandwidth", "scale_out")
    assert boxes["ranks_per_node"] == 8  # the domain of this machine
    rack = figures(*JUDGED, "topology.ranks_per_node=8")
    assert [one["latency_us"] for one in rack["times"]] == [18.9, 31.0]
    assert (rack["bound"], rack["layer_us"]) == ("bandwidth", pytest.approx(sum(us)))
    shared = figures(
        *JUDGED, "hardware=h100_sxm", "hardware.nics_per_rank=0.5", "hardware.oversubscription=2"
    )
    assert shared["layer_us"] == pytest.approx(4 * sum(us))
    assert shared["scale_out_GBps"] == 12.5


def test_tokens_move_the_bound_from_latency_to_bandwidth():
    few, many = (figures("ep_size=64", f"tokens={tokens}") for tokens in (240, 300))
    assert (few["bound"], many["bound"]) == ("latency", "bandwidth")
    between = figures("ep_size=64", "tokens=270")  # combine has the higher floor
    assert [one["bound"] for one in between["times"]] == ["bandwidth", "latency"]
    assert between["bound"] == "both"
    assert between["layer_us"] == pytest.approx(between["times"][0]["bytes_us"] + 32.6)


# traffic_model.md 6, contiguous: (R, N), remote rows of all_to_all, rank_dedup, two_hop (between,
# inside), allgather
TABLE = [
    ((4, 2), 12.0, 2.9713, 1.0, 1.9808, 3),
    ((8, 2), 14.0, 6.1894, 1.0, 5.3052, 7),
    ((16, 2), 15.0, 9.7069, 1.0, 9.0598, 15),
    ((32, 4), 15.5, 12.4283, 2.9713, 11.2256, 31),
    ((64, 8), 15.75, 14.1375, 6.1894, 12.5667, 63),
]


@pytest.mark.parametrize(("shape", "copies", "dedup", "between", "inside", "gathered"), TABLE)
def test_reference_values(shape, copies, dedup, between, inside, gathered):
    ranks, nodes = shape
    where = (f"ep_size={ranks}", f"topology.ranks_per_node={ranks // nodes}", "layers=1")
    found = {
        name: figures(*where, f"dispatcher={name}")
        for name in ("all_to_all", "rank_dedup", "two_hop", "allgather")
    }
    rows = {name: one["rows_per_token"] for name, one in found.items()}
    assert rows["all_to_all"] == pytest.approx(copies)
    assert rows["rank_dedup"] == pytest.approx(dedup, abs=5e-5)
    assert rows["allgather"] == gathered
    two = found["two_hop"]  # both ways, 7,168 B each
    out, up = (
        two[f"{tier}_payload_bytes_per_token_layer"] / 2 / BF16
        for tier in ("scale_out", "scale_up")
    )
    assert (out, up) == (pytest.approx(between, abs=5e-5), pytest.approx(inside, abs=5e-5))
    crossed = {one["ep_size"]: one for one in found["two_hop"]["crossovers"]["table"]}[ranks]
    for name, number in rows.items():
        told = crossed["rows"][name]
        assert told["scale_up"] + told["scale_out"] == pytest.approx(number)


@pytest.mark.parametrize(
    ("ranks", "num_bytes"), [(8, 44366), (16, 69579), (32, 89086), (64, 101338), (72, 102805)]
)
def test_bytes_of_a_token_and_layer(ranks, num_bytes):
    found = figures(f"ep_size={ranks}", "layers=1", "tokens=1")
    assert round(found["payload_bytes_per_token_layer"] / 2) == num_bytes


def test_72_ranks_are_uneven():
    """32 ranks of 13 experts receive most; a guide says how far one of 32 alike may go."""
    found = figures("ep_size=72", "tokens=128", "layers=1")
    assert found["slots_per_rank"] == {13: 32, 12: 40}
    mean = (32 * hit(13) + 40 * hit(12)) * 128 * 71 / 72
    most, n = 128 * 71 * hit(13), 128 * 71
    dispatch, combine = found["busiest"]
    for one, way in ((dispatch, "receives"), (combine, "sends")):
        assert (one["way"], one["rank"], one["ranks"]) == (way, 0, 32)
        assert one["rows"] == pytest.approx(most)
        assert one["mean_rows"] == pytest.approx(mean)
        sd = sqrt(n * hit(13) * (1 - hit(13)))
        assert one["guide_rows"] == pytest.approx(most + sd * sqrt(2 * log(32)))
    assert found["busiest_over_mean"] == pytest.approx(most / mean)
    assert found["times"][0]["bytes"]["scale_up"] == pytest.approx(most * BF16)


def test_936_slots_on_72_ranks():
    """40 experts twice, used in turn: half of the tokens meet each of two placements."""
    prediction = predict(
        compose(["job=predict", "ep_size=72", "placement=balance", "tokens=128", "layers=1"])
    )
    found = prediction.as_dict()
    assert (found["slots"], found["slots_per_rank"]) == (936, {13: 72})
    placement = prediction.plan.placements[0]
    rows = []
    for turn in (0, 1):
        sizes = np.zeros(72, int)
        for expert in range(896):
            slots = np.flatnonzero(placement.physical_to_logical == expert)
            sizes[placement.slot_rank[slots[turn % len(slots)]]] += 1
        rows.append(sum(map(hit, sizes.tolist())) * 71 / 72)
    assert found["rows_per_token"] == pytest.approx(sum(rows) / 2, rel=1e-12)


def test_a_million_tokens_on_1024_ranks_do_not_overflow():
    """896 ranks own one expert each: 16 choices are 16 ranks, one in 1024 the token's own."""
    found = figures("ep_size=1024", "tokens=1000000", "dispatcher=all_to_all")
    exact = 92 * 2 * BF16 * 1_000_000 * (16 - 16 / 1024)
    assert found["payload_bytes_per_rank_step"] == pytest.approx(exact, rel=1e-12)
    prediction = predict(compose(["job=predict", "ep_size=4096", "tokens=10000000"]))
    total = prediction.of("remote", kinds=("hidden",)).mean
    assert total == pytest.approx(92 * 2 * BF16 * 4096e7 * (16 - 16 / 4096), rel=1e-12)


def test_a_thousand_ranks_take_less_than_a_second():
    words = ("ep_size=1024", "topology.ranks_per_node=8", "dispatcher=two_hop", "tokens=1000000")
    config, began = compose(["job=predict", *words]), process_time()
    predict(config).as_dict()
    assert process_time() - began < 1.0  # 0.25 when this was written


def test_crossovers(judged):
    found = judged["crossovers"]
    # 16 (R - 1) / R rows for each choice, R - 1 for an all-gather: fewer from R = 17 on
    assert found["copies_beat_allgather"] == 17
    assert found["dedup_beats_allgather"] == 2  # of 1.2e-5 tokens no choice leaves the rank
    four_bits, sixteen = found["expert_moves"]
    values = 3 * 3584 * 3072
    assert four_bits["expert_bytes"] == values // 2 + values // 32
    assert four_bits["rows"] == pytest.approx(values * 4.25 / 8 / (MXFP8 + BF16))
    assert four_bits["tokens_per_rank"] == pytest.approx(four_bits["rows"] * 896 / 16)
    assert sixteen["expert_bytes"] == 2 * values
    tensor = found["all_reduce"]
    assert tensor["tensor_bytes_per_rank_layer"] == pytest.approx(2 * 63 / 64 * 64 * 128 * BF16)
    assert tensor["expert_bytes_per_rank_layer"] == pytest.approx(2 * 128 * 63 * hit(14) * BF16)
    domains = {one["domain"]: one for one in found["domains"]}
    assert set(domains) == {4, 8, 64} and domains[64]["rank_dedup"] == 0
    assert domains[8]["rank_dedup"] == pytest.approx(56 * hit(14) * (MXFP8 + BF16))
    assert domains[8]["two_hop"] == pytest.approx(7 * hit(112) * (MXFP8 + BF16))


def test_two_hops_pay_between_nodes_where_links_there_are_slow():
    slow = figures(*JUDGED, "hardware=h100_sxm")["crossovers"]
    assert slow["two_hop_beats_dedup"] == 16
    fast = figures(*JUDGED, "hardware=h100_sxm", "hardware.scale_out_GBps=4000")["crossovers"]
    assert fast["two_hop_beats_dedup"] is None
    unknown = figures(*JUDGED, "hardware=mi355x", "topology.ranks_per_node=64")
    assert unknown["unknown_rates"] == ["scale_up"] and unknown["step_us"] is None
    assert any(one["us"] is None for one in unknown["crossovers"]["table"])


SMALL = (
    *("model.num_experts=9", "model.top_k=2", "ranks=4", "tokens=[3,1,0,2]", "layers=1"),
    *("topology.node_of_rank=[0,1,0,1]", "router=hot_experts"),
)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "rank_dedup", "two_hop", "allgather"])
def test_rows_of_each_rank_by_enumeration(dispatcher):
    """Every pair of nine experts, weighted; each row followed from rank to rank."""
    prediction = predict(compose(["job=predict", *SMALL, f"dispatcher={dispatcher}"]))
    weights = prediction.law.weights[0]
    owner, node = [0, 0, 0, 1, 1, 2, 2, 3, 3], (0, 1, 0, 1)
    total = sum(prod(weights[list(pair)]) for pair in combinations(range(9), 2))
    sent, received = np.zeros((3, 4)), np.zeros((3, 4))

    def move(src, dst, rows):
        tier = 0 if src == dst else 1 if node[src] == node[dst] else 2
        sent[tier, src] += rows
        received[tier, dst] += rows

    for source, tokens in enumerate((3, 1, 0, 2)):
        for pair in combinations(range(9), 2):
            rows = tokens * prod(weights[list(pair)]) / total
            ranks = [owner[expert] for expert in pair]
            if dispatcher == "all_to_all":
                targets = ranks
            else:
                targets = sorted(set(ranks)) if dispatcher != "allgather" else [0, 1, 2, 3]
            if dispatcher != "two_hop":
                for rank in targets:
                    move(source, rank, rows)
                continue
            for one in {node[rank] for rank in targets}:
                proxy = source if one == node[source] else (source // 2) * 2 + one
                move(source, proxy, rows)
                for rank in targets:
                    if node[rank] == one:
                        move(proxy, rank, rows)
    found = prediction.rows[0]
    assert found["dispatch"].sent == pytest.approx(sent, abs=1e-12)
    assert found["dispatch"].received == pytest.approx(received, abs=1e-12)
    assert found["combine"].sent == pytest.approx(received, abs=1e-12)
    assert found["combine"].received == pytest.approx(sent, abs=1e-12)


def test_no_law_is_said_and_asked_for_in_vain():
    prediction = predict(compose(["job=predict", "router=learned", "layers=1"]))
    assert (
        prediction.as_dict()["reason"] == "a learned router follows no law that is known in advance"
    )
    with pytest.raises(ValueError, match="router=learned: a learned router follows no law"):
        prediction.of("remote")


def test_padding_tells_useful_bytes_from_empty_ones_and_from_choices_without_room():
    """Field case 8: 65,536 tokens, 4 of 256 experts, factor 1: 1,024 rows for each of them."""
    found = figures(
        "model=deepseek_v3", "model.top_k=4", "router=uniform", "ep_size=16", "tokens=65536",
        "layers=1", "dispatcher=padded", "dispatcher.capacity_factor=1.0", "wire.dispatch=mxfp8",
    )  # fmt: skip
    dispatch, row = found["phases"][0], 7168 + 7168 // 32
    # |binomial - mean| is 2 / T x C (T - C) x P(C) on average (de Moivre); half of it is above.
    tokens, room = 65_536, 1024
    log_of_mean = lgamma(tokens + 1) - lgamma(room + 1) - lgamma(tokens - room + 1)
    log_of_mean += room * log(1 / 64) + (tokens - room) * log(63 / 64)
    dropped = room * (63 / 64) * exp(log_of_mean) / room
    assert found["dropped_share"] == pytest.approx(dropped) and round(dropped, 4) == 0.0124
    assert dispatch["scale_up"] - dispatch["counts"] == 15 / 16 * 256 * 1024 * row
    useful = 15 / 16 * 256 * 1024 * (1 - dropped) * row
    assert dispatch["hidden"] + dispatch["scales"] == pytest.approx(useful)
    assert dispatch["padding"] == pytest.approx(15 / 16 * 256 * 1024 * dropped * row)
    assert figures("dispatcher=all_to_all", "layers=1")["dropped_share"] == 0
