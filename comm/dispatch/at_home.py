"""What the strategies share whose router weights stay at home: the answers come back there copy by
copy, and so does all that the gradient of a weight needs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from comm import permute
from comm.dispatch.base import Dispatcher


class HomeHandle(Protocol):
    """choice: int64 [N] flat (token, k) of each copy, in slot order; weights: fp32 [T, K]"""

    @property
    def choice(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


Handle = TypeVar("Handle", bound=HomeHandle)


class WeightsAtHome(Dispatcher[Handle]):
    """A row for each (token, expert), weighted and summed on the token's own rank."""

    @abstractmethod
    def _to_experts(self, rows: Tensor, handle: Handle) -> Tensor:
        """Gradients [N, W] in the order of `choice` to those of the expert-major rows [M, W]."""

    def _combine_backward(
        self, grad: Tensor, expert_output: Tensor, answers: Tensor | None, handle: Handle
    ) -> tuple[Tensor, Tensor]:
        assert answers is not None
        rows = grad.index_select(0, permute.token_of(handle.choice, self.setup.top_k)).float()
        grad_weights = torch.zeros_like(handle.weights).flatten()
        grad_weights[handle.choice] = (rows * answers.float()).sum(1)
        weights = handle.weights.flatten().index_select(0, handle.choice)
        grad_output = self._to_experts((rows * weights[:, None]).to(self.setup.dtype), handle)
        return grad_output, grad_weights.view_as(handle.weights)
