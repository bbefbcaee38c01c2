"""Hears every communication operator that a thread calls, its backward passes included.

A TorchDispatchMode stands below all roads into torch.distributed: its functions under whatever name
they were imported, functional collectives, autograd's, DDP's and FSDP's own, compiled code. Patched
functions would miss all but the first, and a wrapped group those that find a group by its name.
What it does not see are collectives of other threads that the code starts; gloo numbers the
collectives of a group, and by that such a one is noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from comm.counting.ops import NAMESPACES, UnknownOperator, read
from comm.counting.traffic import Traffic
from comm.counting.witness import Witness
from comm.topology import Topology


@contextlib.contextmanager
def count_traffic(
    *,
    ranks_per_node: int | None = None,
    node_of_rank: Sequence[int] | None = None,
    kernel: bool = False,
) -> Iterator[Traffic]:
    """Count all that this rank sends inside the block; what it yields is complete after it.

    ranks_per_node, node_of_rank: the nodes, for tiers; without them hosts are nodes
    kernel: ask the kernel, too, on gloo; then to enter and to leave the block are collectives
    Raises ValueError for a layout that does not fit, RuntimeError where the process groups are not
    there, or where collectives of a group were not heard.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "count_traffic needs torch.distributed to be initialised: @pytest.mark.ranks(n),"
            " torchrun, or init_process_group"
        )
    size = dist.get_world_size()
    topology = _topology(size, ranks_per_node, node_of_rank)
    traffic = Traffic(size, dist.get_rank(), topology, open=True)
    witness = Witness() if kernel else None
    before = _numbers()
    try:
        with _Listener(traffic) as listener:
            yield traffic
    finally:
        traffic.open = False
    listener.check_complete(before)
    if witness is not None:
        traffic.kernel = witness.verdict(traffic)


def _topology(
    size: int, ranks_per_node: int | None, node_of_rank: Sequence[int] | None
) -> Topology | None:
    if node_of_rank is not None:
        if len(node_of_rank) != size:
            raise ValueError(f"node_of_rank has {len(node_of_rank)} nodes for {size} ranks")
        return Topology(tuple(node_of_rank))
    return None if ranks_per_node is None else Topology.blocks(size, ranks_per_node)


def _numbers() -> dict[dist.ProcessGroup, int]:
    """The sequence number of each group of gloo that this rank is in: its collectives so far."""
    return {
        group: group._get_sequence_number_for_group()
        for group in dist.distributed_c10d._world.pg_map
        if _is_gloo(group)
    }


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"


class _Listener(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic
        self._heard: dict[dist.ProcessGroup, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else the first operator imports the whole compiler, a second or two on each rank."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            self._hear(func, args, dict(kwargs or {}))
        return result

    def _hear(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            found = read(func, args, kwargs)
        except UnknownOperator as error:
            name = str(error)
            self._traffic.unknown[name] = 1 + self._traffic.unknown.get(name, 0)
            return
        if found is None:
            return
        member, calls = found
        for call in calls:
            self._traffic.record(call, member.ranks, _is_gloo(member.group))
            self._heard[member.group] = self._heard.get(member.group, 0) + call.steps

    def check_complete(self, before: Mapping[dist.ProcessGroup, int]) -> None:
        """Raises RuntimeError where a group made collectives that were not heard."""
        if self._traffic.unknown:
            return
        for group, number in _numbers().items():
            made = number - before.get(group, 0)
            heard = self._heard.get(group, 0)
            if made > heard:
                raise RuntimeError(
                    f"count_traffic heard {heard} of {made} collectives of the group of ranks"
                    f" {dist.get_process_group_ranks(group)}: those of other threads are not heard"
                )
