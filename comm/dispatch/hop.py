"""One exchange of whole tokens inside a group of ranks, and the ways back along it.

    forth   token order --select--> rank-major --all-to-all--> by source
    back    token order <---sum---- rank-major <--all-to-all-- by source

A strategy that sends a token once to a rank is one or several hops, one after another; what the
rows carry and what happens between two hops is the strategy's.

Legend: R ranks of the group, T rows to send, N rows received, W width, b bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comm import permute
from comm.meter import Position
from comm.transport import Transport
from comm.wire import Parts, pack


@dataclass(frozen=True)
class Hop:
    """Who was sent what.

    destinations: bool [R, T], which row went to which rank of the transport's group
    sent_splits, received_splits: rows to and from each rank
    """

    transport: Transport
    destinations: Tensor
    sent_splits: list[int]
    received_splits: list[int]

    def forth(self, position: Position, rows: Tensor, parts: Parts) -> Tensor:
        """Send packed rows [T, b] once more along the same pairs: uint8 [N, b], staged."""
        message = selected(self.transport, rows, self.destinations)
        return self.transport.all_to_all(
            position, message, parts, self.sent_splits, self.received_splits
        )

    def start_back(self, position: Position, parts: Parts) -> Callable[[], Tensor]:
        """Send an answer [N, b] to each received row, along the reversed pairs; what is returned
        waits for the answers to the rows sent: uint8 [sum(sent_splits), b], staged."""
        returned = self.transport.start_all_to_all(
            position, pack(parts), parts, self.received_splits, self.sent_splits
        )
        return returned.wait

    def sum_answers(self, *answers: Tensor) -> list[Tensor]:
        """Add up the answers to each row, in ascending order of ranks: [sum(sent_splits), W] each
        -> [T, W], zeros for a row that went nowhere."""
        row, first_row = permute.rows_in_token_order(self.destinations)
        return [permute.weighted_sum(answer, row, first_row) for answer in answers]


def start_hop(
    transport: Transport,
    position: Position,
    rows: Tensor,
    parts: Parts,
    destinations: Tensor,
    wire_code: int,
) -> Callable[[], tuple[Tensor, Hop]]:
    """Announce and send packed rows [T, b] to where `destinations` [R, T] says.

    parts: what the rows are packed of, by kind and width, as for the transport
    Returns what waits for the rows of the others, uint8 [N, b] in staging memory, and the hop.
    """
    rows_to = destinations.sum(1).cpu().numpy()
    announced = transport.announce(position, rows_to[:, None], 1, rows.shape[1], wire_code)
    message = selected(transport, rows, destinations)
    sent_splits, received_splits = rows_to.tolist(), announced.wait().flatten().tolist()
    hop = Hop(transport, destinations, sent_splits, received_splits)
    pending = transport.start_all_to_all(position, message, parts, sent_splits, received_splits)
    return lambda: (pending.wait(), hop)


def selected(transport: Transport, rows: Tensor, destinations: Tensor) -> Tensor:
    """Rows [T, b] in the order in which `destinations` [R, T] sends them, in staging memory."""
    index = destinations.nonzero()[:, 1]
    message = transport.staging("sent", len(index), rows.shape[1])
    return torch.index_select(rows, 0, index, out=message)
