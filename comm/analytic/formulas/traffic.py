"""Bytes of rows, and of a whole run, under uniform routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from comm.analytic.formulas.base import TEXT, Parameter, Step, formula
from comm.analytic.law import NoLaw, Uniform
from comm.analytic.rows import DISPATCHERS, KINDS, ROW_PHASES, payload_bytes
from comm.analytic.rows import row_bytes as bytes_by_kind
from comm.analytic.run import RunShape
from comm.analytic.traffic import expected_traffic

WIRE = Parameter(TEXT, "format of the rows: bf16, mxfp8, ...", default="bf16")
WIDTH = Parameter("values", "values of a row", field="payload_width")
TOP_K = Parameter("experts", "experts that a token chooses", field="top_k")
SCOPES = ("remote", "scale_up", "scale_out")


@formula("B", wire=WIRE, width=WIDTH)
def row_payload(wire: str, width: int) -> Iterator[Step]:
    """Bytes of one row, values and block scales, without ids and weights."""
    hidden, scales = payload_bytes(wire, width)
    yield Step("values", f"{width} values in {wire}", hidden, "B")
    yield Step("scales", "of its blocks", scales, "B")
    yield Step("row_payload", f"{hidden:,} + {scales:,}", hidden + scales, "B")


@formula(
    "B",
    dispatcher=Parameter(TEXT, "who sends: all_to_all, rank_dedup, ...", default="rank_dedup"),
    top_k=TOP_K,
)
def row_metadata(dispatcher: str, top_k: int) -> Iterator[Step]:
    """Bytes of the expert ids and routing weights in one dispatched row."""
    row = bytes_by_kind(dispatcher, "dispatch", "bf16", 1, top_k)
    yield Step("row_metadata", f"{row['ids']} + {row['weights']}", row["ids"] + row["weights"], "B")


@formula(
    "rounds",
    training=Parameter("", "1: backward as well", default=0),
    sharded=Parameter("ranks", "that share each expert", default=1),
)
def rounds_a_layer(training: float, sharded: int) -> Iterator[Step]:
    """Exchanges of tokens in one MoE layer: phases that move rows, in each direction."""
    run = replace(
        static_run("rank_dedup", 2 * sharded, 2 * sharded, 1, 2, 1, 1, 1, "bf16", "bf16"),
        training=bool(training),
        expert_tp=sharded,
    )
    phases = [phase for phase in run.phases if phase in ROW_PHASES]
    how = f"{', '.join(phases)}; {' and '.join(run.directions)}"
    yield Step("rounds_a_layer", how, len(phases) * len(run.directions), "rounds")


def static_run(
    dispatcher: str, ranks: int, ranks_per_node: int, tokens: int, num_experts: int, top_k: int,
    width: int, layers: int, wire_dispatch: str, wire_combine: str,
) -> RunShape:  # fmt: skip
    """A run of inference whose experts stay where they are."""
    sizes = num_experts // ranks + (np.arange(ranks) < num_experts % ranks)
    return RunShape(
        dispatcher=dispatcher,
        tokens_per_rank=(tokens,) * ranks,
        node_of_rank=tuple(rank // ranks_per_node for rank in range(ranks)),
        physical_to_logical=(np.arange(num_experts),) * layers,
        slot_rank=(np.repeat(np.arange(ranks), sizes),) * layers,
        num_experts=num_experts,
        top_k=top_k,
        width=width,
        wire_dispatch=wire_dispatch,
        wire_combine=wire_combine,
    )


@formula(
    "B",
    slow=True,
    kind=Parameter(TEXT, f"what is counted: {', '.join(KINDS)}"),
    scope=Parameter(TEXT, f"where: {', '.join(SCOPES)}", default="remote"),
    dispatcher=Parameter(TEXT, "who sends: all_to_all, rank_dedup, ...", default="rank_dedup"),
    ranks=Parameter("ranks", "ranks over which the experts are spread"),
    ranks_per_node=Parameter("ranks", "ranks of a node; 0: all", default=0),
    tokens=Parameter("tokens", "tokens of each rank"),
    num_experts=Parameter("experts", "routed experts of a layer", field="num_experts"),
    top_k=TOP_K,
    width=WIDTH,
    layers=Parameter("layers", "MoE layers", field="num_moe_layers"),
    wire_dispatch=WIRE,
    wire_combine=WIRE,
)
def bytes_of_kind(
    kind: str, scope: str, dispatcher: str, ranks: int, ranks_per_node: int, **run: int | str
) -> Iterator[Step]:
    """Bytes of one kind in a forward pass of all ranks, dispatch and combine; expected.

    The whole law of comm.analytic.traffic: experts stay where they are, routing is uniform.
    """
    for name, value, known in (
        ("kind", kind, KINDS),
        ("scope", scope, SCOPES),
        ("dispatcher", dispatcher, DISPATCHERS),
    ):
        if value not in known:
            raise ValueError(f"{name}={value}: choose one of {', '.join(known)}")
    shape = static_run(dispatcher, ranks, ranks_per_node or ranks, **run)  # type: ignore[arg-type]
    law = expected_traffic(shape, Uniform())
    if isinstance(law, NoLaw):
        raise ValueError(law.reason)
    how = f"{kind} in {shape.num_layers} layers of {ranks} ranks, {dispatcher}"
    yield Step("bytes_of_kind", how, law.of(scope, kinds=[kind]).mean, "B")
