"""Experts spread over several ranks: the same numbers as unsharded, and the bytes of every pair."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from gradient_bodies import (
    PRELOAD,
    Case,
    Gradients,
    assembled,
    by_expert,
    infer,
    join_shards,
    plain,
    train,
)

from comm.meter import ALL_PHASES, DIRECTIONS, KINDS, Traffic
from comm.spawn import run_ranks
from comm.wire import WIRE_FORMATS
from moe.reference import gradient_errors

FP32_BOUND = 2e-5  # sums in another order, through norms and several layers
STRATEGIES = ("all_to_all", "rank_dedup", "allgather")
WIRES = ("fp8_block128", "bf16", "mxfp8")
CASES: dict[int, list[Case]] = {4: [], 6: []}
for mode in ("gather", "all"):
    for name in STRATEGIES:
        two = {"mode": mode, "expert_tp": 2}
        CASES[4] += [
            Case(name, (5, 0, 7, 2), num_layers=2, chunks=2, **two),
            Case(name, (5, 0, 7, 2), wires=WIRES, **two),
            Case(name, (0, 0, 0, 9), inner=25, model="deepseek_v3", ep_size=2, **two),
        ]
        CASES[6] += [
            Case(name, (3, 1, 4, 0, 5, 2), mode=mode, expert_tp=3, absent=0.4, inner=25),
            Case(
                name, (3, 1, 4, 0, 5, 2), num_experts=2, top_k=2, **two
            ),  # a group without experts
        ]
    two = {"mode": mode, "expert_tp": 2, "num_experts": 5}
    CASES[6] += [
        Case("rank_dedup", (3, 1, 4, 0, 5, 2), replicas=((3, 0, 1), (0, 3), (4, 2)), **two)
    ]


OTHERS = ("two_hop", "hierarchical_allgather", "padded")  # inside a lane they are as any other


@cache
def trained(world_size: int) -> list[tuple[Case, list[Gradients]]]:
    cases = CASES[world_size]
    ranks = run_ranks(train, world_size, cases, preload=PRELOAD, deadline_s=300)
    return list(zip(cases, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("world_size", CASES)
def test_outputs_and_gradients_equal_the_unsharded_run(world_size: int) -> None:
    for case, ranks in trained(world_size):
        if case.wires == WIRES:
            continue
        found = assembled(case, list(ranks), join_shards)
        wanted = by_expert(case, plain(case))
        errors = gradient_errors(
            {"x": found.x, "experts.output": found.output},
            {"x": wanted.x, "experts.output": wanted.output},
        )
        for mine, theirs in zip(found.layers, wanted.layers, strict=True):
            errors |= gradient_errors(mine, theirs)
        assert max(errors.values()) < FP32_BOUND, (case, errors)


def test_any_strategy_may_work_inside_a_lane() -> None:
    cases = [Case(name, (3, 1, 4, 0, 5, 2), expert_tp=2, chunks=2) for name in OTHERS]
    ranks = run_ranks(train, 6, cases, preload=PRELOAD, deadline_s=300)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        found, wanted = assembled(case, list(results), join_shards), by_expert(case, plain(case))
        errors = gradient_errors(
            {"x": found.x, "experts.output": found.output, **found.layers[0]},
            {"x": wanted.x, "experts.output": wanted.output, **wanted.layers[0]},
        )
        assert max(errors.values()) < FP32_BOUND, (case, errors)


def test_chunks_that_overlap_give_the_same() -> None:
    """In inference mode phases are begun and finished apart; under autograd they are not."""
    cases = [case for case in CASES[4] if case.chunks > 1]
    assert {case.mode for case in cases} == {"gather", "all"}
    overlapping = run_ranks(infer, 4, cases, preload=PRELOAD, deadline_s=300)
    at_once = {case: results for case, results in trained(4)}
    for index, case in enumerate(cases):
        for rank, result in enumerate(at_once[case]):
            assert torch.equal(overlapping[rank][index], result.output), (case, rank)


@pytest.mark.parametrize("mode", ["gather", "all"])
def test_parts_are_rounded_on_their_way(mode: str) -> None:
    """With compact formats the sums differ from the unsharded run's by their rounding, no more."""
    for case, ranks in trained(4):
        if case.wires != WIRES or case.mode != mode:
            continue
        found = assembled(case, list(ranks), join_shards)
        wanted = by_expert(case, plain(case))
        rows = sum(WIRE_FORMATS[wire].row_error for wire in WIRES)
        errors = gradient_errors(
            {"x": found.x, **found.layers[0]}, {"x": wanted.x, **wanted.layers[0]}
        )
        assert 1e-3 < max(errors.values()) < 4 * rows, (case, errors)


