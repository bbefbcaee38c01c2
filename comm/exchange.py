"""An all-to-all of gloo between hosts, which fills a link in both directions at once.

gloo sends rows when it has the other rank's note that they may come. Its own all_to_all_single
sends to a rank before it says that it is ready to receive from it; the note then waits behind the
rows in the same connection, and the two directions take turns. So here every note goes out before
the first row. The messages are the same: one along each ordered pair, empty ones too.

Between ranks of one host it would only cost time: one call of torch for each message.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Messages:
    """In flight. works: of each message; timeout: for each of them; rows: must live as long"""

    works: list[dist.Work]
    timeout: timedelta
    rows: tuple[Tensor, Tensor]

    def wait(self) -> None:
        """Until all rows are there, and all that were to go are gone. Raises RuntimeError."""
        for work in self.works:
            work.wait(self.timeout)


def receive_first(
    received: Tensor,
    message: Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup,
    timeout: timedelta,
) -> Messages:
    """As dist.all_to_all_single with async_op, on the CPU and by gloo.

    Messages between two ranks arrive in the order in which they were sent, so that several may be
    in flight as long as all ranks start them in the same order.
    """
    size, rank = group.size(), group.rank()
    into, out_of = received.split(output_splits), message.split(input_splits)
    sources = [(rank - shift) % size for shift in range(1, size)]  # each rank another one first
    works = [group.recv([into[place]], place, 0) for place in sources]
    works += [group.send([out_of[place]], place, 0) for place in reversed(sources)]
    into[rank].copy_(out_of[rank])
    return Messages(works, timeout, (received, message))
