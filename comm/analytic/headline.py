"""The headline formula, top_k x tokens x hidden x 2 B, against what really left the ranks.

Measured / headline is taken apart into seven factors, in a fixed order, by walking through the
byte counts that lie between the two:

    headline
      remote_share    copies whose expert lives on another rank
      rows_per_copy   rows sent for them (deduplication; more than 1 for an all-gather)
      hops            times a row is forwarded
      padding         rows sent, empty ones included
      width           elements of a row instead of the hidden size
      format          payload bytes of a row instead of 2 B an element
      metadata        ids, weights and counts
    measured          bytes of one dispatch, forward, that left their rank

Each factor is one count over the count before it, so the product cannot drift from the ratio.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from comm.analytic.rows import PAYLOAD_KINDS

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
) -> Headline:
    """Decompose the dispatch of a run, all steps and layers together.

    remote_bytes: measured bytes of each kind that left their rank, counts messages included
    remote_rows: measured rows that left their rank
    remote_copies: (token, expert) choices whose expert lives on another rank than the token
    num_tokens: tokens over all ranks and measured steps
    width: elements of a row on the wire, hidden_size: elements of a token in the network
    """
    full_row = 2 * hidden_size
    headline_bytes = top_k * num_tokens * num_layers * full_row
    measured_bytes = sum(remote_bytes.values())
    if headline_bytes == 0:
        return Headline(0, measured_bytes, None, ())
    payload_bytes = sum(remote_bytes.get(kind, 0) for kind in PAYLOAD_KINDS)
    rows_bytes = remote_rows * full_row
    path = (
        remote_copies * full_row,
        rows_bytes,
        rows_bytes,  # hops: every dispatcher here sends a row once
        rows_bytes,  # padding: and sends no empty rows
        remote_rows * 2 * width,
        payload_bytes,
        measured_bytes,
    )
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
    return Headline(headline_bytes, measured_bytes, measured_bytes / headline_bytes, tuple(factors))
