"""The crossovers of a prediction: its model, wire and machine in `comm.analytic.crossover`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from comm.analytic.crossover import (
    ExpertMove,
    all_reduce_bytes,
    expert_move,
    first_better,
    order,
)
from comm.analytic.rows import payload_bytes
from comm.analytic.strategies import Machine, Rows

if TYPE_CHECKING:
    from moe.prediction import Prediction

EP_SIZES = (2, 4, 8, 16, 32, 64, 72, 128, 256, 512, 1024, 2048, 4096)
LARGEST = 1024  # ranks up to which strategies are compared, if the run has no more
DOMAINS = (4, 8, 72)  # boxes of four and eight, and a rack
WEIGHTS = ("mxfp4", "bf16")


def crossovers(prediction: Prediction) -> dict[str, Any]:
    """Strategies over numbers of ranks, domains, weights against tokens, TP against EP."""
    run, field = prediction.run, _Field(prediction)
    most = max(LARGEST, run.world_size)
    sizes = sorted({one for one in EP_SIZES if one <= most} | {run.world_size} - {1})
    whole = [field.per_node * nodes for nodes in range(1, 9)]
    steps = sorted({*sizes, *(size for size in whole if 1 < size <= most)})
    few = range(2, 2 * run.top_k + 3)
    return {
        "ranks_per_node": field.per_node,
        "table": [
            {
                "ep_size": size,
                "num_nodes": -(-size // field.per_node),
                "rows": {name: asdict(rows) for name, rows in field.of(size).items()},
                "us": field.times(size),
                "by_rows": order(field.rows(size)),
            }
            for size in sizes
        ],
        "copies_beat_allgather": first_better("all_to_all", "allgather", few, field.rows),
        "dedup_beats_allgather": first_better("rank_dedup", "allgather", few, field.rows),
        "two_hop_beats_dedup": first_better("two_hop", "rank_dedup", steps, field.times),
        "domains": _domains(field),
        "expert_moves": [asdict(field.expert_move(format)) for format in WEIGHTS],
        "all_reduce": _all_reduce(field),
    }


class _Field:
    """Strategies on any number of ranks, with the model, wire, tokens and machine of a prediction.

    per_node: ranks a node; round_trip: payload of a row there and of one back
    """

    def __init__(self, prediction: Prediction) -> None:
        run, config = prediction.run, prediction.config
        domain = config.topology.ranks_per_node or config.hardware.scale_up_domain
        self.run, self.per_node = run, domain or run.world_size
        self.inner_width = prediction.plan.shape.intermediate_size
        self.GBps = prediction.links.GBps
        self.tokens = prediction.tokens / run.world_size
        wires = (run.wire_dispatch, run.wire_combine)
        self.round_trip = sum(sum(payload_bytes(wire, run.width)) for wire in wires)
        self._rows: dict[tuple[int, int], dict[str, Rows]] = {}

    def of(self, ep_size: int, domain: int | None = None) -> dict[str, Rows]:
        """Strategy -> rows of a token; domain: ranks of a node, None: as in this run."""
        key = (ep_size, domain or self.per_node)
        if key not in self._rows:
            self._rows[key] = Machine(*key, self.run.num_experts, self.run.top_k).rows
        return self._rows[key]

    def rows(self, ep_size: int) -> dict[str, float]:
        """Strategy -> rows that leave a token's rank."""
        return {name: rows.remote for name, rows in self.of(ep_size).items()}

    def times(self, ep_size: int) -> dict[str, float] | None:
        """Strategy -> microseconds of a layer there and back, mean rank, bytes alone."""
        found = {name: rows.ns_per_byte(self.GBps) for name, rows in self.of(ep_size).items()}
        known = {name: ns for name, ns in found.items() if ns is not None}
        if len(known) < len(found):
            return None
        return {name: ns * self.tokens * self.round_trip / 1e3 for name, ns in known.items()}

    def expert_move(self, weight_format: str) -> ExpertMove:
        """An expert's weights beside the rows that would go to it."""
        run = self.run
        sizes = (run.width, self.inner_width, run.num_experts, run.top_k)
        return expert_move(weight_format, *sizes, self.round_trip)


def _domains(field: _Field) -> list[dict[str, Any]]:
    """Payload of a token in one layer, there and back, between scale-up domains of other sizes."""
    ranks = field.run.world_size
    sizes = sorted({*(size for size in DOMAINS if size < ranks), ranks})
    return [
        {
            "domain": size,
            **{
                name: field.of(ranks, size)[name].scale_out * field.round_trip
                for name in ("all_to_all", "rank_dedup", "two_hop")
            },
        }
        for size in sizes
    ]


def _all_reduce(field: _Field) -> dict[str, Any]:
    """Tensor parallelism instead: the same tokens, rows of the same width, BF16 both ways."""
    ranks, row = field.run.world_size, sum(payload_bytes("bf16", field.run.width))
    expert = 2 * field.of(ranks, ranks)["rank_dedup"].remote
    return {
        "tensor_bytes_per_rank_layer": all_reduce_bytes(ranks, field.tokens * ranks, row),
        "expert_bytes_per_rank_layer": expert * row * field.tokens,
    }
