"""Bytes of weights and caches: the arithmetic of comm.analytic.weights and .caches, by name."""

from __future__ import annotations

from collections.abc import Iterator

from comm.analytic.caches import CONVOLUTIONS, Cache, break_even_tokens, linear_state_bytes
from comm.analytic.formulas.base import Parameter, Step, formula
from comm.analytic.formulas.routing import EXPERTS, TOP_K
from comm.analytic.weights import Format, Weights, touched_experts

BITS_OF_BYTE = 8
LAYERS = Parameter("layers", "MoE layers", field="num_moe_layers")
STORED = {
    "expert": Parameter("parameters", "of one routed expert", field="parameters.expert"),
    "num_experts": EXPERTS,
    "layers": LAYERS,
    "matrices": Parameter("parameters", "of other matrices", field="parameters.matrices"),
    "plain": Parameter("parameters", "kept in 16 bits", field="parameters.plain"),
    "single": Parameter("parameters", "kept in 32 bits", field="parameters.single"),
    "lookup": Parameter("parameters", "of the input table", field="parameters.lookup"),
    "expert_bits": Parameter("", "bits of an expert's weight", field="weights.expert_bits"),
    "expert_scale": Parameter("", "bits of its scales", field="weights.expert_scale_bits"),
    "expert_block": Parameter("", "weights that share one", field="weights.expert_block"),
    "linear_bits": Parameter("", "bits of other matrices", field="weights.linear_bits"),
    "linear_scale": Parameter("", "bits of their scales", field="weights.linear_scale_bits"),
    "linear_block": Parameter("", "weights that share one", field="weights.linear_block"),
}


def _weights(
    expert: int, num_experts: int, layers: int, matrices: int, plain: int, single: int, lookup: int,
    expert_bits: float, expert_scale: float, expert_block: float,
    linear_bits: float, linear_scale: float, linear_block: float,
) -> Weights:  # fmt: skip
    """The weights of a model from the arguments of a formula."""
    return Weights(
        *(expert, num_experts, layers, matrices, plain, single, lookup),
        expert_format=Format(expert_bits, expert_scale, expert_block),
        matrix_format=Format(linear_bits, linear_scale, linear_block),
    )


@formula("B", **STORED)
def checkpoint_bytes(**stored: float) -> Iterator[Step]:
    """A published checkpoint: routed experts and their scales, and all the rest."""
    weights = _weights(**stored)
    bits = f"{weights.routed:,} x {weights.expert_format.bits:g} bits"
    yield Step("packed", bits, weights.packed_bytes, "B")
    yield Step("scales", "of their blocks", weights.scales_bytes, "B")
    yield Step("rest", "matrices, tables, norms", weights.rest_bytes, "B")
    yield Step("checkpoint_bytes", "packed + scales + rest", weights.stored_bytes, "B")


TOKENS = Parameter("tokens", "tokens of the step, all sequences together")


@formula("B", tokens=TOKENS, top_k=TOP_K, **STORED)
def weights_read(tokens: int, top_k: int, **stored: float) -> Iterator[Step]:
    """Weights that a step reads, each once: experts that its tokens choose, and the rest.

    The input table is left out, of which a token reads a single row.
    """
    weights = _weights(**stored)
    touched = touched_experts(weights.num_experts, top_k, tokens)
    yield Step("experts_touched", f"of {weights.num_experts} by {tokens} tokens", touched)
    yield Step("expert", "one of them, with its scales", weights.expert_bytes, "B")
    how = f"rest + {weights.layers} x {touched:.2f} x expert"
    yield Step("weights_read", how, weights.read_bytes(tokens, top_k), "B")


@formula("experts", tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K)
def experts_touched(tokens: int, num_experts: int, top_k: int) -> Iterator[Step]:
    """Experts of a layer that at least one of the tokens chooses; expected (coupon collecting).

    Derivation: a token leaves an expert out with probability 1 - K / E, tokens are independent.
    """
    how = f"{num_experts} (1 - (1 - {top_k} / {num_experts})^{tokens})"
    yield Step("experts_touched", how, touched_experts(num_experts, top_k, tokens), "experts")


