"""The estimate refuses what cannot fit, before any rank starts, and lets the usual runs pass."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from run_configs import base_config

from comm.memory import free_bytes
from comm.meter import TrafficMeter
from comm.spawn import run_ranks
from moe.assemble import Roads
from moe.fitness import (
    FAIL,
    GIB,
    OK,
    check,
    machine_sockets,
    memory,
    needed_bytes,
    open_files,
    rank_bytes,
    rank_files,
    rank_zero_bytes,
    temporary_folder,
)
from moe.model import ScaleConfig
from moe.plan import make_plan
from moe.settings import DispatcherConfig, PlacementConfig, UnfitError


def test_a_run_that_cannot_fit_is_refused_in_one_line():
    """Field case 19: warm-up tokens by the ten thousand on every rank."""
    with pytest.raises(UnfitError, match=r"needs about [\d,.]+ GiB here for 8 ranks, and .* free"):
        check(base_config("kimi_k2", tokens=10**9), 8)


def ways(config, free, local_ranks=8):
    """word -> value, of what a refusal advises"""
    found = memory(config, local_ranks, free)
    assert found.state == FAIL
    return dict(word.split("=") for word in found.remedy.removeprefix("try ").split(" or "))


def fits(config, free, local_ranks=8):
    return memory(config, local_ranks, free).state == OK


def test_the_advice_names_the_nearest_value_that_fits():
    config = base_config(tokens=10**6, scale=ScaleConfig("full"))
    config = replace(config, scale=replace(config.scale, layers=50))
    free = needed_bytes(replace(config, tokens=1000), 8)
    words = ways(config, free)
    assert words["tokens"] == "1000" and words["scale"] == "laptop" or "scale" not in words
    assert fits(replace(config, tokens=1000), free)
    assert not fits(replace(config, tokens=1001), free)
    config = base_config(tokens=100_000, reference=False, ranks=8)
    free = needed_bytes(config, 8) - 1
    words = ways(config, free)
    for key in ("tokens", "ranks"):
        smaller = replace(config, **{key: int(words[key])})
        assert fits(smaller, free, smaller.world_size)
        larger = replace(config, **{key: int(words[key]) + 1})
        assert not fits(larger, free, larger.world_size)


def test_advice_is_given_only_where_it_helps():
    config = base_config(tokens=64, scale=ScaleConfig("full"), reference=False)
    assert set(ways(config, 24 * GIB)) == {"scale"}  # the weights are too large at any tokens
    config = base_config(tokens=100_000, ep_size=4, reference=False, ranks=8)
    assert "ranks" not in ways(config, needed_bytes(config, 8) - 1)  # ep_size would not divide them
    assert "ranks" not in ways(base_config(tokens=10**6, ranks=16, reference=False), 4 * GIB)
    checked = base_config(tokens=10**6)
    free = needed_bytes(replace(checked, reference=False), 8)
    assert ways(checked, free)["reference"] == "false"
    found = memory(base_config("kimi_k2", scale=ScaleConfig("full")), 8, 1 << 20)
    assert found.remedy == "no one key makes it fit: change several"
    bench = replace(base_config(), job="bench", ranks=8)
    bench = replace(bench, bench=replace(bench.bench, tokens=(64, 10**9)))
    assert set(ways(bench, 8 * GIB)) == {"bench.tokens"}


def test_the_default_run_is_far_from_the_limit():
    config = base_config()
    assert 8 * rank_bytes(config) + rank_zero_bytes(config) < 2 * GIB


def test_more_of_anything_needs_more():
    config = base_config()
    for change in ({"tokens": 800}, {"scale": replace(config.scale, layers=4)}):
        assert rank_bytes(replace(config, **change)) > rank_bytes(config)
    assert rank_zero_bytes(replace(config, reference=False)) < rank_zero_bytes(config)
    assert rank_bytes(replace(config, dtype="bf16")) < rank_bytes(config)
    for name in ("allgather", "hierarchical_allgather"):
        everywhere = replace(config, dispatcher=DispatcherConfig(name))
        assert rank_bytes(everywhere) > rank_bytes(config)
    training = replace(config, mode="training")
    assert rank_bytes(training) > rank_bytes(config)
    assert rank_zero_bytes(training) > rank_zero_bytes(config)
    unchecked = [replace(one, reference=False) for one in (config, training)]
    assert rank_zero_bytes(unchecked[0]) == rank_zero_bytes(unchecked[1])


def weights(**changes):
    """What one more layer adds to a rank of eight that has no tokens."""
    one = base_config(tokens=0, ranks=8, **changes)
    return rank_bytes(replace(one, scale=replace(one.scale, layers=2))) - rank_bytes(one)


def test_experts_of_a_rank_follow_groups_shards_and_replicas():
    """896 experts of 3 x 32 x 16 values; the rest of a layer every rank holds."""
    expert, rest = 4 * 3 * 32 * 16, weights() - 112 * 4 * 3 * 32 * 16
    assert weights(ep_size=2) == 448 * expert + rest
    assert weights(expert_tp=4) == 448 * expert // 4 + rest
    assert weights(ep_size=4, expert_tp=4) == 896 * expert // 4 + rest
    replicas = PlacementConfig("balance", num_redundant_experts=64)
    assert weights(placement=replicas) == 120 * expert + rest
    assert weights(mode="training") == 2 * weights()


def test_weights_are_counted_to_the_byte_of_their_shapes():
    """One more layer costs its experts, router, projections and shared experts."""
    one = base_config(tokens=0, ranks=1)
    two = replace(one, scale=replace(one.scale, layers=2))
    hidden, latent, inner, shared = 64, 32, 16, 32
    values = 896 * 3 * latent * inner + 896 * hidden + 2 * hidden * latent + 3 * hidden * shared
    assert rank_bytes(two) - rank_bytes(one) == 4 * values


def test_exit_status_is_7():
    result = subprocess.run(
        [sys.executable, "-m", "moe", "--check", "tokens=1000000000"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        check=False,
    )
    assert result.returncode == 7
    assert result.stderr.startswith("wideep: needs about") and result.stderr.count("\n") == 1


def test_a_gpu_that_is_not_there_is_refused_before_any_rank_starts(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check(base_config(device="cuda"), 1)
    check(base_config(), 8)
    check(base_config(device="cuda", backend="gloo"), 8)  # they share it
    with pytest.raises(UnfitError) as caught:
        check(base_config(device="cuda"), 8)
    assert str(caught.value) == (
        "device=cuda: 1 GPUs here for 8 ranks, and nccl needs one for each rank; ranks=1, or"
        " backend=gloo (ranks share the GPUs, rows go through the host's memory), or device=cpu"
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for backend in ("auto", "gloo"):
        with pytest.raises(UnfitError, match="torch sees no GPU here; device=cpu"):
            check(base_config(device="cuda", backend=backend), 8)


def open_now(world, config):
    """Files and sockets that a rank has once it has its roads: at most, over the ranks."""
    plan = make_plan(config, world)
    meter = TrafficMeter(plan.num_layers, world.world_size, plan.directions, plan.phases)
    Roads.build(plan, world, meter)
    dist.barrier()
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            kinds.append(os.readlink(f"/proc/self/fd/{fd}"))
    dist.barrier()
    return len(kinds), sum(kind.startswith("socket:") for kind in kinds)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_open_files_are_those_that_ranks_really_open():
    config = base_config(ranks=4, ep_size=2, dispatcher=DispatcherConfig("two_hop"))
    seen = run_ranks(open_now, 4, config, preload=("moe.assemble",))
    files, sockets = (max(column) for column in zip(*seen, strict=True))
    assert sockets * 4 == machine_sockets(config)
    assert files <= rank_files(config) <= files + 32


def test_too_few_open_files_are_refused_with_what_to_type(monkeypatch):
    config = base_config(ranks=512)
    needed = rank_files(config)
    assert needed > 2 * 512 and open_files(config, needed, needed).state == OK
    found = open_files(config, 1024, 4096)
    assert (found.state, found.remedy) == (FAIL, f"ulimit -n {needed}")
    found = open_files(config, 256, 256)
    fewer = int(found.remedy.rpartition("ranks=")[2])
    assert found.remedy.startswith(f"as root: prlimit --pid $$ --nofile={needed} or ranks=")
    assert rank_files(replace(config, ranks=fewer)) <= 256
    assert rank_files(replace(config, ranks=fewer + 1)) > 256
    monkeypatch.setattr("moe.fitness.file_limits", lambda: (20, 20))
    with pytest.raises(UnfitError, match=r"open files in a rank, 128 sockets in all; the limit is"):
        check(base_config(ranks=8), 8)


def test_the_check_is_quick_and_needs_no_torch():
    look = (
        "import sys, time; from moe.config import compose; from moe.fitness import check;"
        "config = compose([]); started = time.perf_counter(); check(config, 8);"
        "assert time.perf_counter() - started < 0.05; sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    assert subprocess.run([sys.executable, "-c", look], env=environment).returncode == 0


@pytest.mark.parametrize("limited", ["inner", "outer"])
def test_memory_of_control_groups_counts(tmp_path, limited):
    """A container, or a batch job around it, may leave less than the machine has."""
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        limit = 3000 if folder.name == limited else "max"
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("1000\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 200\nactive_file 100\n")
    (tmp_path / "own").write_text("0::/outer/inner\n")
    assert free_bytes(tmp_path / "own", tmp_path / "groups") == 3000 - 1000 + 300
    assert free_bytes(tmp_path / "none") > 1 << 20


def test_a_temporary_folder_too_long_for_a_socket_is_refused(tmp_path, monkeypatch):
    """The bound is the system's: a socket binds at it, and not one character beyond."""
    for length, state in ((75, OK), (76, FAIL)):
        folder = f"/tmp/{'x' * (length - 5)}"
        name = folder + "/pymp-12345678/listener-12345678"
        with socket.socket(socket.AF_UNIX) as one:
            said = "AF_UNIX path too long" if state == FAIL else "No such file"
            with pytest.raises(OSError, match=said):
                one.bind(name)
        assert temporary_folder(folder).state == state
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 71)
    with pytest.raises(UnfitError, match="76 characters.*room for 75; set TMPDIR"):
        check(base_config(), 8)
