"""job=pools: memory of the machine pool by pool, and what follows from it; no rank is started."""

from __future__ import annotations

import os
from typing import Any

from comm.analytic.buffers import low_latency_bytes, low_latency_tokens
from comm.analytic.caches import break_even_tokens, saved_share
from comm.analytic.pools import (
    context_that_outgrows,
    sequences_that_fit,
    sequences_that_outgrow,
    smallest,
)
from comm.analytic.weights import PLAIN_BYTES, SINGLE_BYTES, touched_experts
from comm.report.answer import LABEL, labelled_facts
from comm.report.console import WIDTH, print_lines
from comm.report.layout import labelled
from comm.report.pools_page import pools_page
from moe.attention import UnknownShape
from moe.hardware import GB, GIB, UnknownHardware
from moe.pools import (
    MemoryPlan,
    memories,
    plan_memory,
    rank_of,
    served_sequences,
    smallest_number,
    weights_of,
    with_reading,
)
from moe.settings import Config, ConfigError
from moe.version import VERSION

BATCHES = (1, 8, 32, 128, 512, 4096)


def launch(config: Config) -> int:
    """Print the page; always 0."""
    try:
        facts = facts_of(config)
    except (UnknownShape, UnknownHardware) as error:
        raise ConfigError(str(error)) from error
    shape, hardware = config.model, config.hardware
    about = {
        "model": f"{shape.name}: {shape.num_moe_layers} x {shape.num_experts} experts,"
        f" {facts['stored']['parameters']:,} parameters",
        "machine": f"{hardware.name} x {config.world_size}",
    }
    head = labelled(f"WideEP {VERSION}", "pools: no ranks were started", WIDTH, LABEL, "bold")
    print_lines([*head, *labelled_facts(about, WIDTH), *pools_page(facts, WIDTH)])
    return 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank prints, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0


def facts_of(config: Config) -> dict[str, Any]:
    """Everything on the page as plain values."""
    plan = plan_memory(config)
    return {
        "ranks": plan.ranks,
        "num_experts": config.model.num_experts,
        "slots": max(plan.slots),
        "tensor_parallel": plan.tensor_parallel,
        "reading": plan.reading,
        "memory_bytes": plan.rank.memory,
        "stored": _stored(config),
        "rank": _rank(plan),
        "arrangements": _arrangements(config, plan),
        "smallest": _smallest(config),
        "context": plan.context,
        "capacity": plan.capacity,
        "sequences": plan.sequences,
        "sequence": _sequence(config, plan),
        "outgrows": _outgrows(plan),
        "offload": {
            "verdict": plan.offload.verdict,
            "missing": plan.offload.missing,
            "free": max(0.0, plan.rank.left - plan.cached_bytes),
            "seconds": plan.offload.seconds,
            "enough": plan.smallest if plan.rank.left < 0 else None,
        },
        "tiers": _tiers(config, plan),
        "reads": _reads(config),
        "buffer": _buffer(config),
    }


def _stored(config: Config) -> dict[str, Any]:
    weights = weights_of(config.model)
    experts, matrices = weights.expert_format, weights.matrix_format
    parts = {
        "routed experts, packed": (weights.routed, experts.bits, weights.packed_bytes),
        "their block scales": (0, experts.scale_bits / experts.block, weights.scales_bytes),
        "other matrices": (
            weights.matrices,
            matrices.bits_per_weight,
            weights.matrices * matrices.bits_per_weight / 8,
        ),
        "tables, router, norms": (weights.plain, 8 * PLAIN_BYTES, weights.plain * PLAIN_BYTES),
        "kept in fp32": (weights.single, 8 * SINGLE_BYTES, weights.single * SINGLE_BYTES),
    }
    shown = {
        name: {"parameters": parameters, "bits": bits, "bytes": num_bytes}
        for name, (parameters, bits, num_bytes) in parts.items()
        if num_bytes
    }
    published = config.model.weights.total_parameters
    return {"parameters": weights.parameters, "published": published, "parts": shown}


def _rank(plan: MemoryPlan) -> dict[str, float]:
    states = plan.rank_sequences * plan.rank_cache.constant_bytes
    return {
        "routed experts": plan.rank.routed,
        "everything else": plan.rank.rest,
        "caches": plan.cached_bytes - states,
        "states": states,
        "buffers": plan.rank.buffers,
        "activations": plan.rank.activations,
        "reserve": plan.rank.reserve,
    }


