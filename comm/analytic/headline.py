"""The headline formula, top_k x tokens x hidden x 2 B, against what really left the ranks.

Measured / headline is taken apart into seven factors, in a fixed order, by walking through the
byte counts that lie between the two:

    headline
      remote_share    copies whose expert lives on another rank
      rows_per_copy   rows due for them: deduplication, dropped choices, other shards of an expert;
                      more than 1 for an all-gather
      hops            rows sent for each that is due, when they are forwarded
      padding         rows sent, empty ones included
      width           elements of a row instead of the hidden size
      format          payload bytes of a row, full or empty, instead of 2 B an element
      metadata        ids, weights and counts
    measured          bytes of one dispatch, forward, that left their rank

Each factor is one count over the count before it, so the product cannot drift from the ratio.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from comm.analytic.oracle import ExactTraffic
from comm.analytic.rows import PAYLOAD_KINDS
from comm.analytic.run import IntArray, RunShape

FORMULA = "top_k x tokens x hidden x 2 B"
FACTORS = ("remote_share", "rows_per_copy", "hops", "padding", "width", "format", "metadata")


@dataclass(frozen=True)
class Headline:
    """Measured remote dispatch bytes against the headline formula.

    ratio: measured / headline; None where there was nothing to route
    factors: (name, factor) in the order of `FACTORS`, their product is the ratio; empty with None
    """

    headline_bytes: int
    measured_bytes: int
    ratio: float | None
    factors: tuple[tuple[str, float], ...]
    formula: str = FORMULA


def headline(
    remote_bytes: Mapping[str, int],
    remote_rows: int,
    remote_copies: int,
    num_tokens: int,
    num_layers: int,
    top_k: int,
    hidden_size: int,
    width: int,
    *,
    remote_deliveries: int | None = None,
    useful_rows: int | None = None,
) -> Headline:
    """Decompose the dispatch of a run, all steps and layers together.

    remote_bytes: measured bytes of each kind that left their rank, counts messages included
    remote_rows: measured rows that left their rank, empty ones included
    remote_copies: (token, expert) choices whose expert lives on another rank than the token
    num_tokens: tokens over all ranks and measured steps
    width: elements of a row on the wire, hidden_size: elements of a token in the network
    remote_deliveries: rows due, hops left out: (token, rank) or (token, slot); None: useful_rows
    useful_rows: rows that left their rank with a token in them; None: remote_rows
    """
    useful_rows = remote_rows if useful_rows is None else useful_rows
    deliveries = useful_rows if remote_deliveries is None else remote_deliveries
    full_row = 2 * hidden_size
    headline_bytes = top_k * num_tokens * num_layers * full_row
    measured_bytes = sum(remote_bytes.values())
    if headline_bytes == 0:
        return Headline(0, measured_bytes, None, ())
    payload_bytes = sum(remote_bytes.get(kind, 0) for kind in (*PAYLOAD_KINDS, "padding"))
    path = (
        remote_copies * full_row,
        deliveries * full_row,
        useful_rows * full_row,
        remote_rows * full_row,
        remote_rows * 2 * width,
        payload_bytes,
        measured_bytes,
    )
    ratio = measured_bytes / headline_bytes
    return Headline(headline_bytes, measured_bytes, ratio, _factors(headline_bytes, path))


def headline_of_run(
    run: RunShape,
    exact: ExactTraffic,
    kind_bytes: Mapping[str, IntArray],
    rows: IntArray,
    hidden_size: int,
) -> Headline:
    """The headline of a whole run, all layers and steps together.

    exact: what the choices come to; only its copies and deliveries are used
    kind_bytes: kind -> [src, dst] measured bytes of dispatch, forward
    rows: [src, dst] measured rows of dispatch, forward
    """
    remote = ~np.eye(run.world_size, dtype=bool)

    def leaving(cells: IntArray) -> int:
        return int(cells[..., remote].sum())

    deliveries, sent = leaving(exact.deliveries), leaving(rows)
    return headline(
        {kind: leaving(cells) for kind, cells in kind_bytes.items()},
        sent,
        leaving(exact.copies),
        sum(run.tokens_per_rank) * run.num_steps,
        run.num_layers,
        run.top_k,
        hidden_size,
        run.width,
        remote_deliveries=deliveries,
        # Only padded sends empty rows, and it has no hops.
        useful_rows=deliveries if run.dispatcher == "padded" else sent,
    )


def _factors(headline_bytes: int, path: tuple[int, ...]) -> tuple[tuple[str, float], ...]:
    """Each count over the last one before it that was not 0."""
    measured_bytes = path[-1]
    factors, before = [], headline_bytes
    for name, after in zip(FACTORS, path, strict=True):
        if after == 0 and measured_bytes:
            # Bytes left although nothing remote was chosen (counts of an empty exchange, an
            # all-gather): this step explains none of them, the next one that is not 0 does.
            factors.append((name, 1.0))
        elif before == 0:
            factors.append((name, 1.0))
        else:
            factors.append((name, after / before))
            before = after
    return tuple(factors)
