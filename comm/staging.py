"""Rows by way of the host's memory, where ranks compute on GPUs and gloo carries the rows.

    GPU --to_host--> host --gloo--> host --to_device--> GPU

Several ranks may then share a GPU, which nccl refuses. The bytes between ranks are the same; the
two copies are not counted, for they leave no rank, but they take time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def to_host(message: Tensor) -> Tensor:
    """A copy that the rank may not touch until the message has gone."""
    return message.to("cpu", copy=True)


def to_device(landed: Tensor, received: Tensor) -> None:
    """Fill `received`, wherever it lies."""
    received.copy_(landed)


@dataclass(frozen=True)
class StagedWork:
    """A collective between hosts. landed: where its rows come in; received: where they must be"""

    work: dist.Work
    landed: Tensor
    received: Tensor

    def wait(self) -> None:
        """Until `received` is valid."""
        self.work.wait()
        to_device(self.landed, self.received)


def staged_all_to_all(
    received: Tensor,
    message: Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup,
) -> StagedWork:
    """As dist.all_to_all_single with async_op, of tensors on a device that `group` cannot reach."""
    landed = torch.empty(received.shape, dtype=received.dtype)
    work = dist.all_to_all_single(
        landed, to_host(message), output_splits, input_splits, group, async_op=True
    )
    return StagedWork(work, landed, received)
