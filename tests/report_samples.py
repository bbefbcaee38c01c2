"""Records of runs that never ran: seeded choices, counted by the oracle itself.

The counted arrays are the exact ones, so a test that plants an error knows its size. `SAMPLES` has
one run of each kind that there is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from comm.analytic.choices import kept_choices
from comm.analytic.conventions import conventions_of_run
from comm.analytic.headline import headline_of_run
from comm.analytic.law import Uniform
from comm.analytic.oracle import ExactTraffic, exact_traffic
from comm.analytic.owners import expert_owner, one_slot_each
from comm.analytic.paths import answered_pairs
from comm.analytic.reach import expected_reach, reached
from comm.analytic.run import RunShape
from comm.analytic.traffic import expected_traffic
from comm.report.record import RunInputs, build_record
from comm.topology import Topology
from comm.verdict import (
    Verdict,
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
# rms error of each format in rows that a normal law could have made
ROUNDING = {"fp32": 0.0, "bf16": 1.66e-3, "fp8_block128": 2.64e-2, "mxfp8": 2.9e-2, "nvfp4": 9.1e-2}

SAMPLES: dict[str, dict[str, Any]] = {
    "default": {"tokens": 64, "layers": 4},
    "one rank": {"ranks": 1, "ranks_per_node": 1},
    "one node": {"ranks_per_node": 8},
    "nodes of one": {"ranks_per_node": 1},
    "ragged, no law": {"tokens": [0, 5, 1, 0, 0, 2, 9, 3], "router": "learned", "wire": "mxfp8"},
    "replayed": {
        **{"router": "replay", "tokens": 16},
        "notes": (
            "the first 128 of the trace's 4096 tokens are replayed",
            "3 rows without experts were left out; layer 0 of the file is the model's first",
        ),
    },
    "all-gather": {"dispatcher": "allgather", "latent": None},
    "no tokens": {"tokens": 0},
    "72 ranks": {"ranks": 72, "ranks_per_node": 8, "tokens": 2, "dispatcher": "all_to_all"},
    "224 ranks": {"ranks": 224, "ranks_per_node": 8, "tokens": 1, "layers": 1},
    "one layer": {"layers": 1, "tokens": 1},
    "92 layers": {"layers": 92, "ranks": 4, "ranks_per_node": 2, "tokens": 2, "num_experts": 64},
    "two hops": {"dispatcher": "two_hop", "tokens": 16},
    "training": {"training": True, "tokens": 64},
    "training, nothing to do": {"training": True, "tokens": 0},
    "padded": {"dispatcher": "padded", "tokens": 64, "capacity_factor": 1.0, "num_experts": 64},
    "padded training": {
        **{"dispatcher": "padded", "tokens": 64, "capacity_factor": 0.75, "num_experts": 64},
        **{"training": True, "wire": "nvfp4"},
    },
    "shared experts": {"expert_tp": 2, "tokens": 16},
    "shared experts, all": {
        **{"expert_tp": 4, "expert_tp_mode": "all", "dispatcher": "all_to_all", "tokens": 16},
        **{"training": True, "wire": "fp8_block128"},
    },
    "shared experts, training": {"expert_tp": 2, "tokens": 32, "training": True},
    "groups": {"ep_size": 4, "training": True, "tokens": 16},
    "balanced": {"placement": "balance", "tokens": 32, "num_experts": 64},
    "balanced, training": {
        **{"placement": "balance", "tokens": 32, "num_experts": 64, "training": True},
        **{"wire": "mxfp8"},
    },
    "from a file": {"placement": "file", "tokens": 32, "num_experts": 64},
    "chunks": {"chunks": 4, "tokens": 64},
    "one-sided": {"dispatcher": "one_sided", "tokens": 16},
    "one-sided, deduplicated": {"dispatcher": "one_sided", "deduplicate": True, "tokens": 16},
}


@dataclass(frozen=True)
class SampleTraffic:
    """The fields of comm.meter.Traffic, without torch."""

    bytes: np.ndarray
    rows: np.ndarray
    received: np.ndarray
    seconds: np.ndarray
    collectives: int
    directions: tuple[str, ...]
    phases: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(len(self.bytes)))


def sample_inputs(
    ranks: int = 8,
    ranks_per_node: int = 4,
    tokens: int | Sequence[int] = 8,
    layers: int = 2,
    latent: int | None = 128,
    router: str = "uniform",
    placement: str = "contiguous",
    wire: str = "bf16",
    notes: Sequence[str] = (),
    **options: Any,
) -> RunInputs:
    """Inputs of a record whose counted bytes are exactly the predicted ones.

    placement: "balance" and "file" give the first expert of each rank a replica on the rank before
    notes: of the router
    options: other fields of RunShape
    """
    run = _run(ranks, ranks_per_node, tokens, layers, latent, placement, wire, options)
    ids, slots = _choices(run)
    exact = exact_traffic(run, ids, slots)
    tiers = Topology.blocks(ranks, ranks_per_node).tiers()
    traffic = counted(exact)
    expected = expected_traffic(run, Uniform()) if router == "uniform" else None
    replicated = placement in ("balance", "file")
    chosen, kept = int((ids >= 0).sum()), int(kept_choices(run, ids, slots).sum())
    dispatched = traffic.bytes[:, 0, 0].sum(axis=0)
    verdicts = _verdicts(run, traffic, exact, tiers, expected, router)
    return RunInputs(
        manifest=_manifest(run, ranks_per_node, router, placement, latent, notes),
        traffic=traffic,
        exact=exact,
        expected=expected,
        tiers=tiers,
        verdicts=verdicts,
        headline=headline_of_run(
            run,
            exact,
            dict(zip(traffic.kinds, dispatched, strict=True)),
            traffic.rows[:, 0, 0].sum(axis=0),
            256,
        ),
        expert_rows=np.stack(
            [np.bincount(ids[0, i].ravel(), minlength=run.num_experts) for i in range(layers)]
        ),
        status=exit_status(verdicts),
        result_dir="results/20261130-172011-kimi_k3-rank_dedup",
        seconds={"experts": 0.61, "step": 0.98},
        correctness=[_errors(layer, run.training) for layer in range(layers)],
        correctness_bound=8e-3,
        gradient_bound=2.7e-2 if run.training else None,
        conventions=[asdict(one) for one in conventions_of_run(run, ids, slots)],
        choices={
            "possible": ids.size,
            "chosen": chosen,
            "dropped": chosen - kept,
            "predicted_dropped": chosen - kept,
        },
        wire_errors={
            way: ROUNDING[wire] for way in ("dispatch", "combine", *["backward"] * run.training)
        },
        placement=_placed(run) if placement in ("balance", "file") else None,
        kernel=_acknowledged(traffic),
        interfaces=[_interface(node) for node in range(2)] if ranks_per_node < ranks else (),
        fan_out={
            "tokens": reached(run, ids, slots),
            "expected": None
            if router != "uniform" or replicated
            else expected_reach(run, Uniform()),
            "reason": f"router={router}" if router != "uniform" or replicated else "",
        },
        report_html="written",
    )


def sample_record(**changes: Any) -> dict[str, Any]:
    """The run.json dictionary of `sample_inputs(**changes)`."""
    return build_record(sample_inputs(**changes))


@functools.cache
def sample(name: str) -> dict[str, Any]:
    """The record of one of SAMPLES; not to be changed."""
    return sample_record(**SAMPLES[name])


def counted(exact: ExactTraffic) -> SampleTraffic:
    """What the meters would have counted in a run without a fault; phase p took 0.1 (p + 1) s."""
    layers, directions, phases, size, _ = exact.rows.shape
    seconds = np.zeros((size, layers, directions, phases))
    seconds[...] = 0.1 * np.arange(1, phases + 1) / layers
    axes = (exact.directions, exact.phases, exact.kinds)
    received = exact.bytes.sum(axis=3)
    return SampleTraffic(exact.bytes, exact.rows, received, seconds, 3 * layers, *axes)


def with_extra_bytes(inputs: RunInputs, cell: tuple[int, ...], extra: int) -> RunInputs:
    """The same run with `extra` bytes too many in one cell, judged anew."""
    counted_bytes = inputs.traffic.bytes.copy()
    counted_bytes[cell] += extra
    traffic = replace(inputs.traffic, bytes=counted_bytes)
    verdicts = [exact_verdict(traffic, inputs.exact), *inputs.verdicts[1:]]
    return replace(inputs, traffic=traffic, verdicts=verdicts, status=exit_status(verdicts))


def _run(
    ranks: int,
    ranks_per_node: int,
    tokens: int | Sequence[int],
    layers: int,
    latent: int | None,
    placement: str,
    wire: str,
    options: dict[str, Any],
) -> RunShape:
    known = {one.name for one in fields(RunShape)}
    assert set(options) <= known, f"no such option of a run: {set(options) - known}"
    num_experts = options.get("num_experts", 896)
    positions = (options.get("ep_size") or ranks) // options.get("expert_tp", 1)
    owner = expert_owner("contiguous", num_experts, positions)
    logical, slot_rank = one_slot_each(owner)
    replicas = positions > 1 and placement in ("balance", "file")
    if replicas:
        first = np.searchsorted(owner, np.arange(positions))
        logical = np.append(logical, np.roll(first, -1))
        slot_rank = np.append(slot_rank, np.arange(positions))
        order = np.argsort(slot_rank, kind="stable")
        logical, slot_rank = logical[order], slot_rank[order]
    width = latent or 256
    run = RunShape(
        **{
            **{"dispatcher": "rank_dedup", "num_experts": num_experts, "top_k": 16},
            **{"wire_dispatch": wire, "wire_combine": wire, "wire_backward": wire},
            **{"expert_values": 3 * width * 96, "expert_bytes": 12 * width * 96},
            **{"shared_values": num_experts * 256 + 256 * width},
            **options,
        },
        width=width,
        tokens_per_rank=(tokens,) * ranks if isinstance(tokens, int) else tuple(tokens),
        node_of_rank=tuple(rank // ranks_per_node for rank in range(ranks)),
        physical_to_logical=(logical,) * layers,
        slot_rank=(slot_rank,) * layers,
    )
    if placement != "balance" or not replicas:
        return run
    moves = [
        (layer, expert, lane[owner[expert]], lane[position])
        for layer in range(layers)
        for expert, position in zip(logical.tolist(), slot_rank.tolist(), strict=True)
        if owner[expert] != position
        for lane in run.lanes
    ]
    return replace(run, moves=np.array(moves))


def _choices(run: RunShape) -> tuple[np.ndarray, np.ndarray]:
    """topk_ids and slots [1, L, tokens, K]; replicas take turns."""
    rng = np.random.default_rng(7)
    shape = (1, run.num_layers, sum(run.tokens_per_rank), run.num_experts)
    ids = np.argsort(rng.random(shape), axis=-1)[..., : run.top_k]
    holder = run.physical_to_logical[0]
    ends = [np.full(run.num_experts, -1), np.full(run.num_experts, -1)]
    ends[0][holder] = np.arange(len(holder))
    ends[1][holder[::-1]] = np.arange(len(holder))[::-1]
    turn = (np.arange(shape[2]) % 2)[:, None]
    return ids, np.where(turn, ends[0][ids], ends[1][ids])


def _verdicts(
    run: RunShape,
    traffic: SampleTraffic,
    exact: ExactTraffic,
    tiers: np.ndarray,
    expected: Any | None,
    router: str,
) -> list[Verdict]:
    errors = {f"layer {layer} routed": 1e-3 for layer in range(run.num_layers)}
    gradients = {f"layer {layer} experts.down, rank 0": 4e-3 for layer in range(run.num_layers)}
    return [
        exact_verdict(traffic, exact),
        conserved_verdict(traffic, answered_pairs(run), run.training),
        expected_verdict(traffic, tiers, expected)
        if expected
        else not_available("expected", f"router={router}: it follows no law"),
        correctness_verdict(errors, 8e-3),
        *([correctness_verdict(gradients, 2.7e-2, "gradients")] if run.training else []),
    ]


def _acknowledged(traffic: SampleTraffic) -> dict[str, Any] | None:
    """What TCP would have acknowledged, everything sent in one group."""
    cells = traffic.bytes.sum(axis=(0, 1, 2, 3))
    payload, size = int(cells.sum() - np.trace(cells)), len(cells)
    if size == 1:
        return None
    messages = traffic.collectives * size * (size - 1)
    group = {"ranks": list(range(size)), "payload_bytes": payload, "messages": messages}
    groups = [{**group, "acked_bytes": payload + 144 * messages}]
    return {"message_bytes": 96, "answer_bytes": 48, "seconds": 0.02, "groups": groups}


def _errors(layer: int, training: bool) -> dict[str, Any]:
    errors: dict[str, Any] = {"layer": layer, "routed_error": 1e-3, "hidden_error": 2e-3}
    if training:
        errors |= {"gradient_error": 4e-3, "worst_gradient": "experts.down, rank 0"}
    return errors


def _interface(node: int) -> dict[str, Any]:
    """What a host's interface saw, as comm.interfaces has it."""
    words = {"host": f"host {node}", "machine": f"machine {node}", "interface": "eth0"}
    sent = {"sent_bytes": 1003, "received_bytes": 1004, "counted_bytes": 1000, "bound_bytes": 10}
    return {**words, "own": True, **sent, "resent_bytes": 0}


