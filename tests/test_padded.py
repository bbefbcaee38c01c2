"""padded against slow loops: what is kept, outputs and gradients, bytes, rows and padding."""

import functools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import rank_bodies
import torch
from strategy_bodies import Case, assert_counts, gradient_of_output, messages, trips

from comm.dispatch.base import DispatchOptions
from comm.dispatch.padded import check_capacity_factor, renormalised, slot_capacity
from comm.spawn import run_ranks
from comm.wire import WIRE_FORMATS

ROUTINGS = (
    {"tokens": (7, 0, 3, 12)},
    {"tokens": (9, 4), "placed": "round_robin", "absent": 0.4},
    {"tokens": (9, 0, 5), "placed": "replicas"},
    {"tokens": (0, 0, 0, 1), "absent": 0.2},
    {"tokens": (3,), "absent": 1.0},
    {"tokens": (0,)},
    {"tokens": (8,), "routing": "one rank"},
    {"tokens": (4, 9), "num_experts": 8, "top_k": 6},  # more choices than a rank has experts
    {"tokens": (4, 9), "num_experts": 3, "top_k": 2},  # on 5 ranks, more ranks than experts
)
OPTIONS = (
    DispatchOptions(capacity_factor=1.0),
    DispatchOptions(capacity_factor=1.1, renormalize=True),
    DispatchOptions(capacity_factor=0.01, renormalize=True),  # one row for each
    DispatchOptions(capacity_factor=40.0),  # more rows than tokens
)
CASES = [
    Case("padded", options=options, training=training, **routing)
    for routing, training in [(ROUTINGS[0], False), *((each, True) for each in ROUTINGS)]
    for options in OPTIONS
]
WIRES = ("fp8_block128", "mxfp8", "nvfp4")
LANES = ((0, 2, 4), (1, 3, 5))


@functools.cache
def results(world_size, lanes=()):
    """By case: the case, what each rank saw."""
    cases = [Case(**{**vars(case), "lanes": lanes}) for case in CASES]
    cases += [
        Case("padded", (7, 3), lanes=lanes, wires=WIRES, training=True, options=OPTIONS[1]),
    ]
    by_rank = run_ranks(trips, world_size, cases)
    return list(zip(cases, zip(*by_rank, strict=True), strict=True))


every_world = pytest.mark.parametrize(
    ("world_size", "lanes"),
    [(1, ()), (3, ()), (5, ()), (6, LANES)],
    ids=lambda value: str(value or "") if isinstance(value, int) else len(value) * "lanes",
)


def lane_tokens(case, ranks, source):
    return [len(ranks[rank]["ids"]) for rank in case.lane_of(source, len(ranks))]


