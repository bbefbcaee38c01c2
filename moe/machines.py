"""A run over several machines: python -m moe.machines [job] [key=value ...], on each of them

    Slurm, in the batch script       srun, with the same words: one task a node, or one a rank
    Slurm, one task a node           torchrun for the node's ranks
    Slurm, several tasks a node      each task is a rank, wherever Slurm put it
    RDZV_ENDPOINT                    torchrun, which numbers the nodes itself
    NNODES NODE_RANK MASTER_ADDR     torchrun, as told

The node of a rank is what the rank reports, so that any order and any distribution gives right
tiers. gloo gets the interface on the way to the master, unless GLOO_SOCKET_IFNAME names one.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence

import psutil

from moe.settings import DEFAULT_RANKS, UNFIT, USAGE_ERROR, ConfigError, UnfitError

PORT = 29500
KUBEFLOW = "PET_"  # prefix of what its trainer sets, and torchrun reads by itself


def main(words: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> int:
    """Become srun, torchrun or a rank."""
    try:
        for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE"):
            if KUBEFLOW + name in environ:
                environ.setdefault(name, environ[KUBEFLOW + name])
        if "SLURM_JOB_ID" in environ and "NNODES" not in environ:
            command = slurm_command(words, environ)
        else:
            command = torchrun_command(words, environ)
    except ConfigError as error:
        print(f"wideep: {error}", file=sys.stderr)
        return USAGE_ERROR
    except UnfitError as error:
        print(f"wideep: {error}", file=sys.stderr)
        return UNFIT
    os.execvpe(command[0], command, dict(environ))


def torchrun_command(words: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """torchrun for the ranks of this machine, and the interface in `environ`."""
    torchrun = [sys.executable, "-m", "moe.torchrun"]
    if endpoint := environ.get("RDZV_ENDPOINT"):
        nodes = environ.get("NNODES", "1")
        if not re.fullmatch(r"[1-9][0-9]*(:[1-9][0-9]*)?", nodes):
            raise ConfigError(f"NNODES={nodes}: must be a number of nodes, or least:most")
        least = int(nodes.partition(":")[0])
        host, port = _host_and_port(endpoint)
        choose_interface(host, port, least, environ, "RDZV_ENDPOINT")
        meet = ["--nnodes", nodes, "--rdzv-backend", environ.get("RDZV_BACKEND", "c10d")]
        meet += ["--rdzv-endpoint", endpoint, "--rdzv-id", environ.get("RDZV_ID", "wideep")]
    else:
        least = _number("NNODES", environ, least=1)
        node = _number("NODE_RANK", environ, least=0)
        if node >= least:
            raise ConfigError(f"NODE_RANK={node}: NNODES={least} has nodes 0 .. {least - 1}")
        if least > 1 and not environ.get("MASTER_ADDR"):
            raise ConfigError(f"NNODES={least}: needs MASTER_ADDR, the address of node 0")
        host = environ.get("MASTER_ADDR", "127.0.0.1")
        port = _number("MASTER_PORT", environ, least=1, default=PORT, most=65535)
        choose_interface(host, port, least, environ, "MASTER_ADDR")
        meet = ["--nnodes", str(least), "--node-rank", str(node)]
        meet += ["--master-addr", host, "--master-port", str(port)]
    here = ranks_here(words, environ, least)
    return [*torchrun, *meet, "--nproc-per-node", str(here), "-m", "moe", *words]


def ranks_here(words: Sequence[str], environ: Mapping[str, str], num_nodes: int) -> int:
    """Ranks of each node: NPROC_PER_NODE, or an equal part of ranks=, or as many as on a laptop."""
    if "NPROC_PER_NODE" in environ:
        return _number("NPROC_PER_NODE", environ, least=1)
    given = [word.partition("=")[2] for word in words if word.startswith("ranks=")]
    if not given or not given[-1].isdecimal():
        return DEFAULT_RANKS
    ranks = int(given[-1])
    if ranks < num_nodes or ranks % num_nodes:
        nearest = max(round(ranks / num_nodes), 1) * num_nodes
        raise ConfigError(
            f"ranks={ranks}: must divide equally among {num_nodes} nodes; nearest: ranks={nearest}"
        )
    return ranks // num_nodes


def slurm_command(words: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """What a process that Slurm started becomes; where it is a rank, `environ` says which."""
    if "SLURM_STEP_ID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return _srun(words, environ)
    nodes = _number("SLURM_STEP_NUM_NODES", environ, least=1)
    tasks = _number("SLURM_STEP_NUM_TASKS", environ, least=1)
    environ.setdefault("MASTER_ADDR", master_of(environ["SLURM_STEP_NODELIST"]))
    job, step = (_number(name, environ, least=0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    environ.setdefault("MASTER_PORT", str(20000 + (job * 16 + step) % 20000))
    if tasks == nodes:
        environ |= {"NNODES": str(nodes), "NODE_RANK": environ["SLURM_NODEID"]}
        return torchrun_command(words, environ)
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    choose_interface(host, port, nodes, environ, "MASTER_ADDR")
    node = int(environ["SLURM_NODEID"])
    environ |= {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_of_node(environ["SLURM_STEP_TASKS_PER_NODE"], node)),
        "GROUP_RANK": str(node),
    }
    return [sys.executable, "-m", "moe", *words]


def _srun(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """In the batch script: the same on the nodes, distributed as the job says (srun reads it)."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    tasks = environ.get("SLURM_NTASKS", nodes)
    return [
        "srun",
        "--nodes",
        nodes,
        "--ntasks",
        tasks,
        sys.executable,
        "-m",
        "moe.machines",
        *words,
    ]


