"""Rows through the host's memory: the same rows, the same bytes, and the record says so."""

import json
from types import SimpleNamespace

import pytest
import staging_bodies
import torch
from report_samples import sample_record
from run_configs import base_config, in_folders

from comm import world as worlds
from comm.report.console import WIDTH, page
from comm.report.layout import plain_text
from comm.spawn import run_ranks
from comm.world import resolve_backend
from moe.config import compose
from moe.settings import ConfigError, DispatcherConfig

RUNS = (
    {"dispatcher": DispatcherConfig("rank_dedup"), "chunks": 2},
    {"dispatcher": DispatcherConfig("all_to_all"), "mode": "training"},
    {"dispatcher": DispatcherConfig("two_hop"), "expert_tp": 2, "expert_tp_mode": "gather"},
)


def test_rows_arrive_by_two_copies_and_nothing_stale_does():
    rows_to = [[0, 2, 1], [3, 0, 0], [1, 1, 4]]
    for rank, seen in enumerate(run_ranks(staging_bodies.exchange, 3, rows_to)):
        rows_from, before, arrived, same_memory, calls, collectives = seen
        assert rows_from == [rows_to[source][rank] for source in range(3)]
        assert (before == staging_bodies.POISON).all() and same_memory  # filled by `wait` alone
        assert arrived[:, 0].tolist() == [s for s in range(3) for _ in range(rows_to[s][rank])]
        assert calls == {"to_host": 2, "to_device": 2} and collectives == 2  # counts and rows


def test_gloo_is_never_given_memory_of_the_device():
    for found in run_ranks(staging_bodies.on_a_device_without_memory, 2):
        assert found == ("meta", 1, "cpu")


def test_whole_runs_are_exact_and_marked(tmp_path):
    configs = in_folders([base_config(ranks=4, **changes) for changes in RUNS], tmp_path)
    ends = run_ranks(staging_bodies.emulate_staged, 4, configs, preload=("moe.measure",))[0]
    for config, (status, page_text) in zip(configs, ends, strict=True):
        assert status == 0, page_text
        assert "rows staged in host memory, which takes time" in " ".join(page_text.split())
        written = json.loads((tmp_path / config.output_dir / "run.json").read_text())
        assert written["manifest"]["staging"] == "host memory"
        states = {one["name"]: one["state"] for one in written["verdicts"]}
        assert states["exact"] == states["conserved"] == "EXACT"
        assert states["correctness"] == "WITHIN"


def test_a_page_says_that_rows_were_staged():
    about = sample_record()
    text = " ".join(plain_text(line) for line in page(about, WIDTH))
    assert "staging" not in text and "staged" not in text
    about["manifest"]["staging"] = "host memory"
    lines = [plain_text(line) for line in page(about, WIDTH)]
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(" ".join(lines).split())
    assert "staging rows went from each GPU through host memory and gloo: bytes are" in text
    assert "rows staged in host memory, which takes time" in text


def test_which_backend_serves_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [resolve_backend("cpu", "auto"), resolve_backend("cpu", "gloo")] == ["gloo", "gloo"]
    assert [resolve_backend("cuda", one) for one in ("auto", "nccl")] == ["nccl", "nccl"]
    assert resolve_backend("cuda", "gloo") == "gloo"
    with pytest.raises(ValueError, match="backend=nccl needs device=cuda"):
        resolve_backend("cpu", "nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        resolve_backend("cuda", "gloo")


def test_the_benchmark_is_not_staged():
    """It compares with the bare collective, which the copies would drown."""
    assert compose(["device=cuda", "backend=gloo"]).backend == "gloo"
    with pytest.raises(ConfigError, match="copies to the host's memory; use backend=nccl"):
        compose(["job=bench", "device=cuda", "backend=gloo"])


@pytest.mark.parametrize(
    ("backend", "local_rank", "index", "staged"),
    [("gloo", 5, 1, True), ("auto", 1, 1, False), ("nccl", 0, 0, False)],
)
def test_staged_ranks_take_turns_on_the_gpus(monkeypatch, backend, local_rank, index, staged):
    """Two GPUs, imagined: nothing of theirs is touched before the groups are made."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(worlds, "tune_process", lambda _: None)
    monkeypatch.setattr(worlds.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(worlds, "introduce", lambda *_: None)
    monkeypatch.setattr(worlds, "connected_group", lambda *_: (None, ()))
    monkeypatch.setattr(worlds.dist.distributed_c10d, "_set_pg_timeout", lambda *_: None)
    where = {"local_rank": local_rank, "device": "cuda", "backend": backend}
    world = worlds.join(0, 6, init_method="", notebook=SimpleNamespace(), **where)
    assert chosen == [world.device] == [torch.device("cuda", index)]
    assert world.staged == staged
    assert world.link_device == (torch.device("cpu") if staged else world.device)
