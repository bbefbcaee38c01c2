"""Lanes, nodes and proxies."""

from dataclasses import replace

import numpy as np
import pytest

from comm.analytic.owners import expert_owner, one_slot_each
from comm.analytic.paths import Paths, answered_pairs, check_run, shard_mates, shifted
from comm.analytic.run import RunShape


def shape(world_size: int, **changes: object) -> RunShape:
    """A run of one layer, two experts and one token on each rank of a lane."""
    size = int(changes.get("ep_size") or world_size) // int(changes.get("expert_tp", 1))  # type: ignore[call-overload]
    experts, ranks = one_slot_each(expert_owner("contiguous", 2 * size, size))
    fields = {
        "dispatcher": "two_hop",
        "tokens_per_rank": (1,) * world_size,
        "node_of_rank": (0,) * world_size,
        "physical_to_logical": (experts,),
        "slot_rank": (ranks,),
        "num_experts": 2 * size,
        "top_k": 1,
        "width": 8,
    }
    return RunShape(**(fields | changes))  # type: ignore[arg-type]


def test_the_worked_example() -> None:
    paths = Paths.of(shape(5, node_of_rank=("A", "B", "A", "B", "A")))
    assert paths.node.tolist() == [0, 1, 0, 1, 0]
    assert paths.proxy.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 1]]


def test_any_numbering_of_nodes() -> None:
    paths = Paths.of(shape(4, node_of_rank=(9, -2, 9, 5)))
    assert paths.node.tolist() == [2, 0, 2, 1]
    assert paths.proxy.tolist() == [[1, 3, 0], [1, 3, 0], [1, 3, 2], [1, 3, 0]]


def test_proxies_are_members_of_the_lane() -> None:
    """8 ranks on 2 nodes, two shards: lanes 0 2 4 6 and 1 3 5 7, each with two ranks a node."""
    run = shape(8, node_of_rank=(0, 0, 0, 0, 1, 1, 1, 1), expert_tp=2)
    paths = Paths.of(run)
    assert paths.rank_at.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert paths.position.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert paths.proxy[:, 1].tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    assert answered_pairs(run)[1].tolist() == [rank % 2 == 1 for rank in range(8)]


def test_a_node_without_members_has_no_proxy() -> None:
    run = shape(4, node_of_rank=(0, 0, 1, 1), ep_size=2)
    assert Paths.of(run).proxy.tolist() == [[0, -1], [1, -1], [-1, 2], [-1, 3]]


def test_hops_of_one_token() -> None:
    """Rank 4 of the worked example hits ranks 1, 3 of node B and ranks 0, 4 of its own."""
    paths = Paths.of(shape(5, node_of_rank=(0, 1, 0, 1, 0)))
    hits, pairs = np.zeros((5, 2), np.int64), np.zeros((5, 5), np.int64)
    hits[4], pairs[4] = (1, 1), (1, 1, 0, 1, 1)
    rows = paths.hops(hits, pairs)
    assert rows[4].tolist() == [1, 1, 0, 0, 2]  # to itself twice: as a proxy and as an owner
    assert rows[1].tolist() == [0, 1, 0, 1, 0]
    assert rows.sum() == hits.sum() + pairs.sum()


def test_shards() -> None:
    run = shape(6, expert_tp=3, dispatcher="all_to_all", expert_tp_mode="all")
    assert shard_mates(run)[1].tolist() == [True, False, True, False, False, False]
    cells = np.arange(36).reshape(6, 6)
    moved = shifted(run, cells, 2)  # shard 0 -> 2, 1 -> 0, 2 -> 1
    assert moved[0].tolist() == [1, 2, 0, 4, 5, 3]
    np.testing.assert_array_equal(shifted(run, moved, 1), cells)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dispatcher": "two"}, "dispatcher='two' has no law"),
        ({"ep_size": 3}, "ep_size=3 must divide the 4 ranks"),
        ({"expert_tp": 3}, "expert_tp=3 must divide ep_size=4"),
        ({"expert_tp_mode": "some"}, "expert_tp_mode='some'.*gather"),
        ({"expert_tp": 2, "expert_tp_mode": "all"}, "no law for dispatcher=two_hop"),
        ({"chunks": 0}, "chunks=0"),
        ({"node_of_rank": (0,)}, "node_of_rank names 1 ranks, there are 4"),
        ({"physical_to_logical": ()}, "describes 0 layers, slot_rank 1"),
        ({"slot_rank": (np.arange(3),)}, r"layer 0: physical_to_logical has shape \(8,\)"),
        ({"slot_rank": (np.arange(8),)}, r"layer 0: slot_rank holds 0\.\.7, valid are 0\.\.3"),
        ({"num_experts": 7}, r"layer 0: physical_to_logical holds 0\.\.7, valid are -1\.\.6"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    run = shape(4)
    check_run(run)
    with pytest.raises(ValueError, match=message):
        check_run(replace(run, **changes))  # type: ignore[arg-type]
