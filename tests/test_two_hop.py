"""two_hop and hierarchical_allgather against slow loops: outputs and gradients, bytes and rows."""

import functools
from collections import Counter

import numpy as np
import pytest
import rank_bodies
import torch
from strategy_bodies import Case, assert_counts, gradient_of_output, overlapped, trips

from comm.dispatch.two_hop import proxies_of
from comm.meter import Traffic
from comm.spawn import run_ranks
from comm.wire import WIRE_FORMATS, pack

LAYOUTS = {
    "one rank": (0,),
    "blocks": (0, 0, 1, 1),
    "ragged": (0, 0, 0, 1, 1),
    "cyclic": (0, 1, 2, 0, 1, 2),
    "any numbers": (5, 2, 2, 5, 9, 2, 5),
    "a node each": (3, 1, 2),
}
LOSSY = ("fp8_block128", "mxfp8", "bf16")
ROUTINGS = (
    {"tokens": (7, 0, 3, 12)},
    {"tokens": (6, 4), "placed": "round_robin", "absent": 0.4},
    {"tokens": (6, 0, 5), "placed": "replicas"},
    {"tokens": (0, 0, 0, 1), "absent": 0.2},
    {"tokens": (3,), "absent": 1.0},
    {"tokens": (0,)},
    {"tokens": (5,), "routing": "one rank"},
    {"tokens": (4, 9), "num_experts": 8, "top_k": 6},  # more choices than a rank has experts
    {"tokens": (4, 9), "num_experts": 3, "top_k": 2},  # more ranks than experts
    {"tokens": (6, 5), "wires": LOSSY},
    {"tokens": (6, 5), "wires": ("bf16", "bf16", "fp32"), "dtype": torch.bfloat16},
)
STRATEGIES = ("two_hop", "hierarchical_allgather")


def cases_of(nodes, lanes=()):
    return [
        Case(strategy, nodes=nodes, lanes=lanes, training=training, **routing)
        for strategy in STRATEGIES
        for routing, training in [(ROUTINGS[0], False), *((each, True) for each in ROUTINGS)]
    ]


@functools.cache
def results(nodes, lanes=()):
    """By case: the case, what each rank saw."""
    cases = cases_of(nodes, lanes)
    by_rank = run_ranks(trips, len(nodes), cases)
    return list(zip(cases, zip(*by_rank, strict=True), strict=True))


LANES = ((0, 2, 4, 6), (1, 3, 5, 7)), (4, 4, 4, 1, 1, 4, 1, 0)
WORLDS = [pytest.param(nodes, (), id=name) for name, nodes in LAYOUTS.items()]
WORLDS.append(pytest.param(LANES[1], LANES[0], id="two lanes"))
every_world = pytest.mark.parametrize(("nodes", "lanes"), WORLDS)


def members(case, lane, node):
    return [rank for rank in lane if case.nodes[rank] == node]


def proxy(case, lane, source, node):
    """The words of the rule: the rank with the source's place among its mates, counted round."""
    place = members(case, lane, case.nodes[source]).index(source)
    there = members(case, lane, node)
    return there[place % len(there)]


def hits(case, lane, slots, placement):
    """By node hit: the ranks there that a token goes to, ascending."""
    chosen = [slot for slot in slots if slot < placement.num_slots]
    ranks = {lane[int(placement.slot_rank[slot])] for slot in chosen}
    if case.dispatcher == "hierarchical_allgather" and chosen:
        ranks = set(lane)
    nodes = {case.nodes[rank] for rank in ranks}
    return {node: sorted(r for r in ranks if case.nodes[r] == node) for node in nodes}


def tokens_of(case, ranks):
    """Every token of every rank: rank, lane, placement, number, slots."""
    for source, seen in enumerate(ranks):
        lane = case.lane_of(source, len(ranks))
        placement = case.placement(len(lane))
        for number, slots in enumerate(seen["slots"].tolist()):
            yield source, lane, placement, number, slots


def over(wire, row):
    """A row as it comes out at the other end of a wire, in fp32."""
    made = WIRE_FORMATS[wire].encode(row[None])
    return WIRE_FORMATS[wire].decode(pack(made), len(row), torch.float32)[0]


