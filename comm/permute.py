"""Pure maps between the orders that rows take on their way; no communication here.

    token order       t0k0 t0k1 t1k0 t1k1 ...        as the router chose
    rank-major        to/from rank 0 | rank 1 | ...  as a collective wants its rows
    expert-major      slot 0 | slot 1 | ...          as the experts want theirs

Slots are numbered rank after rank (`comm.placement`), so sorting choices by slot is rank-major and
expert-major at once on the sending side. The receiver holds one such run from each source and
regroups. Sums run in a fixed order: ascending k within a rank, ascending rank within a token.

A choice that names no expert has slot S, one past the last: it sorts behind all others, belongs to
rank R, one past the last, and is nobody's.

Legend: T tokens, K choices, N rows in flight, M rows for local experts, S slots, W width.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def check_topk_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Raise ValueError unless they are int64, each an expert or -1 for none."""
    if topk_ids.dtype != torch.int64:  # a narrower type may already have wrapped
        raise ValueError(f"topk_ids is {topk_ids.dtype}, must be torch.int64")
    if not topk_ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(topk_ids))
    if low < -1 or high >= num_experts:
        raise ValueError(
            f"topk_ids span {low}..{high}; experts are 0..{num_experts - 1}, and -1 means no expert"
        )


def stable_order(keys: Tensor, num_keys: int) -> Tensor:
    """Stable ascending order of integer keys [N] in [0, num_keys): int64 [N]."""
    if keys.device.type != "cpu":
        return torch.argsort(keys, stable=True)
    return torch.from_numpy(_stable_order(keys.numpy(), num_keys))


def _stable_order(keys: np.ndarray, num_keys: int) -> np.ndarray:
    # Key and place in one number: all differ, so any sort of them is stable, and numpy sorts such
    # numbers a register at a time.
    bits = len(keys).bit_length()
    dtype = np.int32 if num_keys << bits <= 1 << 31 else np.int64
    numbers = keys.astype(dtype)
    numbers <<= bits
    numbers |= np.arange(len(numbers), dtype=dtype)
    numbers.sort()
    numbers &= (1 << bits) - 1
    return numbers.astype(np.int64)


def inverse(order: Tensor, numbers: Tensor | None = None) -> Tensor:
    """Where each element went: inverse[order[i]] = i, int64 [N]; or numbers[i], of their type."""
    if numbers is None:
        numbers = torch.arange(len(order), device=order.device)
    if order.device.type == "cpu":  # numpy starts sooner, and is no slower
        places = np.empty_like(numbers.numpy())
        places[order.numpy()] = numbers.numpy()
        return torch.from_numpy(places)
    return torch.empty_like(numbers).scatter_(0, order, numbers)


def put(values: Tensor, places: Tensor, numbers: Tensor) -> None:
    """values[places] = numbers, on the CPU by numpy, which starts sooner and is no slower."""
    if values.device.type == "cpu":
        values.numpy()[places.numpy()] = numbers.numpy()
    else:
        values.scatter_(0, places, numbers)


