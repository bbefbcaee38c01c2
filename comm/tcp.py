"""What Linux knows of this process's own TCP connections; no privilege is needed to ask.

`struct tcp_info` of <linux/tcp.h> only ever grows at its end, so the offsets below hold on every
64-bit Linux that is new enough to have the fields; an older kernel returns fewer bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

FIELDS = {  # name -> offset and format
    "unacked": (24, "=I"),  # segments
    "acked": (120, "=Q"),  # bytes; each once, however often it was sent
    "received": (128, "=Q"),
    "unsent": (144, "=I"),
}
INFO_BYTES = 148  # up to the end of tcpi_notsent_bytes, which came with Linux 4.6
ROOM_BYTES = 256

Address = tuple[str, int]


@dataclass(frozen=True)
class TcpInfo:
    """Bytes acknowledged by the peer and received from it; unacked: segments; unsent: bytes"""

    acked: int
    received: int
    unacked: int
    unsent: int

    @property
    def settled(self) -> bool:
        """Has the peer acknowledged all that was written?"""
        return not self.unacked and not self.unsent


def parse_info(raw: bytes) -> TcpInfo:
    """Raises ValueError where the kernel returned less than what is read."""
    if len(raw) < INFO_BYTES:
        raise ValueError(
            f"this kernel's tcp_info has {len(raw)} B, and the counters end at {INFO_BYTES} B"
            " (Linux 4.6 or later has them)"
        )
    return TcpInfo(
        **{name: struct.unpack_from(of, raw, at)[0] for name, (at, of) in FIELDS.items()}
    )


def read_info(fd: int) -> TcpInfo:
    """Raises OSError for what is no open TCP socket, ValueError as parse_info."""
    with _borrowed(fd) as connection:
        return parse_info(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ROOM_BYTES))


def acknowledge_now(fd: int) -> None:
    """Send what acknowledgement the kernel is holding back (up to 40 ms, in hope of data)."""
    with _borrowed(fd) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def addresses(fd: int) -> tuple[Address, Address] | None:
    """Of both ends, own and other; None for what is no connected TCP socket."""
    try:
        with _borrowed(fd) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                return None
            return connection.getsockname()[:2], connection.getpeername()[:2]
    except OSError:  # it listens, or has been closed
        return None


def own_sockets() -> frozenset[tuple[int, str]]:
    """(file descriptor, identity) of every socket of this process; none where there is no /proc."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed since it was listed
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found.add((int(name), target))
    return frozenset(found)


def why_unsupported() -> str:
    """Why this system cannot be asked, in words; "" when it can."""
    if sys.platform != "linux":
        return f"{sys.platform} has no TCP_INFO as Linux has it"
    if not os.path.isdir("/proc/self/fd"):
        return "/proc is not there, where a process finds its own sockets"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            read_info(probe.fileno())
    except (OSError, ValueError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Somebody else's socket, which stays open and theirs."""
    borrowed = socket.socket(fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()
