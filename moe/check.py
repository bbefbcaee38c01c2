"""Outputs and gradients of a run against the dense reference, layer by layer.

Rank 0 has every rank's samples; gradients of experts stay where they are until their layer is
compared, so that no more than one layer of them lies in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from comm.dispatch import FORWARDING
from comm.wire import WIRE_FORMATS, quantisation_error
from comm.world import World
from moe.experts import latent_weights
from moe.measure import LayerSample, RankLog, sampled_step
from moe.plan import Plan
from moe.reference import (
    gradient_bound,
    gradient_errors,
    reference_gradients,
    reference_layer,
    relative_error,
)
from moe.routings import Case
from moe.training import LayerGradients

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
ARITHMETIC_FACTOR = 8.0  # see error_bound

Errors = dict[str, float]


def error_bound(wires: Sequence[str], dtype: str, top_k: int) -> float:
    """Largest relative L2 error of a token that rounding may cause.

    wires: the format of each rounding on a row's way, out and back
    The gated experts and the norm amplify the rounding of the wire, the more the fewer experts
    there are to average over, and the arithmetic rounds after each of several steps. The largest
    error seen in 360 random small runs was 0.64 of this bound. One expert's row lost or counted
    twice, or its weight doubled, moves a token by about one part in the root of top_k: with four
    bits both ways the bound is wider than that, and says little.
    """
    rounding = sum(WIRE_FORMATS[name].row_error for name in wires)
    return 2 * (1 + 2 / top_k) * rounding + ARITHMETIC_FACTOR * UNIT_ROUNDOFF[dtype]


def bounds(plan: Plan) -> tuple[float, float]:
    """Largest relative error that rounding may cause in outputs, and in gradients."""
    config, wire = plan.config, plan.config.wire
    sharded = config.expert_tp > 1
    gathered = sharded and config.expert_tp_mode == "gather"  # rows are rounded once more
    back = 1 + (config.dispatcher.name in FORWARDING) + sharded  # and answers at each hop
    wires = [wire.dispatch] * (1 + gathered) + [wire.combine] * back
    row_errors = [WIRE_FORMATS[name].row_error for name in [*wires, *[wire.backward] * back]]
    return (
        error_bound(wires, config.dtype, plan.shape.top_k),
        gradient_bound(row_errors, UNIT_ROUNDOFF[config.dtype]),
    )


def output_errors(
    plan: Plan,
    logs: Sequence[RankLog],
    case: Case,
    progress: Callable[[], None] = lambda: None,
) -> list[Errors]:
    """Errors of each layer in one step against the reference, fed what was recorded."""
    errors = []
    for layer in range(plan.num_layers if plan.config.reference else 0):
        samples = [log.samples[layer] for log in logs]
        reference = reference_layer(
            plan.shape,
            plan.config.seed,
            layer,
            _joined(samples, "x"),
            _choices(plan, case, layer),
            _joined(samples, "topk_weights"),
            plan.dtype,
            _kept(plan, case, layer),
            plan.config.dispatcher.renormalize,
        )
        errors.append(
            {
                "layer": layer,
                "routed_error": relative_error(_joined(samples, "routed"), reference.routed),
                "hidden_error": relative_error(_joined(samples, "hidden"), reference.hidden),
            }
        )
        progress()
    return errors


def all_gradient_errors(
    plan: Plan,
    world: World,
    gradients: Mapping[int, LayerGradients],
    logs: Sequence[RankLog],
    case: Case | None,
) -> list[Errors]:
    """For each layer the errors of all gradients by name, on rank 0; a collective.

    gradients: of this rank, by layer; logs and case only rank 0 has
    """
    errors: list[Errors] = []
    for layer in range(plan.num_layers if plan.training and plan.config.reference else 0):
        parts = world.gather(gradients[layer])
        if case is not None:
            errors.append(_gradient_errors(plan, layer, parts, logs, case))
    return errors


def _gradient_errors(
    plan: Plan,
    layer: int,
    parts: Sequence[LayerGradients],
    logs: Sequence[RankLog],
    case: Case,
) -> Errors:
    samples = [log.samples[layer] for log in logs]
    reference = reference_gradients(
        plan.shape,
        plan.config.seed,
        layer,
        _joined(samples, "x"),
        _choices(plan, case, layer),
        _joined(samples, "grad_hidden"),
        plan.dtype,
        _kept(plan, case, layer),
        plan.config.dispatcher.renormalize,
        _joined(samples, "topk_weights") if plan.weights_given else None,
    )
    measured = {"x": _joined(samples, "grad_x")} | parts[0].replicated
    wanted = {"x": reference.x} | reference.replicated
    if plan.weights_given:  # constants: the router has no say
        del measured["router.weight"], wanted["router.weight"]
    placement, shards = logs[0].placements[layer], plan.config.expert_tp
    for rank, part in enumerate(parts):
        position = plan.lane_of(rank).index(rank)
        experts = placement.local_experts(position).tolist()
        if not experts:
            continue
        stacked = reference.stacked(experts, (rank % shards, shards))
        for name in ("gate_up", "down"):
            measured[f"experts.{name}, rank {rank}"] = getattr(part, name)
            wanted[f"experts.{name}, rank {rank}"] = getattr(stacked, name)
    return gradient_errors(measured, wanted, {"router.weight": reference.router_floor})


def wire_errors(plan: Plan, logs: Sequence[RankLog]) -> dict[str, float]:
    """Relative rms error that each format of the wire makes in this run's own rows: dispatched
    ones, and combined ones as far as they are known, after the sum over ranks."""
    if not plan.config.reference:
        return {}
    samples = [log.samples[0] for log in logs]
    rows = _joined(samples, "x").float()
    if plan.shape.latent_size is not None:
        rows = rows @ latent_weights(plan.shape, plan.config.seed, 0)[0].T
    wire = plan.config.wire
    errors = {
        "dispatch": quantisation_error(WIRE_FORMATS[wire.dispatch], rows.to(plan.dtype)),
        "combine": quantisation_error(WIRE_FORMATS[wire.combine], _joined(samples, "routed")),
    }
    if plan.training:
        gradients = _joined(samples, "grad_hidden")
        errors["backward"] = quantisation_error(WIRE_FORMATS[wire.backward], gradients)
    return errors


def _joined(samples: Sequence[LayerSample], name: str) -> Tensor:
    """All ranks' tokens of one part of a sample."""
    return torch.cat([getattr(sample, name) for sample in samples])


def _choices(plan: Plan, case: Case, layer: int) -> Tensor:
    """int64 [tokens, K] of the step that was sampled"""
    step = sampled_step(layer, plan.config.steps)
    return torch.from_numpy(case.routing.topk_ids[step, layer].astype(np.int64))


def _kept(plan: Plan, case: Case, layer: int) -> Tensor:
    return torch.from_numpy(case.kept[sampled_step(layer, plan.config.steps), layer])
