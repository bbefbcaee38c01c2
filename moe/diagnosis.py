"""What job=doctor thinks of what it has seen: one pure function a subject, input -> Finding.

moe.probes looks at the machine, moe.fitness has what is estimated from shapes. Nothing is looked up
here, so that every bad day can be tested on a good one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe.fitness import FAIL, GIB, OK, WARN, Finding

OLDEST_TORCH = (2, 6)
SLOW_LOOKUP_S = 1.0
AS_BYTES = ("float8_e4m3fn", "float8_e5m2", "int16", "uint16")  # what gloo has no name for


@dataclass(frozen=True)
class Host:
    """This machine as the network sees it.

    interfaces: name -> its addresses, of those that are up
    looked_up: addresses that the host's own name stands for; error: why there are none
    seconds: how long the look-up took
    """

    name: str
    interfaces: Mapping[str, Sequence[str]]
    looked_up: Sequence[str] = ()
    error: str = ""
    seconds: float = 0.0

    def interface_of(self, addresses: Sequence[str]) -> str | None:
        """The interface with the first of the addresses that any has; loopback has all of its."""
        owner = {one: name for name, own in self.interfaces.items() for one in own}
        for address in addresses:
            if is_loopback(address):
                return self.loopback
            if address in owner:
                return owner[address]
        return None

    @property
    def loopback(self) -> str:
        names = (n for n, own in self.interfaces.items() if any(map(is_loopback, own)))
        return next(names, "lo")


@dataclass(frozen=True)
class Master:
    """Where the ranks of several machines meet.

    name: MASTER_ADDR, "" where it is not set: all ranks are here
    port: MASTER_PORT, None where it is not set
    addresses: that the name stands for; error: why there are none
    source: this machine's address on the way there
    """

    name: str
    port: int | None = None
    addresses: Sequence[str] = ()
    error: str = ""
    source: str | None = None

    @property
    def elsewhere(self) -> bool:
        """Must the ranks be reached from outside of this machine?"""
        return bool(self.name) and not any(is_loopback(one) for one in self.addresses)


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interface(host: Host, master: Master, wanted: str, forked: bool) -> Finding:
    """Which interface gloo binds, and whether the other machines can reach it.

    wanted: GLOO_SOCKET_IFNAME, "" where it is not set
    forked: ranks are forked by this program, which then tells them to use loopback
    """
    what = "interface"
    route = host.interface_of([master.source]) if master.source else None
    outward = [name for name in host.interfaces if name != host.loopback]
    better = route or (outward[0] if master.elsewhere and outward else host.loopback)
    remedy = f"export GLOO_SOCKET_IFNAME={better}"
    if wanted:
        chosen, why = wanted.split(",")[0], "by GLOO_SOCKET_IFNAME"
        if chosen not in host.interfaces:
            there = ", ".join(host.interfaces)
            value = f"GLOO_SOCKET_IFNAME={wanted}: no such interface up here; there are {there}"
            return Finding(FAIL, what, value, remedy)
    elif forked and not master.elsewhere:
        chosen, why = host.loopback, "all ranks are forked here"
    else:
        found = host.interface_of(host.looked_up)
        chosen = found or host.loopback
        why = "has the address of the host's name" if found else "the host's name leads nowhere"
    value = f"{chosen} ({why})"
    if not master.elsewhere:
        return Finding(OK, what, value)
    if chosen == host.loopback:
        value += f"; no other machine reaches it, and MASTER_ADDR={master.name} is another"
        return Finding(FAIL, what, value, remedy)
    if route and route != chosen:
        value += f"; the way to MASTER_ADDR={master.name} leaves by {route}"
        return Finding(WARN, what, value, remedy)
    return Finding(OK, what, f"{value}, on the way to MASTER_ADDR={master.name}")


def host_name(host: Host, master: Master) -> Finding:
    """Does the own name stand for an address of this machine?"""
    what = "host name"
    bad = FAIL if master.elsewhere else WARN  # here, loopback does as well
    hosts_line = f"echo '127.0.1.1 {host.name}' >> /etc/hosts"
    if master.elsewhere and master.source:
        hosts_line = f"echo '{master.source} {host.name}' >> /etc/hosts"
    if host.error or not host.looked_up:
        value = f"{host.name or '(none)'}: {host.error or 'stands for no address'}"
        return Finding(bad, what, value, f"as root: {hosts_line}" if host.name else "hostname NAME")
    value = f"{host.name} is {', '.join(dict.fromkeys(host.looked_up))}"
    if host.interface_of(host.looked_up) is None:
        value += ", which no interface here has"
        return Finding(bad, what, value, f"as root: {hosts_line}")
    if host.seconds > SLOW_LOOKUP_S:
        value += f", found after {host.seconds:.1f} s"
        return Finding(WARN, what, value, f"as root: {hosts_line}")
    return Finding(OK, what, value)


def port(master: Master, local: bool, joined: bool, busy: str, free: int) -> Finding:
    """Can the ranks meet at the master's port?

    local: is the master this machine; joined: are the ranks already there, started by torchrun
    busy: why the port cannot be had (locally) or reached; free: a port that nobody has
    """
    what, where = "port", f"{master.name or '127.0.0.1'}:{master.port or 'any'}"
    if master.error:
        value = f"MASTER_ADDR={master.name}: {master.error}"
        return Finding(FAIL, what, value, "export MASTER_ADDR=<an address of the first machine>")
    if not busy:
        return Finding(OK, what, f"{where} {'is free' if local and not joined else 'is reached'}")
    if local and not joined:
        return Finding(FAIL, what, f"{where}: {busy}", f"export MASTER_PORT={free}")
    remedy = "open the port in the firewall of that machine, or export another MASTER_PORT"
    return Finding(FAIL, what, f"{where}: {busy}", remedy)


def threads(ranks: int, cores: int, omp: str) -> Finding:
    """omp: OMP_NUM_THREADS, "" where it is not set: ranks then take one thread each"""
    what = "threads"
    if omp and not (omp.isdecimal() and int(omp) > 0):
        return Finding(
            FAIL,
            what,
            f"OMP_NUM_THREADS={omp}: must be a number from 1",
            "export OMP_NUM_THREADS=1",
        )
    each = int(omp or 1)
    value = f"{ranks} ranks x {each} on {cores} cores"
    if ranks * each <= cores:
        return Finding(OK, what, value)
    if each > 1:
        return Finding(
            WARN,
            what,
            f"{value}: threads of different ranks push each other aside",
            f"export OMP_NUM_THREADS={max(1, cores // ranks)}",
        )
    return Finding(OK, what, f"{value}: ranks take turns, which costs time and changes no count")


def shared_memory(refusal: str | None, one_sided: bool, shm_free: int | None) -> Finding:
    """refusal: of comm.barrier or of a try; shm_free: bytes left in /dev/shm, None: not there"""
    what = "shared memory"
    left = "no /dev/shm" if shm_free is None else f"/dev/shm has {shm_free / GIB:,.1f} GiB left"
    if refusal is None:
        return Finding(OK, what, f"memfd and futex work; {left}, which is not used")
    if one_sided:
        return Finding(FAIL, what, refusal, "dispatcher=rank_dedup")
    return Finding(WARN, what, refusal, "use any dispatcher but one_sided")


def software(version: str, gloo: bool, nccl: bool, wanted: str) -> Finding:
    """version: of torch; gloo, nccl: is it built in; wanted: the backend of the run"""
    what = "torch"
    built = [name for name, there in (("gloo", gloo), ("nccl", nccl)) if there]
    value = f"{version}, with {' and '.join(built) or 'neither gloo nor nccl'}"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Finding(
            FAIL, what, f"{value}; older than {oldest}", f"pip install 'torch>={oldest}'"
        )
    if wanted not in built:
        remedy = "device=cpu" if wanted == "nccl" else "pip install --force-reinstall torch"
        return Finding(FAIL, what, f"{value}; the run needs {wanted}", remedy)
    return Finding(OK, what, value)


def dtypes(refused: Mapping[str, str]) -> Finding:
    """refused: type -> what gloo said, of those tried; uint8 must not be among them"""
    what = "dtypes"
    if "uint8" in refused:
        value = f"gloo refuses uint8, in which all rows travel: {refused['uint8']}"
        return Finding(FAIL, what, value, "pip install --force-reinstall torch")
    if not refused:
        return Finding(OK, what, "gloo takes them all; rows travel as bytes (uint8)")
    value = f"gloo refuses {', '.join(refused)}; rows travel as bytes (uint8), so none is lost"
    return Finding(OK, what, value)


def tcp_info(sent: int, acknowledged: int | None, reason: str) -> Finding:
    """sent: bytes over a loopback connection; acknowledged: as the kernel says; None: it does not

    A gloo run without it is as right, but one witness fewer has seen it.
    """
    what = "TCP_INFO"
    if acknowledged is None:
        return Finding(WARN, what, f"not readable: {reason}", "no kernel verdict without it")
    if acknowledged != sent:
        value = f"the kernel acknowledged {acknowledged:,} of {sent:,} bytes sent"
        return Finding(WARN, what, value, "the kernel verdict would be wrong here: do not use it")
    return Finding(OK, what, f"readable; {acknowledged:,} of {sent:,} bytes acknowledged")


def namespaces(way: str, reason: str, missing: Sequence[str]) -> Finding:
    """way: how a network namespace was made here, "" for not at all, for the reason given
    missing: tools of iproute2 that are not found

    Only nodes on one machine need them, hence never FAIL.
    """
    what = "namespaces"
    if not way:
        remedy = "run as root, or as root: sysctl -w user.max_user_namespaces=10000"
        return Finding(WARN, what, f"none can be made: {reason}", remedy)
    if missing:
        value = f"can be made ({way}), but {' and '.join(missing)} not found"
        return Finding(WARN, what, value, "as root: apt-get install iproute2")
    return Finding(OK, what, f"can be made ({way}); ip and tc are there")


def gpu_memory(needed: int, ranks_a_gpu: int, free: Sequence[int], names: Sequence[str]) -> Finding:
    """needed: bytes of one rank; free: bytes left on each GPU; names: of the GPUs"""
    what = "GPU memory"
    least = min(free)
    models = ", ".join(dict.fromkeys(names))
    value = (
        f"needs about {ranks_a_gpu * needed / GIB:,.1f} GiB a GPU, and {least / GIB:,.1f} GiB are"
        f" free ({models})"
    )
    if ranks_a_gpu * needed <= least:
        return Finding(OK, what, value)
    return Finding(FAIL, what, value, "take fewer tokens or layers, or a smaller scale")
