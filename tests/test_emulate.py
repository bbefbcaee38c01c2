"""The job as a whole on forked ranks, judged by the files that it leaves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import rank_bodies
from emulate_runs import Runs, emulate_named, emulate_with_fault, network
from run_configs import base_config
from shape_runs import preset_runs, runs_of_every_shape

import moe.__main__ as entry
from comm.spawn import run_ranks
from comm.topology import TIER_NAMES
from moe.conf_files import options
from moe.jobs import ranks as jobs

FORWARD, DISPATCH = 0, 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"), runs_of_every_shape())


HOWEVER = ("dealt out", "per copy", "over nodes", "unevenly", "in groups")

# -- what is placed where --------------------------------------------------------------------------


def test_the_same_tokens_meet_the_same_experts_on_any_number_of_ranks(runs):
    def sha256(name):
        return runs[name].record["manifest"]["routing_sha256"]

    names = ["same on 4", "same on 8"]
    names += [f"same, {how}" for how in HOWEVER]
    assert {sha256(name) for name in names} == {sha256("same on 2")}
    assert sha256("other seed") != sha256("same on 2")


def test_remainder_experts_are_spread(runs):
    run = runs["remainder"]
    slots = np.bincount(run.routing["slot_rank"][0], minlength=8)
    assert slots.tolist() == [4, 4, 4, 4, 4, 4, 3, 3]
    assert run.status == 0


@pytest.mark.parametrize(
    ("name", "nodes", "num_nodes", "source"),
    [
        ("one step", [0, 1, 0, 1], 2, "configured"),  # cyclic
        ("blocks", [0, 0, 1, 1], 2, "emulated"),
        ("ragged nodes", [3, 3, 1, 3], 2, "configured"),
        ("one node", [0, 0, 0, 0], 1, "reported"),
    ],
)
def test_tiers_follow_the_nodes_and_sum_to_the_total(runs, name, nodes, num_nodes, source):
    """Field cases 28 and 29: ranks dealt out to nodes, and nodes of three ranks and one."""
    run = runs[name]
    manifest, totals = run.record["manifest"], run.record["totals"]
    assert manifest["node_of_rank"] == nodes and manifest["num_nodes"] == num_nodes
    assert manifest["node_source"].startswith(source)

    cells = run.traffic["bytes"].sum(axis=(0, 1, 2, 3))
    by_tier = dict.fromkeys(TIER_NAMES, 0)
    for src in range(4):
        for dst in range(4):
            apart = "scale_up" if nodes[src] == nodes[dst] else "scale_out"
            by_tier["self" if src == dst else apart] += int(cells[src, dst])
    counted = {tier: scope["measured_bytes"] for tier, scope in totals["tiers"].items()}
    assert counted == {**by_tier, "network": network(by_tier)}
    assert sum(by_tier.values()) == totals["measured_bytes"]
    metadata, payload = totals["network_metadata_bytes"], totals["network_payload_bytes"]
    assert metadata + payload == network(by_tier)


def test_fp8_does_not_halve_the_traffic(runs):
    record = runs["fp8"].record
    payload = Counter()
    for cell in record["totals"]["cells"]:
        if cell["kind"] in ("hidden", "scales"):
            payload[cell["phase"]] += cell["measured_bytes"]
    assert payload["dispatch"] / payload["combine"] == 0.515625


# -- steps and files -------------------------------------------------------------------------------


def test_recorded_routing_has_the_documented_shapes(runs):
    run, routing = runs["two steps"], runs["two steps"].routing
    steps, layers, tokens, top_k, experts = 2, 2, 26, 6, 30
    for name in ("topk_ids", "topk_weights", "slots"):
        assert routing[name].shape == (steps, layers, tokens, top_k), name
    assert routing["slot_rank"].shape == (layers, experts)
    assert routing["physical_to_logical_map"].shape == (layers, experts)
    assert routing["token_rank"].tolist() == [0] * 9 + [1] * 5 + [3] * 12
    named = np.take(routing["physical_to_logical_map"][0], routing["slots"])
    assert np.array_equal(named, routing["topk_ids"])
    assert not (runs["one step"].folder / "routing.npz").exists()
    assert run.record["rounds"] == 2 * layers * steps


def test_warm_up_is_not_counted(runs):
    cold, warm = runs["one step"], runs["warmed up"]
    assert np.array_equal(cold.traffic["bytes"], warm.traffic["bytes"])
    assert np.array_equal(cold.traffic["rows"], warm.traffic["rows"])
    assert cold.record["collectives"] == warm.record["collectives"] == 2 * 3
    assert len(warm.events(0)) == len(cold.events(0)) == 2 * 2
    assert warm.record["manifest"]["warmup"] == 2


def test_steps_add_up(runs):
    """The first of two steps is the single step, and both together are the counted total."""
    one, two = runs["one step"], runs["two steps"]
    for rank in range(4):
        first = [event for event in two.events(rank) if event["step"] == 0]
        assert [timeless(event) for event in first] == [
            timeless(event) for event in one.events(rank)
        ]
        assert {event["step"] for event in two.events(rank)} == {0, 1}
    assert two.traffic["rows"].sum() != 2 * one.traffic["rows"].sum()  # a step draws anew


def timeless(event):
    return {name: value for name, value in event.items() if not name.endswith("seconds")}


@pytest.mark.parametrize(
    "name",
    ["one step", "two steps", "blocks", "fp8", "ragged nodes", "trained", "everything"],
)
def test_events_sum_to_the_counted_traffic(runs, name):
    run = runs[name]
    traffic, nodes = run.traffic, run.record["manifest"]["node_of_rank"]
    for rank in range(4):
        sent: Counter = Counter()
        rows: Counter = Counter()
        for event in run.events(rank):
            place = (event["layer"], event["direction"], event["phase"])
            for tier, number in event["rows"].items():
                rows[(*place, tier)] += number
            for kind, tiers in event["bytes"].items():
                for tier, number in tiers.items():
                    sent[(*place, kind, tier)] += number
        assert +sent == cells_by_tier(traffic, "bytes", rank, nodes)
        assert +rows == cells_by_tier(traffic, "rows", rank, nodes)


def cells_by_tier(traffic, array, rank, nodes):
    """The cells of one source, their destinations summed by tier, zeros left out."""
    names = [traffic["layers"], traffic["directions"], traffic["phases"], traffic["kinds"]]
    names = names[: traffic[array].ndim - 2]
    found: Counter = Counter()
    for *place, src, dst in np.argwhere(traffic[array]).tolist():
        if src == rank:
            tier = "scale_up" if nodes[src] == nodes[dst] else "scale_out"
            labels = [axis[i].item() for axis, i in zip(names, place, strict=True)]
            tier = "self" if src == dst else tier
            found[(*labels, tier)] += int(traffic[array][(*place, src, dst)])
    return found


def test_the_csv_holds_the_non_zero_cells(runs):
    run = runs["one step"]
    traffic, again = run.traffic, np.zeros_like(run.traffic["bytes"])
    for line in run.csv():
        place = tuple(
            traffic[f"{axis}s"].tolist().index(int(line[axis]) if axis == "layer" else line[axis])
            for axis in ("layer", "direction", "phase", "kind")
        )
        cell = (*place, int(line["src"]), int(line["dst"]))
        assert again[cell] == 0 and int(line["bytes"]) > 0
        again[cell] = int(line["bytes"])
    assert np.array_equal(again, traffic["bytes"])


def test_the_record_holds_the_status_and_the_page_the_verdicts(runs):
    run = runs["one step"]
    assert run.record["status"] == run.status == 0
    for verdict in run.record["verdicts"]:
        assert verdict["state"] in run.page
    assert max(map(len, run.page.splitlines())) <= 100
    assert str(run.folder) in run.page.replace("\n", "").replace(" ", "")
    assert not list(run.folder.glob(".*"))  # nothing half-written


# -- odd shapes ------------------------------------------------------------------------------------


def test_a_router_without_a_law_gets_no_expectation(runs):
    run = runs["learned"]
    assert run.states == {
        "exact": "EXACT",
        "conserved": "EXACT",
        "expected": "NOT_AVAILABLE",
        "correctness": "WITHIN",
        "kernel": "EXACT",
    }
    assert all(cell["z"] is None for cell in run.record["totals"]["cells"])
    assert run.status == 0


def test_without_a_reference_nothing_is_said_of_the_outputs(runs):
    run = runs["no reference"]
    assert run.states["correctness"] == "NOT_AVAILABLE" and run.status == 0
    assert run.record["correctness"]["layers"] == []
    assert np.array_equal(run.traffic["bytes"], runs["one step"].traffic["bytes"])


def test_a_rank_without_tokens_takes_part(runs):
    run = runs["one step"]
    sent = run.traffic["rows"][:, FORWARD, DISPATCH]
    assert not sent[:, 2].any() and sent[:, :, 2].any()  # sends nothing, serves the others
    assert run.status == 0


def test_no_tokens_at_all(runs):
    run = runs["no tokens at all"]
    assert not run.traffic["rows"].any()
    counts = run.traffic["kinds"].tolist().index("counts")
    assert run.traffic["bytes"].sum() == run.traffic["bytes"][:, :, :, counts].sum() > 0
    assert run.states["exact"] == "EXACT" and run.status == 0
    assert run.record["full_scale"] is None


def test_a_warm_up_in_training_is_not_counted(runs):
    cold, warm = runs["trained"], runs["trained, warmed up"]
    assert np.array_equal(cold.traffic["bytes"], warm.traffic["bytes"])
    assert len(cold.events(0)) == len(warm.events(0)) == 2 * 5  # 2 layers; 2 forward, 3 backward


def test_every_phase_there_is(runs):
    """Replicas, shards, chunks and training at once."""
    run = runs["everything"]
    phases = ["dispatch", "combine", "tp_gather", "tp_reduce", "rebalance", "grad_sync"]
    assert run.traffic["phases"].tolist() == phases
    assert run.traffic["directions"].tolist() == ["forward", "backward"]
    moved = run.traffic["bytes"].sum(axis=(0, 3, 4, 5)) > 0  # [direction, phase]
    assert moved.tolist() == [[True] * 5 + [False], [True] * 4 + [False, True]]
    assert run.states["exact"] == run.states["conserved"] == "EXACT"
    assert run.states["gradients"] == "WITHIN" and run.status == 0


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    configs = preset_runs(tmp_path_factory.mktemp("presets"))
    return run_ranks(emulate_named, 2, configs, preload=["moe.judge", "emulate_runs"])[0]


@pytest.mark.parametrize("model", options("model"))
def test_every_model_runs_at_laptop_scale(presets, model):
    status, page = presets[model]
    assert status == 0, page


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("last_pair_dropped", 3, "dispatch, hidden, rank 0 -> rank 1: counted "),
        ("all_weights_doubled", 4, "routed, error"),
        ("counts_not_counted", 5, "dispatch, counts, rank 0 -> rank 0: counted 0 B"),
        ("one_message_passes_the_meter_by", 5, "; 2 of 2 pairs differ"),
        ("padding_not_counted", 6, "AssertionError: layer 0, forward dispatch: the parts"),
    ],
)
def test_the_job_returns_what_its_verdicts_say(tmp_path, capsys, fault, status, said):
    config = base_config(ranks=2, output_dir=str(tmp_path / "run"))
    assert jobs.launch(emulate_with_fault, config, fault) == status
    told = capsys.readouterr()
    if status == jobs.RANK_FAILED:
        assert "wideep: rank " in told.err and "Traceback" in told.err and said in told.err
        assert not (tmp_path / "run" / "run.json").exists()
    else:
        run = Runs.read(tmp_path / "run")
        assert run.record["status"] == status
        assert said in " ".join(verdict["reason"] for verdict in run.record["verdicts"])


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path, capsys):
    (tmp_path / "note").write_text("mine")
    assert entry.main(["emulate", "ranks=2", f"output_dir={tmp_path}"]) == 2
    assert "exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_ranks_that_were_started_differently_are_named():
    """Other words on another machine: each rank would do as it was told, the record tell of one."""
    one = base_config(ranks=3)
    assert run_ranks(rank_bodies.same_config, 3, [one] * 3) == [""] * 3
    configs = [one, replace(one, output_dir="elsewhere"), replace(one, seed=5)]
    for said in run_ranks(rank_bodies.same_config, 3, configs):
        assert said.startswith("rank 2 was started with another configuration than rank 0")
