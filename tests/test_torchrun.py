"""Through real processes: torchrun, its quiet wrapper, and ranks that the entry starts itself."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from moe import torchrun

ROOT = Path(__file__).parent.parent
SMALL = ["scale.hidden_size=64", "scale.intermediate_size=16", "layers=1", "tokens=8", "warmup=0",
         "report=false"]  # fmt: skip
LONG = ["scale.hidden_size=64", "scale.intermediate_size=16", "layers=1", "tokens=8",
        "steps=1000000", "model=mixtral_8x7b"]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
QUIET = ["-m", "moe.torchrun", "--standalone", "--nproc-per-node", "2"]


def environment():
    """No torchrun around the tests, one thread a rank, and the checkout from any folder."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE", "COLUMNS")
    }
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(words, folder):
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(words, folder, timeout=60):
    process = start(words, folder)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def assert_page(page, world_size):
    """Plain text of at most 100 columns, with the world, the verdicts and the status."""
    assert "\x1b" not in page and "\r" not in page
    assert max(map(len, page.splitlines())) <= 100
    for words in (f"EP {world_size} = 1 node x {world_size} ranks", "dispatch", "combine"):
        assert words in page
    words = page.split()
    assert words.count("EXACT") == 3  # exact, conserved, kernel
    assert words.count("WITHIN") == 2
    assert "OUTSIDE" not in words and "NOT_AVAILABLE" not in words
    assert "  status 0 " in page


