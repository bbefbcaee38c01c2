"""Memory of a configuration: its model's numbers put into the arithmetic of comm.analytic.

    shape --> Weights, Cache      hardware --> memory, lower tiers      both, R ranks --> MemoryPlan

Raises UnknownShape or UnknownHardware, in one line, for a value that nobody has written down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from comm.analytic.buffers import activation_bytes, low_latency_bytes, rank_major_bytes
from comm.analytic.caches import Cache, linear_state_bytes
from comm.analytic.pools import Offload, Rank, offload, sequences_that_fit, smallest_fitting
from comm.analytic.weights import Format, Weights, slots_of
from moe.attention import require
from moe.hardware import GB, GIB, HardwareConfig
from moe.model import ModelShape
from moe.parameters import count, expert
from moe.settings import MAX_RANKS, Config


@dataclass(frozen=True)
class MemoryPlan:
    """What a machine of so many ranks holds.

    tensor_parallel: ranks that share a copy of what is not routed, and serve the same sequences
    reading: which figure of memory is used, "nominal" or "reported"
    slots: [R] experts of each rank in a layer; rank: the fullest one
    cache: of a whole sequence; rank_cache: the part of it that one rank keeps
    sequences, rank_sequences: at once, on all ranks and on one; capacity: as many as fit
    smallest: ranks at which everything that is fixed fits; None: no number does
    """

    ranks: int
    context: int
    tensor_parallel: int
    reading: str
    weights: Weights
    slots: tuple[int, ...]
    rank: Rank
    cache: Cache
    rank_cache: Cache
    capacity: int
    sequences: int
    rank_sequences: int
    smallest: int | None
    offload: Offload

    @property
    def held_bytes(self) -> float:
        """Weights of all ranks, with every copy."""
        held = sum(self.weights.routed_on_rank(slots) for slots in self.slots)
        return held + self.ranks * self.rank.rest

    @property
    def cached_bytes(self) -> float:
        """Caches and states of the sequences on one rank."""
        return self.rank_sequences * self.rank_cache.sequence_bytes(self.context)


def plan_memory(config: Config) -> MemoryPlan:
    """Everything about the memory of one configuration."""
    pools, ranks, shape = config.pools, config.world_size, config.model
    tp = sharing(config, ranks)
    rank = rank_of(config, ranks, tp)
    rank_cache = cache_of(config, shards=tp)
    groups = ranks // tp  # each serves its own sequences
    fit = sequences_that_fit(rank.left, rank_cache, pools.context)
    wanted = fit if pools.sequences is None else -(-pools.sequences // groups)
    missing = wanted * rank_cache.sequence_bytes(pools.context) - rank.left
    return MemoryPlan(
        ranks=ranks,
        context=pools.context,
        tensor_parallel=tp,
        reading=reading_of(config),
        weights=weights_of(shape, pools.overhead),
        slots=slots_of(shape.num_experts, pools.redundant_experts, ranks),
        rank=rank,
        cache=cache_of(config),
        rank_cache=rank_cache,
        capacity=fit * groups,
        sequences=fit * groups if pools.sequences is None else pools.sequences,
        rank_sequences=wanted,
        smallest=smallest_number(config),
        offload=_offload(missing, config.hardware),
    )


def weights_of(shape: ModelShape, overhead: float = 0.0) -> Weights:
    """A model's weights in the format that its file, or the command line, says."""
    counted, release = count(shape), shape.weights
    return Weights(
        expert=expert(shape),
        num_experts=shape.num_experts,
        layers=shape.num_moe_layers,
        matrices=counted.matrices,
        plain=counted.plain,
        single=counted.single_precision,
        lookup=0 if release.tied_embeddings else counted.embedding,
        expert_format=Format(
            require(release, "expert_bits"), release.expert_scale_bits, release.expert_block
        ),
        matrix_format=Format(
            require(release, "linear_bits"), release.linear_scale_bits, release.linear_block
        ),
        overhead=overhead,
    )


