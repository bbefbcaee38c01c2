"""Joins this process to the others: the process groups, and who lives on which node."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from comm.notebook import Notebook
from comm.post_mortem import introduce
from comm.tcp import own_sockets
from comm.topology import Topology, divisibility_message

LAZY = "TORCH_GLOO_LAZY_INIT"
TIMEOUT_S = 60.0
START_S = 60.0  # how long ranks wait for one another to start, were timeout_s shorter


@dataclass(frozen=True)
class RankGroup:
    """Some ranks with connections of their own.

    ranks: global ranks, ascending; rank: this rank's place among them
    number: of the partition of the world that it belongs to, the same on every rank
    sockets: file descriptors of its connections; others that were opened meanwhile may be among
        them, and none are known where there is no /proc or no gloo
    """

    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup
    number: int = 0
    sockets: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class World:
    """What a rank knows of itself and of the others.

    metered_group: carries the traffic of the layers and nothing else, over its own connections;
        control traffic (gathering records, barriers) uses the default group
    metered_sockets: as RankGroup.sockets, of the metered group
    local_rank, local_world_size: among the ranks of this host
    notebook: where this rank says how far it has come
    staged: rows go through the host's memory, for gloo does not reach the device (comm.staging)
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    metered_group: dist.ProcessGroup
    timeout: timedelta = timedelta(seconds=TIMEOUT_S)
    metered_sockets: tuple[int, ...] = ()
    notebook: Notebook | None = None
    staged: bool = False
    _parts: dict[tuple[tuple[int, ...], ...], RankGroup] = field(default_factory=dict)

    @property
    def linked(self) -> bool:
        """Do rows travel between hosts, by gloo? The same on every rank."""
        return self.backend == "gloo" and self.local_world_size < self.world_size

    @property
    def link_device(self) -> torch.device:
        """Where tensors must lie that the backend is given."""
        return torch.device("cpu") if self.staged else self.device

    @property
    def everyone(self) -> RankGroup:
        """All ranks, over the metered connections."""
        ranks = tuple(range(self.world_size))
        return RankGroup(ranks, self.rank, self.metered_group, 0, self.metered_sockets)

    def meet(self) -> None:
        """Return when all ranks are here."""
        dist.barrier()

    def split(self, parts: Sequence[Sequence[int]]) -> RankGroup:
        """Make a group of each part of the world and return the one that holds this rank.

        parts: global ranks, each in exactly one part; the same argument on every rank. A collective
            the first time; the groups of one partition are made once.
        """
        partition = tuple(tuple(sorted(part)) for part in parts)
        assert sorted(sum(partition, ())) == list(range(self.world_size)), partition
        if partition == (self.everyone.ranks,):
            return self.everyone
        if partition not in self._parts:
            number = 1 + len(self._parts)
            for ranks in partition:
                made, sockets = connected_group(ranks, self.rank, self.backend, self.timeout)
                if self.rank in ranks:
                    place = ranks.index(self.rank)
                    self._parts[partition] = RankGroup(ranks, place, made, number, sockets)
        return self._parts[partition]

    def gather(self, value: object) -> list:
        """Every rank's value, in rank order, on rank 0; an empty list elsewhere."""
        values: list = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(value, values if self.rank == 0 else None, dst=0)
        return values

    def all_digests(self, text: str) -> list[int]:
        """A number for each rank, in rank order: equal numbers, equal texts. On every rank."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        mine = torch.tensor([digest], dtype=torch.int64, device=self.link_device)
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(every, mine)
        return [int(value) for value in every]

    def share(self, value: object) -> object:
        """Rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def join(
    rank: int,
    world_size: int,
    *,
    init_method: str,
    local_rank: int = 0,
    local_world_size: int = 1,
    device: str = "cpu",
    backend: str = "auto",
    timeout_s: float = TIMEOUT_S,
    notebook: Notebook | None = None,
) -> World:
    """Meet the other ranks at `init_method` ("env://" under torchrun, "file://..." locally).

    notebook: None makes one that ends with this rank
    Raises ValueError where the device and the backend do not go together.
    """
    backend = resolve_backend(device, backend)
    tune_process(local_world_size)  # first: the threads of the group inherit it
    timeout, patient = timedelta(seconds=timeout_s), timedelta(seconds=max(timeout_s, START_S))
    place, staged = torch.device(device), device == "cuda" and backend == "gloo"
    if device == "cuda":
        # Staged ranks may share a GPU; with nccl there is one for each (moe.fitness).
        index = local_rank % torch.cuda.device_count() if staged else local_rank
        place = torch.device(device, index)
        torch.cuda.set_device(place)
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=patient
    )
    notebook = notebook or Notebook(rank)
    introduce(rank, notebook)
    metered, sockets = connected_group(range(world_size), rank, backend, patient)
    for group in (dist.group.WORLD, metered):
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return World(
        rank,
        world_size,
        local_rank,
        local_world_size,
        place,
        backend,
        metered,
        timeout,
        sockets,
        notebook,
        staged,
    )


