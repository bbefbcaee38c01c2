"""From what a launcher says of the machines to the command that each of them becomes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moe import machines
from moe.machines import ranks_here, slurm_command, tasks_of_node, torchrun_command
from moe.settings import ConfigError, UnfitError

ROOT = Path(__file__).parent.parent
OWN = "192.0.2.7"  # of this machine, towards the others, in these tests
STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",  # cyclic: ranks 0, 2 on node 0 and 1, 3 on node 1
    "SLURM_LOCALID": "0",
}


@pytest.fixture
def route(monkeypatch):
    """The way to any master leaves by `wlan7`, or stays here for those called localhost."""

    def towards(host, port, name):
        return "127.0.0.1" if host in ("localhost", "127.0.0.1") else OWN

    address = type("Address", (), {"address": OWN})
    monkeypatch.setattr(machines, "_address_towards", towards)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "wlan7": [address]})
    monkeypatch.setattr(machines, "master_of", lambda nodelist: "node0")


BY_HAND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}


def options(command):
    """The words of a command by the option before them."""
    return dict(zip(command, command[1:], strict=False))


def test_by_hand(route):
    environ = dict(BY_HAND)
    command = torchrun_command(["ranks=6", "seed=1"], environ)
    assert command[:3] == [sys.executable, "-m", "moe.torchrun"]
    assert command[-4:] == ["-m", "moe", "ranks=6", "seed=1"]
    given = options(command)
    assert (given["--nnodes"], given["--node-rank"], given["--nproc-per-node"]) == ("2", "1", "3")
    assert (given["--master-addr"], given["--master-port"]) == ("node0", "29500")
    assert environ["GLOO_SOCKET_IFNAME"] == "wlan7"


def test_a_given_interface_stays(route):
    environ = BY_HAND | {"GLOO_SOCKET_IFNAME": "eth3"}
    torchrun_command([], environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth3"


def test_elastic_rendezvous_numbers_the_nodes_itself(route):
    environ = {"NNODES": "2:4", "RDZV_ENDPOINT": "node0:4711", "NPROC_PER_NODE": "5"}
    given = options(torchrun_command([], environ))
    assert (given["--nnodes"], given["--rdzv-backend"]) == ("2:4", "c10d")
    assert (given["--rdzv-endpoint"], given["--nproc-per-node"]) == ("node0:4711", "5")
    assert environ["GLOO_SOCKET_IFNAME"] == "wlan7" and "--node-rank" not in given


def test_one_machine_needs_no_interface(route):
    environ = {"NNODES": "1", "NODE_RANK": "0"}
    given = options(torchrun_command([], environ))
    assert given["--nproc-per-node"] == "8" and "GLOO_SOCKET_IFNAME" not in environ


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"NNODES": "two"}, "NNODES=two: must be a number, 1 or more"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2: NNODES=2 has nodes 0 .. 1"),
        ({"NODE_RANK": ""}, "NODE_RANK=: must be a number, 0 or more"),
        ({"MASTER_ADDR": ""}, "NNODES=2: needs MASTER_ADDR, the address of node 0"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be a number, 1 .. 65535"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost: leads to this machine's loopback"),
        ({"RDZV_ENDPOINT": "node0:x"}, "RDZV_ENDPOINT=node0:x: must be host:port"),
        ({"RDZV_ENDPOINT": "node0", "NNODES": "0"}, "NNODES=0: must be a number of nodes, or"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0: must be a number, 1 or more"),
    ],
)
def test_what_cannot_be_is_one_line(route, changes, line):
    with pytest.raises(ConfigError) as error:
        torchrun_command([], BY_HAND | changes)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_ranks_are_of_all_machines():
    assert ranks_here(["ranks=8"], {}, 2) == 4 and ranks_here(["ranks=null"], {}, 2) == 8
    with pytest.raises(ConfigError, match="ranks=7: must divide equally among 2 nodes; nearest"):
        ranks_here(["ranks=7"], {}, 2)


def test_the_real_route_to_oneself_is_the_loopback():
    assert machines._address_towards("127.0.0.1", 29500, "MASTER_ADDR") == "127.0.0.1"
    with pytest.raises(UnfitError, match="MASTER_ADDR=no.such.invalid: .*; no way to it"):
        machines._address_towards("no.such.invalid", 29500, "MASTER_ADDR")


def test_each_task_of_several_on_a_node_is_a_rank(route):
    environ = dict(STEP)
    assert slurm_command(["seed=1"], environ) == [sys.executable, "-m", "moe", "seed=1"]
    place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [environ[name] for name in place] == ["1", "4", "0", "2", "1"]
    assert environ["MASTER_ADDR"] == "node0" and environ["GLOO_SOCKET_IFNAME"] == "wlan7"
    port = environ["MASTER_PORT"]
    other = STEP | {"SLURM_STEP_ID": "2"}
    slurm_command([], other)
    assert 20000 <= int(port) < 40000 and other["MASTER_PORT"] != port


def test_one_task_a_node_is_torchrun(route):
    command = slurm_command(["ranks=4"], STEP | {"SLURM_STEP_NUM_TASKS": "2"})
    given = options(command)
    assert (given["--nnodes"], given["--node-rank"], given["--nproc-per-node"]) == ("2", "1", "2")


def test_the_batch_script_becomes_srun(route):
    batch = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}
    command = slurm_command(["seed=1"], batch)
    assert command[:5] == ["srun", "--nodes", "2", "--ntasks", "4"]
    assert command[5:] == [sys.executable, "-m", "moe.machines", "seed=1"]
    assert slurm_command([], {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "3"})[4] == "3"


def test_tasks_as_slurm_writes_them():
    assert [tasks_of_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    with pytest.raises(UnfitError, match="SLURM_STEP_TASKS_PER_NODE=x"):
        tasks_of_node("x", 0)


@pytest.mark.parametrize("way", ["by hand", "elastic"])
def test_two_torchruns_are_one_run(tmp_path, way):
    """Both on this machine, so over the loopback: which has to be asked for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if way == "elastic":
        meet = {"RDZV_ENDPOINT": f"127.0.0.1:{port}", "RDZV_ID": "test"}
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE")
    environ = {name: value for name, value in os.environ.items() if name not in outer}
    environ |= {"NNODES": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | meet
    environ |= {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR", "NPROC_PER_NODE": "1"}
    words = [
        "layers=1",
        "tokens=8",
        "warmup=0",
        "scale.hidden_size=64",
        "output_dir=out",
        "report=false",
    ]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "moe.machines", *words],
            cwd=tmp_path,
            env=environ | {"NODE_RANK": str(node)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    ended = [agent.communicate(timeout=90) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ended
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["manifest"]["node_of_rank"] == [0, 1]
    (verdict,) = [one for one in record["verdicts"] if one["name"] == "interfaces"]
    assert verdict["state"] == "NOT_AVAILABLE" and "are one machine" in verdict["reason"]
