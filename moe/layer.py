"""One mixture-of-experts layer around a dispatcher: where the projections sit (LatentMoE).

    topk_ids, topk_weights = Router(x)          full hidden width, fp32
    z = x W_down                  [T, W]        local, before the wire
    u = combine(experts(dispatch(z)))           the wire; experts weighted and summed there, [T, W]
    y = RMSNorm(u) W_up + Shared(x)             local, on the token's own rank, full width

The norm is not linear, so it must follow the sum over ranks. A model without a latent has no
W_down, RMSNorm and W_up, and W is the hidden width. Between layers: x <- x + layer(pre_norm(x)).

T tokens of this rank, H hidden, W payload width, K = top_k. This file knows the contract of a
dispatcher and none of them; who may reach whom: layer -> {router, experts}, comm.dispatch.base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.experts import ACTIVATIONS, latent_weights, shared_weights
from moe.model import NORM_EPS, ModelShape
from moe.overlap import routed
from moe.router import Router

if TYPE_CHECKING:
    from comm.dispatch.base import Dispatcher
    from comm.replicas import ReplicaChooser


@dataclass(frozen=True)
class LayerOutput:
    """hidden: [T, H] y, before the residual is added
    routed: [T, W] u, combined, before RMSNorm and up-projection (which would hide a wrong factor)
    topk_ids: int64 [T, K]; topk_weights: fp32 [T, K]
    slots: int64 [T, K] the physical slot of each choice where experts have replicas, else None
    num_dropped: choices that found no room
    """

    hidden: Tensor
    routed: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    slots: Tensor | None
    num_dropped: int


def pre_norm(x: Tensor) -> Tensor:
    """RMSNorm of the residual stream [T, H] on its way into a layer, with unit gains."""
    return F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)


class LatentProjection(nn.Module):
    """Down before dispatch, norm and up after combine. down: [W, H], up: [H, W]"""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)
        self.gain = nn.Parameter(torch.ones_like(up[0]))

    def into(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, W]"""
        return F.linear(x, self.down)

    def out_of(self, routed: Tensor) -> Tensor:
        """[T, W] -> [T, H]"""
        return F.linear(F.rms_norm(routed, routed.shape[-1:], self.gain, NORM_EPS), self.up)


class SharedExperts(nn.Module):
    """All shared experts as one MLP of their total width; every token, full width, no wire."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: str) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.activation(*F.linear(x, self.gate_up).chunk(2, dim=-1)), self.down)


class MoELayer(nn.Module):
    """Router, latent projections and shared experts of one rank, around experts and dispatchers.

    experts: this rank's routed experts, called with (expert_input, tokens_per_expert)
    dispatchers: one for each chunk of the tokens
    replicas: says which slot serves a token, where experts have several
    """

    def __init__(
        self,
        shape: ModelShape,
        experts: nn.Module,
        dispatchers: Sequence[Dispatcher],
        *,
        seed: int,
        layer: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        replicas: ReplicaChooser | None = None,
    ) -> None:
        super().__init__()
        self.dispatchers = tuple(dispatchers)
        self.replicas = replicas
        self.experts = experts
        self.router = Router(shape, seed=seed, layer=layer, device=device)
        self.latent: LatentProjection | None = None
        self.shared: SharedExperts | None = None
        if shape.latent_size is not None:
            down, up = latent_weights(shape, seed, layer)
            self.latent = LatentProjection(down.to(device, dtype), up.to(device, dtype))
        if shape.num_shared_experts:
            gate_up, down = shared_weights(shape, seed, layer)
            self.shared = SharedExperts(
                gate_up.to(device, dtype), down.to(device, dtype), shape.activation
            )

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        first_token: int = 0,
    ) -> LayerOutput:
        """Run the layer on this rank's tokens; a collective, so ranks without tokens call it too.

        x: [T, H], already normalised (pre_norm)
        topk_ids: int64 [T, K] where something else has chosen (-1 = no expert); None: this layer's
            router chooses
        topk_weights: fp32 [T, K] that belong to them; None: the router's
        first_token: global number of the first token, by which replicas are chosen
        """
        if topk_ids is None:
            topk_ids, topk_weights = self.router(x)
        elif topk_weights is None:
            topk_weights = self.router.weights_for(x, topk_ids)
        slots = None
        if self.replicas is not None:
            slots = self.replicas.slots(
                topk_ids, torch.arange(first_token, first_token + len(x), device=x.device)
            )
        z = x if self.latent is None else self.latent.into(x)
        combined, dropped = routed(self.dispatchers, self.experts, z, topk_ids, topk_weights, slots)
        hidden = combined if self.latent is None else self.latent.out_of(combined)
        if self.shared is not None:
            hidden = hidden + self.shared(x)
        return LayerOutput(hidden, combined, topk_ids, topk_weights, slots, dropped)