def connected_group(
    ranks: Sequence[int], rank: int, backend: str, timeout: timedelta
) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """A new process group, and the sockets that came with it; a collective of the whole world."""
    before = own_sockets()
    made = dist.new_group(list(ranks), backend=backend, timeout=timeout)
    if backend != "gloo" or rank not in ranks:
        return made, ()
    if LAZY in os.environ:  # then gloo connects two ranks when the first message is sent
        rows, nothing = [0] * len(ranks), torch.empty(0, dtype=torch.uint8)
        dist.all_to_all_single(nothing, nothing.clone(), rows, rows, made)
    return made, tuple(sorted(fd for fd, _ in own_sockets() - before))


def leave() -> None:
    """Close the connections; safe to call when there are none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def resolve_backend(device: str, backend: str) -> str:
    """gloo for the CPU, nccl for one GPU a rank; gloo serves GPUs by way of the host's memory.

    Raises ValueError for a pair that cannot work.
    """
    wanted = {"cpu": "gloo", "cuda": "nccl"}[device] if backend == "auto" else backend
    if device == "cpu" and wanted == "nccl":
        raise ValueError("backend=nccl needs device=cuda; with device=cpu use backend=gloo")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no GPU here; use device=cpu")
    return wanted


def tune_process(local_world_size: int) -> None:
    """Settings that a crowded host needs; each is skipped where the system lacks it.

    With more ranks than cores, batch scheduling stops ranks from preempting one another on every
    wake-up, which makes a small collective several times faster. Freed tensors are kept in the
    process: glibc otherwise returns every large one to the kernel and faults it in again each time.
    """
    if hasattr(os, "sched_setscheduler") and local_world_size > (os.cpu_count() or 1):
        with contextlib.suppress(OSError):  # forbidden in some containers; only slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    keep_freed_memory()


def keep_freed_memory() -> None:
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of glibc's <malloc.h>
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(mmap_max, 0)  # a threshold will not do: glibc allows none above 32 MiB
        mallopt(trim_threshold, (1 << 31) - 1)


def gather_topology(
    world: World,
    ranks_per_node: int | None = None,
    node_of_rank: tuple[int, ...] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Topology:
    """The node of each rank as that rank reports it, numbered in order of first appearance.

    ranks_per_node: splits each host into emulated nodes of that many of its ranks (or joins whole
        hosts into one scale-up domain when it is a multiple of a host's ranks)
    node_of_rank: a layout given outright, one node a rank
    """
    if node_of_rank is not None:
        return Topology(tuple(node_of_rank))
    seen = world.all_digests(own_node(world, ranks_per_node, environ))
    names = {value: node for node, value in enumerate(dict.fromkeys(seen))}
    return Topology(tuple(names[value] for value in seen))


def own_node(world: World, ranks_per_node: int | None, environ: Mapping[str, str]) -> str:
    """This rank's node in words: equal words, equal node."""
    host = environ.get("GROUP_RANK", socket.gethostname())
    local = world.local_world_size
    if ranks_per_node is None:
        return f"host {host}"
    if local % ranks_per_node == 0:
        return f"host {host}, part {world.local_rank // ranks_per_node}"
    if ranks_per_node % local == 0 and "GROUP_RANK" in environ:
        return f"domain {int(host) // (ranks_per_node // local)}"
    raise ValueError(divisibility_message(local, ranks_per_node))
