"""What job=bench times: raw collectives and dispatchers, side by side on the same routing.

A *contender* is a thunk that moves one batch of tokens out and back. Raw contenders move exactly
the rows' payload with one `all_to_all_single` each way: of all K copies, and of the deduplicated
rows. Dispatchers do the same work for real, with experts that return what they get.

Contenders take turns within each iteration, in a new order each time, so that a drift of the
machine's speed hits all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from comm import permute
from comm.dispatch import FORWARDING, build_dispatcher
from comm.dispatch.base import Dispatcher, DispatchOptions, DispatchSetup
from comm.meter import TrafficMeter
from comm.placement import ExpertPlacement, build_placement
from comm.transport import Transport
from comm.wire import WIRE_FORMATS
from comm.world import World
from moe.experts import IdentityExperts
from moe.overlap import routed
from moe.plan import torch_dtype
from moe.synthetic import token_hidden, topk_ids

RAW_COPIES, RAW_DEDUP, UNMETERED = "raw, K copies", "raw, deduplicated", "unmetered"
CAPACITY_FACTOR = 1.25  # of padded


@dataclass(frozen=True)
class Case:
    """tokens: of each rank; width: values in a row; dtype: of rows, on the wire too"""

    tokens: int
    width: int
    dtype: str


@dataclass(frozen=True)
class Batch:
    """One rank's tokens. hidden: [T, W]; topk_ids, topk_weights: [T, K], weights sum to one"""

    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class Contender:
    """run: one batch out and back; sent_bytes: int64 [R], what that sends to each rank"""

    name: str
    run: Callable[[], object]
    sent_bytes: np.ndarray


def make_batch(case: Case, world: World, num_experts: int, top_k: int, seed: int) -> Batch:
    """The tokens of this rank, the same on any machine."""
    first = world.rank * case.tokens
    ids = topk_ids(seed, 0, 0, first, case.tokens, num_experts, top_k)
    hidden = torch.from_numpy(token_hidden(seed, 0, first, case.tokens, case.width))
    generator = torch.Generator().manual_seed(seed * 4096 + world.rank)
    weights = torch.rand(case.tokens, top_k, generator=generator) + 0.5
    return Batch(
        hidden.to(world.device, torch_dtype(case.dtype)),
        torch.from_numpy(ids).to(world.device),
        (weights / weights.sum(1, keepdim=True)).to(world.device),
    )


def contenders(
    case: Case,
    world: World,
    names: tuple[str, ...],
    num_experts: int,
    top_k: int,
    seed: int,
    chunks: int = 1,
) -> list[Contender]:
    """All contenders of one case; a collective. The first of `names` also runs unmetered and, with
    chunks > 1, in that many."""
    placement = build_placement("contiguous", num_experts, world.world_size)
    batch = make_batch(case, world, num_experts, top_k, seed)
    slot_rank = torch.from_numpy(placement.slot_rank).to(world.device)
    copies = torch.bincount(slot_rank[batch.topk_ids].flatten(), minlength=world.world_size)
    distinct = permute.ranks_hit(batch.topk_ids, slot_rank, world.world_size).sum(1)
    field = [
        raw(RAW_COPIES, world, copies, batch.hidden),
        raw(RAW_DEDUP, world, distinct, batch.hidden),
    ]
    for name in names:
        field.append(metered(name, name, case, world, placement, batch))
    first = names[0]
    field.append(
        metered(f"{first}, {UNMETERED}", first, case, world, placement, batch, enabled=False)
    )
    if chunks > 1:
        label = in_chunks(first, chunks)
        field.append(metered(label, first, case, world, placement, batch, chunks=chunks))
    return field


def in_chunks(name: str, chunks: int) -> str:
    """What a dispatcher that sends its tokens in parts is called."""
    return f"{name}, {chunks} chunks"


