"""Sweeps: which combinations, why not others, what is kept of an end that comes too early."""

import csv
import json
import os
import re
import sys
from html.parser import HTMLParser
from math import comb

import pytest
from report_samples import SAMPLES, sample

import moe.jobs.sweep as job
from comm.report.curves import axis_of, series
from comm.report.layout import plain_text
from comm.report.sweep_figures import run_figures
from comm.report.sweep_page import sweep_csv, sweep_page
from comm.spawn import RankFailure, RankReport
from moe.__main__ import main
from moe.config import compose, variants
from moe.settings import ConfigError
from moe.sweep import read_sweep

SMALL = ("layers=1", "model.num_experts=12", "model.top_k=3", "warmup=0", "kernel=false")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("tokens=4,8", ["tokens=4", "tokens=8"]),
        ("tokens=[4,8]", ["tokens=[4,8]"]),
        ("tokens=[4,8],[1,2]", ["tokens=[4,8]", "tokens=[1,2]"]),
        ("output_dir='a,b'", ["output_dir='a,b'"]),
        ("router.path='a,b',c", ["router.path='a,b'", "router.path=c"]),
        ("ranks=range(8,25,8)", ["ranks=8", "ranks=16", "ranks=24"]),
        ("seed=1,1,2", ["seed=1", "seed=2"]),
    ],
)
def test_commas_separate_values_but_not_inside_lists_and_quotes(word, values):
    assert variants(word) == values
    for one in values:
        assert variants(one) == [one]


def test_values_that_hydra_would_look_up_are_refused():
    with pytest.raises(ConfigError, match=r"ep_size=glob\(\*\): a sweep names its values"):
        variants("ep_size=glob(*)")


def test_every_combination_is_a_run_and_what_cannot_run_has_its_reason():
    sweep = read_sweep(
        [
            "sweep.total_tokens=10",
            "router=uniform,skew",
            "router.max_over_mean=2",
            "ep_size=2,3",
            *SMALL,
        ]
    )
    assert sweep.axes == {"router": ("uniform", "skew"), "ep_size": ("2", "3")}
    assert sweep.settings == ("router.max_over_mean=2", *SMALL)
    plans = {run.values: run for run in sweep.runs}
    assert len(plans) == 4
    for ranks in ("2", "3"):
        left, runs = plans["uniform", ranks], plans["skew", ranks]
        assert left.config is None and "router=uniform does not use it" in left.reason
        assert runs.config.ranks == int(ranks) and runs.config.ep_size is None
        assert sum(runs.config.tokens_per_rank) == 10
    assert plans["skew", "3"].config.tokens == (4, 3, 3)


def test_groups_and_predictions_keep_their_ep_size():
    (run, other) = read_sweep(["ep_size=2,4", "ranks=4", *SMALL]).runs
    assert (run.config.ranks, run.config.ep_size, other.config.ep_size) == (4, 2, 4)
    (run, other) = read_sweep(["job=sweep", "job=predict", "ep_size=8,1024"]).runs
    assert (other.config.job, other.config.ep_size, other.config.tokens) == ("predict", 1024, 64)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["token=3", "ranks=2,3"], "token=3: no such key (did you mean tokens?)"),
        (["job=bench", "ranks=2,3"], "job=bench: a sweep runs emulate or predict"),
        (["ranks=2,3", "dispatcher=magic"], "dispatcher=magic: no such dispatcher"),
        (["seed=range(1,1002)"], "seed=range(1,1002): 1,001 combinations; at most 1,000"),
        (["tokens=interval(1,3)"], "tokens=interval(1,3): a sweep names its values"),
        (["tokens=4", "sweep.total_tokens=8"], "tokens=4: sweep.total_tokens=8 says it"),
        (["ranks=2,3", "output_dir=/proc/x"], "output_dir=/proc/x: cannot write"),
        (["ep_size=3,5", "ranks=4"], "ep_size=3: must divide the 4 ranks"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_in_one_line(words, said, capsys):
    assert main(["sweep", *words]) == 2
    assert capsys.readouterr().err.startswith(f"wideep: {said}")


def test_a_sweep_does_not_start_inside_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["sweep", "tokens=1,2"]) == 2
    assert "start it with wideep" in capsys.readouterr().err


class Page(HTMLParser):
    """What a page asks of the network, and the text of its pictures."""

    def __init__(self, text):
        super().__init__()
        self.asked, self.labels, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.asked.append(value)
            if name == "aria-label":
                self.labels.append(value)

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two runs of two and three ranks, and two that no router of that name can make."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    words = [
        "ep_size=2,3",
        "dispatcher=rank_dedup,two_hop",
        "topology.ranks_per_node=2",
        "tokens=6",
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        status = main(["sweep", *words, *SMALL, f"output_dir={folder}"])
    return status, folder, json.loads((folder / "sweep.json").read_text())


