"""job=predict: what uniform routing lets one expect, in every convention; no rank is started."""

from __future__ import annotations

import os
from dataclasses import asdict

from comm.analytic.conventions import NCCL_TESTS_NOTE, expected_conventions
from comm.analytic.rows import payload_bytes
from comm.report.answer import LABEL, labelled_facts
from comm.report.console import WIDTH, print_lines
from comm.report.conventions_page import conventions
from comm.report.layout import labelled
from moe.settings import Config
from moe.version import VERSION


def launch(config: Config) -> int:
    """Print the table; always 0."""
    model, ranks = config.model, config.world_size
    ranks_per_node = config.topology.ranks_per_node or ranks
    row = sum(payload_bytes(config.wire.dispatch, model.payload_width))
    tokens = max(config.tokens_per_rank)
    entries = expected_conventions(
        ranks, ranks_per_node, model.num_experts, model.top_k, tokens, row
    )
    facts = {
        "model": f"{model.name}: {model.num_experts} experts, top-{model.top_k},"
        f" {model.payload_width} values a row, {row:,} B in {config.wire.dispatch}",
        "ranks": f"{ranks}, {ranks_per_node} on a node; {tokens:,} tokens a rank",
    }
    remark = "expected under uniform routing, experts placed contiguous"
    print_lines(
        [
            *labelled(f"WideEP {VERSION}", "predict: no ranks were started", WIDTH, LABEL, "bold"),
            *labelled_facts(facts, WIDTH),
            *conventions([asdict(entry) for entry in entries], config.wire.dispatch, WIDTH, remark),
            *labelled("  nccl-tests", NCCL_TESTS_NOTE.partition(": ")[2], WIDTH, LABEL),
        ]
    )
    return 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank prints, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0
