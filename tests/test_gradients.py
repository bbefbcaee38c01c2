"""Gradients that travelled equal those of plain autograd in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from gradient_bodies import (
    PRELOAD,
    SEED,
    Case,
    Gradients,
    assembled,
    by_expert,
    join_shards,
    only_experts_train,
    plain,
    train,
)
from torch import Tensor

from comm.meter import ALL_PHASES, DIRECTIONS, KINDS, Traffic
from comm.spawn import run_ranks
from comm.wire import WIRE_FORMATS
from moe.layer import pre_norm
from moe.reference import gradient_bound, gradient_errors, reference_gradients

DISPATCHERS = ("all_to_all", "rank_dedup", "allgather")
FP32_BOUND = 2e-5  # sums in another order, through norms and several layers
DISPATCH, COMBINE = (ALL_PHASES.index(name) for name in ("dispatch", "combine"))
FORWARD, BACKWARD = (DIRECTIONS.index(name) for name in ("forward", "backward"))

TOKENS = {
    1: ((9,), (0,)),
    2: ((7, 4), (0, 5)),
    3: ((3, 0, 8),),
    8: ((64, 0, 0, 0, 0, 0, 0, 0), (1, 2, 3, 0, 5, 0, 0, 4)),  # field case 15: one rank has all
}


def layouts(dispatcher: str, tokens: tuple[int, ...]) -> list[Case]:
    """Several holders of an expert: replicas in unlike order, groups that hold the same."""
    if len(tokens) == 3:
        return [
            Case(dispatcher, tokens, num_experts=5, replicas=((3, 0, 1), (0, 3), (4, 2))),
            Case(dispatcher, tokens, ep_size=1),
        ]
    return [Case(dispatcher, tokens, ep_size=4, num_layers=2)] if len(tokens) == 8 else []


def cases_of(world_size: int) -> list[Case]:
    """Wires, shapes and layouts, each for every strategy."""
    first, *others = TOKENS[world_size]
    rounded = ("fp8_block128", "bf16", "fp32")
    cases = []
    for name in DISPATCHERS:
        if world_size < 8:
            cases += [
                Case(name, first),
                Case(name, first, absent=1.0),
                Case(name, first, wires=("mxfp8", "fp8_block128", "fp32"), model="deepseek_v3"),
            ]
        cases += [
            Case(name, first, num_layers=3, chunks=3, wires=rounded),
            Case(name, first, hot=True, placement="contiguous", top_k=2, absent=0.0),  # case 16
            Case(name, first, num_experts=5, model="qwen3_235b_a22b", chunks=2),  # R > E at 8
            *layouts(name, first),
            *(Case(name, tokens, num_layers=2, model="mixtral_8x7b") for tokens in others),
        ]
    return cases


@cache
def trained(world_size: int) -> list[tuple[Case, list[Gradients]]]:
    cases = cases_of(world_size)
    ranks = run_ranks(train, world_size, cases, preload=PRELOAD, deadline_s=300)
    return list(zip(cases, zip(*ranks, strict=True), strict=True))


def errors_of(case: Case, ranks: list[Gradients], wanted: Gradients) -> dict[str, float]:
    """Of the output, of x and of every weight of every layer; the worst first."""
    found = assembled(case, list(ranks), join_shards)
    errors = gradient_errors(
        {"x": found.x, "experts.output": found.output},
        {"x": wanted.x, "experts.output": wanted.output},
    )
    for index, (mine, theirs) in enumerate(zip(found.layers, wanted.layers, strict=True)):
        for name, error in gradient_errors(mine, theirs).items():
            errors[f"layer {index} {name}"] = error
    return dict(sorted(errors.items(), key=lambda entry: -entry[1]))


def against_reference(
    case: Case, ranks: list[Gradients]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Of a case of one layer: gradients measured, those of moe.reference, and floors."""
    x, (ids,), grad = case.batch()
    # The batch's x is the residual stream; its own gradient passes the norm and the residual.
    leaf = x.clone().requires_grad_()
    normed = pre_norm(leaf)
    reference = reference_gradients(case.shape, SEED, 0, normed.detach(), ids, grad, case.dtype)
    (through_norm,) = torch.autograd.grad(normed, leaf, reference.x.to(case.dtype))
    found = assembled(case, ranks, join_shards)
    experts = reference.stacked(range(case.num_experts))
    wanted = {
        "x": grad + through_norm,
        **reference.replicated,
        "experts.gate_up": experts.gate_up,
        "experts.down": experts.down,
    }
    floors = {"router.weight": reference.router_floor}
    return {"x": found.x, **found.layers[0]}, wanted, floors


@pytest.mark.parametrize("world_size", TOKENS)
def test_equal_plain_autograd(world_size: int) -> None:
    """Field cases 15, 16 and 27, ids of -1, more ranks than experts, layers, chunks."""
    for case, ranks in trained(world_size):
        errors = errors_of(case, ranks, by_expert(case, plain(case)))
        worst = next(iter(errors))
        assert errors[worst] < FP32_BOUND, (case, worst, errors[worst])
        for rank in ranks:
            for layer in rank.layers:
                assert all(gradient.isfinite().all() for gradient in layer.values()), case