def test_figures_are_those_of_the_runs(swept):
    status, folder, record = swept
    assert status == record["status"] == 0 and record["schema"] == "wideep.sweep/1"
    done = [run for run in record["runs"] if run["state"] == "done"]
    assert [run["values"]["dispatcher"] for run in done] == ["rank_dedup", "two_hop"]
    for run in done:
        one = json.loads((folder / run["folder"] / "run.json").read_text())
        assert one["manifest"]["world_size"] == int(run["values"]["ep_size"]) == 2
        full = one["full_scale"]["forward_pass"]
        for name in ("scale_up_bytes", "scale_out_bytes", "network_bytes"):
            assert run["figures"][name] == full[name]
        assert run["figures"]["verdicts"]["exact"] == "EXACT" and run["status"] == one["status"]
    refused = [run for run in record["runs"] if run["state"] == "refused"]
    assert len(refused) == 2 and all("ranks (3)" in run["reason"] for run in refused)
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == [run["state"] for run in record["runs"]]
    assert float(rows[0]["network_bytes"]) == done[0]["figures"]["network_bytes"]


def test_the_page_needs_no_network_and_says_what_the_picture_shows(swept):
    pytest.importorskip("matplotlib")
    _, folder, record = swept
    assert record["page"]
    page = Page((folder / "sweep.html").read_text())
    assert page.asked == [] and len(page.labels) == 1 and "ep_size" in page.labels[0]
    for line in sweep_page(record, 100):
        assert plain_text(line) in page.text
    assert "two_hop" in page.text and (folder / "sweep.html").stat().st_size < 200_000


def run_fakes(monkeypatch, ends, *words):
    """A sweep whose runs end as told: figures and a status, or an error to raise."""
    calls = iter(ends)

    def end(config, folder):
        what = next(calls)
        if isinstance(what, BaseException):
            raise what
        return what

    monkeypatch.setitem(job.FIGURES_OF, "emulate", end)
    status = main(["sweep", *words, *SMALL, "output_dir=out"])
    with open("out/sweep.json") as file:
        return status, json.load(file)


GOOD = ({"network_bytes": 1e6, "verdicts": {"exact": "EXACT"}}, 0)
BAD = ({"network_bytes": 2e6, "verdicts": {"exact": "OUTSIDE"}}, 3)


def test_an_interrupted_sweep_keeps_what_is_done(monkeypatch, capsys):
    status, record = run_fakes(monkeypatch, [GOOD, KeyboardInterrupt()], "seed=1,2,3")
    assert status == record["status"] == 130
    assert [run["state"] for run in record["runs"]] == ["done", "not reached", "not reached"]
    assert record["outcome"] == "1 of 3 done"
    assert "not reached: the sweep ended before" in capsys.readouterr().out


def test_a_run_that_fails_does_not_end_the_sweep(monkeypatch, capsys):
    guilty = RankReport(1, 0.0, error="RuntimeError: broken", where="layer 0")
    failure = RankFailure(guilty, [guilty])
    status, record = run_fakes(monkeypatch, [GOOD, failure, BAD], "seed=1,2,3")
    assert status == record["status"] == 6  # the first that is not 0
    assert [run["state"] for run in record["runs"]] == ["done", "failed", "done"]
    assert record["outcome"] == "2 of 3 done, 1 failed, 1 differ from a prediction"
    page = capsys.readouterr().out
    assert "failed: rank 1, layer 0: RuntimeError: broken" in page and "exact OUTSIDE" in page


