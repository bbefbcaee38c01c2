"""Keys of the jobs that ask about memory, requests and ports; each group belongs to them alone."""

from __future__ import annotations

from dataclasses import dataclass

from moe.keys import key

# figures of a memory; buffers of an all-to-all, as in comm/analytic/buffers.py
MEMORIES = ("nominal", "reported")
BUFFERS = ("low_latency", "rank_major", "none")


@dataclass(frozen=True)
class CacheConfig:
    """What a sequence keeps between steps."""

    bits: float = key(16.0, "of a cached value", minimum=1, maximum=64)
    state_bits: float = key(32.0, "of a value of a linear layer's state", minimum=1, maximum=64)
    state_slots: int = key(
        1, "states that a sequence holds; engines that reuse prefixes, up to 5", minimum=1
    )


@dataclass(frozen=True)
class PoolsConfig:
    context: int = key(131_072, "tokens of a sequence", minimum=1)
    sequences: int | None = key(
        None, "sequences at once on all ranks; null: as many as fit", minimum=1
    )
    tensor_parallel: int | None = key(
        None,
        "ranks that share a copy of attention and all else that is not routed; null: as many as"
        " serve the most sequences",
        minimum=1,
    )
    redundant_experts: int = key(0, "expert slots of a layer beyond one an expert", minimum=0)
    overhead: float = key(
        0.0, "share added to the weights, for padding and unpacked copies", minimum=0
    )
    reserve: float = key(
        0.1, "share of the memory that nothing is put into", minimum=0, maximum=0.99
    )
    memory: str | None = key(
        None,
        "the maker's figure in GB or what the driver reports; null: the latter where known",
        MEMORIES,
    )
    buffer: str = key(
        "low_latency", "of the all-to-all: DeepEP's slots, TensorRT-LLM's, or none", BUFFERS
    )
    buffer_GiB: float = key(4.0, "a budget: the most tokens a rank whose buffers fit", minimum=0)


@dataclass(frozen=True)
class RequestConfig:
    prompt: int = key(8192, "tokens that come in", minimum=0)
    cached: int = key(0, "the first tokens of the prompt that some cache has", minimum=0)
    output: int = key(1024, "tokens that go out", minimum=0)


@dataclass(frozen=True)
class FabricConfig:
    accelerators: int = key(1024, "accelerators with a card in the fabric", minimum=1)
    nic_Gbps: float | None = key(
        None, "of a card, one way; null: hardware.scale_out_GBps", minimum=1
    )
    port_Gbps: float = key(800.0, "of a switch port, one way", minimum=1)
    radix: int = key(64, "ports of a switch", minimum=4)
    tiers: int = key(2, "of switches between two accelerators", minimum=1, maximum=8)
