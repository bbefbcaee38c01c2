"""The only road between ranks: every collective of a layer passes the meter and the split guard.

gloo reports success and leaves stale memory behind when a receiver expects more rows than were
sent, and aborts the process when it expects fewer. So no payload moves before both sides have
agreed on the splits: `exchange_counts` carries a header beside the counts, and checks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from comm.meter import PHASES, Position, TrafficMeter
from comm.world import World

HEADER_FIELDS = ("layer", "phase", "row bytes", "wire format")


class SplitMismatch(RuntimeError):
    """Two ranks do not mean the same message."""


class Transport:
    """A metered process group and its staging memory.

    The staging memory is reused by every message: a result must be copied out of it before the
    next message of the same name, and nothing that a caller keeps may live in it.
    """

    def __init__(self, world: World, meter: TrafficMeter) -> None:
        self.world = world
        self.meter = meter
        self._arena: dict[str, Tensor] = {}

    def staging(self, name: str, num_rows: int, row_bytes: int) -> Tensor:
        """uint8 [num_rows, row_bytes] of reused memory, contents undefined."""
        wanted = num_rows * row_bytes
        held = self._arena.get(name)
        if held is None or held.numel() < wanted:
            # A quarter more than asked, so that ragged steps do not grow it again and again.
            held = torch.empty(wanted + wanted // 4, dtype=torch.uint8, device=self.world.device)
            self._arena[name] = held
        return held[:wanted].view(num_rows, row_bytes)

    def exchange_counts(
        self,
        position: Position,
        counts: Sequence[Tensor],
        num_expected: int,
        row_bytes: int,
        wire_code: int,
    ) -> Tensor:
        """Tell each rank how many rows it is about to get; learn the same from each.

        counts: for each destination, int64 [n_dst]; n_dst may differ between destinations
        num_expected: n of this rank
        Returns int64 [R, num_expected] on the CPU. Raises SplitMismatch when a header differs.
        """
        header = torch.tensor(
            [position.layer, PHASES.index(position.phase), row_bytes, wire_code],
            dtype=torch.int64,
        )
        width = len(HEADER_FIELDS)
        message = torch.cat([part for count in counts for part in (header, count.cpu())])
        input_splits = [width + len(count) for count in counts]
        output_splits = [width + num_expected] * self.world.world_size
        received = self.all_to_all(
            position,
            message.to(self.world.device).view(-1, 1).view(torch.uint8),
            [("counts", torch.empty((0, 8), dtype=torch.uint8))],
            input_splits,
            output_splits,
        )
        table = received.cpu().view(torch.int64).view(self.world.world_size, -1)
        self._check_headers(position, header, table[:, :width])
        return table[:, width:].clone()  # the payload is about to overwrite the staging

    def all_to_all(
        self,
        position: Position,
        message: Tensor,
        parts: Sequence[tuple[str, Tensor]],
        input_splits: Sequence[int],
        output_splits: Sequence[int],
    ) -> Tensor:
        """Exchange rows: uint8 [sum(input_splits), b] -> uint8 [sum(output_splits), b], staged.

        parts: (kind, uint8 [*, b_kind]), what a row of `message` is made of
        """
        received = self.staging("received", sum(output_splits), message.shape[1])
        self.meter.record(position, message, parts, input_splits, output_splits)
        dist.all_to_all_single(
            received, message, list(output_splits), list(input_splits), self.world.metered_group
        )
        return received

    def _check_headers(self, position: Position, mine: Tensor, theirs: Tensor) -> None:
        if bool((theirs == mine).all()):
            return
        wrong = (theirs != mine).nonzero()[0].tolist()
        source, field = wrong
        raise SplitMismatch(
            f"{position}: rank {source} announces {HEADER_FIELDS[field]}"
            f" {int(theirs[source, field])}, rank {self.world.rank} expects {int(mine[field])}"
        )
