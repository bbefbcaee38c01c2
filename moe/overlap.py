"""The tokens of a layer in chunks: the rows of one travel while the experts work on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from comm.dispatch.base import Dispatcher, DispatchResult, Pending


def routed(
    dispatchers: Sequence[Dispatcher],
    experts: Callable[[Tensor, Tensor], Tensor],
    z: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    slots: Tensor | None = None,
) -> tuple[Tensor, int]:
    """[T, W] over the wire, through the experts and back, and how many choices found no room.

    dispatchers: one for each chunk, each a complete dispatch and combine
    experts: function of (expert_input, tokens_per_expert)

    The next chunk is sent before the experts of this one begin, and answers are waited for at the
    very end: what travels meanwhile costs no time of its own.
    """
    if len(dispatchers) == 1:
        (dispatcher,) = dispatchers
        arrived = dispatcher.dispatch_async(z, topk_ids, topk_weights, slots).wait()
        expert_output = experts(arrived.expert_input, arrived.tokens_per_expert)
        output = dispatcher.combine_async(expert_output, arrived.handle).wait()
        return output, arrived.num_dropped
    count = len(dispatchers)
    edges = [index * len(z) // count for index in range(count + 1)]

    def start(chunk: int) -> Pending[DispatchResult]:
        part = slice(edges[chunk], edges[chunk + 1])
        own_slots = None if slots is None else slots[part]
        return dispatchers[chunk].dispatch_async(
            z[part], topk_ids[part], topk_weights[part], own_slots
        )

    combining, dropped, pending = [], 0, start(0)
    for chunk, dispatcher in enumerate(dispatchers):
        arrived = pending.wait()
        if chunk + 1 < count:
            pending = start(chunk + 1)
        expert_output = experts(arrived.expert_input, arrived.tokens_per_expert)
        combining.append(dispatcher.combine_async(expert_output, arrived.handle))
        dropped += arrived.num_dropped
    return torch.cat([combine.wait() for combine in combining]), dropped
