"""Exports: read back they are what was counted, and other programs' readers would take them."""

import csv
import json
import math
import re
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from report_samples import sample_inputs

from comm.report.events import EventLog
from comm.report.record import build_record
from comm.report.replay import Matrix, read_matrix
from comm.report.store import CSV_HEADER, write_result
from comm.report.trace_events import read_events, trace
from moe.__main__ import main

ROOT = Path(__file__).parent.parent
KINDS = ("hidden", "counts")


@pytest.fixture(scope="module")
def inputs():
    return sample_inputs(
        ranks=4, ranks_per_node=2, tokens=[9, 5, 0, 12], wire="mxfp8", training=True
    )


@pytest.fixture
def result(inputs, tmp_path, monkeypatch):
    """A finished run's folder, and its events: three phases of each rank."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(4):
        tiers = inputs.tiers[rank]
        with EventLog(folder, rank, tiers, KINDS) as log:
            for layer, phase in ((0, "dispatch"), (0, "combine"), (1, "dispatch")):
                rows, sent = np.arange(4), np.array([[10, 20, 30, 40], [8] * 4])
                log.append(step=0, layer=layer, phase=phase, rows=rows, sent=sent, seconds=1e-4)
    write_result(folder, build_record(inputs), inputs.traffic, csv=True)
    return folder


def export(*words):
    return main(["export", "result=run", *words])


def as_alltoallv_perf_reads(text):
    """Its parser and its buffers by its documentation: int64 [R, R] aligned, least -e in bytes."""
    lines = [line.split() for line in text.split("\n") if line.strip()]
    assert {len(line) for line in lines} == {len(lines)}, "must be square"
    values = np.array([[float(value) for value in line] for line in lines])  # strtod
    assert (values >= 0).all() and (values < 2**53).all()
    aligned = values.astype(np.int64) & ~15
    return aligned, max(aligned.sum(axis=0).max(), aligned.sum(axis=1).max())


def test_every_exchange_is_a_matrix_that_reads_back_as_counted(result, inputs, capsys):
    assert export("to=nccl_tests") == 0
    traffic, page = inputs.traffic, capsys.readouterr().out
    script = (result / "nccl_tests" / "replay.sh").read_text()
    names = set()
    for layer, d, p in np.ndindex(traffic.bytes.shape[:3]):
        counted = traffic.bytes[layer, d, p].sum(axis=0)
        name = f"layer{layer}.{traffic.directions[d]}.{traffic.phases[p]}.txt"
        file = result / "nccl_tests" / name
        assert file.exists() == (name in page) == bool(counted.any()), name
        if not file.exists():
            continue
        names.add(name)
        assert np.array_equal(read_matrix(file), counted)
        aligned, least = as_alltoallv_perf_reads(file.read_text())
        (command,) = [line for line in script.splitlines() if f"/{name}" in line]
        assert command.startswith("mpirun -np 4 ") and f" -b {least} -e {least} " in command
        assert np.array_equal(aligned, Matrix(0, "", "", counted).replayed)
    assert len(names) == 10  # two layers of two phases, back and forth, and two of gradients
    first = traffic.bytes[0, 0, 0].sum(axis=0)
    assert not np.array_equal(first, first.T)
    assert all(len(line) <= 100 for line in page.splitlines())


def test_a_matrix_of_a_kind_a_phase_and_a_layer(result, inputs):
    words = ("export.phase=combine", "export.layer=1", "export.direction=forward")
    assert export("to=nccl_tests", *words, "export.kind=scales", "output_dir=some") == 0
    files = sorted(path.name for path in (result.parent / "some").iterdir())
    assert files == ["layer1.forward.combine.txt", "replay.sh"]
    scales = inputs.traffic.bytes[1, 0, 1, inputs.traffic.kinds.index("scales")]
    assert np.array_equal(read_matrix(result.parent / "some" / files[0]), scales)


def test_rows_at_full_width(result, inputs):
    """3,584 values in MXFP8 with a scale for 32: 3,696 B; 16 ids and weights of 4 B: 128 B."""
    assert export("to=nccl_tests", "export.width=full", "output_dir=full") == 0
    assert (
        export("to=nccl_tests", "export.width=full", "export.kind=payload", "output_dir=pay") == 0
    )
    rows = inputs.traffic.rows[0, 0, 0]
    for folder, size in (("full", 3696 + 128), ("pay", 3696)):
        files = {path.name for path in (result.parent / folder).iterdir()}
        assert len(files) == 5 and not any("backward" in name for name in files)
        file = result.parent / folder / "layer0.forward.dispatch.txt"
        assert np.array_equal(read_matrix(file), rows * size)


def test_ids_and_weights_alone_at_full_width(result, inputs):
    assert export("to=nccl_tests", "export.width=full", "export.kind=metadata", "output_dir=m") == 0
    files = {path.name for path in (result.parent / "m").iterdir()}
    assert not any("combine" in name for name in files)  # results come back by themselves
    file = result.parent / "m" / "layer0.forward.dispatch.txt"
    assert np.array_equal(read_matrix(file), inputs.traffic.rows[0, 0, 0] * 128)


def test_buffers_hold_the_busiest_sender_or_receiver():
    sent = np.array([[0, 31], [17, 0]])
    assert Matrix(0, "forward", "dispatch", sent).buffer_bytes == 16
    assert Matrix(0, "forward", "dispatch", sent[:, ::-1] * [[1], [100]]).buffer_bytes == 1696 + 0
    assert Matrix(0, "forward", "dispatch", 0 * sent).buffer_bytes == 16


def check_trace(data):
    """The rules of the Trace Event Format for complete events and names, as readers apply them."""
    assert set(data) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert data["displayTimeUnit"] in ("ms", "ns")
    named, open_until = set(), {}
    for event in data["traceEvents"]:
        assert isinstance(event["name"], str) and event["ph"] in ("X", "M")
        assert all(type(event[key]) is int and event[key] > 0 for key in ("pid", "tid"))
        if event["ph"] == "M":
            kinds = {"process_name": str, "thread_name": str, "thread_sort_index": int}
            (value,) = event["args"].values()
            assert isinstance(value, kinds[event["name"]])
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        for key in ("ts", "dur"):
            assert isinstance(event[key], float) and math.isfinite(event[key]) and event[key] >= 0
        thread = (event["pid"], event["tid"])
        assert ("thread_name", *thread) in named and ("process_name", thread[0], 1) in named
        assert event["ts"] >= open_until.get(thread, 0) - 1e-3, "spans of a thread overlap"
        open_until[thread] = event["ts"] + event["dur"]
    return [event for event in data["traceEvents"] if event["ph"] == "X"]


def test_the_trace_has_every_phase_of_every_rank(result):
    assert export("to=chrome_trace") == 0
    spans = check_trace(json.loads((result / "trace.json").read_text()))
    assert [(one["pid"], one["tid"]) for one in spans[::3]] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    for one, event in zip(spans[:3], read_events(result)[0], strict=True):
        assert (one["name"], one["cat"]) == (event["phase"], "forward")
        assert one["args"]["bytes"] == event["bytes"] and one["args"]["layer"] == event["layer"]
        assert one["dur"] <= 100.1  # microseconds
    ends = [event["ended_seconds"] for event in read_events(result)[0]]
    assert spans[2]["ts"] + spans[2]["dur"] - spans[0]["ts"] - spans[0]["dur"] == pytest.approx(
        (ends[2] - ends[0]) * 1e6, abs=1
    )


def test_a_killed_run_has_a_trace(result, capsys):
    for name in ("run.json", "traffic.npz"):
        (result / name).unlink()
    with (result / "events.rank3.jsonl").open("a") as file:
        file.write('{"step": 0, "lay')  # the line that it was at
    assert export("to=chrome_trace") == 0
    spans = check_trace(json.loads((result / "trace.json").read_text()))
    assert len(spans) == 12 and {one["pid"] for one in spans} == {1}
    capsys.readouterr()
    assert export("to=csv") == 2 and "must be a folder with a run.json" in capsys.readouterr().err


def test_spans_of_chunks_are_cut_where_they_overlap():
    """Dispatch 2 began while dispatch 1 was under way; 0.3 s were spent in it, in two pieces."""
    common = {"step": 0, "layer": 0, "direction": "forward", "rows": {}, "bytes": {}}
    events = [
        common | {"phase": "dispatch", "seconds": 0.2, "ended_seconds": 1000.2},
        common | {"phase": "dispatch", "seconds": 0.3, "ended_seconds": 1000.4},
    ]
    first, second = check_trace(trace({0: events}, None, "run"))
    assert first["dur"] == pytest.approx(2e5) and second["ts"] == pytest.approx(2e5)
    assert second["dur"] == pytest.approx(2e5) and second["args"]["seconds"] == 0.3


def test_events_keep_their_schema(result):
    schema = json.loads((ROOT / "docs" / "event.schema.json").read_text())
    for events in read_events(result).values():
        for event in events:
            jsonschema.validate(event, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(dict(event, ended_seconds="now"), schema)


def test_events_without_times_are_refused(result, capsys):
    file = result / "events.rank1.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**line, "ended_seconds": 0}) + "\n" for line in lines))
    assert export("to=chrome_trace") == 0
    del lines[0]["ended_seconds"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (result / "trace.json").unlink()
    assert export("to=chrome_trace") == 2
    assert "its events have no times" in capsys.readouterr().err
    assert not (result / "trace.json").exists()


def test_csv_is_that_of_the_run(result):
    before = (result / "traffic.csv").read_bytes()
    (result / "traffic.csv").unlink()
    assert export("to=csv") == 0
    assert (result / "traffic.csv").read_bytes() == before


def test_parquet_has_the_cells_of_the_csv(result):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export("to=parquet") == 0
    table = parquet.read_table(result / "traffic.parquet")
    assert tuple(table.column_names) == CSV_HEADER
    with (result / "traffic.csv").open() as file:
        rows = [
            {**row, **{n: int(row[n]) for n in ("layer", "src", "dst", "bytes")}}
            for row in csv.DictReader(file)
        ]
    assert table.to_pylist() == rows


def test_parquet_without_pyarrow_says_what_to_type(result, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert export("to=parquet", "output_dir=out") == 2
    said = capsys.readouterr().err
    assert said == ('wideep: to=parquet: needs pyarrow; pip install "wideep[parquet]", or to=csv\n')
    assert not (result.parent / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("to=nccl_test",), "to=nccl_test: no such format; choose .*did you mean nccl_tests"),
        ((), "job=export: needs to=one of nccl_tests, chrome_trace, csv, parquet"),
        (("to=csv", "export.layer=0"), "export.*: to=csv does not use it"),
        (("to=nccl_tests", "export.layer=7"), "export.layer=7: this result has 0, 1"),
        (("to=nccl_tests", "export.phase=up"), "export.phase=up: this result has dispatch"),
        (("to=nccl_tests", "export.kind=padding"), "result=run: nothing was sent"),
        (("to=nccl_tests", "tokens=3"), "tokens=3: job=export does not use it"),
        (("to=csv", "result=nowhere"), "result=nowhere: no such folder"),
    ],
)
def test_mistakes_are_one_line(result, capsys, words, said):
    assert export(*words) == 2
    text = capsys.readouterr().err
    assert re.match(f"wideep: {said}", text) and text.count("\n") == 1
    assert not (result / "nccl_tests").exists()


@pytest.mark.parametrize(
    ("name", "content", "to", "said"),
    [
        ("traffic.npz", b"PK half a file", "csv", "run/traffic.npz: cannot be read"),
        ("run.json", b'{"schema": "wid', "csv", "run/run.json: is no JSON"),
        ("run.json", None, "csv", "run/run.json: has no manifest; it was changed"),
        ("events.rank1.jsonl", b"garbage\n", "chrome_trace", ".*rank1.jsonl: line 1: is no JSON"),
        ("events.rank1.jsonl", b"[1]\n", "chrome_trace", "run/events.rank1.*: line 1: is no event"),
        ("events.rank1.jsonl", b'{"ended_seconds": 1}\n', "chrome_trace", ".*needs seconds"),
        ("events.rankX.jsonl", b"garbage\n", "chrome_trace", None),
    ],
)  # fmt: skip
def test_files_that_are_broken_are_one_line(result, capsys, name, content, to, said):
    """None: only the schema is left; a copy of another name is not read."""
    if content is None:
        schema = json.loads((result / name).read_text())["schema"]
        content = json.dumps({"schema": schema}).encode()
    (result / name).write_bytes(content)
    status, text = export(f"to={to}", "output_dir=out"), capsys.readouterr().err
    if said is None:
        assert (status, text) == (0, "")
        return
    assert status == 2 and re.match(f"wideep: {said}", text) and text.count("\n") == 1, text
    assert not (result.parent / "out").exists()
