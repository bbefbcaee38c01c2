"""The crossovers of a prediction: its model, wire and machine in `comm.analytic.crossover`."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from comm.analytic.crossover import all_reduce_bytes, expert_move, first_better, order
from comm.analytic.rows import payload_bytes
from comm.analytic.strategies import Machine

if TYPE_CHECKING:
    from moe.prediction import Prediction

EP_SIZES = (2, 4, 8, 16, 32, 64, 72, 128, 256, 512, 1024, 2048, 4096)
LARGEST = 1024  # ranks up to which strategies are compared, if the run has no more
DOMAINS = (4, 8, 72)  # boxes of four and eight, and a rack
WEIGHTS = ("mxfp4", "bf16")


def crossovers(prediction: Prediction) -> dict[str, Any]:
    """Strategies over numbers of ranks, domains, weights against tokens, TP against EP."""
    run, model = prediction.run, prediction.config.model
    asked, domain = prediction.config.topology, prediction.config.hardware.scale_up_domain
    per_node = asked.ranks_per_node or domain or run.world_size
    there, back = (
        sum(payload_bytes(wire, run.width)) for wire in (run.wire_dispatch, run.wire_combine)
    )
    tokens = prediction.tokens / run.world_size

    @cache
    def machine(ep_size: int, domain: int) -> Machine:
        return Machine(ep_size, domain, run.num_experts, run.top_k)

    def rows(ep_size: int) -> dict[str, float]:
        return {name: one.remote for name, one in machine(ep_size, per_node).rows.items()}

    def times(ep_size: int) -> dict[str, float] | None:
        """Microseconds of a layer there and back, mean rank, bytes alone."""
        of = machine(ep_size, per_node).rows
        found = {name: one.ns_per_byte(prediction.links.GBps) for name, one in of.items()}
        known = {name: ns for name, ns in found.items() if ns is not None}
        if len(known) < len(found):
            return None
        return {name: ns * tokens * (there + back) / 1e3 for name, ns in known.items()}

    most = max(LARGEST, run.world_size)
    sizes = sorted({one for one in EP_SIZES if one <= most} | {run.world_size} - {1})
    whole = [per_node * nodes for nodes in range(1, 9) if 1 < per_node * nodes <= most]
    steps = sorted({*sizes, *whole})
    few = range(2, 2 * run.top_k + 3)
    return {
        "ranks_per_node": per_node,
        "table": [
            {
                "ep_size": size,
                "num_nodes": -(-size // per_node),
                "rows": {name: asdict(one) for name, one in machine(size, per_node).rows.items()},
                "us": times(size),
                "by_rows": order(rows(size)),
            }
            for size in sizes
        ],
        "copies_beat_allgather": first_better("all_to_all", "allgather", few, rows),
        "dedup_beats_allgather": first_better("rank_dedup", "allgather", few, rows),
        "two_hop_beats_dedup": first_better("two_hop", "rank_dedup", steps, times),
        "copies_beat_two_hop": first_better("all_to_all", "two_hop", steps, rows),
        "domains": _domains(prediction, machine, there + back),
        "expert_moves": [
            asdict(
                expert_move(
                    wire,
                    run.width,
                    prediction.plan.shape.intermediate_size,
                    run.num_experts,
                    run.top_k,
                    there + back,
                )
            )
            for wire in WEIGHTS
        ],
        "all_reduce": _all_reduce(prediction, machine, model.name),
    }


def _domains(prediction: Prediction, machine: Any, round_trip: int) -> list[dict[str, Any]]:
    """Payload of a token in one layer, there and back, between scale-up domains of other sizes."""
    ranks = prediction.run.world_size
    sizes = sorted({*(size for size in DOMAINS if size < ranks), ranks})
    return [
        {
            "domain": size,
            **{
                name: machine(ranks, size).rows[name].scale_out * round_trip
                for name in ("all_to_all", "rank_dedup", "two_hop")
            },
        }
        for size in sizes
    ]


def _all_reduce(prediction: Prediction, machine: Any, model: str) -> dict[str, Any]:
    """Tensor parallelism instead: the same tokens, rows of the same width, BF16 both ways."""
    run = prediction.run
    row = sum(payload_bytes("bf16", run.width))
    tokens = prediction.tokens
    expert = 2 * machine(run.world_size, run.world_size).rows["rank_dedup"].remote
    return {
        "model": model,
        "tensor_bytes_per_rank_layer": all_reduce_bytes(run.world_size, tokens, row),
        "expert_bytes_per_rank_layer": expert * row * tokens / run.world_size,
    }