def test_without_matplotlib_there_is_a_table_and_the_way_to_a_page(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, record = run_fakes(monkeypatch, [GOOD, GOOD], "seed=1,2")
    assert status == 0 and not record["page"]
    assert 'pip install "wideep[plots]"' in " ".join(capsys.readouterr().out.split())


def test_a_table_is_as_narrow_as_the_page():
    axes = {"router.max_over_mean": ["1.5", "2"], "topology.ranks_per_node": ["4", "8"]}
    figures = run_figures(sample("default"))
    runs = [
        {
            **{"values": dict(zip(axes, pair, strict=True)), "state": "done", "reason": ""},
            **{"status": 0, "seconds": 1.0, "folder": "x", "figures": figures},
        }
        for pair in (("1.5", "4"), ("2", "8"))
    ]
    record = {
        **{"axes": axes, "runs": runs, "settings": [], "job": "emulate", "version": "0"},
        **{"started": "now", "seconds": 1.0, "page": True, "result_dir": "d", "status": 0},
        "outcome": "2 of 2 done",
    }
    for width in (100, 80):
        assert max(len(plain_text(line)) for line in sweep_page(record, width)) <= width
    assert axis_of(record) == "router.max_over_mean"
    assert {name: [x for x, _ in points] for name, points in series(record).items()} == {
        "4": [1.5],
        "8": [2.0],
    }
    assert sweep_csv(record).count("\n") == 3


def test_names_stand_side_by_side_where_there_are_no_numbers(monkeypatch):
    pytest.importorskip("matplotlib")
    figures = run_figures(sample("default"))
    ends = [(figures | {"network_bytes": 1e6 * n}, 0) for n in (1, 2)]
    status, record = run_fakes(monkeypatch, ends, "dispatcher=two_hop,padded")
    assert status == 0 and axis_of(record) == "dispatcher" and record["page"]
    assert [x for x, _ in series(record)["all"]] == [0.0, 1.0]
    with open("out/sweep.html") as file:
        text = Page(file.read()).text
    assert "two_hop" in text and "padded" in text


@pytest.mark.parametrize("name", SAMPLES)
def test_figures_of_any_run(name):
    """The expectation at full width is that of the rows: as many deviations away as they are."""
    record = sample(name)
    figures, full = run_figures(record), record["full_scale"]
    if full is None:
        assert "network_bytes" not in figures
        return
    combine = next(
        p
        for p in record["totals"]["phases"]
        if (p["direction"], p["phase"]) == ("forward", "combine")
    )
    if combine["network"]["expected_bytes"] is None:
        assert figures["expected_bytes"] is None
    elif full["rounds"] == 2 * full["num_moe_layers"] and combine["network"]["z"] is not None:
        z = (figures["network_bytes"] - figures["expected_bytes"]) / figures["expected_std"]
        total = record["totals"]["tiers"]["network"]["z"]
        assert z == pytest.approx(total, abs=0.3)
        assert figures["network_bytes"] == full["forward_pass"]["network_bytes"]


def test_the_expectation_at_full_width_is_the_closed_form():
    """A token reaches a rank of 112 experts unless its 16 of 896 all miss it."""
    record = sample("one node")
    missed = comb(896 - 112, 16) / comb(896, 16)
    rows = 7 * (1 - missed)  # off its own rank
    width, wire = 3584, record["manifest"]["wire"]
    assert wire["dispatch"] == wire["combine"] == "bf16"
    expected = 92 * rows * (2 * width + 16 * 8 + 2 * width)
    assert run_figures(record)["expected_bytes"] == pytest.approx(expected, rel=1e-9)


def test_a_sweep_of_predictions(capsys):
    """The closed form of one token in 92 layers, at 8 and at 64 ranks; a router without a law."""
    words = ["ep_size=8,64", "router=uniform,learned", "sweep.total_tokens=512", "output_dir=out"]
    assert main(["sweep", "job=predict", *words]) == 0
    with open("out/sweep.json") as file:
        runs = {tuple(run["values"].values()): run for run in json.load(file)["runs"]}
    for ranks in (8, 64):
        missed = comb(896 - 896 // ranks, 16) / comb(896, 16)
        expected = 92 * (ranks - 1) * (1 - missed) * (2 * 2 * 3584 + 16 * 8)
        figures = runs[str(ranks), "uniform"]["figures"]
        assert figures["network_bytes"] == pytest.approx(expected, rel=1e-9)
        assert figures["rows_per_token"] == pytest.approx((ranks - 1) * (1 - missed))
        left = runs[str(ranks), "learned"]
        assert left["state"] == "refused" and "no law" in left["reason"]
    page = capsys.readouterr().out
    assert "  for all      sweep.total_tokens=512" in page
    assert "no run was made" in page and "least time" in page and "verdict" not in page
    assert sorted(os.listdir("out")) == ["sweep.csv", "sweep.html", "sweep.json"]


def test_the_configuration_of_a_sweep_has_few_keys():
    assert compose(["job=sweep", "sweep.total_tokens=5"]).sweep.total_tokens == 5
    with pytest.raises(ConfigError, match=r"^sweep\.total_tokens=5: belongs to job=sweep$"):
        compose(["sweep.total_tokens=5"])
    assert re.match("000_ep_size-2", job._name(0, {"values": {"ep_size": "2"}}))
    assert re.fullmatch(r"[\w.-]+", job._name(1, {"values": {"tokens": "[1,2]", "a.b": "x/y z"}}))
