"""job=request: all-to-all of a request's tokens beside the transfer of its cache; no ranks."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from comm.analytic.conventions import expected_conventions
from comm.analytic.request import regimes, token_bytes
from comm.analytic.rows import payload_bytes
from comm.report.answer import LABEL, labelled_facts
from comm.report.console import WIDTH, print_lines
from comm.report.layout import labelled
from comm.report.request_page import request_page
from moe.attention import UnknownShape
from moe.pools import cache_of
from moe.settings import Config, ConfigError
from moe.version import VERSION

# dispatcher -> the numerator that counts the rows it puts on the network, one way
NUMERATORS = {
    "all_to_all": "copies, remote",
    "rank_dedup": "distinct ranks, remote",
    "allgather": "all-gather, remote",
}


def launch(config: Config) -> int:
    """Print the page; always 0."""
    try:
        facts = facts_of(config)
    except UnknownShape as error:
        raise ConfigError(str(error)) from error
    about = {
        "model": f"{config.model.name}; {config.world_size} ranks, {config.dispatcher.name},"
        f" {config.wire.dispatch} there and {config.wire.combine} back; uniform routing"
    }
    head = labelled(f"WideEP {VERSION}", "request: no ranks were started", WIDTH, LABEL, "bold")
    print_lines([*head, *labelled_facts(about, WIDTH), *request_page(facts, WIDTH)])
    return 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank prints, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0


def facts_of(config: Config) -> dict[str, Any]:
    """Everything on the page as plain values."""
    shape, asked, cache = config.model, config.request, cache_of(config)
    dispatched, combined = (
        sum(payload_bytes(wire, shape.payload_width))
        for wire in (config.wire.dispatch, config.wire.combine)
    )
    rows = rows_per_token(config)
    each = token_bytes(rows, dispatched, combined, shape.num_moe_layers)
    ways = regimes(cache, asked.prompt, asked.cached, asked.output, each)
    return {
        **asdict(asked),
        "computed": asked.prompt - asked.cached + asked.output,
        "rows": rows,
        "dispatched": dispatched,
        "combined": combined,
        "layers": shape.num_moe_layers,
        "token_bytes": each,
        "cache_token_bytes": cache.token_bytes,
        "state_bytes": cache.state_bytes,
        "regimes": [asdict(way) | {"share": way.share} for way in ways],
    }


def rows_per_token(config: Config) -> float:
    """Expected rows of a token that leave its rank in one layer, one way."""
    ranks, shape = config.world_size, config.model
    entries = expected_conventions(ranks, ranks, shape.num_experts, shape.top_k, 1, 1)
    rows = {entry.name: entry.rows_per_token for entry in entries}
    return rows[NUMERATORS[config.dispatcher.name]]
