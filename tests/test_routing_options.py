"""Options are checked, and every one is used by the routers that it names."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from routing_samples import context

from moe.routing import SOURCES
from moe.routing.base import RoutingContext
from moe.routing.options import RouterOptions

FIELDS = {one.name: one for one in dataclasses.fields(RouterOptions)}


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("reuse", 1.5, "router.reuse=1.5: must be in 0 .. 1; nearest: 1"),
        ("reuse", math.nan, "router.reuse=nan: must be in 0 .. 1; nearest: 0"),
        ("sequence", 0, "router.sequence=0: must be in 1 .. 65536; nearest: 1"),
        ("exponent", -0.5, "router.exponent=-0.5: must be in 0 .. 4; nearest: 0"),
        ("factor", 1e7, "router.factor=10000000.0: must be in 1 .. 1000000; nearest: 1000000"),
        ("hot_rank", -1, "router.hot_rank=-1: must be at least 0; nearest: 0"),
        ("hot_count", 0, "router.hot_count=0: must be at least 1; nearest: 1"),
        ("max_over_mean", 0.9, "router.max_over_mean=0.9: must be at least 1; nearest: 1"),
        ("by", "ranks", "router.by='ranks': must be one of rank, expert; nearest: rank"),
        ("order", "ids", "router.order='ids': must be one of seeded, id; nearest: id"),
        ("num_expert_groups", 0, "router.num_expert_groups=0: must be at least 1; nearest: 1"),
        ("num_limited_groups", 0, "router.num_limited_groups=0: must be at least 1; nearest: 1"),
        ("group_score", "top2", "router.group_score='top2': .* nearest: top2_sum"),
        ("skip_rows", -2, "router.skip_rows=-2: must be at least 0; nearest: 0"),
    ],
)
def test_values_outside_their_limits_are_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RouterOptions(**{name: value})


def test_limits_themselves_are_allowed() -> None:
    for name, one in FIELDS.items():
        for limit in (one.metadata["minimum"], one.metadata["maximum"]):
            if one.metadata["minimum"] is not None:
                RouterOptions(**{name: limit})
        for choice in one.metadata["choices"]:
            RouterOptions(**{name: choice})


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_says_what_it_is_and_who_uses_it(name: str) -> None:
    metadata = FIELDS[name].metadata
    assert metadata["text"] and metadata["routers"]
    assert set(metadata["routers"]) <= set(SOURCES)
    folder = Path(__file__).parent.parent
    for router in metadata["routers"]:
        module, cls = SOURCES[router]
        if module == "moe.routing.replay":
            continue
        # the class and those it inherits from, in the modules that they lie in
        texts = [folder / (module.replace(".", "/") + ".py"), folder / "moe/routing/product.py"]
        assert any(f"options.{name}" in path.read_text() for path in texts), (router, cls)


def test_a_context_must_fit_together() -> None:
    base = vars(context())
    for change, words in [
        ({"top_k": 25}, "top_k=25: must lie in 1 .. num_experts=24; nearest: 24"),
        ({"top_k": 0}, "top_k=0: .* nearest: 1"),
        ({"num_layers": 2}, "expert_rank has shape"),
        ({"group_size": 3}, "expert_rank must lie in 0 .. group_size-1=2"),
        ({"expert_rank": np.full((3, 24), -1)}, "expert_rank must lie in"),
    ]:
        with pytest.raises(ValueError, match=words):
            RoutingContext(**base | change)


def test_looking_at_the_names_imports_no_source() -> None:
    import subprocess
    import sys

    code = (
        "import sys, moe.routing; print([m for m in sys.modules if m.startswith('moe.routing.')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