def cache_of(config: Config, shards: int = 1) -> Cache:
    """A sequence's cache and state, or the part of one of so many ranks that share attention.

    Heads are divided, so states and keys and values of heads are; a latent serves all heads and is
    kept by each rank.
    """
    attention, kept = config.model.attention, config.cache
    values = attention.cached_values
    if attention.kind == "gqa":
        values = -(-attention.num_kv_heads // shards) * 2 * attention.head_dim
    state = 0.0
    if attention.linear_layers:
        sizes = (
            require(attention, name) for name in ("linear_heads", "linear_head_dim", "conv_size")
        )
        state = linear_state_bytes(attention.linear_layers, *sizes, kept.state_bits) / shards
    return Cache(
        values=values,
        bits=kept.bits,
        full_layers=require(attention, "full_layers"),
        window_layers=attention.window_layers,
        window=require(attention, "window") if attention.window_layers else 0,
        state_bytes=state,
        slots=kept.state_slots,
    )


def reading_of(config: Config) -> str:
    """Which figure of memory is used: the one asked for, else what is reported where known."""
    known = config.hardware.memory_reported_MiB is not None
    return config.pools.memory or ("reported" if known else "nominal")


def memory_of(config: Config) -> float:
    hardware = config.hardware
    if reading_of(config) == "reported":
        return hardware.reported_bytes
    return hardware.nominal_bytes


def sharing(config: Config, ranks: int) -> int:
    """Ranks that share a copy: as given, else as many as serve the most sequences.

    Of equals the fewest; where no number leaves room for a sequence, all ranks share one.
    """
    if config.pools.tensor_parallel is not None:
        return config.pools.tensor_parallel
    served = {tp: served_sequences(config, ranks, tp) for tp in _divisors(ranks)}
    best = max(served.values())
    return min(tp for tp in served if served[tp] == best) if best else ranks


def served_sequences(config: Config, ranks: int, tensor_parallel: int) -> int:
    """Sequences that fit at once: those of one rank, for each group that shares attention."""
    left = rank_of(config, ranks, tensor_parallel).left
    cache = cache_of(config, tensor_parallel)
    return sequences_that_fit(left, cache, config.pools.context) * (ranks // tensor_parallel)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def smallest_number(config: Config) -> int | None:
    """Ranks at which all that is fixed fits, shared by all of them unless sharing is given."""
    given = config.pools.tensor_parallel
    return smallest_fitting(
        lambda ranks: rank_of(config, ranks, given or ranks), given or 1, MAX_RANKS
    )


def rank_of(config: Config, ranks: int, tensor_parallel: int) -> Rank:
    """The fullest rank of so many, before any sequence comes."""
    pools, shape, tokens = config.pools, config.model, max(config.tokens_per_rank)
    weights = weights_of(shape, pools.overhead)
    slots = slots_of(shape.num_experts, pools.redundant_experts, ranks)
    memory = memory_of(config)
    return Rank(
        memory=memory,
        routed=weights.routed_on_rank(max(slots)),
        rest=weights.rest_on_rank(tensor_parallel),
        buffers=buffer_bytes(config, ranks),
        activations=activation_bytes(
            tokens,
            shape.hidden_size,
            shape.payload_width,
            shape.intermediate_size,
            shape.top_k,
            require(shape.weights, "vocab_size"),
        ),
        reserve=pools.reserve * memory,
    )


def buffer_bytes(config: Config, ranks: int) -> int:
    """Buffers of the all-to-all on a rank; none where there is nobody to send to."""
    pools, shape, tokens = config.pools, config.model, max(config.tokens_per_rank)
    if ranks == 1 or pools.buffer == "none":
        return 0
    if pools.buffer == "rank_major":
        return rank_major_bytes(ranks, tokens, 2 * shape.payload_width)
    slots = shape.num_experts + pools.redundant_experts
    return low_latency_bytes(slots, tokens, shape.payload_width)


def memories(hardware: HardwareConfig) -> dict[str, float]:
    """Every reading of the memory: the maker's GB as 1e9 B and as 2^30 B, and the report."""
    readings = {}
    if (nominal := hardware.memory_nominal_GB) is not None:
        readings["nominal, GB"] = nominal * GB
        readings["nominal, as GiB"] = nominal * GIB
    if hardware.memory_reported_MiB is not None:
        readings["reported"] = float(hardware.reported_bytes)
    return readings


def with_reading(config: Config, memory_bytes: float) -> Config:
    """The same machine, with a memory of so many bytes."""
    hardware = replace(config.hardware, memory_nominal_GB=memory_bytes / GB)
    return replace(config, hardware=hardware, pools=replace(config.pools, memory="nominal"))


def _offload(missing: float, hardware: HardwareConfig) -> Offload:
    def scaled(value: float | None) -> float | None:
        return None if value is None else value * GB

    tiers = (hardware.host_memory_GB, hardware.host_GBps, hardware.nvme_GB, hardware.nvme_GBps)
    return offload(missing, *map(scaled, tiers))