def raw(name: str, world: World, rows_to: Tensor, hidden: Tensor) -> Contender:
    """One bare collective each way, from and into memory that is already there."""
    rows_from = torch.empty_like(rows_to)
    dist.all_to_all_single(rows_from, rows_to, group=world.metered_group)
    out, back = rows_to.tolist(), rows_from.tolist()
    width = hidden.shape[1]
    mine = hidden.new_zeros((sum(out), width))
    theirs = hidden.new_empty((sum(back), width))

    def run() -> None:
        dist.all_to_all_single(theirs, mine, back, out, world.metered_group)
        dist.all_to_all_single(mine, theirs, out, back, world.metered_group)

    row_bytes = width * hidden.element_size()
    return Contender(name, run, (np.asarray(out) + np.asarray(back)) * row_bytes)


def metered(
    label: str,
    name: str,
    case: Case,
    world: World,
    placement: ExpertPlacement,
    batch: Batch,
    enabled: bool = True,
    chunks: int = 1,
) -> Contender:
    """A dispatcher with identity experts, checked once for the right result."""
    meter = TrafficMeter(1, world.world_size)
    dispatchers = [_dispatcher(name, case, world, placement, meter, batch) for _ in range(chunks)]
    experts = IdentityExperts()

    def run() -> Tensor:
        parts = (batch.hidden, batch.topk_ids, batch.topk_weights)
        return routed(dispatchers, experts, *parts)[0]

    _check(name, case, batch.hidden, run())
    sent_bytes = meter.sent.sum(axis=(0, 1, 2, 3))
    meter.enabled = enabled
    return Contender(label, run, sent_bytes)


def _dispatcher(
    name: str,
    case: Case,
    world: World,
    placement: ExpertPlacement,
    meter: TrafficMeter,
    batch: Batch,
) -> Dispatcher:
    wire, ranks = WIRE_FORMATS[case.dtype], range(world.world_size)
    # With two nodes, as many ranks on each; one rank, or an odd one out, makes do.
    half = (world.world_size + 1) // 2 if name in FORWARDING else world.world_size
    nodes = (
        [tuple(ranks[:half]), tuple(ranks[half:])] if half < world.world_size else [tuple(ranks)]
    )
    setup = DispatchSetup(
        transport=Transport(world, meter),
        placement=placement,
        wire_dispatch=wire,
        wire_combine=wire,
        layer=0,
        width=case.width,
        top_k=batch.topk_ids.shape[1],
        dtype=torch_dtype(case.dtype),
        node_of_rank=tuple(int(rank >= half) for rank in ranks),
        node_transport=Transport(world, meter, world.split(nodes)),
        # Tokens come back whole although some choices find no room.
        options=DispatchOptions(capacity_factor=CAPACITY_FACTOR, renormalize=True),
    )
    return build_dispatcher(name, setup)


def _check(name: str, case: Case, hidden: Tensor, output: Tensor) -> None:
    """Identity experts and weights that sum to one must give the tokens back."""
    error = (output.float() - hidden.float()).norm() / hidden.float().norm()
    if not error <= 4 * WIRE_FORMATS[case.dtype].row_error:
        raise RuntimeError(f"{name} returned other tokens than it was given, error {error:.2e}")


def compete(
    world: World,
    field: list[Contender],
    iterations: int,
    warmup: int,
    progress: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Seconds of the slowest rank: float64 [contender, iteration], on every rank; a collective."""
    seconds = np.zeros((len(field), iterations))
    for iteration in range(-warmup, iterations):
        # A new order each time, equal on all ranks: what ran before leaves its mark on the caches.
        for turn in np.random.default_rng(iteration + warmup).permutation(len(field)):
            dist.barrier()
            started = time.perf_counter()
            with torch.inference_mode():
                field[turn].run()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if iteration >= 0:
                seconds[turn, iteration] = time.perf_counter() - started
        progress()
    slowest = torch.from_numpy(seconds).to(world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.cpu().numpy()
