"""Every token to every rank by two hops: once to each node, then to all ranks inside it."""

from __future__ import annotations

import torch
from torch import Tensor

from comm.dispatch.two_hop import TwoHop


class HierarchicalAllGather(TwoHop):
    """One row to each node and R rows inside the nodes; none for a token that chose nothing."""

    carries = (
        "hidden, scales, K ids and K weights at both hops, a row for each token and node, then for"
        " each rank inside it; one count at each hop"
    )

    def _destinations(self, slots: Tensor) -> Tensor:
        active = (slots < self.setup.placement.num_slots).any(1)
        return self._to_proxies(active.expand(len(self._proxies), -1))

    def _inside(self, slots: Tensor) -> Tensor:
        return torch.ones((len(self._members), len(slots)), dtype=torch.bool, device=slots.device)
