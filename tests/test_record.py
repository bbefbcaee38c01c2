"""run.json: its figures, its schema, its files; each figure against a sum made here by hand."""

from __future__ import annotations

import copy
import csv
import json
import re
import runpy
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from report_samples import SAMPLES, sample, sample_inputs, sample_record, with_extra_bytes

from comm.report.carried import carried as on_machine
from comm.report.events import EventLog
from comm.report.full_scale import full_scale
from comm.report.load import balance, bandwidths
from comm.report.record import build_record, plain
from comm.report.store import (
    make_result_dir,
    read_record,
    write_result,
    write_whole,
)

DOCS = Path(__file__).parents[1] / "docs"
SCHEMA = json.loads((DOCS / "run.schema.json").read_text())
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
    "boolean": bool,
}


def violations(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """What of the JSON Schema subset used in docs/run.schema.json `value` breaks."""
    if "$ref" in schema:
        return violations(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "anyOf" in schema:
        each = [violations(value, option, where) for option in schema["anyOf"]]
        return [] if [] in each else each[-1]
    if "const" in schema or "enum" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return [] if value in allowed else [f"{where}: {value!r} not in {allowed}"]
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if isinstance(value, bool) or not any(isinstance(value, TYPES[name]) for name in names):
        return [f"{where}: {value!r} is not {names}"]
    if "minimum" in schema and value < schema["minimum"]:
        return [f"{where}: {value} < {schema['minimum']}"]
    found = [f"{where}.{key} missing" for key in schema.get("required", ()) if key not in value]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        other = schema.get("additionalProperties")
        for key, item in value.items():
            if rule := properties.get(key, other):
                found += violations(item, rule, f"{where}.{key}")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            found += violations(item, schema["items"], f"{where}[{i}]")
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_record_follows_its_schema(name: str) -> None:
    record = json.loads(json.dumps(sample(name), allow_nan=False))
    jsonschema.validate(record, SCHEMA)
    assert violations(record, SCHEMA) == []  # stricter: 1.0 is no integer


ADDED = {  # since the first records of version 1
    "$": (
        "carried",
        "conventions",
        "choices",
        "wire_errors",
        "placement",
        "kernel",
        "fan_out",
        "report_html",
    ),
    "totals": ("backward", "outside"),
    "correctness": ("gradient_bound",),
    "balance": ("layers",),
    "manifest": ("router_notes",),
}


def test_a_record_of_the_first_version_still_follows_the_schema() -> None:
    record = sample_record()
    record["manifest"]["wire"].pop("backward")
    for place, names in ADDED.items():
        part = record if place == "$" else record[place]
        for name in names:
            del part[name]
    jsonschema.validate(record, SCHEMA)
    assert violations(record, SCHEMA) == []


def properties(schema: dict[str, Any]) -> set[str]:
    """Every name that a schema knows, at any depth."""
    inner = [properties(item) for item in schema.values() if isinstance(item, dict)]
    return set(schema.get("properties", ())).union(*inner)


def names_in(value: Any) -> set[str]:
    """Every key of a record, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


def test_the_schema_knows_every_field_and_no_other() -> None:
    """Names that are data (an option of the configuration, a kind) are not fields."""
    records = [sample(name) for name in SAMPLES]
    for record in records:  # the top of the record and of each of its parts
        assert set(record) == set(SCHEMA["properties"])
        for part in ("totals", "correctness", "choices", "headline", "balance"):
            assert set(record[part]) <= set(SCHEMA["properties"][part]["properties"]), part
        assert set(record["timing"]) <= set(SCHEMA["properties"]["timing"]["properties"])
    there = set().union(*map(names_in, records))
    assert properties(SCHEMA) - there == set()


def test_schema_refuses_a_broken_record() -> None:
    record = sample_record()
    record["layers"][0]["cells"][0]["measured_bytes"] = 0.5
    record["verdicts"][0]["state"] = "FINE"
    del record["manifest"]["seed"]
    assert len(violations(record, SCHEMA)) == 3
    errors = jsonschema.validators.validator_for(SCHEMA)(SCHEMA).iter_errors(record)
    assert {error.json_path for error in errors} == {
        "$.layers[0].cells[0].measured_bytes",
        "$.verdicts[0].state",
        "$.manifest",
    }


def test_cells_add_up_to_the_counted_arrays() -> None:
    inputs = sample_inputs(ranks=6, ranks_per_node=2, tokens=[5, 0, 3, 1, 0, 9])
    record = build_record(inputs)
    traffic = inputs.traffic
    for entry in record["layers"]:
        p = traffic.phases.index(entry["phase"])
        pairs = traffic.bytes[entry["layer"], 0, p].sum(axis=0)
        by_tier = dict.fromkeys(("self", "scale_up", "scale_out"), 0)
        for cell in entry["cells"]:
            by_tier[cell["tier"]] += cell["measured_bytes"]
        same_rank, same_node = np.eye(6, dtype=bool), np.kron(np.eye(3), np.ones((2, 2))) > 0
        assert by_tier == {
            "self": pairs[same_rank].sum(),
            "scale_up": pairs[same_node & ~same_rank].sum(),
            "scale_out": pairs[~same_node].sum(),
        }
        assert entry["network"]["measured_bytes"] == by_tier["scale_up"] + by_tier["scale_out"]
        rows = traffic.rows[entry["layer"], 0, p]
        assert entry["rows"]["self"] == np.trace(rows)
        assert sum(entry["rows"].values()) == rows.sum()
    totals = record["totals"]
    assert totals["measured_bytes"] == traffic.bytes.sum() and totals["outside"] == {}
    assert sum(cell["measured_bytes"] for cell in totals["cells"]) == traffic.bytes.sum()
    network = totals["tiers"]["network"]["measured_bytes"]
    assert network == totals["network_payload_bytes"] + totals["network_metadata_bytes"]
    payload = traffic.bytes[:, :, :, :2].sum(axis=(0, 1, 2, 3))
    assert totals["network_payload_bytes"] == payload.sum() - np.trace(payload)


def test_z_is_the_distance_in_standard_deviations() -> None:
    inputs = sample_inputs(tokens=32)
    figure = build_record(inputs)["totals"]["tiers"]["network"]
    estimate = inputs.expected.of("remote")
    assert figure["expected_bytes"] == pytest.approx(estimate.mean)
    assert figure["z"] == pytest.approx((figure["measured_bytes"] - estimate.mean) / estimate.std)


def test_no_z_without_a_law_or_without_a_spread() -> None:
    no_law = sample_record(router="learned")["totals"]["tiers"]["network"]
    assert (no_law["expected_bytes"], no_law["expected_std"], no_law["z"]) == (None, None, None)
    no_spread = sample_record(dispatcher="allgather")["totals"]["tiers"]["network"]
    assert (no_spread["expected_std"], no_spread["z"]) == (0, None)
    assert no_spread["expected_bytes"] == no_spread["measured_bytes"]


def test_an_extra_byte_shows_in_its_cell_and_in_no_other() -> None:
    inputs = sample_inputs()
    record = build_record(with_extra_bytes(inputs, (1, 0, 0, 0, 2, 5), 256))
    wrong = [
        (e["layer"], e["phase"], c["kind"], c["tier"])
        for e in record["layers"]
        for c in e["cells"]
        if c["measured_bytes"] != c["exact_bytes"]
    ]
    assert wrong == [(1, "dispatch", "hidden", "scale_out")]
    assert [e["differing_bytes"] for e in record["layers"]] == [0, 0, 256, 0]
    assert record["status"] == 3


def test_errors_that_cancel_in_the_sums_are_still_counted() -> None:
    inputs = with_extra_bytes(sample_inputs(), (0, 0, 0, 0, 2, 5), 256)
    record = build_record(with_extra_bytes(inputs, (0, 0, 0, 0, 2, 6), -256))
    first = record["layers"][0]
    assert all(cell["measured_bytes"] == cell["exact_bytes"] for cell in first["cells"])
    assert first["differing_bytes"] == 512


def test_entries_follow_the_order_in_which_phases_happen() -> None:
    forward = ["dispatch", "combine"]
    for name, phases in (
        ("default", forward),
        ("shared experts", ["dispatch", "tp_gather", "tp_reduce", "combine"]),
        ("balanced", ["rebalance", *forward]),
        ("training", [*forward, "back combine", "back dispatch", "back grad_sync"]),
    ):
        found = [
            ("back " if entry["direction"] == "backward" else "") + entry["phase"]
            for entry in sample(name)["layers"]
            if entry["layer"] == 1
        ]
        assert found == phases


def test_backward_has_predictions_of_its_own() -> None:
    inputs = sample_inputs(layers=1, training=True, tokens=64)
    record = build_record(with_extra_bytes(inputs, (0, 1, 1, 0, 2, 5), 256))  # backward, combine
    back = next(e for e in record["layers"] if e["direction"] == "backward")
    assert back["phase"] == "combine" and back["differing_bytes"] == 256
    network = back["network"]
    assert network["measured_bytes"] == network["exact_bytes"] + 256
    estimate = inputs.expected.of("remote", phases=("combine",), directions=("backward",))
    assert network["expected_bytes"] == pytest.approx(estimate.mean)
    assert network["expected_std"] == pytest.approx(estimate.std)


@pytest.mark.parametrize("name", ["training", "balanced, training", "balanced", "groups"])
def test_what_moves_beside_the_tokens_is_in_no_sum(name: str) -> None:
    inputs = sample_inputs(**SAMPLES[name])
    record, traffic = sample(name), inputs.traffic
    totals = record["totals"]
    by_phase = dict(zip(traffic.phases, traffic.bytes.sum(axis=(0, 1, 3)), strict=True))
    outside = [phase for phase in ("rebalance", "grad_sync") if phase in by_phase]
    off_rank = ~np.eye(len(inputs.tiers), dtype=bool)
    assert totals["outside"] == {phase: by_phase[phase][off_rank].sum() for phase in outside}
    assert all(totals["outside"].values()) and outside
    tokens = by_phase["dispatch"] + by_phase["combine"]
    assert totals["measured_bytes"] == tokens.sum()
    network = totals["network_payload_bytes"] + totals["network_metadata_bytes"]
    assert network == tokens[off_rank].sum()
    ways = [totals["tiers"], totals["backward"]]
    assert network == sum(way["network"]["measured_bytes"] for way in ways if way)
    entries = [e for e in record["layers"] if e["phase"] in outside]
    assert {entry["network"]["expected_bytes"] for entry in entries} == {None}
    assert {entry["differing_bytes"] for entry in entries} == {0}


def test_padding_counts_as_metadata_of_the_totals() -> None:
    totals = sample("padded")["totals"]
    cells = [cell for cell in totals["cells"] if cell["tier"] != "self"]
    other = sum(c["measured_bytes"] for c in cells if c["kind"] not in ("hidden", "scales"))
    assert any(cell["kind"] == "padding" for cell in cells)
    assert totals["network_metadata_bytes"] == other


def test_rounds_are_phases_of_tokens() -> None:
    """Chunks and experts that move add none; a shared expert adds two phases."""
    rounds = {"default": 8, "training": 8, "chunks": 4, "balanced": 4, "shared experts": 8}
    assert {name: sample(name)["rounds"] for name in rounds} == rounds


def test_full_scale_recomputes_the_row() -> None:
    """K3 at EP8: 6.189 remote rows of 3584 + 112 B and 16 x 8 B of ids and weights."""
    shape = {
        "name": "kimi_k3",
        "hidden_size": 7168,
        "latent_size": 3584,
        "top_k": 16,
        "num_moe_layers": 92,
    }
    rows = {"self": 1.0, "scale_up": 2.0, "scale_out": 4.0}
    wire = {"dispatch": "mxfp8", "combine": "bf16", "backward": "fp32"}
    full = full_scale({"dispatch": rows, "combine": rows}, shape, "rank_dedup", wire)
    dispatch = full["phases"]["dispatch"]
    assert dispatch["payload_bytes"] == 6 * (3584 + 112)
    assert dispatch["metadata_bytes"] == 6 * 128
    assert dispatch["scale_out_bytes"] == 4 * (3584 + 112 + 128)
    assert full["layer"]["network_bytes"] == 6 * (3584 + 112 + 128) + 6 * 7168
    assert full["forward_pass"]["network_bytes"] == 92 * full["layer"]["network_bytes"]
    assert full["rounds"] == 184
    assert full["headline_bytes"] == 229_376
    assert full["headline_at_payload_width_bytes"] == 114_688
    assert full["wire"] == {"dispatch": "mxfp8", "combine": "bf16"}
    shards = full_scale({"tp_gather": rows, "tp_reduce": rows}, shape, "rank_dedup", wire)["phases"]
    assert shards["tp_gather"]["row_bytes"] == {"hidden": 3584, "scales": 112}
    assert shards["tp_reduce"]["row_bytes"] == {"hidden": 7168}


def test_a_run_is_carried_to_a_machine() -> None:
    """Two nodes of four: bytes of full width over what half a card leaves."""
    record = sample("default")
    full, carried = record["full_scale"], record["carried"]
    tokens = sum(record["manifest"]["tokens_per_rank"]) / 8
    rows = [full["phases"][phase]["rows"]["scale_out"] for phase in ("dispatch", "combine")]
    assert carried["GBps"] == {"scale_up": 900.0, "scale_out": 12.5}  # 50 x 0.5 / 2
    sent = sum(rows) * 7168 * 92 * tokens  # bf16 rows of 3584 values, both ways
    assert carried["payload_bytes"]["scale_out"] == pytest.approx(sent)
    assert carried["us"]["scale_out"] == pytest.approx(sent / 12.5e3)
    shape = record["manifest"]["shape"]
    assert carried["factors"]["width"] == 3584 / shape["latent_size"]
    assert carried["factors"]["layers"] == 92 / shape["num_moe_layers"]
    unknown = copy.deepcopy(record["manifest"])
    unknown["config"]["hardware"]["scale_out_GBps"] = None
    assert on_machine(full, unknown)["us"]["scale_out"] is None
    del unknown["config"]["hardware"]  # a record of an older version
    assert on_machine(full, unknown) is None


def test_full_scale_has_every_phase_of_the_forward_pass() -> None:
    full = sample("shared experts, training")["full_scale"]
    assert list(full["phases"]) == ["dispatch", "tp_gather", "tp_reduce", "combine"]
    assert full["rounds"] == 4 * 92
    gathered = full["phases"]["tp_gather"]
    assert gathered["rows"] == {"self": 0, "scale_up": 16, "scale_out": 0}
    assert gathered["row_bytes"] == {"hidden": 7168}  # experts are named by the order of the rows
    assert full["layer"]["payload_bytes"] == pytest.approx(
        sum(phase["payload_bytes"] for phase in full["phases"].values())
    )
    assert "padded" in sample("padded")["full_scale"]["assumptions"][-1]
    deduplicated = sample("one-sided, deduplicated")["full_scale"]["phases"]["dispatch"]
    assert deduplicated["row_bytes"] == {"hidden": 7168, "ids": 64, "weights": 64}
    per_copy = sample("one-sided")["full_scale"]["phases"]["dispatch"]
    assert per_copy["row_bytes"] == {"hidden": 7168, "ids": 4}


def test_full_scale_of_a_run_has_its_rows_a_token() -> None:
    """All-gather sends a token to the 7 other ranks, whatever the routing."""
    full = sample_record(dispatcher="allgather", tokens=[3, 0, 0, 1, 0, 2, 0, 9])["full_scale"]
    assert full["phases"]["dispatch"]["rows"] == {"self": 1, "scale_up": 3, "scale_out": 4}
    assert full["phases"]["dispatch"]["payload_bytes"] == 7 * 7168
    assert sample_record(tokens=[0] * 8)["full_scale"] is None


def test_bandwidths_of_a_small_exchange() -> None:
    """Two ranks; 0 sends 1 GB to itself and 3 GB out, 1 sends 2 GB to itself, in 2 s."""
    pairs = np.array([[1, 3], [0, 2]]) * 10**9
    assert bandwidths(pairs, 2.0) == {"algbw_GBps": 1.5, "busbw_GBps": 0.75, "wirebw_GBps": 1.5}
    assert set(bandwidths(pairs, 0.0).values()) == {None}


def test_timing_follows_the_slowest_rank() -> None:
    inputs = sample_inputs(layers=2)
    inputs.traffic.seconds[3, :, 0, 1] = 5.0
    timing = build_record(inputs)["timing"]
    assert timing["dispatch"]["seconds"] == pytest.approx(0.1)
    assert timing["combine"]["seconds"] == pytest.approx(10.0)
    assert timing["experts_seconds"] == 0.61


def test_timing_names_every_phase_that_the_run_has() -> None:
    names = {
        "default": ["dispatch", "combine"],
        "no tokens": ["dispatch", "combine"],
        "balanced, training": [
            *("rebalance", "dispatch", "combine"),
            *("backward combine", "backward dispatch", "backward grad_sync"),
        ],
    }
    for name, phases in names.items():
        times = sample(name)["timing"]
        assert list(times) == [*phases, "experts_seconds", "step_seconds"]
    inputs = sample_inputs(training=True, layers=1)
    inputs.traffic.seconds[2, 0, 1, 0] = 7.0  # backward, dispatch
    timing = build_record(inputs)["timing"]
    assert timing["backward dispatch"]["seconds"] == 7.0
    assert timing["dispatch"]["seconds"] == pytest.approx(0.1)
    sent = inputs.traffic.bytes[0, 1, 0].sum() / 8
    assert timing["backward dispatch"]["algbw_GBps"] == pytest.approx(sent / 7e9)


@dataclass(frozen=True)
class Rows:
    """As much of Traffic as its balance needs."""

    rows: np.ndarray
    directions: tuple[str, ...] = ("forward",)
    phases: tuple[str, ...] = ("dispatch",)
    layers: tuple[int, ...] = (0, 1)


def test_balance_names_the_worst_layer() -> None:
    rows = np.zeros((2, 1, 1, 2, 2), np.int64)
    rows[0, 0, 0] = [[2, 2], [2, 2]]
    rows[1, 0, 0] = [[0, 4], [1, 3]]  # rank 1 receives 7 of 8
    traffic = Rows(rows)
    copies = np.array([[[3, 1], [0, 0]], [[1, 1], [1, 1]]])  # 3 of 4 served by rank 0, then even
    figures = balance(traffic, np.array([[4, 0, 2, 2], [2, 2, 2, 2]]), copies)
    assert figures == {
        "rows_by_rank_max_over_mean": 1.75,
        "busiest_rank": 1,
        "busiest_rank_layer": 1,
        "rows_by_expert_max_over_mean": 2.0,
        "busiest_expert": 0,
        "busiest_expert_layer": 0,
        "layers": [
            {
                "layer": 0,
                "by_rank_max_over_mean": 1.0,
                "choices_by_rank_max_over_mean": 1.5,
                "by_expert_max_over_mean": 2.0,
            },
            {
                "layer": 1,
                "by_rank_max_over_mean": 1.75,
                "choices_by_rank_max_over_mean": 1.0,
                "by_expert_max_over_mean": 1.0,
            },
        ],
    }
    none = balance(replace(traffic, rows=0 * rows), np.zeros((2, 4), np.int64), 0 * copies)
    assert none["layers"][1]["by_rank_max_over_mean"] is None
    assert none["rows_by_expert_max_over_mean"] is None


def test_plain_values() -> None:
    value = {1: np.int64(2), "a": (np.float32(0.5), np.array([[True]])), "b": float("nan")}
    assert plain(value) == {"1": 2, "a": [0.5, [[True]]], "b": None}


def test_written_result_reads_back(tmp_path: Path) -> None:
    inputs = sample_inputs(ranks=4, ranks_per_node=2)
    record = build_record(inputs)
    routing = {
        "topk_ids": np.zeros((1, 2, 32, 16), np.int32),
        "topk_weights": np.ones((1, 2, 32, 16)),
        "token_rank": np.zeros(32),
        "slots": np.zeros((1, 2, 32, 16)),
        "slot_rank": np.zeros((2, 896)),
        "physical_to_logical_map": np.zeros((2, 896)),
        "header": {"model": "kimi_k3", "num_experts": 896},
    }
    write_result(tmp_path, record, inputs.traffic, csv=True, routing=routing)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "routing.npz",
        "run.json",
        "traffic.csv",
        "traffic.npz",
    ]
    assert read_record(tmp_path) == record == read_record(tmp_path / "run.json")
    with np.load(tmp_path / "traffic.npz") as saved:
        assert (saved["bytes"] == inputs.traffic.bytes).all() and saved["bytes"].dtype == np.int64
        assert (saved["rows"] == inputs.traffic.rows).all()
        assert saved["kinds"].tolist() == list(inputs.traffic.kinds)
        assert saved["layers"].tolist() == [0, 1]
    with np.load(tmp_path / "routing.npz") as saved:
        assert saved["topk_ids"].shape == (1, 2, 32, 16)
        assert json.loads(str(saved["header"]))["num_experts"] == 896
    with (tmp_path / "traffic.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == np.count_nonzero(inputs.traffic.bytes)
    assert sum(int(cell["bytes"]) for cell in cells) == inputs.traffic.bytes.sum()
    out = sum(int(cell["bytes"]) for cell in cells if cell["tier"] == "scale_out")
    assert out == record["totals"]["tiers"]["scale_out"]["measured_bytes"]


def test_only_what_was_asked_for_is_written(tmp_path: Path) -> None:
    inputs = sample_inputs(ranks=2, ranks_per_node=2)
    write_result(tmp_path, build_record(inputs), inputs.traffic)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "traffic.npz"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_is_whole_or_absent(tmp_path: Path, error: BaseException) -> None:
    def half(file: Any) -> None:
        file.write(b"half of it")
        raise error

    (tmp_path / "old").write_text("old")
    for name in ("new", "old"):
        with pytest.raises(type(error)):
            write_whole(tmp_path / name, half)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_a_failure_leaves_no_run_json(tmp_path: Path) -> None:
    inputs = sample_inputs(ranks=2, ranks_per_node=2)
    broken = replace(inputs.traffic, phases=("dispatch",))  # the CSV stops in the middle
    with pytest.raises(IndexError):
        write_result(tmp_path, build_record(inputs), broken, csv=True)
    assert list(tmp_path.iterdir()) == []  # all files or none


def test_default_folder_is_named_and_never_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 11, 30, 17, 20, 11)
    names = [str(make_result_dir(None, "kimi_k3", "rank_dedup", now)) for _ in range(3)]
    first = "results/20261130-172011-kimi_k3-rank_dedup"
    assert names == [first, f"{first}-2", f"{first}-3"]
    assert all(Path(name).is_dir() for name in names)
    foreign = make_result_dir(None, "../moonshotai/Kimi K3", "d", now)
    assert foreign == Path("results/20261130-172011-..-moonshotai-Kimi-K3-d")


def test_explicit_folder_that_exists_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "run"
    assert make_result_dir(taken, "m", "d") == taken
    with pytest.raises(ValueError, match=re.escape(f"output_dir={taken} exists already")) as error:
        make_result_dir(taken, "m", "d")
    assert f"nearest: output_dir={taken}-2" in str(error.value)


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be made: Not a directory"):
        make_result_dir(tmp_path / "file" / "run", "m", "d")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_foreign_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a folder with a run.json"):
        read_record(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": "wideep.run/2"}')
    with pytest.raises(ValueError, match="schema='wideep.run/2' must be 'wideep.run/1'"):
        read_record(tmp_path)


def test_events_are_on_disk_at_once(tmp_path: Path) -> None:
    sent = np.zeros((6, 4), np.int64)
    sent[0], sent[4] = [10, 20, 30, 40], [1, 1, 1, 1]
    log = EventLog(
        tmp_path, 0, [0, 1, 2, 2], ("hidden", "scales", "ids", "weights", "counts", "padding")
    )
    log.append(
        step=0, layer=3, phase="dispatch", rows=np.array([1, 2, 3, 4]), sent=sent, seconds=0.25
    )
    log.append(
        step=0,
        layer=3,
        phase="combine",
        direction="backward",
        rows=np.zeros(4, np.int64),
        sent=0 * sent,
        seconds=0.5,
    )
    lines = (tmp_path / "events.rank0.jsonl").read_text().splitlines()  # before it is closed
    log.close()
    events = [json.loads(text) for text in lines]
    ends = [event.pop("ended_seconds") for event in events]
    assert time.time() - 60 < ends[0] <= ends[1] <= time.time()
    assert events == [
        {
            "step": 0,
            "layer": 3,
            "direction": "forward",
            "phase": "dispatch",
            "rows": {"self": 1, "scale_up": 2, "scale_out": 7},
            "bytes": {
                "hidden": {"self": 10, "scale_up": 20, "scale_out": 70},
                "counts": {"self": 1, "scale_up": 1, "scale_out": 2},
            },
            "seconds": 0.25,
        },
        {
            "step": 0,
            "layer": 3,
            "direction": "backward",
            "phase": "combine",
            "rows": {"self": 0, "scale_up": 0, "scale_out": 0},
            "bytes": {},
            "seconds": 0.5,
        },
    ]


def test_the_example_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = sample_inputs()
    record = build_record(inputs)
    write_result(tmp_path, record, inputs.traffic)
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "run_record.md").read_text(), re.S)
    (tmp_path / "example.py").write_text(example)
    monkeypatch.setattr("sys.argv", ["example.py", str(tmp_path)])
    runpy.run_path(str(tmp_path / "example.py"))
    network = record["totals"]["tiers"]["network"]["measured_bytes"]
    assert f"{network} B on the network" in capsys.readouterr().out


def test_the_docs_name_every_field() -> None:
    text = (DOCS / "run_record.md").read_text()
    words = properties(SCHEMA) | set(SCHEMA["$defs"]["kind"]["enum"])
    words |= set(SCHEMA["$defs"]["phase_name"]["enum"])
    assert {name for name in words if f"`{name}`" not in text} == set()
