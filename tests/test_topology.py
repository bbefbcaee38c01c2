"""Nodes and link tiers, for any layout of ranks."""

import numpy as np
import pytest

from comm.topology import LinkTier, Topology


def test_blocks_of_ranks_share_a_node():
    topology = Topology.blocks(8, 4)
    assert topology.node_of_rank == (0, 0, 0, 0, 1, 1, 1, 1)
    assert str(topology) == "2 nodes x 4 ranks"


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (2, 2, 2, 7), (0,)])
def test_tiers_follow_the_nodes_and_not_the_rank_numbers(nodes):
    tiers = Topology(nodes).tiers()
    for src, dst in np.ndindex(tiers.shape):
        if src == dst:
            expected = LinkTier.SELF
        else:
            expected = LinkTier.SCALE_UP if nodes[src] == nodes[dst] else LinkTier.SCALE_OUT
        assert tiers[src, dst] == expected


def test_a_cyclic_layout_is_no_block_layout():
    """Field case 29: ranks 0 and 2 on one node, 1 and 3 on the other."""
    tiers = Topology((0, 1, 0, 1)).tiers()
    assert tiers[0, 2] == LinkTier.SCALE_UP and tiers[0, 1] == LinkTier.SCALE_OUT


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(7, 4), (8, 0), (8, 16), (8, -2)])
def test_blocks_that_do_not_fill_up_are_refused_with_the_nearest_choice(world_size, ranks_per_node):
    with pytest.raises(ValueError, match=r"topology\.ranks_per_node=.*nearest: \d"):
        Topology.blocks(world_size, ranks_per_node)


def test_a_ragged_layout_says_so():
    assert str(Topology((0, 0, 0, 1))) == "2 nodes x 1 to 3 ranks"
