"""The router of one MoE layer: which experts a token meets, and with which weights.

    logits = x W_router                                fp32, full hidden width
    scores = score function of the logits
    choose K by scores + bias, inside the best groups   the bias chooses and does nothing else
    weights = chosen scores / their sum * route_scale   the division only where norm_topk

T tokens, H hidden, E experts, K = top_k, G groups of E / G experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.experts import router_weight, seeded_weight
from moe.model import ModelShape
from moe.philox import Purpose

# Deviation of the selection bias: small beside the scores, large enough to change choices.
_BIAS_STD = 0.02

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
    # chosen by the logits; the softmax follows over the chosen ones
    "softmax_topk": lambda logits: logits,
}


class Router(nn.Module):
    """Scores every expert for every token and chooses top_k of them."""

    expert_bias: Tensor

    def __init__(
        self, shape: ModelShape, *, seed: int, layer: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(router_weight(shape, seed, layer).to(device))
        bias = torch.zeros(shape.num_experts)
        if shape.expert_bias:
            bias = seeded_weight(seed, Purpose.EXPERT_BIAS, layer, 0, bias.shape, _BIAS_STD)
        self.register_buffer("expert_bias", bias.to(device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for x [T, H]: (topk_ids int64 [T, K], topk_weights fp32 [T, K])."""
        scores = self._scores(x)
        topk_ids = self._choose(scores + self.expert_bias)
        return topk_ids, self._weights(scores, topk_ids)

    def weights_for(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """The weights that this router gives to experts that something else has chosen.

        x: [T, H]; topk_ids: int64 [T, K], -1 = no expert, which gets weight 0
        returns: fp32 [T, K]
        """
        return self._weights(self._scores(x), topk_ids)

    def _scores(self, x: Tensor) -> Tensor:
        logits = F.linear(x.float(), self.weight.float())
        return _SCORES[self.shape.score_func](logits)

    def _choose(self, selection: Tensor) -> Tensor:
        """The K best of selection [T, E] by expert, among the best groups only."""
        shape = self.shape
        if shape.num_limited_groups < shape.num_expert_groups:
            grouped = selection.unflatten(1, (shape.num_expert_groups, -1))
            best = 1 if shape.group_score == "max" else 2
            group_scores = grouped.topk(best, dim=-1).values.sum(dim=-1)
            kept = group_scores.topk(shape.num_limited_groups, dim=-1).indices
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
            # -inf and not 0: a biased score may be negative and would lose to a dropped group
            selection = grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)
        return selection.topk(shape.top_k, dim=-1).indices

    def _weights(self, scores: Tensor, topk_ids: Tensor) -> Tensor:
        masked = topk_ids < 0
        chosen = scores.gather(1, topk_ids.clamp_min(0))
        if self.shape.score_func == "softmax_topk":
            # the lowest finite value and not -inf: a row without any expert must not become NaN
            lowest = torch.finfo(chosen.dtype).min
            chosen = chosen.masked_fill(masked, lowest).softmax(dim=-1)
        chosen = chosen.masked_fill(masked, 0.0)
        if self.shape.norm_topk and self.shape.score_func != "softmax_topk":
            tiny = torch.finfo(chosen.dtype).tiny
            chosen = chosen / chosen.sum(dim=-1, keepdim=True).clamp_min(tiny)
        return chosen * self.shape.route_scale
