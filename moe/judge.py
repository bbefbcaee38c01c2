"""Rank 0 after a run: the logs of all ranks held against every prediction, and made a record.

logs --> counted traffic --+
     --> topk_ids -------- + --> exact, conserved, expected, headline, conventions --+
     --> kernel's counters ----> kernel ---------------------------------------------+
     --> layer samples --------> dense reference ------------------------------------+--> run.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comm.analytic.conventions import conventions_of_run
from comm.analytic.headline import Headline, headline_of_run
from comm.analytic.law import NoLaw
from comm.analytic.oracle import ExactTraffic, exact_traffic
from comm.analytic.paths import answered_pairs
from comm.analytic.reach import expected_reach, reached
from comm.analytic.run import RunShape
from comm.analytic.traffic import ExpectedTraffic, expected_traffic
from comm.interfaces import between_hosts, interfaces_verdict
from comm.meter import Traffic
from comm.reconcile import reconcile
from comm.report.record import RunInputs, build_record, differing
from comm.verdict import (
    Verdict,
    conserved_verdict,
    correctness_verdict,
    exact_verdict,
    exit_status,
    expected_verdict,
    not_available,
)
from moe.check import Errors, bounds, output_errors, wire_errors
from moe.measure import RankLog
from moe.placed import placement_report
from moe.plan import Plan
from moe.routings import Case, Routing


@dataclass(frozen=True)
class Judgement:
    """record: the run.json dictionary; traffic: what the other files are made of
    arrays: what else belongs into traffic.npz (docs/run_record.md)
    """

    record: dict[str, Any]
    traffic: Traffic
    arrays: dict[str, np.ndarray]

    @property
    def status(self) -> int:
        return self.record["status"]


def judge(
    plan: Plan,
    logs: Sequence[RankLog],
    case: Case,
    gradients: Sequence[Errors],
    manifest: Mapping[str, Any],
    folder: Path,
    progress: Callable[[], None] = lambda: None,
    report_html: str = "off",
) -> Judgement:
    """Hold a run against its predictions. `progress` is called after each reference layer.

    gradients: errors of each layer's gradients, in training
    report_html: what becomes of it, for the record
    """
    traffic = Traffic.assemble([log.meter for log in logs])
    run, routing = case.run, case.routing
    tiers = plan.topology.tiers()
    exact = exact_traffic(run, routing.topk_ids, routing.slots)
    expected, reason = _expected(plan, run)
    errors = output_errors(plan, logs, case, progress)
    limits = bounds(plan)
    sent = traffic.bytes.sum(axis=(0, 1, 2, 3))
    kernel = reconcile([log.kernel for log in logs], [log.meter.carried for log in logs], sent)
    hosts = between_hosts([log.seen for log in logs], sent, traffic.collectives)
    expert_rows = _expert_rows(routing, plan.shape.num_experts)
    verdicts = [
        exact_verdict(traffic, exact),
        conserved_verdict(traffic, answered_pairs(run), plan.training),
        not_available("expected", reason)
        if expected is None
        else expected_verdict(traffic, tiers, expected),
        *_correctness(plan, errors, gradients, limits),
        kernel.verdict,
        *([interfaces_verdict(hosts, manifest["backend"])] if hosts else []),
    ]
    record = build_record(
        RunInputs(
            manifest={**manifest, "routing_sha256": routing.sha256},
            traffic=traffic,
            exact=exact,
            expected=expected,
            tiers=tiers,
            verdicts=verdicts,
            headline=_headline(plan, run, traffic, exact),
            expert_rows=expert_rows,
            status=exit_status(verdicts),
            result_dir=str(folder),
            seconds={
                "experts": max(log.experts_seconds for log in logs),
                "step": max(log.step_seconds for log in logs),
            },
            correctness=_by_layer(errors, gradients),
            correctness_bound=limits[0] if errors else None,
            gradient_bound=limits[1] if gradients else None,
            conventions=[
                asdict(one) for one in conventions_of_run(run, routing.topk_ids, routing.slots)
            ],
            choices={
                "possible": routing.topk_ids.size,
                "chosen": int((routing.topk_ids >= 0).sum()),
                "dropped": sum(log.num_dropped for log in logs),
                "predicted_dropped": int((routing.topk_ids >= 0).sum() - case.kept.sum()),
            },
            wire_errors=wire_errors(plan, logs),
            placement=placement_report(run, routing) if plan.replicates else None,
            kernel=kernel.summary,
            interfaces=hosts,
            fan_out=_fan_out(plan, run, routing),
            report_html=report_html,
        )
    )
    arrays = {
        "differing": differing(traffic, exact),
        "expert_choices": expert_rows,
        "seconds": traffic.seconds,
        "acked": kernel.acked,
        "acked_expected": kernel.expected,
    }
    there = {name: array for name, array in arrays.items() if array is not None}
    return Judgement(record, traffic, there)


def _expected(plan: Plan, run: RunShape) -> tuple[ExpectedTraffic | None, str]:
    """The law of the run's router, or why none is known."""
    law, config = plan.routing.law, plan.config
    if isinstance(law, NoLaw):
        return None, f"router={config.router.name}: {law.reason}"
    found = expected_traffic(run, law, _active_tokens(plan))
    if isinstance(found, NoLaw):
        return None, found.reason
    return found, ""


