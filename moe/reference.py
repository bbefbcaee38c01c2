"""The oracle of the numbers: the layer of `moe.layer`, dense, in one process, slow and plain.

It is fed the recorded ids and weights of all tokens, so a rounding cannot flip a choice, and shares
with the measured path only the weights made from the seed and the activation: no dispatcher, no
placement, no wire format, no router. It computes in the run's dtype and sums in fp32, so what
differs from the measured output is the wire's rounding and the order of sums.

T tokens (of all ranks), H hidden, W payload width, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.experts import (
    ACTIVATIONS,
    ExpertWeights,
    expert_weights,
    latent_weights,
    shared_weights,
)
from moe.model import NORM_EPS, ModelShape


@dataclass(frozen=True)
class ReferenceOutput:
    """hidden: [T, H] y, before the residual; routed: [T, W] u, before RMSNorm and up-projection.

    Both must be compared: RMSNorm makes y blind to a common factor on u.
    """

    hidden: Tensor
    routed: Tensor


def reference_layer(
    shape: ModelShape,
    seed: int,
    layer: int,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    dtype: torch.dtype,
) -> ReferenceOutput:
    """Compute what MoELayer(x, topk_ids) must give, one expert at a time.

    x: [T, H]; topk_ids: int64 [T, K], -1 = no expert; topk_weights: fp32 [T, K]
    dtype: what the run computes in
    """
    activation = ACTIVATIONS[shape.activation]

    def mlp(weights: ExpertWeights, rows: Tensor) -> Tensor:
        gate_up, down = (weight.to(rows.device, dtype) for weight in weights)
        inner = down.shape[1]
        return activation(rows @ gate_up[:inner].T, rows @ gate_up[inner:].T) @ down.T

    def routed_expert(expert: int, rows: Tensor) -> Tensor:
        return mlp(expert_weights(shape, seed, layer, expert), rows)

    x = x.to(dtype)
    if shape.latent_size is None:
        routed = reference_routed(x, topk_ids, topk_weights, routed_expert)
        hidden = routed
    else:
        down, up = (weight.to(x.device, dtype) for weight in latent_weights(shape, seed, layer))
        routed = reference_routed(x @ down.T, topk_ids, topk_weights, routed_expert)
        hidden = _rms_norm(routed) @ up.T
    if shape.num_shared_experts:
        hidden = hidden + mlp(shared_weights(shape, seed, layer), x)
    return ReferenceOutput(hidden=hidden, routed=routed)


def reference_routed(
    z: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Sum of weight * expert(z) over each token's choices, in ascending k, in fp32.

    z: [T, W]; expert: (logical id, rows [n, W]) -> [n, W], called once for each chosen expert
    returns: [T, W] in z's dtype; zeros for a token without experts
    """
    num_tokens, top_k = topk_ids.shape
    parts = torch.zeros(num_tokens, top_k, z.shape[1], dtype=torch.float32, device=z.device)
    for expert_id in topk_ids.unique().tolist():
        if expert_id >= 0:
            token, k = (topk_ids == expert_id).nonzero(as_tuple=True)
            parts[token, k] = expert(expert_id, z[token]).float()
    total = torch.zeros_like(parts[:, 0])
    for k in range(top_k):
        total += topk_weights[:, k, None].float() * parts[:, k]
    return total.to(z.dtype)


def relative_error(measured: Tensor, reference: Tensor) -> float:
    """Largest L2 error of a token, over its reference's norm or the rms norm where that is larger.

    measured, reference: [T, width]
    returns: 0.0 without tokens; infinity where anything is not finite, so that no bound admits it
    """
    if measured.shape != reference.shape:
        raise ValueError(f"measured {tuple(measured.shape)}, reference {tuple(reference.shape)}")
    if not len(measured):
        return 0.0
    error = (measured.double() - reference.double()).norm(dim=1)
    norm = reference.double().norm(dim=1)
    typical = norm.square().mean().sqrt()
    # Where experts cancel, or where there are none, a token's own norm says nothing about rounding.
    floor = typical if typical > 0 else torch.ones_like(typical)
    worst = (error / norm.clamp_min(floor)).max().item()
    return worst if worst < float("inf") else float("inf")  # NaN compares false


def _rms_norm(rows: Tensor) -> Tensor:
    rows32 = rows.float()
    mean_square = rows32.square().mean(dim=1, keepdim=True)
    return (rows32 / (mean_square + NORM_EPS).sqrt()).to(rows.dtype)
