"""Two results side by side: figures against those of the records, and what is said of the why."""

import re

import pytest
from report_samples import SAMPLES, sample, sample_inputs

from comm.report import compare
from comm.report.compare_page import compare_page
from comm.report.layout import plain_text
from comm.report.record import build_record
from comm.report.store import write_result
from moe.__main__ import main


def text_of(a, b):
    return [plain_text(line) for line in compare_page(a, b, 100)]


def cells(record, **names):
    return sum(
        cell["measured_bytes"]
        for cell in record["totals"]["cells"]
        if all(cell[name] == value for name, value in names.items())
        and cell["phase"] not in ("rebalance", "grad_sync")
    )


def changed(record, **config):
    about = record["manifest"]
    return {**record, "manifest": {**about, "config": {**about["config"], **config}}}


def test_totals_of_runs_of_one_shape():
    a, b = (build_record(sample_inputs(tokens=16, dispatcher=d)) for d in ("rank_dedup", "two_hop"))
    assert not compare.per_token(a, b)
    for pair in compare.by_place(a, b):
        direction, phase, tier = pair.name
        for record, figure in ((a, pair.a), (b, pair.b)):
            assert (figure or 0) == cells(record, direction=direction, phase=phase, tier=tier)
    kinds = {pair.name[0]: (pair.a, pair.b) for pair in compare.by_kind(a, b)}
    assert kinds["hidden"] == (cells(a, kind="hidden"), cells(b, kind="hidden"))
    assert kinds["hidden"][0] != kinds["hidden"][1]
    assert sum(one[0] or 0 for one in kinds.values()) == a["totals"]["measured_bytes"]


def test_runs_of_other_shapes_are_compared_by_token_and_layer():
    a, b = (
        build_record(sample_inputs(ranks=r, tokens=t, layers=n, ranks_per_node=r))
        for r, t, n in ((8, 16, 2), (4, 8, 3))
    )
    assert compare.per_token(a, b)
    pairs = {pair.name: pair for pair in compare.by_place(a, b)}
    pair = pairs["forward", "combine", "scale_up"]
    assert pair.a == cells(a, phase="combine", tier="scale_up") / (8 * 16 * 2)
    assert pair.b == cells(b, phase="combine", tier="scale_up") / (4 * 8 * 3)
    b["manifest"]["routing_sha256"] = "another"
    page = text_of(a, b)
    assert any("of one token in one layer" in line for line in page)
    assert any("other choices, or other tokens and layers" in line for line in page)


def test_every_setting_that_differs_is_named_and_no_other():
    a = changed(sample("default"), seed=0, output_dir=None)
    b = changed(a, seed=3, dispatcher={**a["manifest"]["config"]["dispatcher"], "name": "padded"})
    b = changed(b, output_dir="elsewhere", timeout_s=7.0)
    found = {pair.name[0]: (pair.a, pair.b) for pair in compare.settings(a, b)}
    before = a["manifest"]["config"]["dispatcher"]["name"]
    assert found == {"seed": (0, 3), "dispatcher": (before, "padded")}
    assert compare.settings(a, a) == []
    assert any(line.startswith("WHY  no setting differs") for line in text_of(a, a))
    newer = {**a, "manifest": {**a["manifest"], "torch": "9.9"}}
    assert [pair.name for pair in compare.settings(a, newer)] == [("torch",)]


def test_differences_and_ratios_are_those_of_the_figures():
    a, b = (build_record(sample_inputs(tokens=16, wire=w)) for w in ("bf16", "mxfp8"))
    page = text_of(a, b)
    (line,) = [line for line in page if line.startswith("  network ")]
    first, second = (one["full_scale"]["forward_pass"]["network_bytes"] for one in (a, b))
    assert line.split()[-1] == f"{second / first:.4f}" and " -" in line
    assert any(re.match(r"  scales +- +\S+ kB +\+\S+ kB +-$", line) for line in page)


def test_verdicts_stand_side_by_side():
    a, b = sample("default"), sample("ragged, no law")
    page = text_of(a, b)
    assert any(re.match(r"  expected +(EXACT|WITHIN) +NOT AVAILABLE$", line) for line in page)
    b = {**b, "verdicts": b["verdicts"][:1]}
    assert any(re.match(r"  expected +(EXACT|WITHIN) +not made$", line) for line in text_of(a, b))


@pytest.mark.parametrize("name", SAMPLES)
def test_any_two_results_fit_the_page(name):
    for other in ("default", name):
        for line in text_of(sample(other), sample(name)):
            assert len(line) <= 100 and line.isascii(), line


def test_the_job_reads_two_folders(tmp_path, capsys):
    inputs = sample_inputs()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_result(tmp_path / name, build_record(inputs), inputs.traffic)
    assert main(["compare", f"a={tmp_path}/one", f"b={tmp_path}/two"]) == 0
    page = capsys.readouterr().out
    assert f"{tmp_path}/two: kimi_k3" in " ".join(page.split())
    assert "the same choices of experts" in page
    assert main(["compare", f"a={tmp_path}/one", f"b={tmp_path}"]) == 2
    assert f"b={tmp_path} must be a folder with a run.json" in capsys.readouterr().err
    assert main(["compare", f"a={tmp_path}/one"]) == 2
    assert "job=compare: needs b=DIR" in capsys.readouterr().err
