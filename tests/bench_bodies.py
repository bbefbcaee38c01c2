"""What test_bench.py runs on ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from comm import permute
from comm.dispatch import DISPATCHERS
from comm.dispatch.rank_dedup import RankDedup
from comm.meter import KINDS, TrafficMeter
from moe import contest
from moe.contest import RAW_COPIES, RAW_DEDUP, Case

CASE = Case(tokens=13, width=24, dtype="bf16")
NAMES = ("all_to_all", "rank_dedup")
NUM_EXPERTS, TOP_K = 30, 5


def count_and_compare(world):
    """Make the contenders of one case, race them, and look at what their meters saw."""
    meters: list[TrafficMeter] = []

    class Noted(TrafficMeter):
        def __post_init__(self) -> None:
            super().__post_init__()
            meters.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "TrafficMeter", Noted)
        field = contest.contenders(CASE, world, NAMES, NUM_EXPERTS, TOP_K, seed=0)
    payload = {
        name: meter.sent[:, :, :, KINDS.index("hidden")].sum(axis=(0, 1, 2))
        for name, meter in zip(NAMES, meters, strict=False)
    }
    all_kinds = {
        name: meter.sent.sum(axis=(0, 1, 2, 3)) for name, meter in zip(NAMES, meters, strict=False)
    }
    before = [meter.collectives for meter in meters]
    rounds: list[None] = []
    seconds = contest.compete(world, field, 3, 1, lambda: rounds.append(None))
    batch = contest.make_batch(CASE, world, NUM_EXPERTS, TOP_K, 0)
    return {
        "sent": {contender.name: contender.sent_bytes for contender in field},
        "payload": payload,
        "all kinds": all_kinds,
        "collectives": {name: watch(field, name) for name in (RAW_COPIES, RAW_DEDUP)},
        "errors": [error(contender.run(), batch.hidden) for contender in field[2:]],
        "counted while racing": {
            "all_to_all": meters[0].collectives > before[0],
            "unmetered": meters[2].collectives > before[2],
        },
        "seconds": seconds,
        "done": len(rounds),
    }


def every_strategy(world):
    """Contenders of all strategies, the first also in chunks: names, errors and what they send."""
    names = ("two_hop", *(name for name in DISPATCHERS if name != "two_hop"))
    field = contest.contenders(CASE, world, names, NUM_EXPERTS, TOP_K, seed=0, chunks=3)
    batch = contest.make_batch(CASE, world, NUM_EXPERTS, TOP_K, 0)
    return {
        "names": [contender.name for contender in field],
        "errors": [error(contender.run(), batch.hidden) for contender in field[2:]],
        "sent": {contender.name: contender.sent_bytes for contender in field},
    }


def named(field, name):
    return next(contender for contender in field if contender.name == name)


def watch(field, name):
    """Bytes out of and into this rank in each collective that one round makes."""
    seen = []
    original = dist.all_to_all_single

    def counting(output, given, *rest, **more):
        seen.append(output.nbytes + given.nbytes)
        return original(output, given, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        named(field, name).run()
    return seen


def error(output, hidden):
    return float((output.float() - hidden.float()).norm() / hidden.float().norm())


def contend_with_fault(world, fault):
    """Contenders of which one loses a row or a factor."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "row lost":
            destinations = RankDedup._destinations

            def lose(self, slots):
                hit = destinations(self, slots).clone()
                hit[:, 0] = False
                return hit

            patch.setattr(RankDedup, "_destinations", lose)
        else:
            weighted_sum = permute.weighted_sum
            patch.setattr(
                permute,
                "weighted_sum",
                lambda rows, index, first_row, weights=None: weighted_sum(rows, index, first_row),
            )
        contest.contenders(CASE, world, ("rank_dedup",), NUM_EXPERTS, TOP_K, seed=0)
