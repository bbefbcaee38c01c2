"""Bytes of the weights: of a checkpoint, and of what a step reads of them."""

from __future__ import annotations

from collections.abc import Iterator

from comm.analytic.formulas.base import Parameter, Step, formula
from comm.analytic.formulas.routing import EXPERTS, TOP_K, experts_touched

BITS = 1 / 8  # of a byte


@formula(
    "B",
    routed=Parameter("parameters", "of all routed experts", field="parameters.routed"),
    unrouted=Parameter("parameters", "all others", field="parameters.unrouted"),
    single=Parameter(
        "parameters", "of these, kept in 32 bits", field="parameters.single_precision"
    ),
    bits=Parameter("", "of a routed expert's weight", field="weights.expert_bits"),
    scale=Parameter("", "bits of the scale of a block", field="weights.expert_scale_bits"),
    block=Parameter("", "weights that share a scale", field="weights.expert_block"),
)
def checkpoint_bytes(
    routed: int, unrouted: int, single: int, bits: float, scale: float, block: float
) -> Iterator[Step]:
    """A published checkpoint: routed experts quantised, scales beside them, the rest in 16 bits."""
    packed, scales = routed * bits * BITS, routed * scale / block * BITS
    yield Step("packed", f"{routed:,} x {bits:g} bits", packed, "B")
    yield Step("scales", f"{routed:,} / {block:g} x {scale:g} bits", scales, "B")
    rest = (unrouted - single) * 16 * BITS + single * 32 * BITS
    yield Step("rest", f"{unrouted - single:,} x 16 + {single:,} x 32 bits", rest, "B")
    yield Step("checkpoint_bytes", "packed + scales + rest", packed + scales + rest, "B")


@formula(
    "B",
    tokens=Parameter("tokens", "tokens of the step, all sequences together"),
    expert=Parameter("B", "bytes of one routed expert, scales included"),
    rest=Parameter("B", "bytes of all other weights that a step reads"),
    layers=Parameter("layers", "MoE layers", field="num_moe_layers"),
    num_experts=EXPERTS,
    top_k=TOP_K,
)
def weights_read(
    tokens: int, expert: float, rest: float, layers: int, num_experts: int, top_k: int
) -> Iterator[Step]:
    """Weights that a forward pass reads once each: the rest, and the experts that are chosen."""
    (*before, touched) = experts_touched(tokens, num_experts, top_k)
    yield from (*before, touched)
    routed = layers * touched.value * expert
    yield Step("of routed experts", f"{layers} x {touched.value:.2f} x {expert:,.0f}", routed, "B")
    yield Step("weights_read", f"{routed:.5g} + {rest:.5g}", routed + rest, "B")
