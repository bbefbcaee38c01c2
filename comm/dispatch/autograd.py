"""Dispatch and combine as two nodes of the autograd graph, whatever the strategy.

    forward    hidden, topk_weights -> Dispatch -> expert_input, weights -> experts -> Combine -> y
    backward   the same road the other way: each node calls its strategy's transpose

Every rank must build the same graph, those without tokens or without experts too: a transpose is a
collective. Backward runs a graph's nodes in the reverse of the order in which forward made them, so
several layers, and several chunks of one, keep step on all ranks.

Rounding on the wire is passed straight through: the gradient is that of the exact value. Gradients
are rounded on their own way, to the setup's format of gradients. The weights that combine applies
are an output of Dispatch, so that their gradient comes home along the road that they took.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comm.dispatch.base import Combined, Dispatcher, DispatchResult


def dispatch_with_grad(
    dispatcher: Dispatcher, hidden: Tensor, slots: Tensor, topk_weights: Tensor
) -> DispatchResult:
    """A dispatch that backward can follow; arguments as for `Dispatcher._start_dispatch`."""
    kept: list[DispatchResult] = []  # what is no tensor cannot be an output of a graph node
    expert_input, weights = _Dispatch.apply(hidden, topk_weights, dispatcher, slots, kept)
    handle = replace(kept[0].handle, weights=weights)
    return replace(kept[0], expert_input=expert_input, handle=handle)


def combine_with_grad(dispatcher: Dispatcher, expert_output: Tensor, handle: Any) -> Tensor:
    """A combine that backward can follow."""
    return _Combine.apply(expert_output, handle.weights, dispatcher, handle)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        topk_weights: Tensor,
        dispatcher: Dispatcher,
        slots: Tensor,
        kept: list[DispatchResult],
    ) -> tuple[Tensor, Tensor]:
        pending = dispatcher.timed(
            "dispatch", lambda: dispatcher._start_dispatch(hidden, slots, topk_weights)
        )
        result = pending.wait()
        ctx.dispatcher, ctx.handle = dispatcher, result.handle
        kept.append(result)
        # A view: an input that is also an output would be mistaken for an in-place change.
        return result.expert_input, result.handle.weights.view_as(result.handle.weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple:
        pending = ctx.dispatcher.timed(
            "dispatch",
            lambda: lambda: ctx.dispatcher._dispatch_backward(grad, grad_weights, ctx.handle),
            "backward",
        )
        return *pending.wait(), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, expert_output: Tensor, weights: Tensor, dispatcher: Dispatcher, handle: Any
    ) -> Tensor:
        pending = dispatcher.timed(
            "combine", lambda: dispatcher._start_combine(expert_output, handle)
        )
        combined: Combined = pending.wait()
        answers = combined.answers
        summed = combined.expert_output
        ctx.save_for_backward(expert_output if summed is None else summed)
        ctx.answers = None if answers is None else answers.clone()  # they may lie in the arena
        ctx.dispatcher, ctx.handle = dispatcher, handle
        return combined.output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (expert_output,) = ctx.saved_tensors
        grad = grad.contiguous()
        pending = ctx.dispatcher.timed(
            "combine",
            lambda: (
                lambda: ctx.dispatcher._combine_backward(
                    grad, expert_output, ctx.answers, ctx.handle
                )
            ),
            "backward",
        )
        return *pending.wait(), None, None