def _arrangements(config: Config, plan: MemoryPlan) -> list[dict[str, Any]]:
    """The same ranks, with attention shared by more and more of them."""
    ranks, found = plan.ranks, []
    for shared in (1, 2, 4, 8, 16, 32, 64):
        if ranks % shared:
            continue
        rank = rank_of(config, ranks, shared)
        found.append(
            {
                "tensor_parallel": shared,
                "data_parallel": ranks // shared,
                "experts": max(plan.slots),
                "weights": rank.routed + rank.rest,
                "left": rank.left,
                "sequences": served_sequences(config, ranks, shared),
            }
        )
    return found


def _smallest(config: Config) -> dict[str, Any]:
    """For each reading of the memory."""
    stored = weights_of(config.model).stored_bytes
    return {
        name: {
            "bytes": num_bytes,
            "weights": smallest(stored, num_bytes),
            "all": smallest_number(with_reading(config, num_bytes)),
        }
        for name, num_bytes in memories(config.hardware).items()
    }


def _sequence(config: Config, plan: MemoryPlan) -> dict[str, float]:
    linear, cache = config.model.attention.linear_layers, plan.cache
    return {
        "token_bytes": cache.token_bytes,
        "constant_bytes": cache.constant_bytes,
        "bytes": cache.sequence_bytes(plan.context),
        "break_even": break_even_tokens(cache, linear),
        "saved": saved_share(cache, linear, plan.context) if linear else 0.0,
    }


def _outgrows(plan: MemoryPlan) -> dict[str, Any]:
    """Sequences, and tokens of those at hand, that keep more than weights or than what is left."""
    of = max(1, plan.sequences)
    groups = plan.ranks // plan.tensor_parallel
    on_rank = max(1, -(-of // groups))
    stored, left = plan.weights.stored_bytes, plan.rank.left
    found: dict[str, Any] = {
        "weights": {
            "of": of,
            "sequences": sequences_that_outgrow(stored, plan.cache, plan.context),
            "context": context_that_outgrows(stored, plan.cache, of),
        },
        "left": None,
    }
    if left > 0:
        found["left"] = {
            "of": of,
            "sequences": plan.capacity + 1,
            "context": context_that_outgrows(left, plan.rank_cache, on_rank),
        }
    return found


def _tiers(config: Config, plan: MemoryPlan) -> list[dict[str, Any]]:
    """What lower tiers would hold, and the time to bring one sequence's part to its rank."""
    hardware, groups = config.hardware, plan.ranks // plan.tensor_parallel
    each = plan.rank_cache.sequence_bytes(plan.context)
    found = []
    for name, room_GB, rate_GBps in (
        ("host memory", hardware.host_memory_GB, hardware.host_GBps),
        ("NVMe", hardware.nvme_GB, hardware.nvme_GBps),
    ):
        if room_GB is not None:
            found.append(
                {
                    "name": name,
                    "bytes": room_GB * GB,
                    "sequences": sequences_that_fit(room_GB * GB, plan.rank_cache, plan.context)
                    * groups,
                    "seconds": rate_GBps and each / (rate_GBps * GB),
                }
            )
    return found


def _reads(config: Config) -> list[dict[str, Any]]:
    weights, shape = weights_of(config.model), config.model
    rate = config.hardware.memory_bandwidth_GBps
    found = []
    for tokens in BATCHES:
        num_bytes = weights.read_bytes(tokens, shape.top_k)
        found.append(
            {
                "tokens": tokens,
                "touched": touched_experts(shape.num_experts, shape.top_k, tokens),
                "bytes": num_bytes,
                "seconds": rate and num_bytes / config.world_size / rate / 1e9,
            }
        )
    return found


def _buffer(config: Config) -> dict[str, Any]:
    slots = config.model.num_experts + config.pools.redundant_experts
    width, tokens = config.model.payload_width, max(config.tokens_per_rank)
    budget = config.pools.buffer_GiB
    return {
        "bytes": low_latency_bytes(slots, tokens, width),
        "tokens": tokens,
        "budget_GiB": budget,
        "most": low_latency_tokens(slots, width, budget * GIB),
    }
