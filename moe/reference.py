"""The oracle of the numbers: the layer of `moe.layer`, dense, in one process, slow and plain.

It is fed the recorded ids and weights of all tokens, so a rounding cannot flip a choice, and shares
with the measured path only the weights made from the seed and the activation: no dispatcher, no
placement, no wire format, no router.

    outputs     in the run's dtype, sums in fp32: what differs from the measured output is the
                wire's rounding and the order of sums
    gradients   of the same equations by plain autograd in fp32, from weights rounded to the run's
                dtype; the ids are fixed, the router's weights are derived from x once more

A choice that a full expert turned away (`kept` is false) contributes nothing; with `renormalize`,
a token's other choices take over its weight.

T tokens (of all ranks), H hidden, W payload width, E experts, I inner width, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.experts import (
    ACTIVATIONS,
    ExpertWeights,
    expert_weights,
    latent_weights,
    router_weight,
    shard_of,
    shared_weights,
)
from moe.model import NORM_EPS, ModelShape

# See gradient_bound.
GRADIENT_FACTOR, FOUR_BIT_FACTOR, ARITHMETIC_STEPS = 3.0, 6.0, 8.0
FOUR_BITS = 0.1  # rows that are off by more than this have values of four bits


@dataclass(frozen=True)
class ReferenceOutput:
    """hidden: [T, H] y, before the residual; routed: [T, W] u, before RMSNorm and up-projection.

    Both must be compared: RMSNorm makes y blind to a common factor on u.
    """

    hidden: Tensor
    routed: Tensor


@dataclass(frozen=True)
class ReferenceGradients:
    """fp32 gradients of sum(grad_hidden * y), all ranks' tokens together.

    x: [T, H]; router_weight: [E, H], zeros where the weights were given
    router_floor: norm of a row of router_weight in whose sums nothing cancels
    experts: (gate_up [2 I, W], down [W, I]) by logical id, of the experts that had tokens; all
        others have zero gradients
    others: of "latent.down", "latent.gain", "latent.up", "shared.gate_up", "shared.down", where the
        model has them, named as the parameters of the layer
    shape: of the model
    """

    x: Tensor
    router_weight: Tensor
    router_floor: float
    experts: dict[int, ExpertWeights]
    others: dict[str, Tensor]
    shape: ModelShape

    @property
    def replicated(self) -> dict[str, Tensor]:
        """Of what every rank holds, by the name of the layer's parameter."""
        return {"router.weight": self.router_weight, **self.others}

    def stacked(self, experts: Sequence[int], shard: tuple[int, int] = (0, 1)) -> ExpertWeights:
        """Of some logical experts, in this order, one shard of each: [n, 2 I, W] and [n, W, I]."""
        width, inner = self.shape.payload_width, self.shape.intermediate_size
        gate_up = self.x.new_zeros(len(experts), 2 * inner, width)
        down = self.x.new_zeros(len(experts), width, inner)
        for slot, expert in enumerate(experts):
            if expert in self.experts:
                gate_up[slot], down[slot] = self.experts[expert]
        return shard_of(ExpertWeights(gate_up, down), shard)


def reference_layer(
    shape: ModelShape,
    seed: int,
    layer: int,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    dtype: torch.dtype,
    kept: Tensor | None = None,
    renormalize: bool = False,
) -> ReferenceOutput:
    """Compute what MoELayer(x, topk_ids) must give, one expert at a time.

    x: [T, H]; topk_ids: int64 [T, K], -1 = no expert; topk_weights: fp32 [T, K], the router's
    dtype: what the run computes in
    kept: bool [T, K], false for a dropped choice; None: all were kept
    """
    x = x.to(dtype)
    topk_ids, topk_weights = _without_dropped(topk_ids, topk_weights, kept, renormalize)
    replicated = {
        name: weight.to(x.device, dtype) for name, weight in _replicated(shape, seed, layer).items()
    }

    def expert(logical: int) -> ExpertWeights:
        made = expert_weights(shape, seed, layer, logical)
        return ExpertWeights(*(weight.to(x.device, dtype) for weight in made))

    return _layer(shape, x, topk_ids, topk_weights, expert, replicated)


