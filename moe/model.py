"""The shape of a mixture-of-experts network, and how a run shrinks it.

What decides routing, traffic and the arithmetic of an MoE layer is here; what stands around these
layers, which memory needs and no run, is in moe/attention.py. Legend: E experts, K = top_k, hidden
and latent widths as in `conf/model/*.yaml`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moe.attention import AttentionShape, ReleasedWeights, check

SCORE_FUNCS = ("sigmoid", "softmax", "softmax_topk", "sqrt_softplus")
GROUP_SCORES = ("max", "top2_sum")
ACTIVATIONS = ("swiglu", "situ_glu")

# Kimi K3's epsilon of every RMSNorm; where a model has 1e-6, values of order one do not notice.
NORM_EPS = 1e-5


@dataclass(frozen=True)
class ModelShape:
    """One model's MoE layers.

    latent_size: width in which tokens are dispatched and experts compute; None: hidden_size
    intermediate_size: inner width of one routed expert
    num_moe_layers, num_dense_layers: only the former are run; the latter are for the record
    shared_intermediate_size: inner width of all shared experts fused into one, 0 without any
    score_func: "sigmoid", "softmax" over all experts, "softmax_topk" over the chosen ones only, or
        "sqrt_softplus"
    expert_bias: a bias for each expert that takes part in choosing and in nothing else
    norm_topk: divide the chosen scores by their sum
    route_scale: factor on the weights after that
    num_expert_groups, num_limited_groups: experts are chosen inside the best num_limited_groups of
        num_expert_groups equal groups
    group_score: what ranks a group: its best expert ("max") or its two best added ("top2_sum")
    source: where the numbers come from; path: the file they were read from, if any
    attention, weights: what memory needs to know of the rest of the network
    """

    name: str
    hidden_size: int
    latent_size: int | None
    intermediate_size: int
    num_experts: int
    top_k: int
    num_moe_layers: int
    num_dense_layers: int
    num_shared_experts: int
    shared_intermediate_size: int
    score_func: str
    expert_bias: bool
    norm_topk: bool
    route_scale: float
    num_expert_groups: int
    num_limited_groups: int
    group_score: str
    activation: str
    source: str
    path: str | None = None
    attention: AttentionShape = field(default_factory=AttentionShape)
    weights: ReleasedWeights = field(default_factory=ReleasedWeights)

    @property
    def payload_width(self) -> int:
        """Values in a dispatched or combined row."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    def validate(self) -> ModelShape:
        """Return self, or raise ValueError with the field, its value and the rule."""
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_moe_layers"):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("num_dense_layers", "num_shared_experts", "shared_intermediate_size"):
            _require_at_least(name, getattr(self, name), 0)
        if self.latent_size is not None:
            _require_at_least("latent_size", self.latent_size, 1)
        if (self.num_shared_experts > 0) != (self.shared_intermediate_size > 0):
            raise ValueError(
                f"num_shared_experts={self.num_shared_experts} and shared_intermediate_size="
                f"{self.shared_intermediate_size} must both be 0 or both be positive"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}")
        if not 0 < self.route_scale < math.inf:  # false for nan, too
            raise ValueError(f"route_scale={self.route_scale} must be a positive number")
        _require_one_of("score_func", self.score_func, SCORE_FUNCS)
        _require_one_of("group_score", self.group_score, GROUP_SCORES)
        _require_one_of("activation", self.activation, ACTIVATIONS)
        self._validate_groups()
        check(self.attention, "attention")
        check(self.weights, "weights")
        return self

    def _validate_groups(self) -> None:
        groups, limited = self.num_expert_groups, self.num_limited_groups
        _require_at_least("num_expert_groups", groups, 1)
        if self.num_experts % groups:
            raise ValueError(
                f"num_expert_groups={groups} does not divide num_experts={self.num_experts}"
            )
        if not 1 <= limited <= groups:
            raise ValueError(f"num_limited_groups={limited} must lie in 1 .. {groups} groups")
        experts_per_group = self.num_experts // groups
        if self.top_k > limited * experts_per_group:
            raise ValueError(
                f"top_k={self.top_k} exceeds the {limited * experts_per_group} experts of "
                f"num_limited_groups={limited} groups"
            )
        if limited < groups and self.group_score == "top2_sum" and experts_per_group < 2:
            raise ValueError("group_score=top2_sum needs at least 2 experts in a group; use max")


@dataclass(frozen=True)
class ScaleConfig:
    """How far a run shrinks the model; None leaves a quantity as it is.

    hidden_size, intermediate_size: upper bounds of the widths
    layers: at most this many MoE layers are run
    """

    name: str
    hidden_size: int | None = None
    intermediate_size: int | None = None
    layers: int | None = None


def scaled(shape: ModelShape, scale: ScaleConfig) -> ModelShape:
    """Shrink widths and depth, never E, K, groups or scoring, which decide who talks to whom.

    The latent width keeps its ratio to the hidden one, the shared width its ratio to an expert's.
    Nothing grows: a model smaller than the scale stays as it is.
    """
    for name in ("hidden_size", "intermediate_size", "layers"):
        if getattr(scale, name) is not None:
            _require_at_least(f"scale.{name}", getattr(scale, name), 1)
    hidden = min(shape.hidden_size, scale.hidden_size or shape.hidden_size)
    intermediate = min(shape.intermediate_size, scale.intermediate_size or shape.intermediate_size)
    return replace(
        shape,
        hidden_size=hidden,
        latent_size=(shape.latent_size and _in_ratio(shape.latent_size, hidden, shape.hidden_size)),
        intermediate_size=intermediate,
        shared_intermediate_size=_in_ratio(
            shape.shared_intermediate_size, intermediate, shape.intermediate_size
        ),
        num_moe_layers=min(shape.num_moe_layers, scale.layers or shape.num_moe_layers),
    )


def _in_ratio(width: int, new: int, old: int) -> int:
    """width * new / old to the nearest integer; 0 (absent) stays 0, nothing else becomes 0."""
    return max(1, round(width * new / old)) if width else 0


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def _require_one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}{hint}")
