"""A result as an object: each sum against one made by hand from the arrays of the run."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from report_samples import sample_inputs

from comm.report.reading import Result
from comm.report.record import build_record
from comm.report.store import write_result


@pytest.fixture(scope="module")
def inputs():
    """Eight ranks on two nodes, two layers, trained, in a format with scales."""
    return sample_inputs(tokens=16, training=True, wire="mxfp8")


@pytest.fixture(scope="module")
def result(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("result")
    write_result(folder, build_record(inputs), inputs.traffic)
    return Result(folder)


def slow_sum(traffic, wanted):
    """Bytes of all cells whose names `wanted` (a function of a cell's names) takes."""
    total, nodes = 0, [0] * 4 + [1] * 4
    for place in np.argwhere(traffic.bytes).tolist():
        layer, d, p, k, src, dst = place
        names = {
            **{"layer": layer, "direction": traffic.directions[d], "phase": traffic.phases[p]},
            **{"kind": traffic.kinds[k], "src": src, "dst": dst},
            "tier": "self" if src == dst else ("out", "up")[nodes[src] == nodes[dst]],
        }
        total += int(traffic.bytes[tuple(place)]) * wanted(names)
    return total


CHOICES = [
    ({}, lambda one: True),
    ({"phase": "dispatch"}, lambda one: one["phase"] == "dispatch"),
    ({"tier": "network"}, lambda one: one["tier"] != "self"),
    ({"tier": ["self", "scale_out"]}, lambda one: one["tier"] in ("self", "out")),
    (
        {"kind": "payload", "layer": 1},
        lambda one: one["kind"] in ("hidden", "scales") and one["layer"],
    ),
    (
        {"kind": ["metadata", "hidden"], "src": 3},
        lambda one: one["kind"] != "scales" and one["src"] == 3,
    ),
    (
        {"direction": "backward", "dst": range(2, 8, 3), "src": [0, 1]},
        lambda one: one["direction"] == "backward" and one["dst"] in (2, 5) and one["src"] < 2,
    ),
    ({"phase": (), "layer": 0}, lambda one: False),
]


@pytest.mark.parametrize(("choice", "wanted"), CHOICES, ids=[str(one) for one, _ in CHOICES])
def test_bytes_are_the_sum_of_what_was_named(result, inputs, choice, wanted):
    assert result.bytes(**choice) == slow_sum(inputs.traffic, wanted)
    assert type(result.bytes(**choice)) is int


def test_matrices_have_senders_as_rows(result, inputs):
    sent = result.matrix(direction="forward", phase="dispatch")
    assert sent.dtype == np.int64 and sent.shape == (8, 8)
    assert np.array_equal(sent, inputs.traffic.bytes[:, 0, 0].sum(axis=(0, 1)))
    assert not np.array_equal(sent, sent.T)
    assert np.array_equal(
        np.diag(np.diag(sent)), result.matrix(phase="dispatch", direction="forward", tier="self")
    )
    assert result.rows(phase="combine") == inputs.traffic.rows[:, :, 1].sum()
    assert np.array_equal(result.row_matrix(layer=0), inputs.traffic.rows[0].sum(axis=(0, 1)))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"phase": "dispach"}, "phase=dispach: this result has dispatch, combine, grad_sync"),
        ({"kind": "payloads"}, "kind=payloads: this result has hidden, .*payload, metadata"),
        ({"tier": "out"}, "tier=out: this result has self, scale_up, scale_out, network"),
        ({"layer": 2}, "layer=2: this result has 0, 1"),
        ({"dst": 8}, "dst=8: this result has 0, 1, 2"),
    ],
)
def test_a_name_that_is_not_there_is_no_zero(result, choice, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        result.bytes(**choice)
    with pytest.raises(TypeError):
        result.rows(kind="hidden")


def test_the_record_is_there_and_cannot_be_changed_through_a_copy(result, inputs):
    record = json.loads((result.folder / "run.json").read_text())
    assert result.to_dict() == record and result.status == 0
    assert result.full_scale == record["full_scale"] and result.headline == record["headline"]
    assert [asdict(one) for one in result.verdicts.values()] == record["verdicts"]
    assert result.verdicts["exact"].state == "EXACT"
    for part in (result.to_dict(), result.full_scale, result.headline, result.manifest):
        part.clear()
    assert result.to_dict() == record
    assert "kimi_k3" in repr(result) and str(result.folder) in repr(result)


def test_a_folder_without_a_result_is_refused(tmp_path, result):
    with pytest.raises(ValueError, match="must be a folder with a run.json"):
        Result(tmp_path)
    (tmp_path / "run.json").write_text((result.folder / "run.json").read_text())
    with pytest.raises(ValueError, match=r"has no traffic\.npz"):
        Result(tmp_path).bytes()