class Count:
    """Bytes and rows by (direction, phase) in the contract's words, row by row."""

    def __init__(self, case: Case) -> None:
        self.case, self.world_size = case, len(case.tokens)
        self.shards, self.group = case.expert_tp, case.group_size
        shape = (len(DIRECTIONS), len(ALL_PHASES), self.world_size, self.world_size)
        self.bytes = np.zeros(shape, dtype=np.int64)
        self.rows = np.zeros(shape, dtype=np.int64)
        self.arrived = np.zeros(self.world_size, dtype=np.int64)  # M of each rank's own lane
        self.size = []
        for wire in case.formats:
            width = case.shape.payload_width
            self.size.append(wire.hidden_bytes(width) + wire.scale_bytes(width))

    def add(
        self, direction: str, phase: str, src: int, dst: int, rows: int, row_bytes: int
    ) -> None:
        place = (DIRECTIONS.index(direction), ALL_PHASES.index(phase), src, dst)
        self.bytes[place] += rows * row_bytes
        self.rows[place] += rows

    def counts(self, phase: str, src: int, dst: int, num_counts: int) -> None:
        self.bytes[0, ALL_PHASES.index(phase), src, dst] += (32 + 8 * num_counts) * self.case.chunks

    def rank(self, src: int, place: int, shift: int = 0) -> int:
        """The rank at a place of the lane `shift` further on than that of src, in its group."""
        lane = (src + shift) % self.shards
        return src // self.group * self.group + place * self.shards + lane

    def token(self, src: int, slots: list[int]) -> None:
        """One token's rows, there and back, in all phases of both directions."""
        case, placement = self.case, self.case.placed
        chosen = [int(placement.slot_rank[slot]) for slot in slots if slot < placement.num_slots]
        if case.dispatcher == "all_to_all":
            places = chosen
        elif case.dispatcher == "rank_dedup":
            places = sorted(set(chosen))
        else:
            places = list(range(placement.world_size)) if chosen else []
        travels = 0 if case.dispatcher == "all_to_all" else 4 * case.top_k
        dispatch, combine, backward = self.size
        for place in places:
            home = self.rank(src, place)
            for shift in range(self.shards if case.mode == "all" else 1):
                dst = self.rank(src, place, shift)
                self.add("forward", "dispatch", src, dst, 1, dispatch + 2 * travels)
                self.add("backward", "dispatch", dst, src, 1, backward + travels)
            self.add("forward", "combine", home, src, 1, combine)
            self.add("backward", "combine", src, home, 1, backward)
        for place in chosen:
            home = self.rank(src, place)
            for shift in range(1, self.shards):
                other = self.rank(src, place, shift)
                if case.mode == "gather":
                    self.add("forward", "tp_gather", home, other, 1, dispatch)
                    self.add("backward", "tp_gather", other, home, 1, backward)
                self.add("forward", "tp_reduce", other, home, 1, combine)
                self.add("backward", "tp_reduce", home, other, 1, backward)

    def announcements(self) -> None:
        case, slots = self.case, self.case.placed.slots_per_rank.tolist()
        for src in range(self.world_size):
            for shift in range(self.shards if case.mode == "all" else 1):
                for place, local in enumerate(slots):
                    num = local if case.dispatcher == "all_to_all" else 1
                    self.counts("dispatch", src, self.rank(src, place, shift), num)
            own = src % self.group // self.shards
            for shift in range(self.shards if case.mode == "gather" else 0):
                self.counts("tp_gather", src, self.rank(src, own, shift), slots[own])


def slow_count(case: Case, layer: int) -> Count:
    count = Count(case)
    _, ids, _ = case.batch()
    placement = case.placed
    first = placement.logical_to_physical.tolist() + [placement.num_slots]
    number = 0
    for src, tokens in enumerate(case.tokens):
        for token in ids[layer][number : number + tokens]:
            slots = case.slots(token[None], number) if case.replicas else None
            count.token(
                src, [first[e] for e in token.tolist()] if slots is None else slots[0].tolist()
            )
            number += 1
    count.announcements()
    return count


@pytest.mark.parametrize("world_size", CASES)
def test_every_pair_carries_what_the_contract_says(world_size: int) -> None:
    sync = ALL_PHASES.index("grad_sync")
    for case, ranks in trained(world_size):
        traffic = Traffic.assemble([rank.meter for rank in ranks])
        assert traffic.phases == ALL_PHASES
        assert np.array_equal(traffic.received, traffic.bytes.sum(axis=3)), case
        for layer in range(case.num_layers):
            wanted = slow_count(case, layer)
            for phase, name in enumerate(ALL_PHASES[:sync]):
                found = traffic.bytes[layer, :, phase].sum(axis=1)  # over kinds
                assert np.array_equal(found, wanted.bytes[:, phase]), (case, layer, name)
                assert np.array_equal(traffic.rows[layer, :, phase], wanted.rows[:, phase]), name


def test_scales_and_counts_are_booked_by_kind() -> None:
    case, ranks = next(entry for entry in trained(4) if entry[0].wires == WIRES)
    traffic = Traffic.assemble([rank.meter for rank in ranks])
    gather, reduce = (ALL_PHASES.index(name) for name in ("tp_gather", "tp_reduce"))
    rows = traffic.rows[0, 0, gather]
    assert rows.any() and not np.diagonal(rows).any()  # payload goes to the others alone
    by_kind = traffic.bytes[0, 0, gather]
    width = case.shape.payload_width
    assert np.array_equal(by_kind[KINDS.index("hidden")], rows * width)
    assert np.array_equal(by_kind[KINDS.index("scales")], rows * 4)
    assert np.diagonal(by_kind[KINDS.index("counts")]).all()  # the count comes to itself, too
    assert not traffic.bytes[0, :, reduce, KINDS.index("counts")].any()


def test_time_is_booked_where_it_is_spent() -> None:
    case, ranks = trained(4)[0]
    assert case.mode == "gather"
    for rank in ranks:
        for direction in range(2):
            for name in ("dispatch", "combine", "tp_gather", "tp_reduce"):
                assert rank.meter.seconds[0, direction, ALL_PHASES.index(name)] > 0, name


def test_shards_need_not_be_equal() -> None:
    """25 inner values over 3 ranks: 9, 8 and 8."""
    case, ranks = next(entry for entry in trained(6) if entry[0].inner == 25)
    widths = [rank.layers[0]["experts.down"].shape[2] for rank in ranks]
    assert widths == [9, 8, 8, 9, 8, 8]
    assert all(torch.isfinite(rank.x).all() for rank in ranks)
