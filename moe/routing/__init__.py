"""The catalogue of routing sources: who chooses the experts of a token. One entry here for each.

    options.py    what can be set, with defaults and limits      weighted.py  exact weighted draws
    base.py       what a source is given and what it gives       draws.py     uniform draws, orders

A source that needs no model and no communication chooses the ids from a counter-based generator, by
the token's global number: on any number of ranks, and however the tokens are cut, a token meets the
same experts. The modules are imported only when a source is built, so that the names are free to
look at.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe.routing.base import RoutingContext, RoutingSource

SOURCES: dict[str, tuple[str, str]] = {
    "uniform": ("moe.routing.uniform", "UniformSubsets"),
    "learned": ("moe.routing.uniform", "Learned"),
    "balanced": ("moe.routing.balanced", "Balanced"),
    "markov": ("moe.routing.markov", "MarkovChain"),
    "group_limited": ("moe.routing.group_limited", "BestGroups"),
    "zipf": ("moe.routing.product", "Zipf"),
    "hot_rank": ("moe.routing.product", "HotRank"),
    "hot_experts": ("moe.routing.product", "HotExperts"),
    "skew": ("moe.routing.skew", "Skew"),
    "w0": ("moe.routing.balanced", "Balanced"),
    "w1": ("moe.routing.workloads", "HotSet"),
    "w2": ("moe.routing.product", "HotRank"),
    "w3": ("moe.routing.workloads", "SpreadHotSet"),
    "w4": ("moe.routing.workloads", "RaggedSources"),
    "w5": ("moe.routing.workloads", "ZeroExperts"),
    "w6": ("moe.routing.workloads", "RotatingHotSpot"),
    "w7": ("moe.routing.workloads", "Burst"),
    "replay": ("moe.routing.replay", "Replay"),
    "counts": ("moe.routing.replay", "CountDriven"),
}


def build_source(name: str, context: RoutingContext) -> RoutingSource:
    """One of SOURCES for one run; ValueError where the run and the options do not go together."""
    from importlib import import_module

    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"router={name!r} is not one of {', '.join(SOURCES)}{hint}")
    module, cls = SOURCES[name]
    return getattr(import_module(module), cls)(context)
