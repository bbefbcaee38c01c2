"""A prediction as plain values: what the page shows, and what a file or a table of a sweep keeps.

flat       one number a name: of a token, a rank, a layer, a step
phases     bytes by phase, kind and tier
busiest    the largest load of a rank
time       the least time of a layer, and what binds it
crossovers where another choice would begin to pay
conventions  what other programs would call the bytes
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from comm.analytic.conventions import expected_conventions
from comm.analytic.paths import TWO_HOPS
from comm.analytic.project import TIERS, bound_in_words, tokens_at_bandwidth
from comm.analytic.rows import PAYLOAD_KINDS, payload_bytes
from moe.predict_crossovers import crossovers

if TYPE_CHECKING:
    from moe.prediction import Prediction

HEADLINE_BYTES = 2  # of a value, in top_k x tokens x hidden x 2 B
NAMES = {"ids_weights": ("ids", "weights"), "counts": ("counts",), "padding": ("padding",)}


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """All figures; only `setting` and `reason` where the router has no law."""
    setting = _setting(prediction)
    if prediction.reason is not None:
        return {**setting, "reason": prediction.reason}
    return {
        **setting,
        "reason": None,
        **_bytes(prediction),
        **_messages(prediction),
        **_time(prediction),
        "phases": _phases(prediction),
        "busiest": [asdict(one) for one in prediction.busiest],
        "crossovers": crossovers(prediction),
        "conventions": _conventions(prediction),
    }


def _setting(prediction: Prediction) -> dict[str, Any]:
    """What was planned."""
    config, plan, run = prediction.config, prediction.plan, prediction.run
    nodes = Counter(plan.topology.node_of_rank)
    slots = sorted(set(map(len, run.slot_rank)))
    held = plan.placements[0].slots_per_rank
    return {
        "model": config.model.name,
        "scale": config.scale.name,
        "num_moe_layers": plan.num_layers,
        "num_experts": run.num_experts,
        "top_k": run.top_k,
        "hidden_size": plan.shape.hidden_size,
        "payload_width": run.width,
        "ranks": run.world_size,
        "ep_size": run.group_size,
        "expert_tp": run.expert_tp,
        "num_nodes": len(nodes),
        "ranks_per_node": max(nodes.values()),
        "smallest_node": min(nodes.values()),
        "tokens_per_rank": prediction.tokens / run.world_size,
        "most_tokens_per_rank": max(run.tokens_per_rank),
        "dispatcher": config.dispatcher.name,
        "deduplicate": config.dispatcher.deduplicate,
        "capacity_factor": config.dispatcher.capacity_factor,
        "router": config.router.name,
        "placement": config.placement.name,
        "slots": slots[-1],
        "slots_per_rank": dict(sorted(Counter(held.tolist()).items(), reverse=True)),
        "wire": asdict(config.wire),
        "mode": config.mode,
        "chunks": config.chunks,
        "hardware": config.hardware.name,
    }


def _bytes(prediction: Prediction) -> dict[str, Any]:
    """Network bytes of a token, a rank, a layer and a step, both ways; self rows left out."""
    run, ranks = prediction.run, prediction.num_ranks
    tokens, layers = max(prediction.tokens, 1), run.num_layers
    figures: dict[str, Any] = {"rounds": prediction.rounds}
    flow = prediction.traffic.flows[0]
    remote = prediction.traffic.scopes.index("remote")
    figures["rows_per_token"] = float(flow.rows_mean[:, remote].mean()) / run.num_steps / tokens
    figures["dropped_share"] = prediction.dropped_share
    for name, kinds in (("payload", PAYLOAD_KINDS), ("network", None)):
        total = prediction.of("remote", kinds=kinds)
        figures[f"{name}_bytes_per_token_layer"] = total.mean / tokens / layers
        figures[f"{name}_bytes_per_token_step"] = total.mean / tokens
        figures[f"{name}_bytes_per_rank_layer"] = total.mean / ranks / layers
        figures[f"{name}_bytes_per_rank_step"] = total.mean / ranks
        figures[f"{name}_std_per_rank_step"] = total.std / ranks
    for tier in TIERS:
        figures[f"{tier}_bytes_per_rank_step"] = prediction.of(tier).mean / ranks
        of_tier = prediction.of(tier, kinds=PAYLOAD_KINDS).mean
        figures[f"{tier}_payload_bytes_per_token_layer"] = of_tier / tokens / layers
    headline = run.top_k * prediction.plan.shape.hidden_size * HEADLINE_BYTES
    figures["headline_bytes_per_token_layer"] = headline
    figures["headline_bytes_per_rank_step"] = 2 * headline * tokens / ranks * layers
    most = max((one.rows / one.mean_rows for one in prediction.busiest), default=1.0)
    figures["busiest_over_mean"] = most
    return figures


def _phases(prediction: Prediction) -> list[dict[str, Any]]:
    """Bytes of the mean rank in the mean layer and step, by direction and phase."""
    share = prediction.num_ranks * prediction.run.num_layers
    found = []
    for direction in prediction.traffic.directions:
        for phase in prediction.traffic.phases:
            where = {"phases": (phase,), "directions": (direction,)}
            entry: dict[str, Any] = {"direction": direction, "phase": phase}
            for kind in PAYLOAD_KINDS:
                entry[kind] = prediction.of("remote", kinds=(kind,), **where).mean / share
            for name, kinds in NAMES.items():
                entry[name] = prediction.of("remote", kinds=kinds, **where).mean / share
            for tier in ("self", *TIERS):
                entry[tier] = prediction.of(tier, **where).mean / share
            total = prediction.of("remote", **where)
            entry["network"] = total.mean / share
            # Layers are independent: the deviation of one is that of all over their root.
            entry["network_std"] = total.std / share * prediction.run.num_layers**0.5
            entry["row_bytes"] = prediction.row_bytes(direction, phase)
            found.append(entry)
    return found


def _messages(prediction: Prediction) -> dict[str, Any]:
    """Messages with rows that a rank sends to other ranks, mean over ranks, and their mean size."""
    run = prediction.run
    nodes = np.array(prediction.plan.topology.node_of_rank)
    one_way = len(run.lanes[0]) - 1.0
    if run.dispatcher in TWO_HOPS:  # to a proxy in each other node, and to the ranks of the own
        ranks_at = [np.unique(nodes[list(lane)], return_counts=True)[1] for lane in run.lanes]
        one_way = sum(float((at * (at + len(at) - 2)).sum()) for at in ranks_at) / run.world_size
    of_phase = {
        "dispatch": one_way * run.shifts + (run.shifts - 1 if run.shifts > 1 else 0),
        "combine": one_way,
        "tp_gather": run.expert_tp - 1,
        "tp_reduce": run.expert_tp - 1,
    }
    traffic = prediction.traffic
    exchanges = len(traffic.directions) * run.num_layers * run.chunks
    number = exchanges * sum(of_phase[phase] for phase in traffic.phases)
    rows = tuple(kind for kind in traffic.kinds if kind != "counts")
    sent = prediction.of("remote", kinds=rows).mean / run.world_size
    return {
        "messages_per_rank_step": number,
        "mean_message_bytes": sent / number if number else 0.0,
    }


def _time(prediction: Prediction) -> dict[str, Any]:
    """The least time of a step, what binds it, and how many tokens a second it allows."""
    machine, rates = prediction.config.hardware, prediction.links
    figures: dict[str, Any] = {
        "scale_up_GBps": rates.GBps["scale_up"],
        "scale_out_GBps": rates.GBps["scale_out"],
        "card_GBps": machine.scale_out_GBps,
        "nics_per_rank": machine.nics_per_rank,
        "oversubscription": machine.oversubscription,
        "scale_up_domain": machine.scale_up_domain,
        "measured_ranks": rates.measured_ranks,
        "measured_GBps": dict(rates.measured_GBps),
        "unknown_rates": prediction.unknown_tiers,
    }
    if prediction.unknown_tiers:
        nothing = ("layer_us", "step_us", "bound", "binding_tier", "tokens_per_s")
        return figures | dict.fromkeys(nothing) | {"times": []}
    slowest = max(prediction.layer_times, key=lambda layer: sum(phase.us for phase in layer))
    step = prediction.step_us
    tokens = prediction.tokens / prediction.num_ranks
    binding = max(slowest, key=lambda phase: phase.bytes_us)
    return figures | {
        "layer_us": sum(phase.us for phase in slowest),
        "step_us": step,
        "bound": bound_in_words(slowest),
        "binding_tier": binding.tier,
        "tokens_per_s": prediction.tokens / step * 1e6 if step else None,
        "times": [
            {
                **asdict(phase),
                "bytes_us": phase.bytes_us,
                "bound": phase.bound,
                "tier": phase.tier,
                "us": phase.us,
                "tokens_at_bandwidth": tokens_at_bandwidth(phase, tokens),
            }
            for phase in slowest
        ],
    }


def _conventions(prediction: Prediction) -> list[dict[str, Any]]:
    """Numerators of a dispatch under uniform routing; none where nodes are not blocks."""
    run, nodes = prediction.run, prediction.plan.topology.node_of_rank
    per_node = max(Counter(nodes).values())
    blocks = all(node == rank // per_node for rank, node in enumerate(nodes))
    if not blocks or run.group_size < run.world_size or run.expert_tp > 1:
        return []
    row = sum(payload_bytes(run.wire_dispatch, run.width))
    return [
        asdict(one)
        for one in expected_conventions(
            run.world_size,
            per_node,
            run.num_experts,
            run.top_k,
            prediction.tokens / run.world_size,
            row,
        )
    ]