def reference_gradients(
    shape: ModelShape,
    seed: int,
    layer: int,
    x: Tensor,
    topk_ids: Tensor,
    grad_hidden: Tensor,
    dtype: torch.dtype,
    kept: Tensor | None = None,
    renormalize: bool = False,
    topk_weights: Tensor | None = None,
) -> ReferenceGradients:
    """Gradients of MoELayer(x, topk_ids), given those of its output.

    x: [T, H], already normalised; grad_hidden: [T, H], of y; topk_ids, kept: as `reference_layer`
    dtype: what the run computes in; here x and the weights are rounded to it, and nothing else
    topk_weights: fp32 [T, K] where they are not the router's: constants, and so is the router
    """

    def leaf(values: Tensor) -> Tensor:
        # A copy: rounding may have been none, and the caller's tensor must not become a leaf.
        return values.to(x.device, dtype).float().clone().detach().requires_grad_()

    def expert(logical: int) -> ExpertWeights:
        made = expert_weights(shape, seed, layer, logical)
        used[logical] = ExpertWeights(*(leaf(weight) for weight in made))
        return used[logical]

    used: dict[int, ExpertWeights] = {}
    with torch.inference_mode(False), torch.enable_grad():
        inputs = leaf(x)
        router = router_weight(shape, seed, layer).to(x.device).requires_grad_()  # fp32 in any run
        others = {name: leaf(weight) for name, weight in _replicated(shape, seed, layer).items()}
        if topk_weights is None:
            topk_weights = reference_router_weights(shape, inputs, router, topk_ids)
        # clones: autograd refuses what was made in inference mode
        topk_ids, topk_weights = _without_dropped(
            topk_ids.clone(), topk_weights.clone(), kept, renormalize
        )
        output = _layer(shape, inputs, topk_ids, topk_weights, expert, others)
        experts = [weight for pair in used.values() for weight in pair]
        leaves = [inputs, router, output.routed, *others.values(), *experts]
        grad = grad_hidden.to(inputs).clone()
        # Without any expert the routed part is a constant, and has no gradient of its own.
        moving = [one for one in leaves if one.requires_grad]
        moved = iter(torch.autograd.grad(output.hidden, moving, grad, materialize_grads=True))
        found = iter(
            [next(moved) if one.requires_grad else torch.zeros_like(one) for one in leaves]
        )
    return ReferenceGradients(
        x=next(found),
        router_weight=next(found),
        router_floor=_router_floor(shape, inputs.detach(), output.routed.detach(), next(found)),
        others={name: next(found) for name in others},
        experts={logical: ExpertWeights(next(found), next(found)) for logical in used},
        shape=shape,
    )


def reference_router_weights(
    shape: ModelShape, x: Tensor, router: Tensor, topk_ids: Tensor
) -> Tensor:
    """The weights of given choices from the router's matrix [E, H], by the published formulas.

    x: [T, H]; topk_ids: int64 [T, K], -1 = no expert, whose weight is 0
    returns: fp32 [T, K]
    """
    logits = x.float() @ router.float().T
    scores = {
        "sigmoid": lambda: (1 + torch.tanh(logits / 2)) / 2,
        "softmax": lambda: torch.exp(logits - logits.logsumexp(dim=1, keepdim=True)),
        "sqrt_softplus": lambda: torch.logaddexp(logits, torch.zeros_like(logits)).sqrt(),
        # over the chosen ones alone; the division comes below
        "softmax_topk": lambda: torch.exp(logits - logits.amax(dim=1, keepdim=True).detach()),
    }[shape.score_func]()
    token = torch.arange(len(x), device=x.device)[:, None]
    weights = scores[token, topk_ids.clamp(min=0)] * (topk_ids >= 0)
    if shape.norm_topk or shape.score_func == "softmax_topk":
        total = weights.sum(dim=1, keepdim=True)
        weights = weights / torch.where(total > 0, total, torch.ones_like(total))
    return weights * shape.route_scale


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


