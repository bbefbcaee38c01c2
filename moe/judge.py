"""Rank 0 after a run: the logs of all ranks held against every prediction, and made a record.

logs --> counted traffic --+
     --> topk_ids -------- + --> exact, conserved, expected, headline --+
     --> layer samples --------> dense reference -----------------------+--> run.json
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comm.analytic.headline import Headline, headline
from comm.analytic.oracle import count_rows, exact_traffic
from comm.analytic.owners import expert_owner
from comm.analytic.traffic import ExpectedTraffic, expected_traffic
from comm.meter import KINDS, PHASES, Traffic
from comm.report.record import RunInputs, build_record
from comm.topology import LinkTier
from comm.verdict import (
    Verdict,
    conserved_verdict,
    correctness_verdict,
    exact_verdict,
    exit_status,
    expected_verdict,
    not_available,
)
from comm.wire import WIRE_FORMATS
from moe.measure import RankLog, sampled_step
from moe.plan import Plan
from moe.reference import reference_layer, relative_error
from moe.synthetic import ROUTERS

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
ARITHMETIC_FACTOR = 8.0  # see error_bound


@dataclass(frozen=True)
class Routing:
    """Who chose what, all ranks together, tokens in global order.

    topk_ids: int32 [steps, L, tokens, K]; topk_weights: fp32, same shape
    """

    topk_ids: np.ndarray
    topk_weights: np.ndarray

    @classmethod
    def gather(cls, logs: Sequence[RankLog]) -> Routing:
        return cls(
            np.concatenate([log.topk_ids for log in logs], axis=2),
            np.concatenate([log.topk_weights for log in logs], axis=2),
        )

    @property
    def sha256(self) -> str:
        """Equal on any number of ranks and any machine, for a synthetic router."""
        return hashlib.sha256(self.topk_ids.astype("<i4").tobytes()).hexdigest()


@dataclass(frozen=True)
class Judgement:
    """record: the run.json dictionary; traffic and routing: what the other files are made of"""

    record: dict[str, Any]
    traffic: Traffic
    routing: Routing

    @property
    def status(self) -> int:
        return self.record["status"]


def judge(
    plan: Plan,
    logs: Sequence[RankLog],
    manifest: Mapping[str, Any],
    folder: Path,
    progress: Callable[[], None] = lambda: None,
) -> Judgement:
    """Hold a run against its predictions. `progress` is called after each reference layer."""
    traffic = Traffic.assemble([log.meter for log in logs])
    routing = Routing.gather(logs)
    tiers = plan.topology.tiers()
    expert_rank = _expert_rank(plan)
    slots_per_rank = np.stack(
        [np.bincount(layer, minlength=plan.topology.world_size) for layer in expert_rank]
    )
    exact = exact_traffic(
        plan.config.dispatcher.name,
        routing.topk_ids,
        plan.token_rank,
        expert_rank,
        slots_per_rank,
        plan.config.wire.dispatch,
        plan.config.wire.combine,
        plan.shape.payload_width,
    )
    expected = _expected(plan, tiers, slots_per_rank)
    errors = _errors(plan, logs, routing, progress)
    bound = error_bound(
        plan.config.wire.dispatch, plan.config.wire.combine, plan.config.dtype, plan.shape.top_k
    )
    verdicts = [
        exact_verdict(traffic, exact),
        conserved_verdict(traffic),
        _expected_verdict(plan, traffic, tiers, expected),
        _correctness_verdict(plan, errors, bound),
    ]
    record = build_record(
        RunInputs(
            manifest={**manifest, "routing_sha256": routing.sha256},
            traffic=traffic,
            exact=exact,
            expected=expected,
            tiers=tiers,
            verdicts=verdicts,
            headline=_headline(plan, traffic, routing, tiers),
            expert_rows=_expert_rows(routing, plan.shape.num_experts),
            status=exit_status(verdicts),
            result_dir=str(folder),
            seconds={
                "experts": max(log.experts_seconds for log in logs),
                "step": max(log.step_seconds for log in logs),
            },
            correctness=errors,
            correctness_bound=bound if errors else None,
        )
    )
    return Judgement(record, traffic, routing)


def error_bound(wire_dispatch: str, wire_combine: str, dtype: str, top_k: int) -> float:
    """Largest relative L2 error of a token that rounding may cause.

    The gated experts and the norm amplify the rounding of the wire, the more the fewer experts
    there are to average over, and the arithmetic rounds after each of several steps. The largest
    error seen in 360 random small runs was 0.64 of this bound. One expert's row lost or counted
    twice, or its weight doubled, moves a token by about one part in the root of top_k.
    """
    wires = WIRE_FORMATS[wire_dispatch].row_error + WIRE_FORMATS[wire_combine].row_error
    return 2 * (1 + 2 / top_k) * wires + ARITHMETIC_FACTOR * UNIT_ROUNDOFF[dtype]


def routing_file(plan: Plan, routing: Routing) -> dict[str, Any]:
    """The contents of routing.npz, by name (docs/run_record.md)."""
    placement, num_layers = plan.placement, plan.num_layers
    padded = np.append(placement.logical_to_physical, -1)  # -1 stays -1
    return {
        "topk_ids": routing.topk_ids,
        "topk_weights": routing.topk_weights,
        "token_rank": plan.token_rank,
        "slots": padded[routing.topk_ids].astype(np.int32),
        "slot_rank": np.tile(placement.slot_rank, (num_layers, 1)),
        "physical_to_logical_map": np.tile(placement.physical_to_logical, (num_layers, 1)),
        "header": {
            "model": plan.config.model.name,
            "num_experts": plan.shape.num_experts,
            "top_k": plan.shape.top_k,
            "ranks": plan.topology.world_size,
            "source": f"router={plan.config.router.name} seed={plan.config.seed}",
        },
    }


def _expert_rank(plan: Plan) -> np.ndarray:
    """int64 [L, E], who must own each expert: predicted from the placement's name alone"""
    owner = expert_owner(
        plan.config.placement.name, plan.shape.num_experts, plan.topology.world_size
    )
    return np.tile(owner, (plan.num_layers, 1))