def test_experts_without_tokens_get_zero_gradients() -> None:
    """Field case 16: everything goes to rank 0."""
    case, ranks = next(entry for entry in trained(2) if entry[0].hot)
    assert case.placed.slots_per_rank.tolist() == [5, 5]
    for name in ("experts.gate_up", "experts.down"):
        assert ranks[0].layers[0][name].any()
        assert not ranks[1].layers[0][name].any()


@pytest.mark.parametrize("world_size", TOKENS)
def test_backward_takes_the_pairs_of_forward(world_size: int) -> None:
    """Field case 27: rows along the same pairs, the phases the other way round."""
    for case, ranks in trained(world_size):
        traffic = Traffic.assemble([rank.meter for rank in ranks])
        rows = traffic.rows
        assert np.array_equal(rows[:, BACKWARD, COMBINE], rows[:, FORWARD, DISPATCH]), case
        assert np.array_equal(
            rows[:, BACKWARD, DISPATCH], rows[:, FORWARD, DISPATCH].swapaxes(1, 2)
        ), case
        width, wire = case.shape.payload_width, WIRE_FORMATS[case.wires[2]]
        wanted = {"hidden": wire.hidden_bytes(width), "scales": wire.scale_bytes(width)}
        for phase in (DISPATCH, COMBINE):
            if phase == DISPATCH and case.dispatcher != "all_to_all":
                wanted["weights"] = 4 * case.top_k
            else:
                wanted.pop("weights", None)
            for kind, name in enumerate(KINDS):
                sent = traffic.bytes[:, BACKWARD, phase, kind]
                assert np.array_equal(sent, rows[:, BACKWARD, phase] * wanted.get(name, 0)), name
        assert np.array_equal(traffic.received, traffic.bytes.sum(axis=3)), case


def test_gradients_do_not_depend_on_the_number_of_ranks() -> None:
    """Field case 27: E = 8, K = 2, two ranks against one, the same batch."""
    two = [Case(name, (6, 5), num_experts=8, top_k=2) for name in DISPATCHERS]
    one = [replace(case, tokens=(11,)) for case in two]
    ranks = run_ranks(train, 2, two, preload=PRELOAD)
    (alone,) = run_ranks(train, 1, one, preload=PRELOAD)
    for index, case in enumerate(two):
        found = [rank[index] for rank in ranks]
        errors = errors_of(case, found, by_expert(one[index], alone[index]))
        assert max(errors.values()) < FP32_BOUND, (case, errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_the_bound(dtype: torch.dtype) -> None:
    """Weights, arithmetic and every wire in few bits, against the dense reference in fp32."""
    wires = {torch.bfloat16: ("fp8_block128", "bf16", "bf16"), torch.float16: ("fp16",) * 3}[dtype]
    cases = [Case(name, (7, 0, 12), wires=wires, dtype=dtype) for name in DISPATCHERS]
    ranks = run_ranks(train, 3, cases, preload=PRELOAD)
    roundoff = torch.finfo(dtype).eps
    bound = gradient_bound([WIRE_FORMATS[wire].row_error for wire in wires], roundoff)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        found, wanted, floors = against_reference(case, list(results))
        errors = gradient_errors(found, wanted, floors)
        assert roundoff / 8 < max(errors.values()) < bound < 0.5, (case, errors)


@pytest.mark.parametrize("backward", ["bf16", "fp8_block128", "mxfp8"])
def test_gradients_are_rounded_on_their_own_way(backward: str) -> None:
    """Each row is rounded twice, once in each phase of backward; nothing else changes."""
    cases = [Case(name, (7, 4), wires=("fp32", "fp32", backward)) for name in DISPATCHERS]
    ranks = run_ranks(train, 2, cases, preload=PRELOAD)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        wanted = by_expert(case, plain(case))
        errors = errors_of(case, list(results), wanted)
        assert errors.pop("experts.output") < FP32_BOUND  # forward is exact
        row_error = WIRE_FORMATS[backward].row_error
        worst = max(errors.values())
        assert row_error / 100 < worst < 4 * row_error, (case, errors)


@pytest.mark.parametrize("world_size", [2])
def test_the_dense_reference_gives_the_same(world_size: int) -> None:
    """moe.reference, which shares neither the router's code nor the layer's."""
    for case, ranks in trained(world_size):
        if case.num_layers > 1 or set(case.wires) != {"fp32"}:
            continue
        found, wanted, floors = against_reference(case, list(ranks))
        errors = gradient_errors(found, wanted, floors)
        assert max(errors.values()) < FP32_BOUND, (case, errors)


def test_gradients_that_would_end_at_the_experts_are_refused() -> None:
    """Trained experts under inputs that are not: ranks without experts would not go backward."""
    (message,) = run_ranks(only_experts_train, 1, Case("rank_dedup", (4,)), preload=PRELOAD)
    assert "hidden or topk_weights must require grad" in message
