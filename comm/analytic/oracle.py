"""Exact traffic: the bytes of every (layer, phase, kind, source, destination) from the routing.

Inputs are the recorded choices and who owns what, nothing else. The worked example, also a test:
two ranks, four experts (0, 1 on rank 0; 2, 3 on rank 1), one token on rank 0 that chose {1, 2, 3}:

    rows to rank        0  1
    all_to_all          1  2      one for each (token, expert)
    rank_dedup          1  1      one for each (token, rank)
    allgather           1  1      one for each token, to every rank

Legend: L layers, R ranks, E experts, K top_k. -1 in topk_ids means no expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from comm.analytic.rows import KINDS, PHASES, check_dispatcher, counts_bytes, row_bytes

# Choices handled at once: bounds the temporaries whatever the number of tokens.
_CHUNK_CHOICES = 1 << 21


@dataclass(frozen=True)
class ExactTraffic:
    """Bytes and rows that a run must have moved in the forward direction, summed over steps.

    bytes: [L, phase, kind, src, dst] int64
    rows: [L, phase, src, dst] int64; a combined row goes back from the rank it was sent to
    """

    bytes: NDArray[np.int64]
    rows: NDArray[np.int64]
    phases: tuple[str, ...] = PHASES
    kinds: tuple[str, ...] = KINDS


def exact_traffic(
    dispatcher: str,
    topk_ids: NDArray[np.integer],
    token_rank: NDArray[np.integer],
    expert_rank: NDArray[np.integer],
    slots_per_rank: NDArray[np.integer],
    wire_dispatch: str,
    wire_combine: str,
    width: int,
) -> ExactTraffic:
    """Count a whole run.

    topk_ids: [steps, L, tokens, K] logical experts chosen by each token
    token_rank: [tokens] rank that holds the token
    expert_rank: [L, E] rank that owns the expert
    slots_per_rank: [L, R] physical experts owned by each rank
    width: elements of a row
    """
    slots_per_rank = np.asarray(slots_per_rank)
    num_steps, num_layers, _, top_k = topk_ids.shape
    world_size = slots_per_rank.shape[1]
    dispatched = count_rows(dispatcher, topk_ids, token_rank, expert_rank, world_size)
    rows = np.stack([dispatched, dispatched.swapaxes(-1, -2)], axis=1)

    num_bytes = np.zeros((num_layers, len(PHASES), len(KINDS), world_size, world_size), np.int64)
    for p, (phase, wire) in enumerate(zip(PHASES, (wire_dispatch, wire_combine), strict=True)):
        for kind, size in row_bytes(dispatcher, phase, wire, width, top_k).items():
            num_bytes[:, p, KINDS.index(kind)] = rows[:, p] * size
    announced = [[counts_bytes(dispatcher, int(n)) for n in layer] for layer in slots_per_rank]
    counts = num_bytes[:, PHASES.index("dispatch"), KINDS.index("counts")]
    counts += num_steps * np.array(announced, np.int64)[:, None, :]
    return ExactTraffic(num_bytes, rows)


def count_rows(
    dispatcher: str,
    topk_ids: NDArray[np.integer],
    token_rank: NDArray[np.integer],
    expert_rank: NDArray[np.integer],
    world_size: int,
) -> NDArray[np.int64]:
    """Dispatched rows [L, src, dst], summed over steps; arguments as for `exact_traffic`."""
    check_dispatcher(dispatcher)
    source, owner_of = np.asarray(token_rank, np.int64), np.asarray(expert_rank, np.int64)
    num_steps, num_layers, num_tokens, top_k = topk_ids.shape
    if source.shape != (num_tokens,):
        raise ValueError(
            f"token_rank has shape {source.shape}, topk_ids holds {num_tokens} tokens a step"
        )
    for name, ranks in (("token_rank", source), ("expert_rank", owner_of)):
        if ranks.size and not 0 <= ranks.min() <= ranks.max() < world_size:
            raise ValueError(
                f"{name} holds ranks {ranks.min()}..{ranks.max()}, valid are 0..{world_size - 1}"
            )
    rows = np.zeros((num_layers, world_size, world_size), np.int64)
    for layer in range(num_layers):
        for step in range(num_steps):
            for chunk in _chunks(num_tokens, top_k):
                owner = _owners(topk_ids[step, layer, chunk], owner_of[layer])
                rows[layer] += _pair_rows(dispatcher, source[chunk], owner, world_size)
    return rows


def _chunks(num_tokens: int, top_k: int) -> Iterator[slice]:
    """Slices of the token axis of bounded size."""
    stride = max(1, _CHUNK_CHOICES // max(1, top_k))
    return (slice(start, start + stride) for start in range(0, num_tokens, stride))


def _owners(ids: NDArray[np.integer], expert_rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rank that serves each choice [n, K]; -1 where no expert was chosen."""
    num_experts = len(expert_rank)
    if ids.size and not -1 <= ids.min() <= ids.max() < num_experts:
        raise ValueError(
            f"topk_ids holds {ids.min()}..{ids.max()}, valid are 0..{num_experts - 1} and -1"
        )
    # -1 would index the last expert; the mask takes it out again.
    return np.where(ids >= 0, expert_rank[ids], -1)


def _pair_rows(
    dispatcher: str, src: NDArray[np.int64], owner: NDArray[np.int64], world_size: int
) -> NDArray[np.int64]:
    """Rows [src, dst] of n tokens held by src [n] whose choices are served by owner [n, K]."""
    if dispatcher == "allgather":
        sent = np.bincount(src[(owner >= 0).any(axis=1)], minlength=world_size)
        return np.repeat(sent[:, None], world_size, axis=1)
    is_row = owner >= 0
    if dispatcher == "rank_dedup":
        owner = np.sort(owner, axis=1)
        is_row = owner >= 0
        is_row[:, 1:] &= owner[:, 1:] != owner[:, :-1]  # the first choice of each run of equals
    pair = (src[:, None] * world_size + owner)[is_row]
    return np.bincount(pair, minlength=world_size**2).reshape(world_size, world_size)
