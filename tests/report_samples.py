"""Records of runs that never ran: uniform routing, counted by the oracle itself.

The counted arrays are the exact ones, so a test that plants an error knows its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from comm.analytic.headline import headline
from comm.analytic.oracle import ExactTraffic, exact_traffic
from comm.analytic.rows import KINDS, PHASES
from comm.analytic.traffic import expected_traffic
from comm.report.record import RunInputs, build_record
from comm.topology import Topology
from comm.verdict import (
    conserved_verdict,
    correctness_verdict,
    exact_verdict,
    exit_status,
    expected_verdict,
    not_available,
)

K3 = {
    "name": "kimi_k3",
    "hidden_size": 7168,
    "latent_size": 3584,
    "intermediate_size": 3072,
    "num_experts": 896,
    "top_k": 16,
    "num_moe_layers": 92,
}


@dataclass(frozen=True)
class SampleTraffic:
    """The fields of comm.meter.Traffic, without torch."""

    bytes: np.ndarray
    rows: np.ndarray
    received: np.ndarray
    seconds: np.ndarray
    collectives: int
    directions: tuple[str, ...] = ("forward", "backward")
    phases: tuple[str, ...] = PHASES
    kinds: tuple[str, ...] = KINDS

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(len(self.bytes)))


def sample_inputs(
    ranks: int = 8,
    ranks_per_node: int = 4,
    tokens: int | Sequence[int] = 8,
    layers: int = 2,
    dispatcher: str = "rank_dedup",
    wire: str = "bf16",
    latent: int | None = 128,
    router: str = "uniform",
    num_experts: int = 896,
    top_k: int = 16,
) -> RunInputs:
    """Inputs of a record whose counted bytes are exactly the predicted ones."""
    tokens_per_rank = [tokens] * ranks if isinstance(tokens, int) else list(tokens)
    total, width = sum(tokens_per_rank), latent or 256
    rng = np.random.default_rng(7)
    ids = np.argsort(rng.random((1, layers, total, num_experts)), axis=-1)[..., :top_k]
    token_rank = np.repeat(np.arange(ranks), tokens_per_rank)
    blocks = np.array_split(np.arange(num_experts), ranks)
    expert_rank = np.tile(np.repeat(np.arange(ranks), [len(b) for b in blocks]), (layers, 1))
    slots = np.tile([len(b) for b in blocks], (layers, 1))
    exact = exact_traffic(dispatcher, ids, token_rank, expert_rank, slots, wire, wire, width)
    tiers = Topology.blocks(ranks, ranks_per_node).tiers()
    traffic = counted(exact)
    expected = None
    if router == "uniform":
        expected = expected_traffic(
            dispatcher, tokens_per_rank, slots, tiers, top_k, 1, wire, wire, width
        )
    shape = {
        **K3,
        "hidden_size": 256,
        "latent_size": latent,
        "num_experts": num_experts,
        "top_k": top_k,
        "num_moe_layers": layers,
    }
    verdicts = [
        exact_verdict(traffic, exact),
        conserved_verdict(traffic),
        expected_verdict(traffic, tiers, expected)
        if expected
        else not_available("expected", f"router {router} follows no law"),
        correctness_verdict({f"layer {i} routed": 1e-3 for i in range(layers)}, 8e-3),
    ]
    remote = tiers > 0
    dispatched = exact.bytes[:, 0][..., remote].sum(axis=(0, 2))
    copies = int((expert_rank[0][ids] != token_rank[:, None]).sum())
    return RunInputs(
        manifest=_manifest(
            ranks, ranks_per_node, tokens_per_rank, dispatcher, wire, router, shape, latent
        ),
        traffic=traffic,
        exact=exact,
        expected=expected,
        tiers=tiers,
        verdicts=verdicts,
        headline=headline(
            dict(zip(KINDS, dispatched.tolist(), strict=True)),
            int(exact.rows[:, 0][..., remote].sum()),
            copies,
            total,
            layers,
            top_k,
            256,
            width,
        ),
        expert_rows=np.stack(
            [np.bincount(ids[0, i].ravel(), minlength=num_experts) for i in range(layers)]
        ),
        status=exit_status(verdicts),
        result_dir="results/20261130-172011-kimi_k3-rank_dedup",
        seconds={"experts": 0.61, "step": 0.98},
        correctness=[
            {"layer": i, "routed_error": 1e-3, "hidden_error": 2e-3} for i in range(layers)
        ],
        correctness_bound=8e-3,
    )


def sample_record(**changes: Any) -> dict[str, Any]:
    """The run.json dictionary of `sample_inputs(**changes)`."""
    return build_record(sample_inputs(**changes))


def counted(exact: ExactTraffic) -> SampleTraffic:
    """What the meters would have counted in a run without a fault; phase p took 0.1 (p + 1) s."""
    forward = np.stack([exact.bytes, np.zeros_like(exact.bytes)], axis=1)
    rows = np.stack([exact.rows, np.zeros_like(exact.rows)], axis=1)
    layers, ranks = len(rows), rows.shape[-1]
    seconds = np.zeros((ranks, layers, 2, 2))
    seconds[:, :, 0] = np.array([0.1, 0.2]) / layers
    return SampleTraffic(forward, rows, forward.sum(axis=3), seconds, 3 * layers)


def with_extra_bytes(inputs: RunInputs, cell: tuple[int, ...], extra: int) -> RunInputs:
    """The same run with `extra` bytes too many in one cell, judged anew."""
    forward = inputs.traffic.bytes.copy()
    forward[cell] += extra
    traffic = replace(inputs.traffic, bytes=forward)
    verdicts = [exact_verdict(traffic, inputs.exact), *inputs.verdicts[1:]]
    return replace(inputs, traffic=traffic, verdicts=verdicts, status=exit_status(verdicts))


def _manifest(
    ranks: int,
    ranks_per_node: int,
    tokens_per_rank: list[int],
    dispatcher: str,
    wire: str,
    router: str,
    shape: dict[str, Any],
    latent: int | None,
) -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "commit": "0123456789abcdef",
        "command": "wideep emulate ranks=8",
        "started": "2026-11-30T17:20:11+00:00",
        "finished": "2026-11-30T17:20:14+00:00",
        "seconds": 3.214,
        "torch": "2.13.0",
        "python": "3.11.4",
        "backend": "gloo",
        "device": "cpu",
        "hosts": ["node0"],
        "world_size": ranks,
        "num_nodes": ranks // ranks_per_node,
        "node_of_rank": [rank // ranks_per_node for rank in range(ranks)],
        "node_source": "topology.ranks_per_node",
        "config": {"seed": 0},
        "shape": shape,
        "full_shape": {**K3, "latent_size": latent and 3584, "top_k": shape["top_k"]},
        "model": "kimi_k3",
        "scale": "laptop",
        "router": router,
        "placement": "contiguous",
        "dispatcher": dispatcher,
        "wire": {"dispatch": wire, "combine": wire},
        "dtype": "fp32",
        "tokens_per_rank": tokens_per_rank,
        "steps": 1,
        "warmup": 1,
        "seed": 0,
        "routing_sha256": "00" * 32,
        "environment": {},
    }
