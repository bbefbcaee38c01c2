"""What stands beside the figures: legends, and lines that only some runs have."""

from __future__ import annotations

import copy

import pytest
from page_text import ONLY_BESIDE, joined, note, table_rows, text_of
from report_samples import SAMPLES, sample, sample_record

from comm.report.table_rows import format_z
from comm.report.units import format_bytes


@pytest.mark.parametrize("name", SAMPLES)
def test_a_page_has_the_notes_of_its_run_and_no_others(name: str) -> None:
    """A default run says nothing of what it does not do."""
    about = SAMPLES[name]
    balanced = about.get("placement") == "balance"
    wanted = {
        "beside": about.get("training", False) or balanced,
        "dropped": about.get("dispatcher") == "padded",
        "routing": "notes" in about,
        "rounding": about.get("wire", "bf16") != "bf16",
        "placement": balanced or about.get("placement") == "file",
        "chunks": about.get("chunks", 1) > 1,
    }
    assert {label: note(name, label) != "" for label in wanted} == wanted


def test_the_router_has_its_say() -> None:
    assert note("replayed", "routing") == "; ".join(SAMPLES["replayed"]["notes"])


def test_choices_without_room_are_counted_and_predicted() -> None:
    record = copy.deepcopy(sample("padded"))
    choices = record["choices"]
    assert 0 < choices["dropped"] < choices["chosen"] == 8 * 64 * 2 * 16
    share = 100 * choices["dropped"] / choices["chosen"]
    said = (
        f"{choices['dropped']:,} of 16,384 choices found no room ({share:.2f} %);"
        f" {choices['dropped']:,} predicted from the recorded routing"
    )
    assert note("padded", "dropped") == said and "! dropped" not in joined(record)
    choices["predicted_dropped"] += 1
    assert "! dropped" in joined(record)
    choices |= {"chosen": 0, "dropped": 0, "predicted_dropped": 0}
    assert "0 of 0 choices found no room (0.00 %)" in joined(record)


def test_rounding_is_said_of_formats_coarser_than_bf16() -> None:
    assert note("padded training", "rounding").endswith(
        "their rms: dispatch nvfp4 9.10 %, combine nvfp4 9.10 %, backward nvfp4 9.10 %"
    )
    record = copy.deepcopy(sample("default"))
    record["wire_errors"] = {"dispatch": 2.0**-8, "combine": 0.0}
    assert "rounding" not in joined(record)
    record["wire_errors"]["combine"] = 0.02
    assert "dispatch bf16 0.391 %, combine bf16 2.00 %" in joined(record)
    record["wire_errors"] = {}  # nothing was compared
    assert "rounding" not in joined(record)


def test_what_moves_beside_the_tokens_is_said_to_be_outside() -> None:
    record = sample("balanced, training")
    outside = record["totals"]["outside"]
    said = note("balanced, training", "beside")
    for phase in ("rebalance", "grad_sync"):
        assert f"{phase} {format_bytes(outside[phase])} on the network (" in said
    assert said.endswith("in no figure of the tokens' own traffic")
    network = record["totals"]["tiers"]["network"], record["totals"]["backward"]["network"]
    moved = sum(way["measured_bytes"] for way in network)
    assert note("balanced, training", "network").startswith(
        f"{format_bytes(moved)}, all that leaves a rank, forward and backward"
    )
    labels = [row[0] for row in table_rows(record)[1]]
    assert labels.index("beside") > labels.index("all")


def test_the_network_line_adds_up() -> None:
    for name in ("padded", "training", "default", "shared experts, all"):
        totals = sample(name)["totals"]
        words = note(name, "network")
        cells = [cell for cell in totals["cells"] if cell["tier"] != "self"]
        cells = [cell for cell in cells if cell["phase"] not in ONLY_BESIDE]
        kinds = dict.fromkeys((cell["kind"] for cell in cells), 0)
        for cell in cells:
            kinds[cell["kind"]] += cell["measured_bytes"]
        payload = kinds.pop("hidden") + kinds.pop("scales", 0)
        padding = kinds.pop("padding", 0)
        parts = [
            f"{format_bytes(payload)} payload",
            f"{format_bytes(sum(kinds.values()))} metadata",
        ]
        if name == "padded":
            assert padding
            parts.append(f"{format_bytes(padding)} padding (empty rows)")
        assert all(part in words for part in parts), words
        assert ("padding" in words) == (name == "padded")