def slow_output(case, lane, placement, source, hidden, slots, weights):
    """Ascending k in a rank, ascending rank in a node, then by proxy; each row over its wire."""
    there = over(case.wires[0], hidden).to(case.dtype)
    found = hits(case, lane, slots, placement)
    total = torch.zeros(case.width)
    for node in sorted(found, key=lambda node: proxy(case, lane, source, node)):
        inside = torch.zeros(case.width)
        for rank in found[node]:
            partial = torch.zeros(case.width)
            for slot, weight in zip(slots, weights, strict=True):
                if slot < placement.num_slots and lane[placement.slot_rank[slot]] == rank:
                    scale = rank_bodies.scale_of(placement.physical_to_logical[slot])
                    partial += weight * (there * torch.tensor(scale, dtype=case.dtype)).float()
            inside += over(case.wires[1], partial.to(case.dtype))
        total += over(case.wires[1], inside).to(case.dtype)
    return total.to(case.dtype)


@every_world
def test_outputs_are_the_sums_in_the_documented_order_bit_by_bit(nodes, lanes):
    for case, ranks in results(nodes, lanes):
        for source, lane, placement, number, slots in tokens_of(case, ranks):
            seen = ranks[source]
            wanted = slow_output(
                case, lane, placement, source, seen["hidden"][number], slots,
                seen["weights"][number].tolist(),
            )  # fmt: skip
            found = seen["combined"][number]
            if case.dtype == torch.float32:
                assert torch.equal(found, wanted), case
            else:  # at a tie, either neighbour is a nearest one; then the next sums differ
                torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)


@every_world
def test_each_choice_reaches_its_expert_once(nodes, lanes):
    for case, ranks in results(nodes, lanes):
        wanted = Counter()
        for source, lane, placement, number, slots in tokens_of(case, ranks):
            row = tuple(over(case.wires[0], ranks[source]["hidden"][number]).tolist())
            for slot in slots:
                if slot < placement.num_slots:
                    owner = lane[placement.slot_rank[slot]]
                    wanted[owner, int(placement.physical_to_logical[slot]), row] += 1
        arrived = Counter(
            (rank, expert, tuple(row))
            for rank, seen in enumerate(ranks)
            for expert, row in zip(
                seen["expert_of_row"].tolist(), seen["expert_input"].tolist(), strict=True
            )
        )
        assert arrived == wanted, case


def plain_counts(case, ranks):
    """Rows and bytes as the contract words them: by (direction, phase, [kind,] source, target)."""
    rows, num_bytes = Counter(), Counter()
    wires = [WIRE_FORMATS[name] for name in case.wires]

    def row(direction, phase, source, target, wire, **extra):
        rows[direction, phase, source, target] += 1
        payload = {"hidden": wire.hidden_bytes(case.width), "scales": wire.scale_bytes(case.width)}
        for kind, size in (payload | extra).items():
            num_bytes[direction, phase, kind, source, target] += size

    def pair(source, target):
        ids, weights = 4 * case.top_k, 4 * case.top_k
        row("forward", "dispatch", source, target, wires[0], ids=ids, weights=weights)
        row("forward", "combine", target, source, wires[1])
        if case.training:
            row("backward", "combine", source, target, wires[2])
            row("backward", "dispatch", target, source, wires[2], weights=weights)

    for source, lane, placement, _, slots in tokens_of(case, ranks):
        for node, inside in hits(case, lane, slots, placement).items():
            pair(source, proxy(case, lane, source, node))
            for target in inside:
                pair(proxy(case, lane, source, node), target)
    for source in range(len(ranks)):
        lane = case.lane_of(source, len(ranks))
        for target in [*lane, *members(case, lane, case.nodes[source])]:
            num_bytes["forward", "dispatch", "counts", source, target] += 32 + 8
    return +rows, +num_bytes


@every_world
def test_rows_and_bytes_are_those_of_a_plain_count(nodes, lanes):
    for case, ranks in results(nodes, lanes):
        assert_counts(ranks, *plain_counts(case, ranks), case)


