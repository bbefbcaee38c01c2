"""The benchmark: its statistics, its page, and contenders that move what they say and return it."""

from __future__ import annotations

import json

import bench_bodies
import numpy as np
import pytest

from comm.dispatch import DISPATCHERS
from comm.report.bench_page import METERING_MIN_BYTES, bench_page, bench_record, case_record
from comm.report.ratios import paired_ratio
from comm.report.units import format_seconds
from comm.spawn import RankFailure, run_ranks
from moe.contest import RAW_COPIES, RAW_DEDUP, UNMETERED, in_chunks

CHUNKED = in_chunks("rank_dedup", 4)
NAMES = (RAW_COPIES, RAW_DEDUP, "rank_dedup", "all_to_all", f"rank_dedup, {UNMETERED}", CHUNKED)
SPEEDS = {
    **{RAW_COPIES: 1.0, RAW_DEDUP: 0.5, "rank_dedup": 1.5, "all_to_all": 2.0},
    **{NAMES[4]: 1.5, CHUNKED: 1.8},
}


# -- ratios ----------------------------------------------------------------------------------------


def drifting(iterations, seed=0, cases=1):
    """float64 [cases, iterations]: a machine that slows down threefold, with spikes of its own."""
    random = np.random.default_rng(seed)
    drift = np.linspace(1, 3, iterations) * random.lognormal(0, 0.05, (cases, iterations))
    return drift * np.where(random.random((cases, iterations)) < 0.05, 10, 1)


def test_a_known_ratio_is_found_through_the_drift():
    machine = drifting(50)
    ratio = paired_ratio(1.6 * machine, machine)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.6, 1.6, 1.6))


def test_the_interval_covers_the_ratio():
    """95 % of the time: of 200 noisy measurements, at least 180 (5 deviations below 190)."""
    covered = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        reference = drifting(21, seed) * random.lognormal(0, 0.2, (1, 21))
        seconds = 1.3 * drifting(21, seed) * random.lognormal(0, 0.2, (1, 21))
        ratio = paired_ratio(seconds, reference)
        assert ratio.low <= ratio.value <= ratio.high
        covered += ratio.low <= 1.3 <= ratio.high
    assert covered >= 180


def test_more_iterations_narrow_the_interval():
    random = np.random.default_rng(0)
    widths = []
    for iterations in (10, 1000):
        noise = random.lognormal(0, 0.2, (2, 1, iterations))
        ratio = paired_ratio(noise[0], noise[1])
        widths.append(ratio.high - ratio.low)
    assert widths[1] < widths[0] / 4


def test_cases_weigh_alike_whatever_they_take():
    """The geometric mean of the cases' medians: 2 and 8 give 4, in any order and any unit."""
    reference = np.ones((2, 9)) * [[1e-6], [1e3]]
    ratio = paired_ratio(reference * [[2.0], [8.0]], reference)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((4, 4, 4))
    assert paired_ratio(reference * [[8.0], [2.0]], reference).value == pytest.approx(4)
    assert paired_ratio(reference, reference * [[2.0], [8.0]]).value == pytest.approx(1 / 4)


def test_the_order_of_iterations_does_not_matter():
    random = np.random.default_rng(3)
    seconds, reference = random.lognormal(0, 0.3, (2, 3, 15))
    shuffled = random.permutation(15)
    one, other = (
        paired_ratio(seconds[:, order], reference[:, order]) for order in (range(15), shuffled)
    )
    assert one.value == other.value
    # the same draws meet other iterations, so the interval moves a little
    assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=0.1)
    assert paired_ratio(seconds, reference) == paired_ratio(seconds, reference)


# -- the record and the page -----------------------------------------------------------------------


def sample_record(payload_bytes=2 * METERING_MIN_BYTES, metering=1.01):
    """Two cases on two ranks, with times that are exact multiples of the raw collective's.

    payload_bytes: of a rank, one way
    """
    cases = []
    for tokens in (256, 1024):
        speeds = SPEEDS | {"rank_dedup": 1.5 * metering}
        seconds = np.array([speeds[name] * drifting(7, tokens)[0] for name in NAMES])
        pairs = np.full((len(NAMES), 2, 2), payload_bytes)  # both ways, half to each rank
        place = {"tokens": tokens, "width": 256, "dtype": "bf16", "world_size": 2}
        cases.append(case_record(place, NAMES, pairs, seconds))
    manifest = {
        "version": "0.0",
        "commit": "0123456789ab",
        "torch": "2.0",
        "backend": "gloo",
        "device": "cpu",
        "world_size": 2,
        "num_experts": 896,
        "top_k": 16,
        "model": "kimi_k3",
        "seed": 0,
        "iterations": 9,
        "started": "2026-11-30T17:20:11+00:00",
        "seconds": 3.214,
    }
    record = bench_record(manifest, cases, "rank_dedup", NAMES[4], (4, CHUNKED))
    return record | {"result_dir": "results/20261130-172011-kimi_k3-bench"}


