"""What stands around the MoE layers: attention, embeddings, and how the weights were released.

Nothing of it runs or travels in an emulated layer; memory and parameter counts need it. A model
whose file leaves these values out can still be emulated: whoever needs one asks `require` for it.

    mla      multi-head latent attention: a token caches kv_lora_rank + qk_rope_head_dim values
    gqa      grouped queries: a token caches a key and a value of head_dim for each of num_kv_heads
    window   gqa that sees, and keeps, only the last `window` tokens
    linear   delta attention (KDA): a state of constant size instead of a cache
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

KINDS = ("mla", "gqa")


class UnknownShape(ValueError):
    """A value that a computation needs and the model's file does not have; one line."""


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one model; widths in values, None: unknown or not of this kind.

    kind: of the layers with a cache, "mla" or "gqa"
    full_layers, window_layers, linear_layers: how many layers are of each sort
    num_heads: of queries; num_kv_heads, head_dim: of gqa; window: tokens that window layers see
    q_lora_rank: None where queries are projected straight; the others name parts of mla
    output_gate: the output of mla is multiplied by a projection of its input
    qk_norm, bias, sinks: a norm on queries and keys; biases; a learned logit for each head
    linear_heads, linear_head_dim, conv_size: of linear layers, whose convolution sees so many
        tokens; decay_rates: learned rates of a layer, None: one a head
    full_rank_gate: one projection for the output gate of linear layers instead of two thin ones
    residual_attention: each half layer weighs the earlier blocks by a norm and a projection
    """

    kind: str | None = None
    full_layers: int | None = None
    window_layers: int = 0
    linear_layers: int = 0
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    output_gate: bool = False
    qk_norm: bool = False
    bias: bool = False
    sinks: bool = False
    linear_heads: int | None = None
    linear_head_dim: int | None = None
    conv_size: int | None = None
    decay_rates: int | None = None
    full_rank_gate: bool = True
    residual_attention: bool = False

    @property
    def num_layers(self) -> int:
        """All layers, whatever their attention."""
        return int(require(self, "full_layers")) + self.window_layers + self.linear_layers

    @property
    def cached_values(self) -> int:
        """Values that a token leaves in the cache of one layer."""
        if require(self, "kind") == "mla":
            return int(require(self, "kv_lora_rank")) + int(require(self, "qk_rope_head_dim"))
        return 2 * int(require(self, "num_kv_heads")) * int(require(self, "head_dim"))


@dataclass(frozen=True)
class ReleasedWeights:
    """The rest of the parameters, and the format in which the checkpoint was published.

    vocab_size, tied_embeddings: one table for input and output, or two
    dense_intermediate_size: inner width of the layers without experts; None without such layers
    expert_bias_terms: experts and router have biases
    expert_bits, expert_scale_bits, expert_block: of a routed expert's weight, and the bits of the
        scale that each block of so many weights shares; 0 bits: no scales
    linear_bits, linear_scale_bits, linear_block: the same of all other matrices, but for
        embeddings, router and norms, which stay in 16 bits
    other_parameters: published, but not in the formulas (a vision tower); `source` says what
    total_parameters: as published, None where no count was found
    """

    vocab_size: int | None = None
    tied_embeddings: bool = False
    dense_intermediate_size: int | None = None
    expert_bias_terms: bool = False
    expert_bits: float | None = 16
    expert_scale_bits: float = 0
    expert_block: int = 1
    linear_bits: float | None = 16
    linear_scale_bits: float = 0
    linear_block: int = 1
    other_parameters: int = 0
    total_parameters: int | None = None


def require(part: AttentionShape | ReleasedWeights, field: str) -> Any:
    """The value of a field, or an UnknownShape that says which key to set."""
    value = getattr(part, field)
    if value is None:
        key = f"model.{'attention' if isinstance(part, AttentionShape) else 'weights'}.{field}"
        raise UnknownShape(f"{key}: not known of this model; set {key}=...")
    return value


def check(part: AttentionShape | ReleasedWeights, prefix: str) -> None:
    """Raise ValueError, in one line, for a value that cannot be."""
    for item in fields(part):
        value = getattr(part, item.name)
        if isinstance(value, bool | str | None):
            continue
        least = 0 if item.default in (0, None) else 1
        if not least <= value < 2**63:  # false for nan, too
            raise ValueError(f"{prefix}.{item.name}={value} must be at least {least}")
    kind = getattr(part, "kind", None)
    if kind is not None and kind not in KINDS:
        raise ValueError(f"{prefix}.kind={kind!r} is not one of {', '.join(KINDS)}")
