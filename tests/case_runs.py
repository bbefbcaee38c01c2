"""The runs of test_field_cases.py: what went wrong elsewhere, with every strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import trace_files
from emulate_runs import HOT_ROUTERS, small_run
from run_configs import VARIANTS, base_config

from moe.settings import PlacementConfig, RouterConfig, TopologyConfig


def runs_of_the_field(folder: Path):
    """folder: of the runs; takes the files that some of them read, too"""
    base = base_config(record_routing=False)
    return {**each_strategy(base), **field_cases(base), **replayed(base, folder)}


def each_strategy(base):
    """Routers and networks that leave little room, with every strategy."""
    small = small_run(base)
    wide = replace(small, model=replace(small.model, num_experts=30, top_k=16))
    shapes = {
        "few experts": replace(small, model=replace(small.model, num_experts=3, top_k=2)),
        "more choices than a rank has experts": wide,
        "masked": replace(small, router=RouterConfig(name="w4"), record_routing=True),
        "trained": replace(small, mode="training"),
        "nothing received": replace(
            small, mode="training", router=RouterConfig(name="to rank 0"), ranks=2, tokens=(9, 5),
            topology=TopologyConfig(),
        ),
        **{hot: replace(small, router=RouterConfig(name=hot)) for hot in HOT_ROUTERS},
    }  # fmt: skip
    return {
        f"{shape} {name}": replace(config, dispatcher=dispatcher)
        for shape, config in shapes.items()
        for name, dispatcher in VARIANTS.items()
    }


def field_cases(base):
    """All tokens on one of eight ranks; replicas of a few experts."""
    alone = replace(base, ranks=8, tokens=(64, *[0] * 7))
    replicas = replace(
        base,
        ranks=2,
        tokens=8,
        warmup=1,
        model=replace(base.model, num_experts=4, top_k=2),
        placement=PlacementConfig("balance", num_redundant_experts=2),
        record_routing=True,
    )
    runs = {}
    for name, dispatcher in VARIANTS.items():
        runs[f"tokens on one rank {name}"] = replace(alone, dispatcher=dispatcher)
        runs[f"trained on one rank {name}"] = replace(
            alone,
            dispatcher=dispatcher,
            mode="training",
            model=replace(base.model, num_experts=30, top_k=6),
        )
        runs[f"replicas {name}"] = replace(replicas, dispatcher=dispatcher)
    return runs


def replayed(base, folder: Path):
    """Recorded routing: a trace of ours, a run of ours, and a recorder's physical ids."""
    small = replace(small_run(base), record_routing=True)
    recorded = replace(
        small,
        placement=PlacementConfig("balance", num_redundant_experts=6),
        dispatcher=VARIANTS["one_sided"],
        warmup=1,
    )
    foreign = replace(
        base,
        ranks=4,
        model=replace(base.model, num_experts=trace_files.E, top_k=trace_files.K),
        scale=replace(base.scale, layers=2),
        tokens=10,
        placement=PlacementConfig("round_robin"),
        record_routing=True,
        router=replay(trace_files.sglang_per_token(folder)),
    )
    trace = replay(write_trace(folder))
    return {
        "recorded": recorded,
        "recorded, again": replace(small, router=replay(folder / "recorded")),
        "recorded by others": foreign,
        **{
            f"replayed {name}": replace(small, router=trace, dispatcher=dispatcher)
            for name, dispatcher in VARIANTS.items()
        },
    }


def replay(path: Path) -> RouterConfig:
    return RouterConfig(name="replay", path=str(path))


def write_trace(folder: Path) -> Path:
    """26 tokens of one layer, one with one expert, one with none; weights that sum to anything."""
    random = np.random.default_rng(3)
    ids = np.stack([random.permutation(30)[:6] for _ in range(26)])[None, None]
    ids[..., 4, :], ids[..., 5, 1:] = -1, -1
    np.savez(
        folder / "trace.npz",
        topk_ids=ids.astype(np.int32),
        topk_weights=random.uniform(0.2, 3, ids.shape).astype(np.float32),
        header=json.dumps({"num_experts": 30, "top_k": 6}),
    )
    return folder / "trace.npz"
