"""The backward pass of a step on this rank, and what is kept of its gradients.

The loss is linear in the last hidden state, with seeded coefficients: every gradient is as large as
in real training, and none depends on how the tokens are spread over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comm.grad_sync import expert_holders, gradients_of, sync_experts, sync_replicated
from comm.meter import Position
from comm.staging import to_host
from comm.world import World
from moe.assemble import Roads
from moe.layer import LayerOutput, MoELayer
from moe.plan import Plan
from moe.synthetic import token_hidden


@dataclass(frozen=True)
class LayerGradients:
    """Of one layer on one rank, synchronised.

    replicated: of what every rank holds, by the name of the layer's parameter
    gate_up: [local slots, 2 I, W], down: [local slots, W, I], shards of I
    """

    replicated: dict[str, Tensor]
    gate_up: Tensor
    down: Tensor


def backward(
    plan: Plan,
    world: World,
    layers: Sequence[MoELayer],
    inputs: Sequence[Tensor],
    outputs: Sequence[LayerOutput],
    end: Tensor,
    step: int,
) -> None:
    """Fill the gradients of every layer's weights, input and output; a collective.

    inputs: [T, H] of each layer, normalised; end: [T, H] the last hidden state
    """
    first, tokens = int(plan.first_token[world.rank]), len(end)
    loss = token_hidden(plan.config.seed + 1, step, first, tokens, plan.shape.hidden_size)
    for layer, x, out in zip(layers, inputs, outputs, strict=True):
        layer.zero_grad(set_to_none=True)
        x.retain_grad()
        out.hidden.retain_grad()
    end.backward(torch.from_numpy(loss).to(end))


def synchronise(plan: Plan, world: World, roads: Roads, layers: Sequence[MoELayer]) -> None:
    """Add up gradients between the ranks that hold the same weights; a collective."""
    everyone, config = roads.world, plan.config
    for index, (layer, placement) in enumerate(zip(layers, plan.placements, strict=True)):
        position = Position(index, "grad_sync", "backward")
        everyone.meter.phase_began(position)
        started = time.perf_counter()
        sync_replicated(everyone, index, gradients_of(_replicated(layer).values()))
        gate_up, down = gradients_of([layer.experts.gate_up, layer.experts.down])
        rows = torch.cat([gate_up.flatten(1), down.flatten(1)], dim=1)
        holders = expert_holders(
            placement, world.rank, world.world_size, config.group_size, config.expert_tp
        )
        sync_experts(everyone, index, holders, rows)
        values = [gate_up.shape[1] * gate_up.shape[2], down.shape[1] * down.shape[2]]
        for gradient, summed in zip((gate_up, down), rows.split(values, dim=1), strict=True):
            gradient.copy_(summed.view_as(gradient))
        spent = time.perf_counter() - started
        everyone.meter.phase_ended(position, spent)


def _replicated(layer: MoELayer) -> dict[str, torch.nn.Parameter]:
    """What every rank holds of a layer, by name."""
    named = layer.named_parameters()
    return {name: parameter for name, parameter in named if not name.startswith("experts.")}


def local_gradients(layer: MoELayer) -> LayerGradients:
    """A copy of what `synchronise` left, on the host, where the reference is."""
    replicated = _replicated(layer)
    copies = [to_host(gradient) for gradient in gradients_of(replicated.values())]
    gate_up, down = gradients_of([layer.experts.gate_up, layer.experts.down])
    named = dict(zip(replicated, copies, strict=True))
    return LayerGradients(named, to_host(gate_up), to_host(down))
