"""Small random runs and what their tokens chose, for tests that count them twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from comm.analytic.oracle import ExactTraffic
from comm.analytic.owners import expert_owner, one_slot_each
from comm.analytic.paths import TWO_HOPS
from comm.analytic.rows import WIRES
from comm.analytic.run import RunShape


def random_run(
    seed: int, dispatcher: str, **changes: Any
) -> tuple[RunShape, np.ndarray, np.ndarray]:
    """(run, topk_ids, slots): any layout of nodes, lanes, replicas, chunks and formats."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    shards = pick(1, 1, 2, 3)
    mode = "gather" if dispatcher in TWO_HOPS else pick("gather", "all")
    num_positions, num_groups = int(rng.integers(1, 5)), pick(1, 1, 2)
    size = shards * num_positions * num_groups
    num_experts, num_layers = int(rng.integers(1, 8)), int(rng.integers(1, 3))
    placed = [_placed(rng, num_experts, num_positions, pick(0, 0, 2)) for _ in range(num_layers)]
    fields: dict[str, Any] = {
        "dispatcher": dispatcher,
        "tokens_per_rank": tuple(rng.integers(0, 6, size).tolist()),
        # any numbering, any layout: ragged, cyclic, nodes of one rank
        "node_of_rank": tuple((7 - 3 * rng.integers(0, pick(1, 2, 3), size)).tolist()),
        "physical_to_logical": tuple(experts for experts, _ in placed),
        "slot_rank": tuple(ranks for _, ranks in placed),
        "num_experts": num_experts,
        "top_k": int(rng.integers(1, num_experts + 1)),
        "width": int(rng.integers(1, 140)),
        "num_steps": pick(1, 2),
        "wire_dispatch": pick(*WIRES),
        "wire_combine": pick(*WIRES),
        "wire_backward": pick(*WIRES),
        "training": pick(False, True),
        "chunks": pick(1, 2, 3),
        "ep_size": pick(None, shards * num_positions) if num_groups == 1 else size // num_groups,
        "expert_tp": shards,
        "expert_tp_mode": mode,
        "deduplicate": dispatcher == "one_sided" and pick(False, True),
        "capacity_factor": pick(0.1, 0.7, 1.0, 1.25, 3.0),
        "expert_values": 6 * int(rng.integers(1, 5)),
        "expert_bytes": 12 * int(rng.integers(1, 5)),
        "shared_values": int(rng.integers(0, 30)),
        "moves": _moves(rng, num_layers, num_experts, size) if pick(False, True) else _NO_MOVES,
    }
    run = RunShape(**(fields | changes))
    return run, *chosen(rng, run)


_NO_MOVES = np.zeros((0, 4), np.int64)


def _moves(rng: np.random.Generator, layers: int, experts: int, size: int) -> np.ndarray:
    return rng.integers(0, [layers, experts, size, size], (int(rng.integers(0, 5)), 4))


def _placed(
    rng: np.random.Generator, num_experts: int, num_positions: int, redundant: int
) -> tuple[np.ndarray, np.ndarray]:
    """(physical_to_logical, slot_rank): every expert somewhere, some of them twice"""
    experts = np.append(np.arange(num_experts), rng.integers(0, num_experts, redundant))
    ranks = np.sort(rng.integers(0, num_positions, len(experts)))
    return rng.permutation(experts), ranks


def chosen(
    rng: np.random.Generator, run: RunShape, masked: float = 0.125
) -> tuple[np.ndarray, np.ndarray]:
    """(topk_ids, slots) [steps, L, tokens, K], some choices -1, some tokens without any"""
    shape = (run.num_steps, run.num_layers, sum(run.tokens_per_rank))
    ids = rng.random((*shape, run.num_experts)).argsort(axis=-1)[..., : run.top_k]
    ids[rng.random(ids.shape) < masked] = -1
    ids[rng.random(shape) < masked] = -1
    slots = np.full_like(ids, -1)
    for layer, experts in enumerate(run.physical_to_logical):
        for cell in np.argwhere(ids[:, layer] >= 0):
            step, token, k = cell.tolist()
            (holders,) = np.nonzero(np.asarray(experts) == ids[step, layer, token, k])
            slots[step, layer, token, k] = rng.choice(holders)
    return ids.astype(np.int32), slots.astype(np.int32)


def simple_run(dispatcher: str, world_size: int, num_experts: int, **changes: Any) -> RunShape:
    """One node, contiguous placement, one lane, one token a rank, one layer, unless said."""
    num_layers = changes.pop("num_layers", 1)
    positions = (changes.get("ep_size") or world_size) // changes.get("expert_tp", 1)
    placed = one_slot_each(expert_owner("contiguous", num_experts, positions))
    fields: dict[str, Any] = {
        "dispatcher": dispatcher,
        "tokens_per_rank": (1,) * world_size,
        "node_of_rank": (0,) * world_size,
        "physical_to_logical": (placed[0],) * num_layers,
        "slot_rank": (placed[1],) * num_layers,
        "num_experts": num_experts,
        "top_k": 1,
        "width": 16,
    }
    return RunShape(**(fields | changes))


def rows_of(exact: ExactTraffic, phase: str, direction: str = "forward") -> np.ndarray:
    """[src, dst] rows of one phase, over all layers"""
    place = exact.directions.index(direction), exact.phases.index(phase)
    return exact.rows[:, *place].sum(axis=0)


def bytes_of(exact: ExactTraffic, phase: str, kind: str, direction: str = "forward") -> np.ndarray:
    """[src, dst] bytes of one kind in one phase, over all layers"""
    place = exact.directions.index(direction), exact.phases.index(phase), exact.kinds.index(kind)
    return exact.bytes[:, *place].sum(axis=0)
