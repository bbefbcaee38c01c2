"""Nodes on one machine: network namespaces joined by virtual Ethernet, with root or without.

    node 0: eth0 10.83.0.1 --+
    node 1: eth0 10.83.0.2 --+-- hub: a bridge, in the namespace of the process that starts them
    ...

No namespace has a name. Each lives as long as a process in it, and its devices with it: nothing can
be left behind, two runs cannot meet, and nobody else's network is touched. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

INTERFACE = "eth0"  # of each node, in its own namespace
MAX_NODES = 250
SYSTEM_PATHS = "/usr/sbin:/sbin"  # of ip and tc; a plain user's PATH may lack them
TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
HUBS = (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net"))
PROBE_S = 10.0
PROBE = "ip link add type bridge && ip link add type veth"
# A host name of its own, and then nothing until the devices are there.
NODE = 'hostname "$0" 2> /dev/null; read -r _ && exec "$@" < /dev/null'
MTU = 9000  # jumbo frames, as between machines of a cluster: 66 B of headers for 8,948 B
QUEUE_MS = 400
BURST_S, LEAST_BURST_BYTES = 0.001, 128 * 1024  # one segment of the sender is 64 KiB


class NoNamespaces(RuntimeError):
    """This machine gives us none; one line, with the remedy."""


@dataclass(frozen=True)
class Rate:
    """What a link carries. word: as tc spells it"""

    word: str
    bits_per_second: float

    @property
    def burst_bytes(self) -> int:
        return max(LEAST_BURST_BYTES, int(self.bits_per_second / 8 * BURST_S))


def find_hub() -> tuple[str, ...]:
    """The command that runs another in a namespace where we may make devices.

    Raises NoNamespaces.
    """
    if sys.platform != "linux":
        raise NoNamespaces("nodes=: needs the network namespaces of Linux; use ranks= here")
    if missing := missing_tools():
        tool = missing[0]
        raise NoNamespaces(f"nodes=: needs {tool}; install {TOOLS[tool]}")
    hub, said = try_hubs(PROBE)
    if hub:
        return hub
    raise NoNamespaces(
        f"nodes=: no network namespace to be had ({said}); run as root, or allow user namespaces"
        " (sysctl user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1; in Docker"
        " --cap-add SYS_ADMIN --cap-add NET_ADMIN)"
    )


def missing_tools() -> list[str]:
    """Of TOOLS; from now on they are looked for where the system keeps them, too."""
    path = os.environ.get("PATH", os.defpath)
    if SYSTEM_PATHS not in path:
        os.environ["PATH"] = f"{path}:{SYSTEM_PATHS}"
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def try_hubs(command: str = "true") -> tuple[tuple[str, ...], str]:
    """The first of HUBS that runs a shell command, and what the last one said if none does."""
    said = ""
    for hub in HUBS:
        try:
            tried = subprocess.run(
                [*hub, "sh", "-c", command], capture_output=True, text=True, timeout=PROBE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return (), str(error)
        if tried.returncode == 0:
            return hub, ""
        said = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    return (), said


def address(node: int) -> str:
    return f"10.83.0.{node + 1}"


def make_bridge() -> None:
    """Turn the namespace of this process into the hub."""
    _batch(["ip"], ["link set lo up", "link add hub type bridge", "link set hub up"])


def start_node(
    node: int, command: Sequence[str], environ: Mapping[str, str], rate: Rate | None = None
) -> subprocess.Popen:
    """Run a command as node number `node`; once it starts, its link is up.

    It gets SIGTERM when this process dies, and no signal of the terminal.
    """
    process = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", NODE, f"node{node}", *command],
        stdin=subprocess.PIPE,
        env=dict(environ),
        start_new_session=True,
        preexec_fn=_terminate_with_parent,
    )
    assert process.stdin is not None
    try:
        _wait_for_namespace(process)
        _link(node, process.pid, rate)
        process.stdin.write(b"\n")
        process.stdin.close()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _link(node: int, pid: int, rate: Rate | None) -> None:
    """A cable from the hub to the namespace of a process; the rate holds in both directions."""
    port, inside = f"port{node}", ["nsenter", f"--net=/proc/{pid}/ns/net"]
    limit = ""
    if rate is not None:
        limit = f"root tbf rate {rate.word} burst {rate.burst_bytes} latency {QUEUE_MS}ms"
    _batch(
        ["ip"],
        [
            f"link add {port} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {pid}",
            f"link set {port} master hub up",
        ],
    )
    _batch(
        [*inside, "ip"],
        [
            "link set lo up",
            f"addr add {address(node)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ],
    )
    if limit:
        _batch(["tc"], [f"qdisc add dev {port} {limit}"])
        _batch([*inside, "tc"], [f"qdisc add dev {INTERFACE} {limit}"])


def _batch(tool: Sequence[str], lines: Sequence[str]) -> None:
    done = subprocess.run(
        [*tool, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    if done.returncode:
        raise NoNamespaces(f"nodes=: {' '.join(tool)}: {done.stderr.strip().splitlines()[0]}")


def _wait_for_namespace(process: subprocess.Popen, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if namespace(process.pid) not in (None, namespace("self")):
            return
        time.sleep(0.002)
    raise NoNamespaces("nodes=: a node did not get its namespace (unshare --net --uts)")


def namespace(pid: int | str) -> str | None:
    """The network namespace of a process; None where there is no such process, or not ours."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return None


def sweep(namespaces: set[str]) -> None:
    """Kill whatever still lives in these namespaces, which thereby end."""
    namespaces = namespaces - {namespace("self") or ""}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if namespace(pid) in namespaces:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _terminate_with_parent() -> None:
    """In a child: get SIGTERM when the parent dies, through any exec."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