def relative_error(measured: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Largest L2 error of a token, over its reference's norm or the rms norm where that is larger.

    The rms is over rows that are not zero: those of experts without tokens say nothing.
    measured, reference: [T, width]; floor: a norm that is still smaller is not divided by
    returns: 0.0 without tokens; infinity where anything is not finite, so that no bound admits it
    """
    if measured.shape != reference.shape:
        raise ValueError(f"measured {tuple(measured.shape)}, reference {tuple(reference.shape)}")
    if not len(measured):
        return 0.0
    error = (measured.double() - reference.double()).norm(dim=1)
    norm = reference.double().norm(dim=1)
    # Where experts cancel, or where there are none, a token's own norm says nothing about rounding.
    typical = (norm.square().sum() / (norm > 0).sum().clamp_min(1)).sqrt().clamp_min(floor)
    least = typical if typical > 0 else torch.ones_like(typical)
    worst = (error / norm.clamp_min(least)).max().item()
    return worst if worst < float("inf") else float("inf")  # NaN compares false


def gradient_errors(
    measured: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    floors: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The relative error of each gradient, the worst first.

    "x" is compared by token, "router.*" and "experts.*" by expert, as rows of `relative_error`;
    any other tensor as a whole.
    floors: norms of rows below which rounding is not measured, by name. The router's gradient is 0
        where weights are divided by their sum and a token has but one: what is left is noise.
    Raises ValueError where the names or the shapes differ.
    """
    if measured.keys() != reference.keys():
        raise ValueError(f"gradients of {sorted(measured)}, reference of {sorted(reference)}")
    errors = {}
    for name, wanted in reference.items():
        given = measured[name]
        if given.shape != wanted.shape:
            raise ValueError(
                f"gradient of {name} is {tuple(given.shape)}, reference {tuple(wanted.shape)}"
            )
        rows = len(wanted) if name.split(".")[0] in ("x", "router", "experts") else 1
        width = wanted.numel() // max(rows, 1)
        errors[name] = relative_error(
            given.reshape(rows, width), wanted.reshape(rows, width), (floors or {}).get(name, 0.0)
        )
    return dict(sorted(errors.items(), key=lambda error: -error[1]))


def gradient_bound(row_errors: Sequence[float], unit_roundoff: float) -> float:
    """Largest relative error of any gradient of a layer that rounding may cause.

    row_errors: of the wire formats of dispatch, combine and backward, as `WireFormat.row_error`
    unit_roundoff: of the run's dtype, 2^-24, 2^-8 or 2^-11
    Each rounding enters a gradient about once, and the arithmetic rounds in each of several steps.
    The largest error seen in 400 random layers (K = 1 .. 16, all formats and dtypes) was 0.56 of
    this bound. A gradient lost, sent to another expert or counted twice has an error of about 1.
    What four bits do to a row, an expert with but that row has in its gradient several times over.
    The factor for them is wide, and the bound may exceed 1: then it says little.
    """
    factor = FOUR_BIT_FACTOR if max(row_errors) > FOUR_BITS else GRADIENT_FACTOR
    return factor * (sum(row_errors) + ARITHMETIC_STEPS * unit_roundoff)


def _replicated(shape: ModelShape, seed: int, layer: int) -> dict[str, Tensor]:
    """What every rank holds besides the router, by the name of the layer's parameter; fp32."""
    weights: dict[str, Tensor] = {}
    if shape.latent_size is not None:
        weights["latent.down"], weights["latent.up"] = latent_weights(shape, seed, layer)
        weights["latent.gain"] = torch.ones(shape.latent_size)
    if shape.num_shared_experts:
        weights["shared.gate_up"], weights["shared.down"] = shared_weights(shape, seed, layer)
    return weights


def _router_floor(shape: ModelShape, x: Tensor, routed: Tensor, grad: Tensor) -> float:
    """Row norm of the gradient of a chosen expert's logits if a token's vectors were at random
    angles.

    x: [T, H]; routed, its gradient: [T, W]. A token's part is (grad . outputs) x: W products.
    """
    part = grad.norm(dim=1) * routed.norm(dim=1) * x.norm(dim=1)
    rows = min(shape.num_experts, len(x) * shape.top_k)
    return (part.norm() / (shape.payload_width * max(rows, 1)) ** 0.5).item()


def _layer(
    shape: ModelShape,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert: Callable[[int], ExpertWeights],
    others: Mapping[str, Tensor],
) -> ReferenceOutput:
    """The equations at the top of `moe.layer`, from weights in the dtype of x.

    expert: (logical id) -> its weights; others: as `_replicated`
    """
    activation = ACTIVATIONS[shape.activation]

    def mlp(gate_up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
        inner = down.shape[1]
        return activation(rows @ gate_up[:inner].T, rows @ gate_up[inner:].T) @ down.T

    def routed_expert(logical: int, rows: Tensor) -> Tensor:
        return mlp(*expert(logical), rows)

    if shape.latent_size is None:
        hidden = routed = reference_routed(x, topk_ids, topk_weights, routed_expert)
    else:
        z = x @ others["latent.down"].T
        routed = reference_routed(z, topk_ids, topk_weights, routed_expert)
        hidden = (_rms_norm(routed) * others["latent.gain"]) @ others["latent.up"].T
    if shape.num_shared_experts:
        hidden = hidden + mlp(others["shared.gate_up"], others["shared.down"], x)
    return ReferenceOutput(hidden=hidden, routed=routed)


def _without_dropped(
    topk_ids: Tensor, topk_weights: Tensor, kept: Tensor | None, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Ids and weights with the dropped choices taken out, as if the router had not made them."""
    if kept is None:
        return topk_ids, topk_weights
    present = topk_weights * (topk_ids >= 0)
    left = present * kept
    if renormalize:
        total, remaining = (w.sum(dim=1, keepdim=True) for w in (present, left))
        left = left * (total / torch.where(remaining > 0, remaining, torch.ones_like(remaining)))
    return torch.where(kept, topk_ids, -1), left


def _rms_norm(rows: Tensor) -> Tensor:
    rows32 = rows.float()
    mean_square = rows32.square().mean(dim=1, keepdim=True)
    return (rows32 / (mean_square + NORM_EPS).sqrt()).to(rows.dtype)
