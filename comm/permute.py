"""Pure maps between the orders that rows take on their way; no communication here.

    token order       t0k0 t0k1 t1k0 t1k1 ...        as the router chose
    rank-major        to/from rank 0 | rank 1 | ...  as a collective wants its rows
    expert-major      slot 0 | slot 1 | ...          as the experts want theirs

Slots are numbered rank after rank (`comm.placement`), so sorting choices by slot is rank-major and
expert-major at once on the sending side. The receiver holds one such run from each source and
regroups. Sums run in a fixed order: ascending k within a rank, ascending rank within a token.

Legend: T tokens, K choices, N rows in flight, M rows for local experts, S slots, W width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

RADIX_SORT_KEYS = 1 << 15  # numpy sorts 16-bit keys by radix: ten times faster than comparisons


def stable_order(keys: Tensor, num_keys: int) -> Tensor:
    """Stable ascending order of integer keys [N] in [0, num_keys): int64 [N]."""
    if keys.device.type == "cpu" and num_keys <= RADIX_SORT_KEYS:
        return torch.from_numpy(np.argsort(keys.numpy().astype(np.int16), kind="stable"))
    return torch.argsort(keys, stable=True)


def inverse(order: Tensor) -> Tensor:
    """Where each element went: inverse[order[i]] = i, int64 [N]."""
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    return positions


def run_starts(lengths: Tensor) -> Tensor:
    """Start of each run when runs of these lengths lie end to end: exclusive sum, int64."""
    return lengths.cumsum(0) - lengths


def order_by_slot(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Choices [T, K] (-1 = none) sorted by slot.

    Returns `choice` int64 [N], the flat (token, k) index of each sorted choice (token =
    choice // K), and `rows_per_slot` int64 [S]. Absent choices sort last and are cut off.
    """
    keys = torch.where(slots < 0, num_slots, slots).flatten()
    rows_per_slot = torch.bincount(keys, minlength=num_slots + 1)[:num_slots]
    order = stable_order(keys, num_slots + 1)
    return order[: int(rows_per_slot.sum())], rows_per_slot


def ranks_hit(slots: Tensor, slot_rank: Tensor, world_size: int) -> Tensor:
    """bool [R, T]: does token t choose any expert of rank r? -1 hits nobody."""
    destination = torch.where(slots < 0, world_size, slot_rank[slots])
    hit = torch.zeros((slots.shape[0], world_size + 1), dtype=torch.bool, device=slots.device)
    return hit.scatter_(1, destination, True)[:, :world_size].t().contiguous()


def rows_in_token_order(hit: Tensor) -> tuple[Tensor, Tensor]:
    """For rows sent rank-major as `hit` [R, T] says, how to sum them back token by token.

    Returns `row` int64 [N], the rank-major row numbers sorted by (token, rank), and
    `rows_per_token` int64 [T].
    """
    number = hit.flatten().cumsum(0).view(hit.shape) - 1
    by_token = hit.t()
    return number.t()[by_token], by_token.sum(1)


def local_choices(slots: Tensor, first_slot: int, num_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """The choices among [N, K] global slots that fall on this rank's `num_local` slots.

    Returns `choice` int64 [M] (flat index into [N, K], ascending), `local` int64 [M] (slot number
    within the rank) and `choices_per_row` int64 [N].
    """
    local = slots - first_slot
    mine = (local >= 0) & (local < num_local)
    choice = mine.flatten().nonzero().squeeze(1)
    return choice, local.flatten()[choice], mine.sum(1)


def regroup_by_expert(rows_from: Tensor) -> Tensor:
    """Rank-major rows to expert-major: int64 [M], the received row that comes i-th.

    rows_from: int64 [R, e], rows from each source for each local expert.

        received    src 0: e0 e0 e1 | src 1: e0 e1 e1
        wanted      e0: src 0, src 0, src 1 | e1: src 0, src 1, src 1
    """
    lengths = rows_from.flatten()
    starts = run_starts(lengths).view_as(rows_from).t().flatten()  # by expert, then source
    runs = rows_from.t().flatten()
    total = int(runs.sum())
    within = torch.arange(total, device=runs.device)
    return within + torch.repeat_interleave(starts - run_starts(runs), runs, output_size=total)


def weighted_sum(
    rows: Tensor, index: Tensor, rows_per_bag: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sum rows[index] bag by bag, each times its fp32 weight: [len(rows_per_bag), W].

    Accumulates in fp32 whatever the dtype. A 16-bit `rows` wants weights of its own type; two of
    them, a weight rounded and what the rounding lost, keep 16 bits of each weight.
    """
    if not len(index):
        return rows.new_zeros((len(rows_per_bag), rows.shape[1]))
    offsets = run_starts(rows_per_bag)
    if weights is not None and rows.dtype != torch.float32:
        rounded = weights.to(rows.dtype)
        lost = (weights - rounded.float()).to(rows.dtype)
        index = index.repeat_interleave(2)
        weights = torch.stack([rounded, lost], dim=1).flatten()
        offsets = offsets * 2
    return embedding_bag(index, rows, offsets, mode="sum", per_sample_weights=weights)
