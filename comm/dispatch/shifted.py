"""A road that leads from one lane of an expert-parallel group into another.

    positions of the group     0  1  2  3  4  5        n = 2 shards, lanes {0 2 4} and {1 3 5}
    shift 1, to the experts    0 -> 1 3 5   1 -> 0 2 4   2 -> 1 3 5 ...
    shift 1, back to tokens    1 -> 0 2 4   0 -> 1 3 5   ...

A dispatcher sees as many ranks as a lane has, itself at its own place among them; its messages go
to the same places of the lane that lies `shift` further on, and come from the lane that lies
`shift` behind. Answers and gradients of rows go the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from comm.meter import Position
from comm.staging import StagedWork
from comm.transport import Transport
from comm.wire import Parts


class ShiftedTransport(Transport):
    """A view of a group's connections, with staging memory of its own.

    whole: among all ranks of the group, lane after lane at every num_shards-th position
    shift: 0 .. num_shards - 1; with 0 the rank stays in its own lane
    """

    def __init__(self, whole: Transport, num_shards: int, shift: int) -> None:
        super().__init__(whole.world, whole.meter, whole.group)
        self._whole, self._num_shards, self._shift = whole.group, num_shards, shift
        place, self._lane = divmod(whole.group.rank, num_shards)
        self.group = replace(whole.group, ranks=self._ranks_of(self._lane), rank=place)

    def _ranks_of(self, lane: int) -> tuple[int, ...]:
        return self._whole.ranks[lane :: self._num_shards]

    def _lanes(self, position: Position) -> tuple[int, int]:
        """The lanes that a message of this phase goes to and comes from."""
        to_experts = (position.phase == "dispatch") == (position.direction == "forward")
        step = self._shift if to_experts else -self._shift
        return (self._lane + step) % self._num_shards, (self._lane - step) % self._num_shards

    def _spread(self, splits: Sequence[int], lane: int) -> list[int]:
        """Rows for each place of a lane as rows for each place of the group."""
        spread = [0] * self._whole.size
        spread[lane :: self._num_shards] = splits
        return spread

    def _start(
        self,
        position: Position,
        message: Tensor,
        parts: Parts,
        input_splits: list[int],
        output_splits: list[int],
        received: Tensor,
        empty_rows: Sequence[int] | None = None,
    ) -> dist.Work | StagedWork:
        to, source = self._lanes(position)
        return super()._start(
            position,
            message,
            parts,
            self._spread(input_splits, to),
            self._spread(output_splits, source),
            received,
            None if empty_rows is None else self._spread(empty_rows, to),
        )

    def _sources(self, position: Position) -> tuple[int, ...]:
        return self._ranks_of(self._lanes(position)[1])
