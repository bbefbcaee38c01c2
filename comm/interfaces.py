"""What the network interfaces say was sent between hosts: the witness of whole machines.

An interface counts all that passes it, framing and acknowledgements included, and whatever else the
machine sends: hence a bracket, counted <= sent <= counted + 7 % + so much a message, whose upper
end holds only where nobody else uses the interface (`own`). What TCP sent twice, since it took a
segment for lost, is known from the ranks' own sockets and kept apart. Linux only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comm.tcp import resent_bytes
from comm.verdict import State, Verdict, not_available

# Not /sys/class/net, which shows the namespace that /sys was mounted in.
COUNTERS = Path("/proc/self/net/dev")
# Of the bytes: 66 B of headers for a segment of 1,448 B, and as many for the acknowledgement of
# every other segment that comes the opposite way. Where the kernel hands over 64 KiB at a time it
# is a few parts in a thousand; the quicker the link and the idler the machine, the less it does.
FRAMING = 0.07
MESSAGE_BYTES = 1024  # headers of gloo, frames and acknowledgements of a small message
FEW_BYTES = 64 * 1024  # of those who keep in touch: agents, barriers, neighbours


@dataclass(frozen=True)
class Seen:
    """What one rank saw of its host's interface while the metered traffic passed.

    host: in words; equal words, equal host. machine: equal where two hosts are one after all
    interface: its name; "" where none is known. own: nobody else's traffic is on it
    resent_bytes: of this rank alone, to other hosts
    """

    host: str
    machine: str
    interface: str = ""
    own: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0
    resent_bytes: int = 0


def chosen_interface(environ: Mapping[str, str] = os.environ) -> str:
    """The interface that gloo was told to use, where it has counters; else ""."""
    name = environ.get("GLOO_SOCKET_IFNAME", "")
    return name if read_counters(name) is not None else ""


def read_counters(interface: str, file: Path = COUNTERS) -> tuple[int, int] | None:
    """(bytes sent, bytes received) by an interface since it is there; None for none such."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            fields = figures.split()  # 8 of what was received, then 8 of what was sent
            return int(fields[8]), int(fields[0])
    return None


def watch(
    host: str, meet: Callable[[], object], environ: Mapping[str, str] = os.environ
) -> Callable[[], Seen]:
    """Read the counters now, and once more when the answer is called; collectives, both.

    meet: returns when all ranks have called it: what comes before and after is not counted
    """
    interface, machine = chosen_interface(environ), _machine()
    meet()
    before, resent = read_counters(interface) or (0, 0), resent_bytes() if interface else 0
    meet()

    def seen() -> Seen:
        meet()
        after = read_counters(interface) or (0, 0)
        again = resent_bytes() - resent if interface else 0
        meet()
        sent, received = after[0] - before[0], after[1] - before[1]
        own = "WIDEEP_OWN_LINK" in environ
        return Seen(host, machine, interface, own, sent, received, again)

    return seen


def _machine() -> str:
    """Processes with the same words share their network interfaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot + os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def between_hosts(seen: Sequence[Seen], sent: np.ndarray, collectives: int) -> list[dict[str, Any]]:
    """Of each host what was counted leaving it and what its interface sent; [] for one host.

    seen: of each rank; sent: [R, R] counted bytes; collectives: that a rank took part in
    """
    hosts = np.array([one.host for one in seen])
    away = hosts[:, None] != hosts[None, :]  # [src, dst]
    found = []
    for host in dict.fromkeys(hosts.tolist()) if away.any() else ():
        leaving = away & (hosts == host)[:, None]
        first = seen[int(np.argmax(hosts == host))]
        counted = int(sent[leaving].sum())
        again = sum(one.resent_bytes for one in seen if one.host == host)
        room = FRAMING * counted + MESSAGE_BYTES * collectives * int(leaving.sum()) + FEW_BYTES
        own = {"counted_bytes": counted, "resent_bytes": again, "bound_bytes": int(room) + again}
        found.append(asdict(first) | own)
    return found


def interfaces_verdict(hosts: Sequence[Mapping[str, Any]], backend: str = "gloo") -> Verdict:
    """Whether every host's interface sent what was counted, and little more.

    hosts: from `between_hosts`, at least two
    """
    if reason := _why_not(hosts, backend):
        return not_available("interfaces", reason)
    worst = min(hosts, key=_room)
    names = "counted_bytes", "sent_bytes", "resent_bytes"
    counted, sent, again = (sum(host[name] for host in hosts) for name in names)
    state = State.WITHIN if _room(worst) >= 0 else State.OUTSIDE
    judged = all(host["own"] for host in hosts)
    reason = f"{len(hosts)} hosts sent {sent:,} B for {counted:,} B counted"
    if again:
        reason += f" and {again:,} B once more"
    if counted:
        reason += f", {100 * (sent - again - counted) / counted:+.2f} %"
    reason += " for framing" if judged else "; other traffic of these machines is in it"
    if state is State.OUTSIDE:
        reason = (
            f"{worst['host']}: {worst['counted_bytes']:,} B were counted leaving it and"
            f" {worst['interface']} sent {worst['sent_bytes']:,} B; allowed are"
            f" {worst['bound_bytes']:,} B more, and none less"
        )
    return Verdict("interfaces", state, sent, counted, worst["bound_bytes"], reason)


def _room(host: Mapping[str, Any]) -> int:
    """Bytes to the nearer end of the bracket; negative outside."""
    more = host["sent_bytes"] - host["counted_bytes"]
    return min(more, host["bound_bytes"] - more) if host["own"] else more


def _why_not(hosts: Sequence[Mapping[str, Any]], backend: str) -> str:
    if backend != "gloo":
        return f"backend={backend} has ways of its own between hosts"
    if len({host["machine"] for host in hosts}) < len(hosts):
        return "several of the nodes are one machine: their traffic passes no interface"
    if without := [host["host"] for host in hosts if not host["interface"]]:
        return f"{without[0]}: no interface with counters; set GLOO_SOCKET_IFNAME"
    return ""
