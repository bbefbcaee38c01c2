"""count_traffic: bytes to and from each rank, in every way that torch.distributed has, to the byte;
and what gloo moves for it, as the kernel's counters have it.
"""

from __future__ import annotations

import sys

import counting_bodies
import numpy as np
import pytest
from counting_bodies import WAYS, due

from comm.counting.gloo import MOVED, NEEDED, Call, moved, needed
from comm.spawn import run_ranks

RANKS, PARTS, SIZES = 5, [[0, 2], [1, 3, 4]], (1, 7, 1000)
seen_by_kernel = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")


@pytest.fixture(scope="module")
def ways():
    return run_ranks(counting_bodies.every_way, RANKS, SIZES, PARTS, deadline_s=200)[0]


@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_counted_to_the_byte(ways, name):
    for ranks in (range(RANKS), *PARTS):
        wanted = np.zeros((RANKS, RANKS), np.int64)
        for src, one in enumerate(ranks):
            for dst, other in enumerate(ranks):
                wanted[one, other] = sum(due(name, len(ranks), src, dst, k) for k in SIZES)
        assert np.array_equal(ways[name].matrix(group=ranks), wanted), ranks


@seen_by_kernel
@pytest.mark.parametrize("name", WAYS)
def test_the_kernel_has_what_gloo_is_said_to_move(ways, name):
    verdict = ways[name].kernel
    assert verdict.state == "EXACT", verdict.reason


def test_what_is_asked_for(ways):
    traffic, groups = ways["functional, several"], (range(RANKS), *PARTS)
    ops = ("all_reduce", "all_gather", "reduce_scatter")
    assert set(traffic.cells) == {(op, tuple(ranks)) for op in ops for ranks in groups}
    whole, own = traffic.bytes(), traffic.bytes(tier="self")
    assert whole == traffic.bytes(tier="network") + own and own > 0
    by_group = [traffic.bytes(group=ranks) for ranks in groups]
    by_op = [traffic.bytes(op=op) for op in ops]
    assert sum(by_group) == sum(by_op) == whole and all(by_group) and all(by_op)
    assert traffic.calls(op="reduce_scatter", group=PARTS[0]) == 2 * len(SIZES)
    assert traffic.bytes(moved=True) != whole
    assert traffic.bytes(op="send") == 0


# -- the laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("op", MOVED)
def test_what_is_moved_is_at_least_what_is_needed(op, size):
    """Nothing gets to a rank that nobody sent to; one alone sends nothing."""
    parts = (4_000_004,) * (size if op in ("all_to_all", "reduce_scatter", "scatter") else 1)
    calls = [Call(op, size, place, parts, root=size - 1, item=4) for place in range(size)]
    rows = [moved(call) for call in calls]
    payload, messages = (np.stack([row[i] for row in rows]) for i in (0, 1))
    wanted = np.stack([needed(call) for call in calls])
    np.fill_diagonal(wanted, 0)
    assert not np.diag(payload).any() and not np.diag(messages).any()
    assert ((payload > 0) <= (messages > 0)).all()
    assert payload.sum() >= (wanted.sum() if op != "reduce_scatter" else 2 * wanted.sum())
    if op not in ("barrier", "recv"):
        into, due_into = payload.sum(axis=0) > 0, wanted.sum(axis=0) > 0
        assert (into >= due_into).all()


def test_every_collective_has_both_laws():
    assert set(NEEDED) == set(MOVED)
    assert moved(Call("all_reduce", 4, 0, (0,), item=4))[1].sum() == 0  # gloo sends nothing then


# -- foreign code ----------------------------------------------------------------------------------


def by_loops(topk_ids, width):
    """What the dispatcher of counting_bodies.foreign has to send, token by token."""
    size = len(topk_ids)
    expected = np.full((size, size), 8 * size)  # one count for each rank, in an all_gather
    for src, tokens in enumerate(topk_ids):
        for token in tokens:
            for dst in {expert % size for expert in token}:
                if src != dst:
                    expected[src, dst] += 2 * width  # bfloat16, there
                expected[dst, src] += 4 * width  # float32, back
    return expected


def test_a_foreign_dispatcher_on_plain_torch():
    rng = np.random.default_rng(0)
    topk_ids = [
        [rng.permutation(12)[:3].tolist() for _ in range(tokens)] for tokens in (9, 0, 17, 4)
    ]
    traffic = run_ranks(counting_bodies.foreign, 4, topk_ids, 33, deadline_s=100)[2]
    expected = by_loops(topk_ids, 33)
    assert np.array_equal(traffic.matrix(), expected)
    crossing = np.array([[(src + dst) % 2 == 1 for dst in range(4)] for src in range(4)])
    assert traffic.bytes(tier="scale_out") == expected[crossing].sum()
    assert traffic.bytes(tier="self") == np.trace(expected)
    if sys.platform == "linux":
        assert traffic.kernel.state == "EXACT", traffic.kernel.reason


def test_the_layer_of_a_public_library():
    """fairscale's MOELayer: each rank sends every expert's buffer, there and back, twice."""
    pytest.importorskip("fairscale", reason="pip install --no-deps fairscale")
    ranks, tokens, width = 4, 24, 20
    traffic = run_ranks(counting_bodies.of_fairscale, ranks, tokens, width, deadline_s=100)[1]
    experts = 2 * ranks
    capacity = 2 * tokens // experts  # rows of an expert's buffer, with two choices a token
    one_way = 2 * capacity * width * 4  # both experts of a rank, float32
    assert (traffic.matrix() == 4 * one_way).all()
    assert traffic.calls() == traffic.calls(op="all_to_all") == 4
    if sys.platform == "linux":
        assert traffic.kernel.state == "EXACT", traffic.kernel.reason


def test_what_the_program_does_not_call_itself():
    found = run_ranks(counting_bodies.other_roads, 2, deadline_s=100)[0]
    assert found["ddp"].bytes(op="all_reduce", moved=True) == 2 * 310 * 4
    shard = 30 * 10 * 4
    assert found["fsdp"].bytes(op="all_gather", tier="network") == 2 * shard
    assert found["fsdp"].bytes(op="reduce_scatter", tier="network") == 2 * shard
    assert found["compiled"].calls(op="all_reduce") == 1


# -- limits ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd():
    return run_ranks(counting_bodies.limits, 3, deadline_s=100)[0]


def test_where_the_kernel_is_no_witness(odd):
    verdict = odd["new group"].kernel
    assert verdict.state == "NOT_AVAILABLE" and "was made inside the block" in verdict.reason
    assert odd["new group"].calls(group=range(3)) == 1


def test_an_operator_that_is_not_known_is_no_zero(odd):
    traffic = odd["unknown"]
    with pytest.raises(ValueError, match="not known here.*monitored_barrier"):
        traffic.bytes()
    assert traffic.calls(op="all_reduce") == 1


@seen_by_kernel
def test_the_kernel_sees_a_byte_that_is_miscounted(odd):
    assert odd["right"].state == "EXACT" and odd["wrong"].state == "OUTSIDE"
    assert odd["wrong"].reason.startswith("rank 1 -> rank 2")


def test_what_cannot_be_had_is_said(odd):
    assert "heard 0 of 1 collectives" in odd["thread"]
    assert "belongs after the block" in odd["inside"]
    assert "ranks_per_node=2" in odd["layout"] and "nearest: 1 or 3" in odd["layout"]
    assert odd["nodes"] == "node_of_rank has 1 nodes for 3 ranks"
    assert "known after gather()" in odd["tier"]
    assert "self, scale_up, scale_out, network" in odd["name"]
    assert "all_to_all" in odd["op"]
