"""Ranks, nodes and experts that tokens reach under uniform routing.

Every set of K experts out of E is equally likely, and experts lie in blocks that are as equal as
can be: where E / R leaves a remainder, the first ranks hold one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import numpy as np

from comm.analytic.fanout import Distinct, group_limited_pmf, miss_probability
from comm.analytic.formulas.base import Parameter, Step, formula

RANKS = Parameter("ranks", "ranks, or nodes, over which the experts are spread")
EXPERTS = Parameter("experts", "routed experts of a layer", field="num_experts")
TOP_K = Parameter("experts", "experts that a token chooses", field="top_k")
DRAWN_TOKENS = 6_000
SEED = 0


def _sizes(ranks: int, num_experts: int) -> list[int]:
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: must be >= 1; nearest: 1")
    least, more = divmod(num_experts, ranks)
    return [least + (rank < more) for rank in range(ranks)]


def _missed(ranks: int, num_experts: int, top_k: int) -> Step:
    size = _sizes(ranks, num_experts)[0]
    miss = float(miss_probability(num_experts, top_k, size))
    how = f"C({num_experts} - {size}, {top_k}) / C({num_experts}, {top_k})"
    return Step("P(a rank is not hit)", how, miss)


@formula("ranks", ranks=RANKS, num_experts=EXPERTS, top_k=TOP_K)
def distinct_ranks(ranks: int, num_experts: int, top_k: int) -> Iterator[Step]:
    """Ranks that own at least one expert of a token, its own rank included; expected.

    Derivation: a rank with e experts is missed with q = C(E - e, K) / C(E, K), so the mean is the
    sum of 1 - q over the ranks.
    """
    yield _missed(ranks, num_experts, top_k)
    mean = Distinct.of(_sizes(ranks, num_experts), num_experts, top_k).mean
    yield Step("distinct_ranks", f"sum of 1 - P over {ranks} ranks", mean, "ranks")


@formula("ranks", ranks=RANKS, num_experts=EXPERTS, top_k=TOP_K)
def distinct_remote_ranks(ranks: int, num_experts: int, top_k: int) -> Iterator[Step]:
    """As distinct_ranks, the token's own rank left out; mean over the ranks that may hold it."""
    (*before, all_ranks) = distinct_ranks(ranks, num_experts, top_k)
    yield from (*before, all_ranks)
    remote = all_ranks.value * (1 - 1 / ranks)
    yield Step("distinct_remote_ranks", f"{all_ranks.value:.4f} (1 - 1 / {ranks})", remote, "ranks")


@formula("ranks", ranks=RANKS, num_experts=EXPERTS, top_k=TOP_K)
def distinct_ranks_deviation(ranks: int, num_experts: int, top_k: int) -> Iterator[Step]:
    """Standard deviation of distinct_ranks for one token.

    Derivation: hits of two ranks are correlated; the variance adds q_rs - q_r q_s over all pairs.
    """
    law = Distinct.of(_sizes(ranks, num_experts), num_experts, top_k)
    yield Step("variance", "sum over pairs of q_rs - q_r q_s", law.variance)
    yield Step("deviation", f"sqrt({law.variance:.6f})", sqrt(law.variance), "ranks")


@formula(
    "rows",
    ranks=RANKS,
    tokens=Parameter("tokens", "tokens of each rank"),
    num_experts=EXPERTS,
    top_k=TOP_K,
)
def received_rows(ranks: int, tokens: int, num_experts: int, top_k: int) -> Iterator[Step]:
    """Rows that reach a rank, one for each (token, rank), from all ranks and itself; expected."""
    miss = _missed(ranks, num_experts, top_k)
    yield miss
    rows = ranks * tokens * (1 - miss.value)
    yield Step("received_rows", f"{ranks} x {tokens} x (1 - {miss.value:.6f})", rows, "rows")


@formula(
    "rows",
    ranks=RANKS,
    tokens=Parameter("tokens", "tokens of each rank"),
    num_experts=EXPERTS,
    top_k=TOP_K,
)
def received_rows_deviation(
    ranks: int, tokens: int, num_experts: int, top_k: int
) -> Iterator[Step]:
    """Standard deviation of received_rows: a binomial over R T tokens."""
    miss = _missed(ranks, num_experts, top_k)
    yield miss
    spread = sqrt(ranks * tokens * miss.value * (1 - miss.value))
    yield Step("deviation", f"sqrt({ranks} x {tokens} x q (1 - q))", spread, "rows")


GROUPS = {
    "nodes": Parameter("nodes", "expert groups, one on each node"),
    "limit": Parameter("nodes", "groups that a token may use"),
    "num_experts": EXPERTS,
    "top_k": TOP_K,
}


@formula("nodes", **GROUPS)
def nodes_with_limit(nodes: int, limit: int, num_experts: int, top_k: int) -> Iterator[Step]:
    """Nodes that a token reaches where groups are ranked by their best expert; expected.

    Derivation: min(M, D) of the unrestricted count D, token by token.
    """
    law = group_limited_pmf(num_experts, top_k, nodes, limit)
    mean = float(sum(d * chance for d, chance in enumerate(law)))
    yield Step("nodes_with_limit", f"mean of min({limit}, nodes hit without limit)", mean, "nodes")


@formula("nodes", slow=True, **GROUPS)
def nodes_with_limit_by_two(nodes: int, limit: int, num_experts: int, top_k: int) -> Iterator[Step]:
    """The same where a group is ranked by the sum of its two best: DeepSeek-V3's own rule.

    No closed form is known. Scores are drawn, independent and uniform, for 6,000 tokens from a
    fixed seed; the mean has a standard error of about 0.003.
    """
    scores = np.random.Generator(np.random.Philox(SEED)).random(
        (DRAWN_TOKENS, num_experts), np.float32
    )
    grouped = scores.reshape(DRAWN_TOKENS, nodes, -1)
    best_two = np.partition(grouped, -2, axis=2)[:, :, -2:].sum(axis=2)
    kept = best_two >= np.partition(best_two, -limit, axis=1)[:, -limit, None]
    open_scores = np.where(kept[:, :, None], grouped, -1).reshape(DRAWN_TOKENS, -1)
    chosen = np.argpartition(open_scores, -top_k, axis=1)[:, -top_k:] // (num_experts // nodes)
    hit = (chosen[:, :, None] == np.arange(nodes)).any(axis=1).sum(axis=1)
    error = float(hit.std()) / sqrt(DRAWN_TOKENS)
    yield Step("standard error", f"of {DRAWN_TOKENS:,} tokens", error, "nodes")
    yield Step("nodes_with_limit_by_two", "mean of the drawn tokens", float(hit.mean()), "nodes")