def _active_tokens(plan: Plan) -> np.ndarray:
    """[steps, L, R] tokens that chose any expert"""
    return np.stack(
        [
            np.stack([plan.routing.active_tokens(step, layer) for layer in range(plan.num_layers)])
            for step in range(plan.config.steps)
        ]
    )


def _fan_out(plan: Plan, run: RunShape, routing: Routing) -> dict[str, Any]:
    """Tokens by the number of ranks that they reach, counted and in closed form."""
    law = plan.routing.law
    active = None if isinstance(law, NoLaw) else _active_tokens(plan)
    expected = expected_reach(run, law, active)
    unknown = isinstance(expected, NoLaw)
    return {
        "tokens": reached(run, routing.topk_ids, routing.slots),
        "expected": None if unknown else expected,
        "reason": expected.reason if unknown else "",
    }


def _headline(plan: Plan, run: RunShape, traffic: Traffic, exact: ExactTraffic) -> Headline:
    forward, dispatch = traffic.directions.index("forward"), traffic.phases.index("dispatch")
    sent = traffic.bytes[:, forward, dispatch].sum(axis=0)  # [kind, src, dst]
    rows = traffic.rows[:, forward, dispatch].sum(axis=0)
    by_kind = dict(zip(traffic.kinds, sent, strict=True))
    return headline_of_run(run, exact, by_kind, rows, plan.shape.hidden_size)


def _expert_rows(routing: Routing, num_experts: int) -> np.ndarray:
    """int64 [L, E], choices of each logical expert, all tokens and steps"""
    by_layer = routing.topk_ids.swapaxes(0, 1)
    return np.stack([np.bincount(layer[layer >= 0], minlength=num_experts) for layer in by_layer])


def _by_layer(errors: Sequence[Errors], gradients: Sequence[Errors]) -> list[dict[str, Any]]:
    """Errors of outputs and, in training, the worst of each layer's gradients, by name."""
    if not gradients:
        return [dict(entry) for entry in errors]
    return [
        {**entry, "gradient_error": max(found.values()), "worst_gradient": next(iter(found))}
        for entry, found in zip(errors, gradients, strict=True)
    ]


def _correctness(
    plan: Plan,
    errors: Sequence[Errors],
    gradients: Sequence[Errors],
    limits: tuple[float, float],
) -> list[Verdict]:
    """Of outputs and, in training, of gradients."""
    names = ["correctness"] + (["gradients"] if plan.training else [])
    if not plan.config.reference:
        return [not_available(name, "reference=false: nothing was compared") for name in names]
    outputs = {
        f"layer {entry['layer']} {output}": entry[f"{output}_error"]
        for entry in errors
        for output in ("routed", "hidden")
    }
    verdicts = [correctness_verdict(outputs, limits[0])]
    if plan.training:
        by_name = {
            f"layer {layer} {name}": error
            for layer, found in enumerate(gradients)
            for name, error in found.items()
        }
        verdicts.append(correctness_verdict(by_name, limits[1], "gradients"))
    return verdicts