@every_world
def test_nothing_crosses_a_node_boundary_twice(nodes, lanes):
    """Rows into a node from outside, all of a source's: one for each of its tokens that goes there,
    and all to one rank; the same rows come out again."""
    node = np.array(nodes)
    outside = node[:, None] != node[None, :]
    for case, ranks in results(nodes, lanes):
        traffic = Traffic.assemble([seen["meter"] for seen in ranks])
        crossing = Counter()
        for source, lane, placement, _, slots in tokens_of(case, ranks):
            for there in hits(case, lane, slots, placement):
                if there != nodes[source]:
                    crossing[source, there] += 1
        dispatched = traffic.rows[0, 0, 0] * outside
        for source in range(len(ranks)):
            for there in set(nodes):
                into = dispatched[source, node == there]
                assert into.sum() == crossing[source, there]
                assert (into > 0).sum() <= 1
        assert np.array_equal(traffic.rows[0, 0, 1] * outside, dispatched.T)


@every_world
def test_gradients_are_those_of_one_process(nodes, lanes):
    """Of hidden and weights to rounding (sums in another order), of experts' outputs exactly: a
    power of two times what came back."""
    for case, ranks in results(nodes, lanes):
        if not case.training or case.wires != ("fp32",) * 3:
            continue
        wanted_rows = Counter()
        for source, seen in enumerate(ranks):
            hidden = seen["hidden"].clone().requires_grad_()
            weights = seen["weights"].clone().requires_grad_()
            chosen = (seen["ids"] >= 0).float()
            scale = rank_bodies.scale_of(seen["ids"]) * chosen
            output = (weights[:, :, None] * (hidden[:, None] * scale[:, :, None])).sum(1)
            back = gradient_of_output(type("", (), {"rank": source}), output.shape)
            (output * back).sum().backward()
            torch.testing.assert_close(seen["hidden_grad"], hidden.grad, msg=str(case))
            torch.testing.assert_close(seen["weights_grad"], weights.grad, msg=str(case))
            for number, experts in enumerate(seen["ids"].tolist()):
                for k, expert in enumerate(experts):
                    if expert >= 0:
                        grad = seen["weights"][number, k] * back[number]
                        row = seen["hidden"][number]
                        wanted_rows[expert, tuple(row.tolist()), tuple(grad.tolist())] += 1
        assert found_rows(ranks) == wanted_rows, case


def found_rows(ranks):
    return Counter(
        (expert, tuple(row), tuple(grad))
        for seen in ranks
        for expert, row, grad in zip(
            seen["expert_of_row"].tolist(),
            seen["expert_input"].tolist(),
            seen["output_grad"].tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_node_named_all_ranks_are_one_node(strategy):
    """Hop 1 is a row to oneself, and the transport serves both hops."""
    case = Case(strategy, tokens=(7, 0, 4), training=True)
    ranks = run_ranks(trips, 3, [case])
    named = Case(strategy, tokens=(7, 0, 4), nodes=(1, 1, 1), training=True)
    for (seen,), (wanted,) in zip(ranks, run_ranks(trips, 3, [named]), strict=True):
        for name in ("combined", "hidden_grad", "weights_grad", "expert_input"):
            assert torch.equal(seen[name], wanted[name])
        assert np.array_equal(seen["meter"].sent, wanted["meter"].sent)
        assert np.array_equal(seen["meter"].rows, wanted["meter"].rows)


def test_two_chunks_in_flight_do_not_disturb_one_another():
    case = Case("two_hop", tokens=(8, 3, 6, 5), nodes=(0, 1, 0, 1))
    for together, apart in run_ranks(overlapped, 4, case):
        for one, other in zip(together, apart, strict=True):
            assert torch.equal(one, other)


def test_proxies():
    nodes = (5, 2, 2, 5, 9, 2, 5)  # node 2: ranks 1 2 5, node 5: 0 3 6, node 9: 4
    assert proxies_of(0, nodes) == {2: 1, 5: 0, 9: 4}
    assert proxies_of(6, nodes) == {2: 5, 5: 6, 9: 4}
    assert proxies_of(4, nodes) == {2: 1, 5: 0, 9: 4}
    assert proxies_of(2, (0, 0, 0, 1, 1)) == {0: 2, 1: 3}  # third of three, in a node of two
    assert all(proxies_of(rank, nodes)[node] == rank for rank, node in enumerate(nodes))
