"""Several nodes on this machine: python -m moe.nodes nodes=2x4 [rate=1gbit] [job] [key=value ...]

    words --> checked --> a hub of its own --> torchrun in each node --> everything is gone

Each node is a network namespace (moe.netns) and runs torchrun for its ranks; between nodes their
traffic takes a virtual Ethernet link, limited to `rate`. The status is that of rank 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from moe import netns
from moe.settings import MAX_RANKS, RANKLESS, UNFIT, USAGE_ERROR, ConfigError

INSIDE = "--in-hub"
PORT = "29500"  # nobody else lives in these namespaces
GRACE_S = 20.0  # from the first node that fails, or from a signal, until the others are killed
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 1e6, 100e9
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Layout:
    """nodes x ranks on each, the rate of each node's link, and the words for the job."""

    num_nodes: int
    ranks_per_node: int
    rate: netns.Rate | None
    words: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


def read_layout(words: Sequence[str]) -> Layout:
    """Take nodes= and rate= out of a command line. Raises ConfigError."""
    given = {"ranks": "null", "job": "emulate", "dispatcher": "", "ep_size": "null"}
    rest: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and not rest:  # of the words for the job, the first
            name, value = "job", word
        given[name] = value
        if name not in ("nodes", "rate"):
            rest.append(word)
    if "nodes" not in given:
        raise ConfigError(f"rate={given['rate']}: limits the links of nodes; add nodes=2x4")
    num_nodes, ranks_per_node = _read_nodes(given["nodes"])
    ranks = num_nodes * ranks_per_node
    if given["ranks"] not in ("null", str(ranks)):
        raise ConfigError(
            f"ranks={given['ranks']}: nodes={given['nodes']} has {ranks}; leave ranks= out"
        )
    if given["job"] in RANKLESS:
        raise ConfigError(
            f"nodes={given['nodes']}: job={given['job']} starts no ranks; leave it out"
        )
    if given["dispatcher"] == "one_sided" and not _inside(given["ep_size"], ranks_per_node):
        raise ConfigError(
            f"dispatcher=one_sided: the nodes of nodes={given['nodes']} share no memory; use"
            f" another dispatcher, or groups inside a node (ep_size={ranks_per_node})"
        )
    rate = _read_rate(given["rate"]) if "rate" in given else None
    return Layout(num_nodes, ranks_per_node, rate, tuple(rest))


def _inside(ep_size: str, ranks_per_node: int) -> bool:
    """Whether each group of so many ranks lies inside one node."""
    return ep_size.isdecimal() and int(ep_size) > 0 and ranks_per_node % int(ep_size) == 0


def _read_nodes(value: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", value)
    if not found:
        raise ConfigError(f"nodes={value}: must be nodes x ranks on each, for example nodes=2x4")
    nodes, ranks = int(found[1]), int(found[2])
    if not 1 <= nodes <= netns.MAX_NODES:
        nearest = min(max(nodes, 1), netns.MAX_NODES)
        ranks = min(max(ranks, 1), MAX_RANKS // nearest)
        raise ConfigError(
            f"nodes={value}: 1 .. {netns.MAX_NODES} nodes; nearest: nodes={nearest}x{ranks}"
        )
    if not 1 <= ranks <= MAX_RANKS // nodes:
        nearest = min(max(ranks, 1), MAX_RANKS // nodes)
        raise ConfigError(
            f"nodes={value}: 1 .. {MAX_RANKS} ranks in all; nearest: nodes={nodes}x{nearest}"
        )
    return nodes, ranks


def _read_rate(value: str) -> netns.Rate:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", value)
    if not found:
        raise ConfigError(
            f"rate={value}: must be a number and kbit, mbit or gbit (bits a second), for example"
            " rate=1gbit"
        )
    bits = float(found[1]) * UNITS[found[2]]
    if not SLOWEST <= bits <= FASTEST:
        nearest = "1mbit" if bits < SLOWEST else "100gbit"
        raise ConfigError(f"rate={value}: must lie in 1mbit .. 100gbit; nearest: rate={nearest}")
    return netns.Rate(value, bits)


def main(words: Sequence[str]) -> int:
    """Check the words, become the hub, run the nodes; the exit status."""
    try:
        if words[:1] == [INSIDE]:
            return run_nodes(read_layout(words[1:]))
        layout = read_layout(words)
        checked = [*layout.words, f"ranks={layout.world_size}"]
        status = subprocess.run([sys.executable, "-m", "moe", "--check", *checked]).returncode
        if status:
            return status
        hub = netns.find_hub()
        os.execvp(hub[0], [*hub, sys.executable, "-m", "moe.nodes", INSIDE, *words])
    except ConfigError as error:
        print(f"wideep: {error}", file=sys.stderr)
        return USAGE_ERROR
    except netns.NoNamespaces as error:
        print(f"wideep: {error}", file=sys.stderr)
        return UNFIT


def run_nodes(layout: Layout) -> int:
    """In the hub: one torchrun a node, until all have ended."""
    ending = _Ending()
    for number in ENDINGS:
        signal.signal(number, ending)
    agents: list[subprocess.Popen] = []
    namespaces: set[str] = set()
    try:
        netns.make_bridge()
        for node in range(layout.num_nodes):
            if not ending.signal:
                agents.append(netns.start_node(node, _agent(layout, node), _environ(), layout.rate))
                namespaces.add(netns.namespace(agents[-1].pid) or "")
        _wait(agents, ending)
    finally:
        netns.sweep(namespaces)
        for agent in agents:
            agent.wait()
    if ending.signal:
        return 128 + ending.signal
    statuses = [_status(agent.returncode) for agent in agents]
    return next(filter(None, statuses), 0)  # that of rank 0's node, where it failed


class _Ending:
    """The first signal that asked for the end."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or number


def _wait(agents: Sequence[subprocess.Popen], ending: _Ending) -> None:
    """Until all have ended; from a signal or a failure on, only for a while."""
    deadline = float("inf")
    told = False
    while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
        if ending.signal and not told:
            _tell(agents, ending.signal)
            told = True
        if told or any(agent.returncode for agent in agents):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)


def _tell(agents: Sequence[subprocess.Popen], number: int) -> None:
    for agent in agents:
        with suppress(ProcessLookupError):
            agent.send_signal(number)


def _agent(layout: Layout, node: int) -> list[str]:
    """The command of one node."""
    return [
        *(sys.executable, "-m", "moe.torchrun", "--nnodes", str(layout.num_nodes)),
        *("--node-rank", str(node), "--nproc-per-node", str(layout.ranks_per_node)),
        *("--master-addr", netns.address(0), "--master-port", PORT),
        *("--local-addr", netns.address(node), "-m", "moe", *layout.words),
    ]


def _environ() -> dict[str, str]:
    return os.environ | {
        "GLOO_SOCKET_IFNAME": netns.INTERFACE,
        "WIDEEP_OWN_LINK": "1",  # nobody else's traffic is on it: comm.interfaces judges it
        # No name server in there: torch would warn that addresses have no names.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def _status(returncode: int) -> int:
    """As a shell says it."""
    return 128 - returncode if returncode < 0 else returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