def _expected(plan: Plan, tiers: np.ndarray, slots_per_rank: np.ndarray) -> ExpectedTraffic | None:
    """The law of the run's router, where one is known; "uniform" is the only one so far."""
    if ROUTERS[plan.config.router.name].law != "uniform":
        return None
    return expected_traffic(
        plan.config.dispatcher.name,
        (plan.tokens_per_rank * plan.config.steps).tolist(),
        slots_per_rank,
        tiers,
        plan.shape.top_k,
        plan.config.steps,
        plan.config.wire.dispatch,
        plan.config.wire.combine,
        plan.shape.payload_width,
    )


def _expected_verdict(
    plan: Plan, traffic: Traffic, tiers: np.ndarray, expected: ExpectedTraffic | None
) -> Verdict:
    if expected is None:
        router = plan.config.router.name
        return not_available("expected", f"router={router} follows no law known in closed form")
    return expected_verdict(traffic, tiers, expected)


def _headline(plan: Plan, traffic: Traffic, routing: Routing, tiers: np.ndarray) -> Headline:
    remote = tiers != LinkTier.SELF
    dispatch = PHASES.index("dispatch")
    sent = traffic.bytes[:, 0, dispatch].sum(axis=0)[:, remote].sum(axis=1)  # [kind]
    copies = count_rows(
        "all_to_all",
        routing.topk_ids,
        plan.token_rank,
        _expert_rank(plan),
        plan.topology.world_size,
    )
    return headline(
        remote_bytes=dict(zip(KINDS, sent.tolist(), strict=True)),
        remote_rows=int(traffic.rows[:, 0, dispatch][:, remote].sum()),
        remote_copies=int(copies[:, remote].sum()),
        num_tokens=int(plan.tokens_per_rank.sum()) * plan.config.steps,
        num_layers=plan.num_layers,
        top_k=plan.shape.top_k,
        hidden_size=plan.shape.hidden_size,
        width=plan.shape.payload_width,
    )


def _expert_rows(routing: Routing, num_experts: int) -> np.ndarray:
    """int64 [L, E], choices of each logical expert, all tokens and steps"""
    by_layer = routing.topk_ids.swapaxes(0, 1)
    return np.stack([np.bincount(layer[layer >= 0], minlength=num_experts) for layer in by_layer])


def _errors(
    plan: Plan, logs: Sequence[RankLog], routing: Routing, progress: Callable[[], None]
) -> list[dict[str, float]]:
    """Errors of each layer in one step against the dense reference, fed what was recorded."""
    errors = []
    for layer in range(plan.num_layers if plan.config.reference else 0):
        samples = [log.samples[layer] for log in logs]
        topk_ids = routing.topk_ids[sampled_step(layer, plan.config.steps), layer]
        reference = reference_layer(
            plan.shape,
            plan.config.seed,
            layer,
            torch.cat([sample.x for sample in samples]),
            torch.from_numpy(topk_ids.astype(np.int64)),
            torch.cat([sample.topk_weights for sample in samples]),
            plan.dtype,
        )
        routed = torch.cat([sample.routed for sample in samples])
        hidden = torch.cat([sample.hidden for sample in samples])
        errors.append(
            {
                "layer": layer,
                "routed_error": relative_error(routed, reference.routed),
                "hidden_error": relative_error(hidden, reference.hidden),
            }
        )
        progress()
    return errors


def _correctness_verdict(plan: Plan, errors: list[dict[str, float]], bound: float) -> Verdict:
    if not plan.config.reference:
        return not_available("correctness", "reference=false: outputs were not compared")
    by_name = {
        f"layer {entry['layer']} {output}": entry[f"{output}_error"]
        for entry in errors
        for output in ("routed", "hidden")
    }
    return correctness_verdict(by_name, bound)