def test_the_placement_is_judged_before_and_after() -> None:
    said = note("balanced", "placement")
    assert said.startswith(
        "contiguous -> balance, worst layer of each; busiest rank 1.42 -> 1.03 x"
    )
    assert "busiest slot 2.50 -> 1.75 x the mean in choices served" in said
    moved = sample("balanced")["placement"]
    assert f"{moved['moved_experts']} experts moved, {format_bytes(moved['moved_bytes'])}" in said
    assert note("from a file", "placement").endswith("no expert moved")
    record = copy.deepcopy(sample("balanced"))  # without tokens nothing can be judged
    for part in ("contiguous", "placed"):
        record["placement"][part] = {"by_rank_max_over_mean": None, "by_expert_max_over_mean": None}
    assert "worst layer of each; 16 experts moved" in joined(record)


def test_the_time_of_chunks_is_what_was_waited_for() -> None:
    assert "what was waited for" in note("chunks", "chunks")
    record = sample_record(chunks=2, training=True, layers=1)
    assert "nothing is hidden" in joined(record) and "what was waited for" not in joined(record)


def test_the_legend_of_rows_says_what_else_is_a_row() -> None:
    words = {
        "default": "(self) included; - is none",
        "two hops": "(self) included, and counted at each hop; - is none",
        "padded": "(self) included, and empty ones; - is none",
        "balanced": "(self) included; those of rebalance are experts; - is none",
    }
    for name, said in words.items():
        assert note(name, "rows").endswith(said)


def test_the_manifest_says_how_ranks_are_grouped_and_what_decides_the_rows() -> None:
    for name, label, said in (
        ("default", "ranks", "EP 8 = 2 nodes x 4 ranks; experts placed contiguous"),
        (
            "groups",
            "ranks",
            "8 = 2 nodes x 4 ranks, in 2 groups of EP 4; experts placed contiguous",
        ),
        (
            "shared experts",
            "ranks",
            "EP 8 = 2 nodes x 4 ranks; 2 ranks share each expert (gather);",
        ),
        ("padded", "traffic", "dispatcher padded (capacity factor 1), router uniform"),
        ("one-sided, deduplicated", "traffic", "dispatcher one_sided (deduplicated), router"),
        ("one-sided", "traffic", "dispatcher one_sided, router"),
        ("chunks", "traffic", "4 chunks a layer"),
        ("training", "traffic", "1 step after 1 to warm up; training"),
        ("training", "wire", "combine bf16, backward bf16, compute fp32"),
        ("default", "wire", "combine bf16, compute fp32"),
    ):
        found = note(name, label)
        assert found.startswith(said) if label == "ranks" else said in found, name


def test_the_legend_explains_z() -> None:
    shared = "dispatch and combine of a layer move the same rows, so they share one z"
    assert shared in joined(sample("default"))
    assert "= is no spread, and equal" in joined(sample("all-gather"))
    assert "none: the learned router follows no law" in joined(sample("ragged, no law"))
    _, rows = table_rows(sample("default"))
    for dispatch, combine in zip(rows[0:8:2], rows[1:8:2], strict=True):
        assert dispatch[-1] == combine[-1]
    assert rows[-1][-1] == format_z(sample("default")["totals"]["tiers"]["network"])
    for name in ("training", "shared experts", "balanced"):
        assert note(name, "z").endswith("phases of a layer that move the same rows share one z")
    (whole,) = (row for row in table_rows(sample("training"))[1] if row[0] == "all")
    assert whole[-1] == "0"  # the difference: two directions have no z together


def test_columns_of_tiers_without_pairs_are_said_not_shown() -> None:
    for name, said in (
        ("one node", "one node: nothing goes between nodes"),
        ("nodes of one", "every rank is a node"),
        ("one rank", "nothing leaves it"),
    ):
        record = sample(name)
        header, _ = table_rows(record)
        assert ("nodes" in header) == (name == "nodes of one")
        assert ("node" in header) == (name == "one node")
        assert any(said in text for text in text_of(record))


def test_an_error_that_is_not_finite_is_told() -> None:
    record = copy.deepcopy(sample("default"))
    record["wire_errors"] = {"dispatch": None, "combine": 0.0}
    assert "dispatch bf16 not finite" in joined(record)
