"""The page of one request: what its tokens send, and what its cache moves, however it is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comm.report.answer import labelled_facts
from comm.report.layout import Line, table, title
from comm.report.units import format_bytes


def request_page(facts: Mapping[str, Any], width: int) -> list[Line]:
    """facts: what moe.jobs.request puts together; bytes everywhere."""
    one = {
        "a token": f"{facts['rows']:.4f} rows leave its rank in a layer, {facts['dispatched']:,} B"
        f" there and {facts['combined']:,} B back; {format_bytes(facts['token_bytes'])} in"
        f" {facts['layers']} MoE layers",
        "its cache": f"{facts['cache_token_bytes']:,.0f} B a token and"
        f" {format_bytes(facts['state_bytes'])} of states",
        "computed": f"{facts['computed']:,} tokens: {facts['prompt']:,} of prompt,"
        f" {facts['cached']:,} of them cached, and {facts['output']:,} of output",
    }
    rows = [
        (
            way["name"],
            " + ".join(f"{tokens:,}" for tokens in way["moved"]) or "-",
            format_bytes(way["transfer"]),
            format_bytes(way["all_to_all"]),
            f"{100 * way['share']:.2f} %",
        )
        for way in facts["regimes"]
    ]
    lines = title("REQUEST", "payload, without ids, weights and counts", width)
    lines += labelled_facts(one, width)
    lines += title("WAYS TO SERVE IT", "bytes of the whole request; transfer moves caches", width)
    header = ("served by", "tokens moved", "transfer", "all-to-all", "transfer's share")
    return lines + table(header, rows)