def slow_capacity(case, ranks, source):
    most = max(lane_tokens(case, ranks, source))
    if most == 0:
        return 0
    exact = Fraction(str(case.options.capacity_factor)) * most * case.top_k / case.num_experts
    return max(1, -(-exact.numerator // exact.denominator))


def slow_kept(seen, num_slots, capacity):
    """bool [T, K]: the first of each slot in the order of tokens and choices."""
    taken, kept = Counter(), []
    for slots in seen["slots"].tolist():
        kept.append([])
        for slot in slots:
            kept[-1].append(slot < num_slots and taken[slot] < capacity)
            taken[slot] += 1
    return torch.tensor(kept, dtype=torch.bool).view(seen["ids"].shape)


def each_rank(case, ranks):
    """Every rank: number, what it saw, its placement, the capacity and what is kept."""
    for source, seen in enumerate(ranks):
        placement = case.placement(len(case.lane_of(source, len(ranks))))
        capacity = slow_capacity(case, ranks, source)
        yield source, seen, placement, capacity, slow_kept(seen, placement.num_slots, capacity)


def plain_weights(case, weights, ids, kept):
    """The weights that combine applies, in plain differentiable words."""
    applied = weights * kept
    if not case.options.renormalize:
        return applied
    whole = (weights * (ids >= 0)).sum(1, keepdim=True)
    left = applied.sum(1, keepdim=True)
    return applied * (whole / left.clamp(min=1e-30))


@every_world
def test_the_first_of_each_slot_are_kept(world_size, lanes):
    dropped = Counter()
    for case, ranks in results(world_size, lanes):
        for _, seen, _, capacity, kept in each_rank(case, ranks):
            assert seen["capacity"] == capacity, case
            assert torch.equal(seen["kept"], kept), case
            dropped[case.options.capacity_factor] += int(((seen["ids"] >= 0) & ~kept).sum())
    assert dropped[0.01] > dropped[1.0] > 0 == dropped[40.0]


@every_world
def test_what_is_kept_reaches_its_expert_once_and_no_padding_does(world_size, lanes):
    for case, ranks in results(world_size, lanes):
        if case.wires == WIRES:
            continue
        wanted = Counter()
        for source, seen, placement, _, kept in each_rank(case, ranks):
            lane = case.lane_of(source, len(ranks))
            for number, k in kept.nonzero().tolist():
                slot = int(seen["slots"][number, k])
                owner = lane[placement.slot_rank[slot]]
                expert = int(placement.physical_to_logical[slot])
                wanted[owner, expert, tuple(seen["hidden"][number].tolist())] += 1
        arrived = Counter(
            (rank, expert, tuple(row))
            for rank, seen in enumerate(ranks)
            for expert, row in zip(
                seen["expert_of_row"].tolist(), seen["expert_input"].tolist(), strict=True
            )
        )
        assert arrived == wanted, case


@every_world
def test_outputs_are_the_weighted_sums_of_what_is_kept(world_size, lanes):
    """Bit by bit where weights stay powers of two; scaled ones to a rounding of each product."""
    for case, ranks in results(world_size, lanes):
        if case.wires == WIRES:
            continue
        for _, seen, _, _, kept in each_rank(case, ranks):
            weights = plain_weights(case, seen["weights"], seen["ids"], kept)
            wanted = torch.zeros_like(seen["hidden"])
            for number, k in kept.nonzero().tolist():
                scale = rank_bodies.scale_of(seen["ids"][number, k])
                wanted[number] += weights[number, k] * (seen["hidden"][number] * scale)
            exact = {"rtol": 0, "atol": 0}
            loose = {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(
                seen["combined"], wanted, **(loose if case.options.renormalize else exact)
            )
            nothing_kept = ~kept.any(1)
            assert (seen["combined"][nothing_kept] == 0).all()


@every_world
def test_gradients_are_those_of_one_process(world_size, lanes):
    """Through the drops and the renormalisation."""
    for case, ranks in results(world_size, lanes):
        if not case.training or case.wires == WIRES:
            continue
        wanted_rows = {}
        for source, seen, _, _, kept in each_rank(case, ranks):
            hidden = seen["hidden"].clone().requires_grad_()
            weights = seen["weights"].clone().requires_grad_()
            applied = plain_weights(case, weights, seen["ids"], kept)
            scale = rank_bodies.scale_of(seen["ids"])
            output = (applied[:, :, None] * (hidden[:, None] * scale[:, :, None])).sum(1)
            back = gradient_of_output(type("", (), {"rank": source}), output.shape)
            (output * back).sum().backward()
            close = {"rtol": 1e-4, "atol": 1e-4, "msg": str(case)}
            torch.testing.assert_close(seen["hidden_grad"], hidden.grad, **close)
            torch.testing.assert_close(seen["weights_grad"], weights.grad, **close)
            for number, k in kept.nonzero().tolist():
                expert, row = int(seen["ids"][number, k]), seen["hidden"][number]
                grad = applied[number, k].detach() * back[number]
                wanted_rows[expert, tuple(row.tolist())] = grad
        for key, grad in found_rows(ranks):
            torch.testing.assert_close(grad, wanted_rows.pop(key))
        assert not wanted_rows, case


def found_rows(ranks):
    """(expert, row) and its gradient, of every row that an expert had."""
    for seen in ranks:
        columns = seen["expert_of_row"].tolist(), seen["expert_input"].tolist(), seen["output_grad"]
        for expert, row, grad in zip(*columns, strict=True):
            yield (expert, tuple(row)), grad


def plain_counts(case, ranks):
    """Rows and bytes as the contract words them: by (direction, phase, [kind,] source, target)."""
    rows, num_bytes = Counter(), Counter()
    dispatch, combine, backward = (WIRE_FORMATS[name] for name in case.wires)

    def message(direction, phase, source, target, wire, filled, all_rows):
        rows[direction, phase, source, target] += all_rows
        hidden, scales = wire.hidden_bytes(case.width), wire.scale_bytes(case.width)
        num_bytes[direction, phase, "hidden", source, target] += filled * hidden
        num_bytes[direction, phase, "scales", source, target] += filled * scales
        empty = (all_rows - filled) * (hidden + scales)
        num_bytes[direction, phase, "padding", source, target] += empty

    for source, seen, placement, capacity, kept in each_rank(case, ranks):
        for place, target in enumerate(case.lane_of(source, len(ranks))):
            slots = np.flatnonzero(placement.slot_rank == place)
            filled = int((torch.isin(seen["slots"], torch.from_numpy(slots)) & kept).sum())
            every = len(slots) * capacity
            message("forward", "dispatch", source, target, dispatch, filled, every)
            message("forward", "combine", target, source, combine, filled, every)
            if case.training:
                message("backward", "combine", source, target, backward, filled, every)
                message("backward", "dispatch", target, source, backward, filled, every)
            counts = 32 + 8 * (len(slots) + 1)
            num_bytes["forward", "dispatch", "counts", source, target] += counts
    return +rows, +num_bytes


@every_world
def test_rows_and_bytes_are_those_of_a_plain_count(world_size, lanes):
    for case, ranks in results(world_size, lanes):
        assert_counts(ranks, *plain_counts(case, ranks), case)


def test_empty_rows_are_zeros_and_only_they():
    """Over memory full of other bytes, in all four messages."""
    case = Case("padded", tokens=(7, 0, 9), training=True, options=OPTIONS[1])
    for sent in run_ranks(messages, 3, case):
        assert [position for position, *_ in sent] == [
            f"layer 0, {direction} {phase}"
            for direction, phases in (
                ("forward", ("dispatch", "combine")),
                ("backward", ("combine", "dispatch")),
            )
            for phase in phases
        ]
        for _, rows_to, empty_rows in sent:
            assert [int((rows == 0).all(1).sum()) for rows in rows_to] == list(empty_rows)


@pytest.mark.parametrize(
    ("factor", "most_tokens", "top_k", "num_experts", "capacity"),
    [
        (1.0, 0, 8, 64, 0),
        (1.0, 1, 1, 64, 1),
        (1e-6, 5, 1, 64, 1),
        (1.0, 64, 8, 64, 8),
        (1.1, 50, 1, 1, 55),  # in floating point 55.00000000000001, rounded up 56
        (1.25, 4096, 8, 256, 160),
        (3, 5, 2, 30, 1),
        (100.0, 5, 2, 30, 34),
    ],
)
def test_capacity_is_the_share_rounded_up_exactly(
    factor, most_tokens, top_k, num_experts, capacity
):
    assert slot_capacity(factor, most_tokens, top_k, num_experts) == capacity


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), float("nan")])
def test_a_factor_that_leaves_no_capacity_is_refused(factor):
    with pytest.raises(ValueError, match=r"capacity_factor=.* must be a number above 0"):
        check_capacity_factor(factor)


def test_renormalised_weights():
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 9.0], [0.3, 0.3, 0.3], [0.1, 0.7, 0.2]])
    wanted = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)
    kept = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    scaled = renormalised(weights.requires_grad_(), wanted, kept)
    expected = [[2 / 3, 0, 1 / 3], [0.75, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(scaled[:3], torch.tensor(expected))
    assert torch.equal(scaled[3], weights[3])  # nothing lost: the very same numbers
    scaled.sum().backward()
    assert weights.grad.isfinite().all()
    # The sum is that of the wanted weights, except where nothing is kept.
    expected = [[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]
    torch.testing.assert_close(weights.grad, torch.tensor(expected).float())
