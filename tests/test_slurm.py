"""A real Slurm: controller and two node daemons on this machine run `sbatch launch.sh`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import TOOLS

from moe import netns

ROOT = Path(__file__).parent.parent
SMALL = "scale.hidden_size=64 scale.intermediate_size=16 layers=1 tokens=8 warmup=0 report=false"
# Both at once, for the time it takes; sbatch --wait looks up too seldom.
JOBS = f"""
submit() {{ sbatch -s -N2 --ntasks-per-node=2 -o $1.out -m $1 {ROOT}/launch.sh {SMALL} $2; }}
submit block output_dir=block
submit cyclic output_dir=cyclic
sbatch -s -N2 --ntasks-per-node=1 -o wrong.out {ROOT}/launch.sh tokenz=1
for second in $(seq 120); do [ -n "$(squeue -h)" ] || break; sleep 0.5; done
for job in 1 2 3; do scontrol show job $job | grep -o 'ExitCode=[0-9]*'; done
"""


def why_no_slurm() -> str:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {missing[0]}: apt-get install slurm-wlm munge"
    if os.getuid() != 0:
        return "Slurm's daemons need root"
    try:
        netns.find_hub()
    except netns.NoNamespaces as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())
def test_sbatch_across_two_nodes(tmp_path):
    (tmp_path / "slurm").mkdir()
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE", "GLOO_SOCKET_IFNAME")
    environ = {name: value for name, value in os.environ.items() if name not in outer}
    environ |= {"VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    cluster = [sys.executable, str(ROOT / "tests" / "slurm_cluster.py"), str(tmp_path / "slurm")]
    done = subprocess.run(
        [*cluster, "bash", "-c", JOBS],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout + done.stderr + "".join(one.read_text() for one in tmp_path.glob("*.out"))
    assert done.stdout.split("\n")[-4:-1] == ["ExitCode=0", "ExitCode=0", "ExitCode=2"], said
    assert "wideep: tokenz=1: no such key" in (tmp_path / "wrong.out").read_text()
    for name, node_of_rank in (("block", [0, 0, 1, 1]), ("cyclic", [0, 1, 0, 1])):
        record = json.loads((tmp_path / name / "run.json").read_text())
        about = record["manifest"]
        assert about["node_of_rank"] == node_of_rank
        assert about["hosts"] == ["node0", "node1"]
        assert about["environment"]["GLOO_SOCKET_IFNAME"] == netns.INTERFACE
        assert all(tier["z"] is not None for tier in record["totals"]["tiers"].values())
        states = {one["name"]: one["state"] for one in record["verdicts"]}
        assert states["exact"] == "EXACT" and states["interfaces"] == "WITHIN"
