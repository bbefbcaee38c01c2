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

# tcpi_unacked at 24, tcpi_bytes_acked at 120, tcpi_bytes_received at 128, tcpi_notsent_bytes at 144
FIELDS = struct.Struct("=24xI92xQQ8xI")
INFO_BYTES = FIELDS.size  # 148: the last field came with Linux 4.6
RESENT = struct.Struct("=208xQ")  # tcpi_bytes_retrans, since Linux 4.19
ROOM_BYTES = 256


@dataclass(frozen=True)
class TcpInfo:
    """acked: bytes that the peer has, each counted once however often it was sent; received: bytes
    from the peer; unacked: segments on their way; unsent: bytes not yet on it; resent: bytes sent
    once more, 0 where the kernel does not say"""

    unacked: int
    acked: int
    received: int
    unsent: int
    resent: int = 0

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
    resent = RESENT.unpack_from(raw)[0] if len(raw) >= RESENT.size else 0
    return TcpInfo(*FIELDS.unpack_from(raw), resent)


def read_info(fd: int, acknowledge: bool = False) -> TcpInfo:
    """Raises OSError for what is no open TCP socket, ValueError as parse_info.

    acknowledge: let go of an acknowledgement that is held back (up to 40 ms, in hope of data)
    """
    with _borrowed(fd) as connection:
        if acknowledge:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return parse_info(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ROOM_BYTES))


def addresses(fd: int) -> tuple[str, str] | None:
    """Of both ends, own and other, "host port"; None for what is no connected TCP socket."""
    try:
        with _borrowed(fd, family=-1) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            ends = connection.getsockname(), connection.getpeername()
    except OSError:  # it listens, has been closed, or is no socket
        return None
    own, other = (f"{host} {port}" for host, port, *_ in ends)
    return own, other


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


def resent_bytes() -> int:
    """Bytes that this process sent once more to other hosts, on the connections that it has."""
    total = 0
    for fd, _ in own_sockets():
        own, other = addresses(fd) or ("", "")
        if own.split()[:1] != other.split()[:1]:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or an old kernel
                total += read_info(fd).resent
    return total


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
def _borrowed(fd: int, family: int = socket.AF_INET) -> Iterator[socket.socket]:
    """Somebody else's socket, which stays open and theirs.

    family: -1 asks the kernel, which takes time; TCP's own options do not depend on it
    """
    borrowed = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()