def tasks_of_node(text: str, node: int) -> int:
    """Entry `node` of a list as Slurm writes it: "2(x3),1" is 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise UnfitError(f"SLURM_STEP_TASKS_PER_NODE={text}: not a list as Slurm writes it")
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks[node]


def master_of(nodelist: str) -> str:
    """The address of the first node, on which rank 0 lives."""
    name = _ask("scontrol", "show", "hostnames", nodelist).split()[0]
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:  # a name that only Slurm knows
        found = re.search(r"NodeAddr=(\S+)", _ask("scontrol", "show", "node", name))
        return found[1] if found else name


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnfitError(f"{' '.join(command)}: {error}; set MASTER_ADDR instead") from error


def choose_interface(
    host: str, port: int, num_nodes: int, environ: MutableMapping[str, str], name: str
) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface on the way to the master, unless it is set.

    Raises ConfigError for a master that only one machine can reach, UnfitError for none.
    name: of the variable that says where the master is
    """
    if num_nodes < 2 or environ.get("GLOO_SOCKET_IFNAME"):
        return
    local = _address_towards(host, port, name)
    if ipaddress.ip_address(local.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{name}={host}: leads to this machine's loopback ({local}), which no other machine"
            f" reaches; set {name} to an address of node 0 that all of them reach (ip -br addr), or"
            " GLOO_SOCKET_IFNAME=lo where all nodes are on this machine"
        )
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address == local for one in addresses):
            environ["GLOO_SOCKET_IFNAME"] = interface
            return
    raise UnfitError(f"no interface has {local}, the way to {name}={host}; set GLOO_SOCKET_IFNAME")


def _address_towards(host: str, port: int, name: str) -> str:
    """This machine's own address on the route to another; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise UnfitError(f"{name}={host}: {error.strerror or error}; no way to it") from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host:
        return endpoint, PORT
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"RDZV_ENDPOINT={endpoint}: must be host:port, for example node0:29500")
    return host.strip("[]"), int(port)


def _number(
    name: str,
    environ: Mapping[str, str],
    least: int,
    default: int | None = None,
    most: int = 2**31,
) -> int:
    """An environment variable that must be a number."""
    value = environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal() or not least <= int(value) <= most:
        limits = f"{least} or more" if most == 2**31 else f"{least} .. {most}"
        raise ConfigError(f"{name}={value or ''}: must be a number, {limits}")
    return int(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
