"""What a run needs of this machine, checked before any rank starts: memory, and a GPU if asked.

The memory is estimated from shapes alone: weights, rows in flight under even routing, and what
rank 0 gathers to check the outputs. That refuses the run that cannot fit; it predicts no peak.
"""

from __future__ import annotations

from comm.placement import experts_per_rank
from moe.model import ModelShape, scaled
from moe.settings import Config, UnfitError

GIB = 1 << 30
RANK_BYTES = 80 << 20  # an idle rank: an interpreter, torch, connections
BYTES_OF = {"fp32": 4, "bf16": 2, "fp16": 2}
ROW_COPIES = 6  # sent, received, expert input, gate and up, output, combined


def check_memory(config: Config, local_ranks: int) -> None:
    """Raise UnfitError when `local_ranks` ranks of the run need more than this machine has free."""
    needed, free = memory(config, local_ranks)
    if needed > free:
        raise UnfitError(
            f"needs about {needed / GIB:,.1f} GiB here for {local_ranks} ranks, and"
            f" {free / GIB:,.1f} GiB are free; try fewer tokens, fewer layers or a smaller scale"
        )


def memory(config: Config, local_ranks: int) -> tuple[int, int]:
    """Bytes that `local_ranks` ranks of the run need here, and that are free now."""
    import psutil

    needed = local_ranks * rank_bytes(config) + rank_zero_bytes(config)
    return needed, psutil.virtual_memory().available


def memory_in_words(config: Config, local_ranks: int) -> str:
    """What to say of a rank that the system may have killed for its memory; called as it starts."""
    needed, free = memory(config, local_ranks)
    return (
        f"needed about {needed / GIB:,.1f} GiB here for {local_ranks} ranks,"
        f" had {free / GIB:,.1f} GiB"
    )


def check_device(config: Config, local_ranks: int) -> None:
    """Raise UnfitError when a GPU is asked for and there are fewer than ranks."""
    if config.device != "cuda":
        return
    import torch

    if torch.cuda.device_count() < local_ranks:
        raise UnfitError(
            f"device=cuda: {torch.cuda.device_count()} GPUs here for {local_ranks} ranks; each rank"
            " needs one: use device=cpu or fewer ranks"
        )


def rank_bytes(config: Config) -> int:
    """Bytes of one rank, the one with the most experts."""
    if config.job == "bench":
        largest = max(config.bench.tokens) * config.model.top_k * max(config.bench.widths)
        return RANK_BYTES + largest * 4 * ROW_COPIES
    shape = scaled(config.model, config.scale)
    size = BYTES_OF[config.dtype]
    redundant = config.placement.num_redundant_experts or 0
    most = int(experts_per_rank(shape.num_experts + redundant, config.num_positions)[0])
    expert = 3 * shape.payload_width * shape.intermediate_size * size // config.expert_tp
    weights = shape.num_moe_layers * (most * expert + _replicated_bytes(shape, size))
    tokens = sum(config.tokens_per_rank)
    rows = -(-tokens * shape.top_k // config.world_size) * config.expert_tp
    widest = max(shape.payload_width, 2 * shape.intermediate_size)
    in_flight = ROW_COPIES * rows * widest * size
    if "allgather" in config.dispatcher.name:  # every token of every rank arrives everywhere
        in_flight += ROW_COPIES * tokens * shape.payload_width * 4
    if config.mode == "training":  # gradients beside weights, and what each layer keeps for them
        return RANK_BYTES + 2 * weights + shape.num_moe_layers * in_flight
    return RANK_BYTES + weights + in_flight


def rank_zero_bytes(config: Config) -> int:
    """What rank 0 holds besides: every rank's routing and, for the reference, its outputs."""
    if config.job == "bench":
        return 0
    shape = scaled(config.model, config.scale)
    tokens = sum(config.tokens_per_rank) * shape.num_moe_layers
    routing = 2 * 8 * tokens * config.steps * shape.top_k  # pickled, then stacked
    if not config.reference:
        return routing
    outputs = 2 * 4 * tokens * (2 * shape.hidden_size + shape.payload_width)
    one_layer = 4 * sum(config.tokens_per_rank) * shape.top_k * shape.payload_width
    if config.mode == "training":  # the experts' gradients of one layer, gathered and worked out
        expert = 3 * shape.payload_width * shape.intermediate_size
        one_layer += 4 * 4 * shape.num_experts * expert
    return routing + outputs + one_layer


def _replicated_bytes(shape: ModelShape, size: int) -> int:
    """Weights of one layer that every rank holds: router, latent projections, shared experts."""
    latent = 2 * shape.hidden_size * (shape.latent_size or 0)
    shared = 3 * shape.hidden_size * shape.shared_intermediate_size
    return 4 * shape.num_experts * shape.hidden_size + size * (latent + shared)