CACHED = {
    "values": Parameter("values", "that a token leaves in a layer", field="attention.values"),
    "full_layers": Parameter("layers", "that cache all tokens", field="attention.full_layers"),
    "value_size": Parameter("B", "of a cached value", default=2),
}
LINEAR = {
    "linear_layers": Parameter("layers", "that keep a state", field="attention.linear_layers"),
    "linear_heads": Parameter("heads", "of such a layer", field="attention.linear_heads"),
    "linear_head_dim": Parameter("values", "of a head", field="attention.linear_head_dim"),
    "conv_size": Parameter("tokens", "that a convolution sees", field="attention.conv_size"),
    "state_size": Parameter("B", "of a value of the state", default=4),
}


@formula("B", **CACHED)
def cache_of_a_token(values: int, full_layers: int, value_size: float) -> Iterator[Step]:
    """Bytes that a token adds to the cache of its sequence, all layers together."""
    cache = Cache(values, value_size * BITS_OF_BYTE, full_layers)
    how = f"{full_layers} x {values} x {value_size:g} B"
    yield Step("cache_of_a_token", how, cache.token_bytes, "B")


@formula("B", **LINEAR)
def state_of_a_sequence(
    linear_layers: int, linear_heads: int, linear_head_dim: int, conv_size: int, state_size: float
) -> Iterator[Step]:
    """Bytes of the states of all linear layers, of one sequence, whatever its length."""
    bits = state_size * BITS_OF_BYTE
    matrix = linear_heads * linear_head_dim**2
    yield Step("values of the matrices", f"{linear_heads} x {linear_head_dim}^2 a layer", matrix)
    inputs = CONVOLUTIONS * (conv_size - 1) * linear_heads * linear_head_dim
    how = f"{CONVOLUTIONS} x {conv_size - 1} x {linear_heads} x {linear_head_dim} a layer"
    yield Step("values of the convolutions", how, inputs)
    state = linear_state_bytes(linear_layers, linear_heads, linear_head_dim, conv_size, bits)
    yield Step("state_of_a_sequence", f"of {linear_layers} layers", state, "B")


@formula(
    "B",
    tokens=Parameter("tokens", "of the sequence"),
    slots=Parameter("sequences", "states that it holds", default=1),
    **CACHED,
    **LINEAR,
)
def sequence_bytes(
    tokens: int, slots: int, values: int, full_layers: int, value_size: float, **linear: float
) -> Iterator[Step]:
    """What a sequence of so many tokens keeps: the cache of all of them, and the states."""
    state = tuple(state_of_a_sequence(**linear))[-1]  # type: ignore[arg-type]
    bits = value_size * BITS_OF_BYTE
    cache = Cache(values, bits, full_layers, state_bytes=state.value, slots=slots)
    yield Step("cache", f"of {tokens:,} tokens", cache.cache_bytes(tokens), "B")
    yield Step("states", f"{slots} x {state.value:,.0f} B", cache.constant_bytes, "B")
    yield Step("sequence_bytes", "cache + states", cache.sequence_bytes(tokens), "B")


@formula("tokens", **CACHED, **LINEAR)
def break_even(values: int, full_layers: int, value_size: float, **linear: float) -> Iterator[Step]:
    """Tokens above which a hybrid keeps less than full layers alone would.

    Derivation: the state is paid once, each linear layer saves the cache of each token.
    """
    state = tuple(state_of_a_sequence(**linear))[-1]  # type: ignore[arg-type]
    cache = Cache(values, value_size * BITS_OF_BYTE, full_layers, state_bytes=state.value)
    tokens = break_even_tokens(cache, int(linear["linear_layers"]))
    yield state
    yield Step("break_even", "state / cache that the linear layers save", tokens, "tokens")
