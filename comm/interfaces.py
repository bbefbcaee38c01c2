"""Bytes that went over the network interfaces of this host, as the kernel counts them.

A bracket for what a run counts, not an equal of it: of everything on the host, and with the framing
of Ethernet, IP and TCP. A network namespace has interfaces, and counters, of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NETWORK = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
WORD_BYTES = 4  # InfiniBand's port counters count words


@dataclass(frozen=True)
class Counters:
    """Bytes sent and received since the interface is there; a difference: meanwhile."""

    sent: int
    received: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(self.sent - before.sent, self.received - before.received)


def read_interfaces(network: Path = NETWORK, infiniband: Path = INFINIBAND) -> dict[str, Counters]:
    """By name ("eth0", "lo"; InfiniBand "mlx5_0/1", device and port); empty where there are none.

    An interface that goes away while it is read is left out.
    """
    found = {}
    for folder in _folders(network, "*/statistics"):
        found[folder.parent.name] = _counters(folder, "tx_bytes", "rx_bytes", 1)
    for folder in _folders(infiniband, "*/ports/*/counters"):
        port = f"{folder.parents[2].name}/{folder.parent.name}"
        found[port] = _counters(folder, "port_xmit_data", "port_rcv_data", WORD_BYTES)
    return {name: counters for name, counters in found.items() if counters is not None}


def traffic_between(before: dict[str, Counters], after: dict[str, Counters]) -> dict[str, Counters]:
    """What each interface that was there both times carried."""
    return {name: after[name] - before[name] for name in after if name in before}


def _folders(root: Path, pattern: str) -> list[Path]:
    return sorted(folder for folder in root.glob(pattern) if folder.is_dir())


def _counters(folder: Path, sent: str, received: str, unit: int) -> Counters | None:
    try:
        return Counters(*(unit * int((folder / name).read_text()) for name in (sent, received)))
    except (OSError, ValueError):
        return None