def test_the_record_holds_both_ratios_of_every_contender():
    record = json.loads(json.dumps(sample_record(metering=1.0), allow_nan=False))
    for place in [*record["cases"], record]:
        methods = (
            {method["name"]: method for method in place["methods"]}
            if "methods" in place
            else place["geometric_mean"]
        )
        for name, speed in SPEEDS.items():
            assert methods[name]["over_raw_copies"]["value"] == pytest.approx(speed)
            assert methods[name]["over_raw_dedup"]["value"] == pytest.approx(2 * speed)


def test_bandwidths_of_a_case():
    record = sample_record()
    for case in record["cases"]:
        raw = case["methods"][0]
        sent = 2 * 2 * METERING_MIN_BYTES  # a rank, out and back, half of it to itself
        assert raw["sent_bytes"] == 2 * sent
        assert raw["algbw_GBps"] == pytest.approx(sent / raw["median_seconds"] / 1e9)
        assert raw["busbw_GBps"] == pytest.approx(raw["algbw_GBps"] / 2)
        assert raw["wirebw_GBps"] == pytest.approx(raw["algbw_GBps"] / 2)


@pytest.mark.parametrize("payload_bytes", [METERING_MIN_BYTES, METERING_MIN_BYTES - 1])
def test_metering_is_judged_where_a_rank_moves_enough(payload_bytes):
    record = sample_record(payload_bytes, metering=1.015)
    page = text(record)
    if payload_bytes < METERING_MIN_BYTES:
        assert record["metering"] is None
        assert "no case moves 8 MiB a rank" in page
    else:
        assert record["metering"]["over_unmetered"]["value"] == pytest.approx(1.015)
        assert "Cost of metering rank_dedup: +1.5 % [+1.5, +1.5] over 2 cases" in page


def test_the_cost_of_chunks_is_that_of_each_further_one():
    """Four take 1.8 where the whole takes 1.5: 0.1 of the raw collective for each of three."""
    record = sample_record(metering=1.0)
    chunks = record["chunks"]
    assert (chunks["dispatcher"], chunks["chunks"]) == ("rank_dedup", 4)
    assert chunks["over_whole"]["value"] == pytest.approx(1.2)
    seconds = [np.array(case["seconds"])[0] for case in record["cases"]]  # of the raw collective
    assert chunks["seconds_per_chunk"] == pytest.approx(0.1 * np.median(seconds))
    page = " ".join(text(record).split())
    each = format_seconds(chunks["seconds_per_chunk"])
    assert f"1.20 [1.20, 1.20] times the whole, {each} for each further chunk" in page


def test_chunks_that_were_not_timed_have_no_cost():
    record = sample_record()
    whole = bench_record(record["manifest"], record["cases"], "rank_dedup", NAMES[4])
    assert whole["chunks"] is None
    assert "Cost of chunks: not measured" in text(whole | {"result_dir": "x"})


def text(record, width=100):
    lines = ["".join(words for words, _ in spans) for spans in bench_page(record, width)]
    assert max(map(len, lines)) <= width
    return "\n".join(lines)


def test_the_page_names_every_case_and_contender():
    page = text(sample_record(metering=1.0))
    for words in ("256 tokens x 256 x bf16", "1024 tokens x 256 x bf16", "GEOMETRIC MEAN", *NAMES):
        assert words in page
    assert "2.00 [2.00, 2.00] x raw K copies" in page and "4.00 x raw dedup" in page


def test_the_page_begins_and_ends_like_that_of_a_run():
    lines = text(sample_record()).split("\n")
    when = "commit 0123456789ab, started 2026-11-30T17:20:11+00:00, 3.214 s"
    assert lines[0] == f"WideEP 0.0 bench   {when}"
    assert lines[-2] == "RESULTS        results/20261130-172011-kimi_k3-bench"


