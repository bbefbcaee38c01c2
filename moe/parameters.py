"""Parameters of a model, part by part, from its shape.

    embedding   the input table; head: the output table, 0 where both are one
    attention   projections, norms, gates, convolutions of all layers
    dense       the layers without experts
    shared      experts that every token takes
    latent      projections into and out of the latent width, with its norm
    router      scores of the experts, and the bias that selects
    routed      the experts
    norms       two a layer and the last, with residual attention four more a layer and two more
    other       published, but of no formula here

Legend: d hidden width, H heads. Each formula is checked against the published count of a model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from moe.attention import AttentionShape, UnknownShape, require
from moe.model import ModelShape


@dataclass(frozen=True)
class Parameters:
    """Counts by part.

    single_linear, single_router: those of attention and router, counted there, that stay in 32 bits
    """

    embedding: int
    head: int
    attention: int
    dense: int
    shared: int
    latent: int
    router: int
    routed: int
    norms: int
    other: int
    single_linear: int
    single_router: int

    @property
    def total(self) -> int:
        return sum(self.by_part().values())

    @property
    def single_precision(self) -> int:
        return self.single_linear + self.single_router

    @property
    def unrouted(self) -> int:
        """All but the routed experts."""
        return self.total - self.routed

    @property
    def matrices(self) -> int:
        """What a checkpoint may quantise beside the experts; the few norms among them are."""
        matrices = self.attention + self.dense + self.shared + self.latent + self.other
        return matrices - self.single_linear

    @property
    def plain(self) -> int:
        """What stays in 16 bits."""
        return self.embedding + self.head + self.router + self.norms - self.single_router

    def by_part(self) -> dict[str, int]:
        return {
            part: number for part, number in asdict(self).items() if not part.startswith("single_")
        }


def count(shape: ModelShape) -> Parameters:
    """The parameters of a model at its published scale.

    Raises UnknownShape, in one line, for a value that the model's file does not have.
    """
    d, moe, attention, weights = (
        shape.hidden_size,
        shape.num_moe_layers,
        shape.attention,
        shape.weights,
    )
    layers = moe + shape.num_dense_layers
    if attention.num_layers != layers:
        raise UnknownShape(
            f"model.attention: {attention.num_layers} layers of attention, but the model has"
            f" {layers}; set model.attention.full_layers=..."
        )
    embedding = require(weights, "vocab_size") * d
    full, linear = _full_layer(attention, d), _linear_layer(attention, d)
    with_cache = layers - attention.linear_layers
    return Parameters(
        embedding=embedding,
        head=0 if weights.tied_embeddings else embedding,
        attention=with_cache * full + attention.linear_layers * linear,
        dense=_dense(shape),
        shared=moe * 3 * d * shape.shared_intermediate_size,
        latent=moe * (2 * d + 1) * shape.latent_size if shape.latent_size else 0,
        router=moe * _router(shape),
        routed=moe * shape.num_experts * expert(shape),
        norms=(2 * layers + 1 + (4 * layers + 2) * attention.residual_attention) * d,
        other=weights.other_parameters,
        single_linear=attention.linear_layers and attention.linear_layers * _single(attention),
        single_router=moe * shape.num_experts * shape.expert_bias,
    )


def expert(shape: ModelShape) -> int:
    """Parameters of one routed expert: three matrices, with their biases where it has them."""
    width, inner = shape.payload_width, shape.intermediate_size
    return 3 * width * inner + (2 * inner + width) * shape.weights.expert_bias_terms


def active(shape: ModelShape) -> int:
    """Parameters that a token of text uses: K experts a layer, the output table, not the input's.

    Other parameters are those of other media.
    """
    counted = count(shape)
    routed = shape.num_moe_layers * shape.top_k * expert(shape)
    lookup = 0 if shape.weights.tied_embeddings else counted.embedding
    return counted.unrouted - counted.other - lookup + routed


def _dense(shape: ModelShape) -> int:
    if not shape.num_dense_layers:
        return 0
    width = require(shape.weights, "dense_intermediate_size")
    return shape.num_dense_layers * 3 * shape.hidden_size * width


def _router(shape: ModelShape) -> int:
    biases = shape.expert_bias + shape.weights.expert_bias_terms
    return shape.num_experts * (shape.hidden_size + biases)


def _full_layer(attention: AttentionShape, d: int) -> int:
    """One layer with a cache, of either kind."""
    heads = require(attention, "num_heads")
    if require(attention, "kind") == "mla":
        return _mla_layer(attention, d)
    head, kv = require(attention, "head_dim"), require(attention, "num_kv_heads")
    matrices = 2 * d * heads * head + 2 * d * kv * head
    biases = (heads + 2 * kv) * head + d
    return (
        matrices + 2 * head * attention.qk_norm + biases * attention.bias + heads * attention.sinks
    )


def _mla_layer(attention: AttentionShape, d: int) -> int:
    """Queries straight or through a low rank, keys and values through theirs, output, gate."""
    heads, rank = attention.num_heads, require(attention, "kv_lora_rank")
    nope, rope = require(attention, "qk_nope_head_dim"), require(attention, "qk_rope_head_dim")
    value = require(attention, "v_head_dim")
    low = attention.q_lora_rank
    queries = (d + 1) * low + low * heads * (nope + rope) if low else d * heads * (nope + rope)
    keys = d * (rank + rope) + rank + rank * heads * (nope + value)
    return queries + keys + heads * value * d * (2 if attention.output_gate else 1)


def _linear_layer(attention: AttentionShape, d: int) -> int:
    """One layer of KDA: q, k, v, o; their convolutions; decay; write strength; gate; norm."""
    if not attention.linear_layers:
        return 0
    heads, head = require(attention, "linear_heads"), require(attention, "linear_head_dim")
    inner = heads * head
    gate = d * inner if attention.full_rank_gate else (d + inner) * head
    decay = (d + inner) * head  # through one head's width
    return 4 * d * inner + gate + decay + d * heads + _single(attention)


def _single(attention: AttentionShape) -> int:
    """Convolutions of q, k and v, the decay's bias and rate, the norm: kept in 32 bits."""
    heads, head = require(attention, "linear_heads"), require(attention, "linear_head_dim")
    inner = heads * head
    rates = heads if attention.decay_rates is None else attention.decay_rates
    return 3 * inner * require(attention, "conv_size") + inner + rates + head
