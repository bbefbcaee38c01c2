"""Where one way of moving tokens begins to beat another, under uniform routing.

    order        the strategies from the cheapest to the dearest, and where that order changes
    weights      rows from which moving an expert costs less than moving its tokens
    all-reduce   tensor parallelism beside the round trip of expert parallelism, same tokens

Rows come from `strategies`. Legend: E experts, K top_k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from comm.analytic.rows import payload_bytes

ALIKE = 1e-12  # relative: sums of the same numbers in another order


def order(cost: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    """Strategies from the cheapest to the dearest, equals together, all in the order given."""
    ranked: list[tuple[str, ...]] = []
    for name in sorted(cost, key=lambda one: cost[one]):
        if ranked and cost[name] <= cost[ranked[-1][0]] * (1 + ALIKE):
            ranked[-1] = tuple(one for one in cost if one in (*ranked[-1], name))
        else:
            ranked.append((name,))
    return tuple(ranked)


def first_better(
    one: str, other: str, sizes: Sequence[int], cost_of: Callable[[int], Mapping[str, float] | None]
) -> int | None:
    """The first number of ranks from which `one` costs less than `other`, to the end of `sizes`.

    cost_of: ranks -> strategy -> cost, None where it is not known
    """
    first = None
    for ep_size in sizes:
        cost = cost_of(ep_size)
        if cost is None or not cost[one] < cost[other] * (1 - ALIKE):
            first = None
        elif first is None:
            first = ep_size
    return first


@dataclass(frozen=True)
class ExpertMove:
    """The weights of one expert beside the tokens that would go to it.

    format: of the weights; expert_bytes: three matrices of width x inner width
    rows: (token, expert) rows, there and back, that weigh as much
    tokens_per_rank: tokens of a rank among which so many choose one given expert, K / E each
    """

    format: str
    expert_bytes: int
    rows: float
    tokens_per_rank: float


def expert_move(
    weight_format: str,
    width: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    round_trip_bytes: int,
) -> ExpertMove:
    """From how many rows on it is cheaper to fetch an expert than to send it tokens.

    round_trip_bytes: of a row there and of one back
    """
    expert_bytes = 3 * sum(payload_bytes(weight_format, width * intermediate_size))
    rows = expert_bytes / round_trip_bytes
    return ExpertMove(weight_format, expert_bytes, rows, rows * num_experts / top_k)


def all_reduce_bytes(num_ranks: int, tokens: float, row_bytes: int) -> float:
    """Bytes that a rank sends to add up `tokens` rows over all ranks: scattered, then gathered."""
    return 2 * (num_ranks - 1) / num_ranks * tokens * row_bytes if num_ranks else 0.0
