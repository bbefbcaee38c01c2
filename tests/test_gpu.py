"""On GPUs: nccl with one rank each, gloo with as many ranks as one likes. tests/gpu.sh runs it."""

import json

import pytest
import torch
from command_line import wideep

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no GPU here; tests/gpu.sh runs these where there is one"),
]
SMALL = ("scale.hidden_size=64", "scale.intermediate_size=16", "layers=2", "tokens=16")


def passed(folder, *words):
    """The record of a run in which everything agrees."""
    done = wideep(folder, *SMALL, "device=cuda", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = folder.glob("results/*/run.json")
    record = json.loads(file.read_text())
    assert record["manifest"]["device"] == "cuda"
    states = {one["name"]: one["state"] for one in record["verdicts"]}
    assert states["exact"] == states["conserved"] == "EXACT"
    assert states["correctness"] == "WITHIN"
    return record


@pytest.mark.parametrize(
    "words",
    [
        ("dispatcher=rank_dedup",),
        ("dispatcher=all_to_all", "wire.dispatch=mxfp8"),
        ("dispatcher=allgather", "dtype=bf16"),
        ("dispatcher=padded", "chunks=2"),
        ("dispatcher=two_hop", "topology.ranks_per_node=2", "wire.dispatch=fp8_block128"),
        ("dispatcher=rank_dedup", "mode=training"),
        ("placement=balance", "placement.num_redundant_experts=64"),
        ("dispatcher=rank_dedup", "expert_tp=2"),
        ("router=learned",),
    ],
    ids=" ".join,
)
def test_four_ranks_share_the_gpus_through_the_host(tmp_path, words):
    record = passed(tmp_path, "ranks=4", "backend=gloo", *words)
    assert record["manifest"]["staging"] == "host memory"


@pytest.mark.parametrize("dispatcher", ["rank_dedup", "all_to_all", "padded", "two_hop"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_one_gpu_a_rank_by_nccl(tmp_path, dispatcher, mode):
    record = passed(tmp_path, f"ranks={GPUS}", f"dispatcher={dispatcher}", f"mode={mode}")
    assert record["manifest"]["backend"] == "nccl" and record["manifest"]["staging"] is None


def test_staged_rows_are_those_of_a_run_on_the_cpu(tmp_path):
    """The same choices, hence the same bytes between each pair of ranks."""
    hashes, totals = [], []
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        done = wideep(tmp_path / device, *SMALL, "ranks=4", f"device={device}", "backend=gloo")
        assert done.returncode == 0, done.stderr
        (file,) = (tmp_path / device).glob("results/*/run.json")
        record = json.loads(file.read_text())
        hashes.append(record["manifest"]["routing_sha256"])
        totals.append(record["totals"]["cells"])
    assert hashes[0] == hashes[1] and totals[0] == totals[1]


def test_more_ranks_than_gpus_are_refused_with_the_choice_that_is_left(tmp_path):
    done = wideep(tmp_path, f"ranks={GPUS + 1}", "device=cuda")
    assert done.returncode == 7
    assert f"{GPUS} GPUs here for {GPUS + 1} ranks" in done.stderr and "backend=gloo" in done.stderr


def test_the_doctor_sees_the_gpus(tmp_path):
    done = wideep(tmp_path, "doctor", f"ranks={GPUS}", "device=cuda")
    assert done.returncode == 0, done.stdout
    assert "  ok    GPU memory " in done.stdout and torch.cuda.get_device_name(0) in done.stdout


def test_bench_on_gpus(tmp_path):
    words = ("bench.tokens=[256]", "bench.widths=[256]", "bench.iterations=3")
    words += ("bench.dispatchers=[rank_dedup,all_to_all]", "bench.dtypes=[bf16]")
    done = wideep(tmp_path, "bench", f"ranks={GPUS}", "device=cuda", *words)
    assert done.returncode == 0, done.stderr