def _placed(run: RunShape) -> dict[str, Any]:
    return {
        "num_redundant_experts": [len(slots) - run.num_experts for slots in run.slot_rank],
        "contiguous": {"by_rank_max_over_mean": 1.421, "by_expert_max_over_mean": 2.5},
        "placed": {"by_rank_max_over_mean": 1.034, "by_expert_max_over_mean": 1.75},
        "moved_experts": len(run.moves),
        "moved_bytes": len(run.moves) * run.expert_bytes // run.expert_tp,
    }


def _manifest(
    run: RunShape,
    ranks_per_node: int,
    router: str,
    placement: str,
    latent: int | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    about = {
        "hidden_size": 256,
        "latent_size": latent,
        "num_experts": run.num_experts,
        "top_k": run.top_k,
        "num_moe_layers": run.num_layers,
    }
    wire = {
        "dispatch": run.wire_dispatch,
        "combine": run.wire_combine,
        "backward": run.wire_backward,
    }
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
        "staging": None,
        "hosts": ["node0"],
        "world_size": run.world_size,
        "num_nodes": run.world_size // ranks_per_node,
        "node_of_rank": list(run.node_of_rank),
        "node_source": "topology.ranks_per_node",
        "config": {
            "ep_size": run.ep_size,
            "expert_tp": run.expert_tp,
            "expert_tp_mode": run.expert_tp_mode,
            "mode": "training" if run.training else "inference",
            "chunks": run.chunks,
            "dispatcher": {
                "name": run.dispatcher,
                "capacity_factor": run.capacity_factor,
                "renormalize": False,
                "deduplicate": run.deduplicate,
            },
            "hardware": {
                "name": "a_rack",
                "scale_up_GBps": 900.0,
                "scale_out_GBps": 50.0,
                "nics_per_rank": 0.5,
                "oversubscription": 2.0,
            },
        },
        "shape": {**K3, **about},
        "full_shape": {**K3, "latent_size": latent and 3584, "top_k": run.top_k},
        "model": "kimi_k3",
        "scale": "laptop",
        "router": router,
        "router_notes": list(notes),
        "placement": placement,
        "dispatcher": run.dispatcher,
        "wire": wire,
        "dtype": "fp32",
        "tokens_per_rank": list(run.tokens_per_rank),
        "steps": 1,
        "warmup": 1,
        "seed": 0,
        "routing_sha256": "00" * 32,
        "environment": {},
    }