def token_of(choice: Tensor, top_k: int) -> Tensor:
    """The token of each flat (token, k) index: int64 [N]."""
    if choice.device.type == "cpu":  # numpy divides a whole register at a time, torch does not
        return torch.from_numpy(choice.numpy() // top_k)
    return choice // top_k


def run_starts(lengths: Tensor) -> Tensor:
    """Start of each run when runs of these lengths lie end to end: exclusive sum, int64."""
    return lengths.cumsum(0) - lengths


def order_by_slot(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Choices [T, K] (slot S = none) sorted by slot.

    Returns `choice` int64 [N], the flat (token, k) index of each sorted choice (token =
    choice // K), and `rows_per_slot` int64 [S]. Absent choices sort last and are cut off.
    """
    if slots.device.type == "cpu":  # numpy starts its work sooner, which tells where rows are few
        slot_of = slots.numpy().ravel()
        counts = np.bincount(slot_of, minlength=num_slots + 1)
        order = _stable_order(slot_of, num_slots + 1)[: len(slot_of) - int(counts[num_slots])]
        return torch.from_numpy(order), torch.from_numpy(counts[:num_slots])
    keys = slots.flatten()
    rows_per_slot = torch.bincount(keys, minlength=num_slots + 1)[:num_slots]
    return stable_order(keys, num_slots + 1)[: int(rows_per_slot.sum())], rows_per_slot


def ranks_hit(slots: Tensor, slot_rank: Tensor, world_size: int) -> Tensor:
    """bool [R, T]: does token t choose any expert of rank r?

    slot_rank: int64 [S + 1], the rank of each slot, R for slot S
    """
    hit = torch.zeros((slots.shape[0], world_size + 1), dtype=torch.bool, device=slots.device)
    rank = slot_rank.index_select(0, slots.flatten()).view(slots.shape)
    return hit.scatter_(1, rank, True)[:, :world_size].t().contiguous()


def rows_in_choice_order(
    choice: Tensor, num_tokens: int, top_k: int, numbers: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | slice]:
    """For rows sent in the order of `choice` (flat (token, k) of each), how to sum them by token.

    numbers: int32 or int64 [N], what the rows are called where they lie; None: 0, 1, 2, ...
    Returns `row` [N], these numbers sorted by (token, k); `first_row` [T] of the same type, where
    each token's begin in `row`; `valid`, which of all T * K choices they belong to.
    """
    if numbers is None:
        numbers = torch.arange(len(choice), device=choice.device)
    if choice.shape[0] == num_tokens * top_k:
        row = inverse(choice, numbers)
        return row, _every(top_k, num_tokens, row.dtype, row.device), slice(None)
    row = numbers.new_full((num_tokens * top_k,), -1)
    put(row, choice, numbers)
    valid = row >= 0
    first_row = run_starts(valid.view(num_tokens, top_k).sum(1)).to(row.dtype)
    return row[valid], first_row, valid


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _every(step: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0, step, 2 * step, ...: [count], the same each time and never to be written."""
    return torch.arange(0, step * count, step, dtype=dtype, device=device)


def of_rows(weights: Tensor, valid: Tensor | slice) -> Tensor:
    """The weights [T, K] of the choices that have rows, as `rows_in_choice_order` names them."""
    flat = weights.flatten()
    return flat if isinstance(valid, slice) else flat[valid]


def rows_in_token_order(hit: Tensor) -> tuple[Tensor, Tensor]:
    """For rows sent rank-major as `hit` [R, T] says, how to sum them back token by token.

    Returns `row` int64 [N], the rank-major row numbers sorted by (token, rank), and `first_row`
    int64 [T], where each token's begin in `row`.
    """
    number = hit.flatten().cumsum(0).view(hit.shape) - 1
    return number.t()[hit.t()], run_starts(hit.sum(0))


def local_choices(slots: Tensor, first_slot: int, num_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """The choices among [N, K] global slots that fall on this rank's `num_local` slots.

    Returns `choice` int64 [M] (flat index into [N, K], ascending), `local` int64 [M] (slot number
    within the rank) and `first_choice` int64 [N], where each row's begin in them.
    """
    local = slots - first_slot
    mine = (local >= 0) & (local < num_local)
    choice = mine.flatten().nonzero().squeeze(1)
    return choice, local.flatten().index_select(0, choice), run_starts(mine.sum(1))


def first_of_each_slot(rows_per_slot: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Of choices sorted by slot, the first `capacity` of each slot, and a place for each of them
    where every slot has `capacity` places.

    rows_per_slot: int64 [S]
    Returns `first` int64 [N], numbers among the sorted choices, and `place` int64 [N] in
    0..S * capacity - 1, both ascending.

        capacity 2    sorted a a a | b |     | d d    first 0 1 3 4 5
                      places a a     b .  . .  d d    place 0 1 2 6 7
    """
    starts = run_starts(rows_per_slot)
    slot = torch.repeat_interleave(rows_per_slot)
    within = torch.arange(len(slot), device=slot.device) - starts.index_select(0, slot)
    first = (within < capacity).nonzero().squeeze(1)
    return first, (slot * capacity + within).index_select(0, first)


def regroup_by_expert(rows_from: np.ndarray, capacity: int | None = None) -> Tensor:
    """Rank-major rows to expert-major: int64 [M] on the CPU, the received row that comes i-th.

    rows_from: int64 [R, e], rows from each source for each local expert
    capacity: received rows that each (source, expert) takes up, the first of them filled; None
        where the runs lie end to end

        received    src 0: e0 e0 e1 | src 1: e0 e1 e1
        wanted      e0: src 0, src 0, src 1 | e1: src 0, src 1, src 1
    """
    runs = rows_from.T.ravel()  # expert after expert, in each by source
    taken_up = rows_from if capacity is None else np.full_like(rows_from, capacity)
    lengths = taken_up.ravel()
    received_at = (lengths.cumsum() - lengths).reshape(rows_from.shape).T.ravel()
    wanted_at = runs.cumsum() - runs
    return torch.from_numpy(np.arange(runs.sum()) + (received_at - wanted_at).repeat(runs))


def weighted_sum(
    rows: Tensor, index: Tensor, first_row: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sum rows[index] bag by bag, each times its fp32 weight: [bags, W].

    first_row: int64 [bags], where each bag's begin in `index`
    Accumulates in fp32 whatever the dtype. A 16-bit `rows` wants weights of its own type; two of
    them, a weight rounded and what the rounding lost, keep 16 bits of each fp32 weight. That reads
    every row twice: who has no time for it rounds the weights.
    """
    if not index.shape[0]:
        return rows.new_zeros((len(first_row), rows.shape[1]))
    if weights is not None and weights.dtype != rows.dtype:
        halves = torch.empty((len(weights), 2), dtype=rows.dtype, device=rows.device)
        halves[:, 0] = weights
        halves[:, 1] = weights - halves[:, 0]
        weights, index = halves.flatten(), index.repeat_interleave(2)
        first_row = first_row * 2
    # The operator behind torch.nn.functional.embedding_bag(mode="sum"), whose checks cost as much
    # as the sum of a few rows: scale_grad_by_freq, mode, sparse, weights.
    return torch.embedding_bag(rows, index, first_row, False, 0, False, weights)[0]