def test_the_page_counts_its_cases():
    record = sample_record()
    assert "GEOMETRIC MEAN  over 2 cases" in text(record)
    record["cases"], record["metering"]["cases"] = record["cases"][:1], 1
    page = text(record)
    assert "GEOMETRIC MEAN  over 1 case\n" in page and "over 1 case of at least" in page


def test_a_contender_over_itself_has_no_interval():
    page = text(sample_record(metering=1.0)).split("\n")
    for name, cells in ((RAW_COPIES, [["1", "2.00"]] * 2), (RAW_DEDUP, [["0.50", "1"]] * 2)):
        rows = [line[26:].split() for line in page if line.startswith(f"  {name:<24}")]
        assert len(rows) == 3  # two cases and the mean
        assert [[row[2], row[-4]] for row in rows[:2]] == cells
    assert sum(" 1 x raw K copies" in line for line in page) == 1
    assert sum(line.endswith(" 1 x raw dedup") for line in page) == 1


def test_the_page_says_what_is_raw_and_gives_its_units():
    page = text(sample_record())
    (raw,) = (line for line in page.split("\n") if line.startswith("  raw  "))
    assert "K copies: a row a (token, expert), deduplicated: a (token, rank)" in raw
    assert page.count("- GB/s -") == 2  # above each case


# -- contenders ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moved():
    """By rank: what each contender says that it sends, and what was counted beside it."""
    return run_ranks(bench_bodies.count_and_compare, 4)


def test_the_raw_collective_moves_the_payload_of_the_dispatcher(moved):
    """To every rank the same bytes, out and back, for K copies and for distinct ranks."""
    for rank, found in enumerate(moved):
        for raw, counted in ((RAW_COPIES, "all_to_all"), (RAW_DEDUP, "rank_dedup")):
            assert found["sent"][raw].tolist() == found["payload"][counted].tolist(), rank
            assert found["sent"][raw].sum() > 0
        assert (found["sent"][RAW_DEDUP] < found["sent"][RAW_COPIES]).any()
        for name in ("all_to_all", "rank_dedup"):  # what it says it sends is all that it sends
            assert (found["sent"][name] > found["payload"][name]).all()
            assert found["sent"][name].tolist() == found["all kinds"][name].tolist()


def test_the_raw_collectives_really_move_their_rows(moved):
    for found in moved:
        for raw in (RAW_COPIES, RAW_DEDUP):
            assert found["collectives"][raw] == [found["sent"][raw].sum()] * 2


def test_contenders_are_the_raw_ones_the_dispatchers_and_one_unmetered(moved):
    names = [RAW_COPIES, RAW_DEDUP, "all_to_all", "rank_dedup", f"all_to_all, {UNMETERED}"]
    assert [list(found["sent"]) for found in moved] == [names] * 4


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_strategy_can_be_timed(num_ranks):
    """On one rank, on two nodes of which one is smaller, and in chunks."""
    others = [name for name in DISPATCHERS if name != "two_hop"]
    chunked = in_chunks("two_hop", 3)
    for found in run_ranks(bench_bodies.every_strategy, num_ranks):
        assert found["names"] == [
            *(RAW_COPIES, RAW_DEDUP, "two_hop", *others, f"two_hop, {UNMETERED}", chunked)
        ]
        assert max(found["errors"]) < 2**-7
        # the same rows, and two more counts messages of each kind
        more = found["sent"][chunked] - found["sent"]["two_hop"]
        assert (more > 0).all() and (more % 40 == 0).all()


def test_dispatchers_give_the_tokens_back(moved):
    for found in moved:
        assert found["errors"] and max(found["errors"]) < 2**-7


def test_an_unmetered_contender_counts_nothing(moved):
    for found in moved:
        assert found["counted while racing"] == {"all_to_all": True, "unmetered": False}


def test_everybody_knows_the_slowest_rank(moved):
    first = moved[0]["seconds"]
    assert first.shape == (5, 3) and (first > 0).all()
    for found in moved:
        assert np.array_equal(found["seconds"], first)
        assert found["done"] == 4  # one warm-up round and three timed ones


@pytest.mark.parametrize("fault", ["row lost", "weights ignored"])
def test_wrong_tokens_are_refused(fault):
    with pytest.raises(RankFailure, match="rank_dedup returned other tokens than it was given"):
        run_ranks(bench_bodies.contend_with_fault, 2, fault)
