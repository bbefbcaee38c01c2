"""The kernel's counters beside the counted ones: do the bytes moved account for all of them?

The sockets are all that this rank has when the block begins, so those of every group made before.
Barriers and addresses go over a group of the witness's own, made last.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch.distributed as dist

from comm.counting.traffic import Traffic
from comm.kernel import KernelWitness
from comm.reconcile import reconcile
from comm.tcp import own_sockets
from comm.verdict import Verdict, not_available
from comm.world import RankGroup


class Witness:
    """To make one, and `verdict`, are collectives of the world."""

    def __init__(self) -> None:
        self._rank, size = dist.get_rank(), dist.get_world_size()
        self._known = _groups()
        sockets = tuple(sorted(fd for fd, _ in own_sockets()))
        self._control = dist.new_group(list(range(size)))
        everyone = RankGroup(tuple(range(size)), self._rank, dist.group.WORLD, 0, sockets)
        member = SimpleNamespace(rank=self._rank, world_size=size)
        reason = "" if dist.get_backend() == "gloo" else "only gloo's sockets are the ranks' own"
        self._witness = KernelWitness(member, [everyone], reason, control=self._control)
        self._witness.begin()

    def verdict(self, traffic: Traffic) -> Verdict:
        """EXACT where every pair of ranks agrees, after the block, on every rank the same."""
        log = self._witness.end()
        payload = sum((cell.moved for cell in traffic.cells.values()), traffic.messages * 0)
        carried = {0: np.stack([payload[self._rank], traffic.messages[self._rank]])}
        size = traffic.world_size
        every: list = [None] * size
        mine = log, carried, payload, self._no_law(traffic)
        dist.all_gather_object(every, mine, group=self._control)
        dist.destroy_process_group(self._control)
        reason = next((reason for *_, reason in every if reason), "")
        if reason:
            return not_available("kernel", reason)
        logs, carried_by, payloads, _ = zip(*every, strict=True)
        return reconcile(logs, carried_by, sum(payloads)).verdict

    def _no_law(self, traffic: Traffic) -> str:
        """Why nothing can be said on this rank; "" where it can."""
        if traffic.unknown:
            return f"operators that are not known here: {', '.join(traffic.unknown)}"
        if traffic.lawless:
            return f"no law is known of what is moved for {', '.join(traffic.lawless)}"
        made = {ranks for _, ranks in traffic.cells} - self._known
        return f"the group of ranks {min(made)} was made inside the block" if made else ""


def _groups() -> set[tuple[int, ...]]:
    """The ranks of every group that this rank is in."""
    return {
        tuple(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map
    }
