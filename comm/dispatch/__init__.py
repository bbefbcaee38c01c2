"""The catalogue of strategies: one file each, one entry here.

`build_dispatcher` imports torch only when it is called, so that the names are free to look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comm.dispatch.base import Dispatcher, DispatchSetup

DISPATCHERS: dict[str, tuple[str, str]] = {
    "all_to_all": ("comm.dispatch.all_to_all", "AllToAll"),
    "rank_dedup": ("comm.dispatch.rank_dedup", "RankDedup"),
    "allgather": ("comm.dispatch.allgather", "AllGather"),
    "two_hop": ("comm.dispatch.two_hop", "TwoHop"),
    "hierarchical_allgather": ("comm.dispatch.hierarchical_allgather", "HierarchicalAllGather"),
    "padded": ("comm.dispatch.padded", "Padded"),
    "one_sided": ("comm.dispatch.one_sided", "one_sided"),
}
FORWARDING = ("two_hop", "hierarchical_allgather")  # rows go by way of a rank in each node


def build_dispatcher(name: str, setup: DispatchSetup) -> Dispatcher:
    """One of DISPATCHERS for one layer."""
    from importlib import import_module

    module, cls = DISPATCHERS[name]
    return getattr(import_module(module), cls)(setup)