@pytest.mark.parametrize(
    ("starter", "ranks"),
    [([*TORCHRUN, "-m", "moe"], 2), ([*QUIET, "-m", "moe"], 2), (["-m", "moe", "ranks=3"], 3)],
    ids=["torchrun", "quiet torchrun", "own ranks"],
)
def test_a_run_prints_its_page_and_leaves_its_files(tmp_path, starter, ranks):
    status, out, err = run([*starter, *SMALL, "output_dir=out"], tmp_path)
    assert status == 0, err
    assert_page(out, ranks)
    assert err == ""
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == 0 and record["manifest"]["world_size"] == ranks
    assert record["manifest"]["tokens_per_rank"] == [8] * ranks
    assert (tmp_path / "out" / f"events.rank{ranks - 1}.jsonl").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("starter", "word", "line"),
    [
        (["-m", "moe"], "tokens=-1", "wideep: tokens=-1: must be >= 0; nearest: 0\n"),
        ([*QUIET, "-m", "moe"], "tokens=-1", "wideep: tokens=-1: must be >= 0; nearest: 0\n"),
        (["-m", "moe"], "model.top_k=897", "top_k=897"),
        (["-m", "moe"], "tokenz=1", "did you mean tokens?"),
        (["-m", "moe"], "output_dir=/dev/null/out", "output_dir=/dev/null/out: cannot"),
    ],
)
def test_a_wrong_value_ends_with_status_2_and_one_line(tmp_path, starter, word, line):
    status, out, err = run([*starter, word], tmp_path)
    assert status == 2 and out == ""
    assert line in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def children_of(process, count):
    """The processes that `process` started and that have come so far as to be ranks."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        family = psutil.Process(process.pid).children(recursive=True)
        if len(family) >= count:
            return family
        time.sleep(0.05)
    raise AssertionError(f"{count} processes did not come up")


def wait_for_events(folder, ranks):
    """Until every rank has counted something: the run is under way."""
    files = [folder / f"events.rank{rank}.jsonl" for rank in range(ranks)]
    deadline = time.monotonic() + 40
    while not all(file.exists() and file.stat().st_size for file in files):
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.05)


def rank_of(process):
    try:
        return process.environ().get("RANK")
    except (psutil.Error, OSError):
        return None


def test_a_killed_rank_of_torchrun_is_named(tmp_path):
    process = start([*QUIET, "-m", "moe", *LONG, "output_dir=out"], tmp_path)
    try:
        wait_for_events(tmp_path / "out", 2)
        family = children_of(process, 2)
        [victim] = [child for child in family if rank_of(child) == "1"]
        victim.send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 6
    assert re.search(
        r"^wideep: rank 1, step \d+, layer 0, forward \w+: killed by SIGKILL, perhaps out of"
        r" memory: needed about [\d.]+ GiB here for 2 ranks, had [\d.]+ GiB$",
        err,
        re.MULTILINE,
    )
    assert_gone(family)
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_killed_rank_of_our_own_is_named(tmp_path):
    process = start(["-m", "moe", "ranks=2", *LONG, "output_dir=out"], tmp_path)
    try:
        wait_for_events(tmp_path / "out", 2)
        family = children_of(process, 4)  # fork server, resource tracker, two ranks
        victim = holder_of(family, tmp_path / "out" / "events.rank1.jsonl")
        victim.send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 6
    assert err.count("\n") == 2 and re.match(
        r"wideep: rank 1, step \d+, layer 0, forward \w+: killed by SIGKILL, perhaps out of memory"
        r" \(1 other rank failed in consequence\): needed about [\d.]+ GiB here for 2 ranks,"
        r" had [\d.]+ GiB\n",
        err,
    )
    assert_gone(family)


def holder_of(family, path):
    """The process that has the file open."""
    return next(p for p in family if str(path) in [file.path for file in p.open_files()])


def assert_gone(family):
    _, alive = psutil.wait_procs(family, timeout=10)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left, left


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_stopped_run_leaves_no_process_and_keeps_its_events(tmp_path, sent, status):
    process = start(["-m", "moe", "emulate", "ranks=2", *LONG, "output_dir=out"], tmp_path)
    try:
        wait_for_events(tmp_path / "out", 2)
        family = children_of(process, 4)
        process.send_signal(sent)
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == status
    assert out == "" and "Traceback" not in err
    assert_gone(family)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "events.rank0.jsonl",
        "events.rank1.jsonl",
    ]
    first = (tmp_path / "out" / "events.rank0.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["phase"] == "dispatch"


def test_a_small_benchmark_writes_its_record_and_prints_its_ratios(tmp_path):
    words = ["bench", "ranks=2", "bench.tokens=[8]", "bench.widths=[32]", "bench.dtypes=[bf16]",
             "bench.iterations=3", "bench.warmup=1", "output_dir=out"]  # fmt: skip
    status, out, err = run(["-m", "moe", *words], tmp_path)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert record["schema"] == "wideep.bench/1"
    [case] = record["cases"]
    assert (case["tokens"], case["width"], case["dtype"], case["world_size"]) == (8, 32, "bf16", 2)
    assert np_shape(case["seconds"]) == (len(case["methods"]), 3)
    for name, ratios in record["geometric_mean"].items():
        ratio = ratios["over_raw_copies"]
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
        interval = f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        assert ("1" if name == "raw, K copies" else interval) in out
        assert name in out
    assert "8 tokens x 32 x bf16" in out and "x raw K copies" in out


def np_shape(rows):
    [width] = {len(row) for row in rows}
    return len(rows), width


@pytest.mark.parametrize(
    ("ranks", "left"),
    [((0, 1), ["events.rank0.jsonl"]), ((2, 3), [".run.json.7.partial", "events.rank0.jsonl"])],
)
def test_half_a_file_goes_with_the_rank_that_wrote_it(tmp_path, monkeypatch, ranks, left):
    """Rank 0 was killed while it wrote; where it lives on another node, it may still write."""
    results = tmp_path / "results"

    def killed(_, notes):
        results.mkdir()
        (results / ".run.json.7.partial").touch()
        (results / "events.rank0.jsonl").touch()
        for rank in ranks:
            (notes / f"note.rank{rank}").touch()
        (notes / "results").write_text(str(results))
        return 6

    for name in ("WIDEEP_STATUS_FILE", "WIDEEP_NOTES"):
        monkeypatch.setenv(name, "")  # put back in the end
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(torchrun, "_torchrun", killed)
    try:
        assert torchrun.main([]) == 6
    finally:
        logging.disable(logging.NOTSET)
    assert sorted(path.name for path in results.iterdir()) == left
