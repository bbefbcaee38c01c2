"""One routing, and every number of rows that the field divides by a time to print a "bandwidth".

The same exchange may be credited with each choice or with each rank or node reached, with the rows
that stay at home or without. A figure means nothing until its numerator is named; this table names
them. It is counted from a run's own choices, or expected under uniform routing: then the numerators
are what the strategies send (`strategies`).

Legend: R ranks, N nodes, E experts, K top_k. Everything is seen inside the source's own lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from comm.analytic.choices import check_routing, count_layer
from comm.analytic.paths import Paths
from comm.analytic.rows import payload_bytes
from comm.analytic.run import IntArray, RunShape
from comm.analytic.strategies import Machine

# name -> who prints it
PRINTED_BY = {
    "copies, self included": "DeepEP low-latency, pplx, NCCL-EP low-latency",
    "min(ranks, top_k)": "TensorRT-LLM with its perfect router",
    "copies, remote": "",
    "distinct ranks, self included": 'DeepEP "NVL", MORI "XGMI"',
    "distinct ranks, remote": "flashinfer exact traffic",
    "two hops, inside the node": "physical NVLink",
    "copies, between nodes": "",
    "distinct ranks, between nodes": "",
    "distinct nodes, own node included": (
        'DeepEP, UCCL, Hybrid-EP, MORI "RDMA" (N/(N-1) over the wire)'
    ),
    "distinct nodes, remote": "physical RDMA",
    "all-gather, remote": "",
    "all-gather, between nodes": "",
}

NCCL_TESTS_NOTE = (
    "nccl-tests: algbw = size / time, and busbw of an all-to-all = algbw (n - 1) / n; size is that"
    " of a buffer, so a ragged exchange does not show in either"
)


@dataclass(frozen=True)
class Convention:
    """One numerator.

    rows_per_token: rows credited to a token in one layer, mean over all tokens, masked ones too
    num_bytes: payload that it credits to a rank in one layer and step, mean, one way
    printed_by: whose published figures use it; "" where none is known
    """

    name: str
    rows_per_token: float
    num_bytes: float
    printed_by: str


def conventions_of_run(
    run: RunShape, topk_ids: IntArray, slots: IntArray | None = None
) -> tuple[Convention, ...]:
    """Every convention, counted from what the tokens of a run chose, whatever its dispatcher.

    Arguments as for `exact_traffic`. Rows weigh what the payload weighs in `wire_dispatch`.
    """
    paths = Paths.of(run)
    check_routing(run, topk_ids, slots)
    totals = dict.fromkeys(PRINTED_BY, 0.0)
    for layer in range(run.num_layers):
        counts = count_layer(run, paths, topk_ids, slots, layer)
        rows = _rows(paths, counts.copies, counts.pairs, counts.node_hits, counts.active, run.top_k)
        for name, number in rows.items():
            totals[name] += number
    row = sum(payload_bytes(run.wire_dispatch, run.width))
    num_tokens = sum(run.tokens_per_rank)
    return _table(
        totals,
        num_tokens * run.num_layers * run.num_steps,
        num_tokens / run.world_size,
        row,
    )


def expected_conventions(
    ep_size: int,
    ranks_per_node: int,
    num_experts: int,
    top_k: int,
    tokens: int,
    row_bytes: int,
) -> tuple[Convention, ...]:
    """Every convention under uniform routing, `tokens` on each rank, as many experts on each.

    Nodes are blocks of `ranks_per_node`, the last one may be smaller. Where E / R leaves a
    remainder, the first ranks hold one expert more and the figures are means over the sources.
    """
    machine = Machine(ep_size, ranks_per_node, num_experts, top_k)
    of, hits = machine.rows, machine.hits
    rows = {
        "copies, self included": float(top_k),
        "min(ranks, top_k)": float(min(ep_size, top_k)),
        "copies, remote": of["all_to_all"].remote,
        "distinct ranks, self included": float(hits.mean.sum()),
        "distinct ranks, remote": of["rank_dedup"].remote,
        "two hops, inside the node": of["two_hop"].scale_up,
        "copies, between nodes": of["all_to_all"].scale_out,
        "distinct ranks, between nodes": of["rank_dedup"].scale_out,
        "distinct nodes, own node included": float(hits.node_mean.sum()),
        "distinct nodes, remote": of["two_hop"].scale_out,
        "all-gather, remote": of["allgather"].remote,
        "all-gather, between nodes": of["allgather"].scale_out,
    }
    return _table(rows, 1, tokens, row_bytes)


def _rows(
    paths: Paths,
    copies: NDArray[np.int64],
    pairs: NDArray[np.int64],
    node_hits: NDArray[np.int64],
    active: NDArray[np.int64],
    top_k: int,
) -> dict[str, float]:
    """Rows of each convention, from the fields of `Counts`."""
    remote = paths.same_lane & ~np.eye(paths.world_size, dtype=bool)
    outside = paths.same_lane & ~paths.same_node
    inside = remote & paths.same_node
    own_node = np.zeros(node_hits.shape, bool)
    own_node[np.arange(paths.world_size), paths.node] = True
    # Rows of the second hop alone, from the proxies.
    forwarded = paths.hops(np.zeros_like(node_hits), pairs)
    everyone = active[:, None]
    lane_size = paths.rank_at.shape[1]
    rows = {
        "copies, self included": copies.sum(),
        "min(ranks, top_k)": min(lane_size, top_k) * active.sum(),
        "copies, remote": copies[remote].sum(),
        "distinct ranks, self included": pairs.sum(),
        "distinct ranks, remote": pairs[remote].sum(),
        "two hops, inside the node": forwarded[inside].sum(),
        "copies, between nodes": copies[outside].sum(),
        "distinct ranks, between nodes": pairs[outside].sum(),
        "distinct nodes, own node included": node_hits.sum(),
        "distinct nodes, remote": node_hits[~own_node].sum(),
        "all-gather, remote": (everyone * remote).sum(),
        "all-gather, between nodes": (everyone * outside).sum(),
    }
    return {name: float(number) for name, number in rows.items()}


def _table(
    totals: Mapping[str, float], num_tokens: int, tokens_per_rank: float, row_bytes: int
) -> tuple[Convention, ...]:
    """totals: rows by convention, of `num_tokens` tokens, each in one layer and step"""
    per_token = {name: rows / num_tokens if num_tokens else 0.0 for name, rows in totals.items()}
    return tuple(
        Convention(name, rows, rows * tokens_per_rank * row_bytes, PRINTED_BY[name])
        for name, rows in per_token.items()
    )
