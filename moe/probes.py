"""Looks at this machine for job=doctor: names, routes, ports, sockets, torch. No opinions here.

Each probe returns what it saw as plain values for moe.diagnosis, also where something is missing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import psutil

from comm.barrier import refusal
from comm.tcp import read_info
from moe import netns
from moe.diagnosis import AS_BYTES, Host, Master, is_loopback

LOOKUP_S = 3.0  # for one name, and for one connection
PROBE_BYTES = 10_000
Seen = TypeVar("Seen")


def own_host() -> Host:
    name = socket.gethostname()
    started = time.monotonic()
    addresses, error = look_up(name)
    return Host(name, interfaces(), addresses, error, time.monotonic() - started)


def interfaces() -> dict[str, list[str]]:
    """Addresses of the interfaces that are up, IPv6 without its zone."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.split("%")[0] for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and any(one.family in families for one in addresses)
    }


def look_up(name: str) -> tuple[list[str], str]:
    """The addresses of a host, or why there are none; a name server gets LOOKUP_S to answer."""
    try:
        found = within(LOOKUP_S, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found)), ""


def within(seconds: float, look: Callable[[], Seen]) -> Seen:
    """What `look` returns or raises. Raises TimeoutError where it takes longer."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((look(), None))
        except Exception as error:  # raised again below, in the thread that asked
            outcome.append((None, error))

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def master(environ: Mapping[str, str]) -> Master:
    """Where the ranks meet, as torchrun's variables say. Raises ValueError for a port that is
    none."""
    name, given = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if given and not (given.isdecimal() and 0 < int(given) < 1 << 16):
        raise ValueError(f"MASTER_PORT={given}: must be a number from 1 to 65535")
    addresses, error = look_up(name) if name else ([], "")
    source = route_source(addresses[0]) if addresses else None
    return Master(name, int(given) if given else None, addresses, error, source)


def route_source(address: str) -> str | None:
    """This machine's address on the way to another; nothing is sent. None: there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def is_here(host: Host, place: Master) -> bool:
    own = {address for addresses in host.interfaces.values() for address in addresses}
    return not place.name or any(is_loopback(one) or one in own for one in place.addresses)


def port_trouble(place: Master, here: bool, joined: bool) -> str:
    """Why the ranks could not meet there; "" where they could.

    Without a port there is nothing to try; the first machine's listens only once it has started.
    """
    address = place.addresses[0] if place.addresses else "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            if here and not joined:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, place.port or 0))
            elif place.port:
                probe.settimeout(LOOKUP_S)
                probe.connect((address, place.port))
        except ConnectionRefusedError:
            return "nobody listens" if joined else ""
        except OSError as error:
            return error.strerror or str(error)
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def shared_memory_trouble() -> str | None:
    """Why ranks cannot share memory: what comm.barrier says, or a try of it."""
    if reason := refusal():
        return reason
    try:
        fd = os.memfd_create("wideep-doctor")
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)
            # as another rank would open it
            os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
        finally:
            os.close(fd)
    except OSError as error:
        return f"shared memory of ranks: {error}"
    return None


def shm_free(folder: str = "/dev/shm") -> int | None:
    try:
        return psutil.disk_usage(folder).free
    except OSError:
        return None


def acknowledged() -> tuple[int, int | None, str]:
    """Bytes sent over a loopback connection, those that TCP_INFO says were acknowledged, or why it
    does not."""
    if sys.platform != "linux":
        return PROBE_BYTES, None, f"{sys.platform} has another structure"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        return (PROBE_BYTES, *_sent_and_acknowledged(sender, receiver))


def _sent_and_acknowledged(
    sender: socket.socket, receiver: socket.socket
) -> tuple[int | None, str]:
    before = _bytes_acked(sender)
    if before is None:
        return None, "the kernel is too old to say how many bytes were acknowledged"
    sender.sendall(bytes(PROBE_BYTES))
    left = PROBE_BYTES
    while left:
        left -= len(receiver.recv(left))
    deadline = time.monotonic() + 1.0
    while True:
        counted = (_bytes_acked(sender) or 0) - before
        if counted >= PROBE_BYTES or time.monotonic() > deadline:
            return counted, ""
        time.sleep(0.001)


def _bytes_acked(connection: socket.socket) -> int | None:
    with contextlib.suppress(ValueError):  # too short an answer
        return read_info(connection.fileno()).acked
    return None


def namespace_way() -> tuple[str, str]:
    """How a network namespace could be made here, or why not; it is made, and gone at once."""
    if sys.platform != "linux":
        return "", f"network namespaces need Linux; this is {sys.platform}"
    if "unshare" in netns.missing_tools():
        return "", "unshare (util-linux) is not found"
    hub, said = netns.try_hubs()
    if not hub:
        return "", said
    return "as root" if hub == netns.HUBS[0] else "user namespace", ""


def missing_tools() -> list[str]:
    """Of iproute2."""
    return [tool for tool in netns.missing_tools() if netns.TOOLS[tool] == "iproute2"]


def refused_dtypes(loopback: str) -> dict[str, str]:
    """Of AS_BYTES and uint8, those that gloo does not send: type -> what it says."""
    import torch
    import torch.distributed as dist

    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = loopback  # its own finding tells whether that is right
    refused = {}
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for name in ("uint8", *AS_BYTES):
            if not hasattr(torch, name):
                continue
            sent = torch.zeros(1, dtype=getattr(torch, name))
            try:
                dist.all_to_all_single(torch.empty_like(sent), sent)
            except (RuntimeError, ValueError) as error:
                refused[name] = str(error).splitlines()[0]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
    return refused
