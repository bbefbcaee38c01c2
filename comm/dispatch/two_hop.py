"""One row for each (token, node) between nodes; the node's proxy hands it to the ranks it is for.

    source --hop 1--> proxy on each node hit --hop 2--> ranks hit there
    source <--sum over nodes-- proxy <--sum over ranks-- ranks

Every source has a proxy of its own on each node: the rank with the source's place among its node
mates, counted round where the node is smaller. On its own node a source is its own proxy, so that
nothing crosses a node boundary twice, and no link inside a node is used before the boundary.

Sums run in a fixed order: ascending k within a rank, ascending rank within a node, then over nodes
in ascending order of the token's proxies.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from comm import permute
from comm.dispatch.base import DispatchSetup
from comm.dispatch.by_rank import ByRank, Road


def proxies_of(rank: int, node_of_rank: tuple[int, ...]) -> dict[int, int]:
    """For each node, ascending, the place of the rank that takes in `rank`'s tokens there.

    node_of_rank: node of each place; any numbering, any layout, nodes of different sizes
    """
    members = {
        node: [place for place, other in enumerate(node_of_rank) if other == node]
        for node in sorted(set(node_of_rank))
    }
    index = members[node_of_rank[rank]].index(rank)
    return {node: places[index % len(places)] for node, places in members.items()}


class TwoHop(ByRank):
    """At most one row a token to another node, whatever it chose there."""

    carries = (
        "hidden, scales, K ids and K weights at both hops, a row for each (token, node), then for"
        " each (token, rank) inside it; one count at each hop"
    )

    def __init__(self, setup: DispatchSetup) -> None:
        super().__init__(setup)
        node = setup.node_of_rank or (0,) * setup.world_size
        one_node = len(set(node)) == 1
        assert one_node or setup.node_transport is not None, "two hops need a node_transport"
        self._node_transport = setup.node_transport or setup.transport
        places = {rank: place for place, rank in enumerate(setup.transport.group.ranks)}
        self._members = [places[rank] for rank in self._node_transport.group.ranks]
        mates = [place for place in range(setup.world_size) if node[place] == node[setup.rank]]
        assert self._members == mates, f"node_transport joins {self._members}, the node is {mates}"
        self._proxies = proxies_of(setup.rank, node)
        numbers = {name: number for number, name in enumerate(self._proxies)}
        self._node_number = [numbers[name] for name in node]

    def _roads(self) -> list[Road]:
        return [*super()._roads(), Road(self._node_transport, self._inside)]

    def _destinations(self, slots: Tensor) -> Tensor:
        return self._to_proxies(permute.ranks_hit(slots, self._slot_node, len(self._proxies)))

    def _to_proxies(self, hit: Tensor) -> Tensor:
        """Which token goes to which node, bool [nodes, T], as to which rank, bool [R, T]."""
        sent = hit.new_zeros((self.setup.world_size, hit.shape[1]))
        sent[list(self._proxies.values())] = hit
        return sent

    def _inside(self, slots: Tensor) -> Tensor:
        """bool [ranks of this node, rows]: which of them a row is for."""
        return permute.ranks_hit(slots, self._slot_member, len(self._members))

    @cached_property
    def _slot_node(self) -> Tensor:
        """int64 [S + 1], number of the node of each slot, as many as there are for slot S."""
        numbers = torch.tensor([*self._node_number, len(self._proxies)])
        return numbers.to(self._slot_rank.device)[self._slot_rank]

    @cached_property
    def _slot_member(self) -> Tensor:
        """int64 [S + 1], place in this node of each slot's rank, as many as it has for others."""
        size = len(self._members)
        place = torch.full((self.setup.world_size + 1,), size)
        place[self._members] = torch.arange(size)
        return place.to(self._slot_rank.device)[self._slot_rank]
