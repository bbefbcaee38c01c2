"""A real Slurm on this machine: python tests/slurm_cluster.py FOLDER COMMAND ...

Controller and munged in the hub, a daemon in each of two virtual nodes (moe.netns), all with files
in FOLDER. Runs COMMAND once both nodes are idle; its status. Nothing is left behind. Needs root.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from moe import netns  # noqa: E402

TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
HUB = "10.83.0.254"
CONF = """ClusterName=wideep
SlurmctldHost={host}({hub})
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=5
NodeName=node0 NodeAddr=10.83.0.1 CPUs=8
NodeName=node1 NodeAddr=10.83.0.2 CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def main(folder: Path, command: list[str]) -> int:
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, hub=HUB, folder=folder))
    environ = os.environ | {"SLURM_CONF": str(conf)}
    daemons: list[subprocess.Popen] = []
    nodes: list[subprocess.Popen] = []
    try:
        netns.make_bridge()
        netns._batch(["ip"], [f"addr add {HUB}/24 dev hub"])
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o600)
        names = ("key-file=munge.key", "socket=munge.socket", "pid-file=munge.pid",
                 "log-file=munge.log", "seed-file=munge.seed")  # fmt: skip
        munged = ["munged", "--foreground", "--force"]
        munged += [f"--{name.replace('=', f'={folder}/')}" for name in names]
        for number, one in enumerate((munged, ["slurmctld", "-D"])):
            with open(folder / f"daemon{number}.log", "w") as log:
                daemons.append(subprocess.Popen(one, env=environ, stdout=log, stderr=log))
            time.sleep(0.5)
        for node in range(2):
            slurmd = ["slurmd", "-D", "-N", f"node{node}", "-L", f"{folder}/node{node}.log"]
            nodes.append(netns.start_node(node, slurmd, environ))
        if not all_idle(environ):
            print((folder / "daemon1.log").read_text()[-3000:], file=sys.stderr)
            return 7
        return subprocess.run(command, env=environ).returncode
    finally:
        netns.sweep({netns.namespace(node.pid) or "" for node in nodes})
        for one in daemons:
            one.terminate()
        for one in (*daemons, *nodes):
            one.wait()


def all_idle(environ: dict[str, str], timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%t"], env=environ, capture_output=True, text=True
        )
        if shown.stdout.split() == ["idle", "idle"]:
            return True
        time.sleep(0.25)
    return False


if __name__ == "__main__":
    if sys.argv[1] == "--in-hub":
        sys.exit(main(Path(sys.argv[2]), sys.argv[3:]))
    hub = netns.find_hub()
    os.execvp(hub[0], [*hub, sys.executable, __file__, "--in-hub", *sys.argv[1:]])
