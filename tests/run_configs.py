"""Small configurations for whole runs, and the runs themselves on ranks that are already there."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from random import Random

from comm.dispatch import DISPATCHERS
from comm.placement import PLACEMENTS
from comm.wire import WIRE_FORMATS
from moe.config import compose
from moe.jobs.emulate import emulate
from moe.settings import DispatcherConfig, PlacementConfig, RouterConfig, TopologyConfig, WireConfig

EXPERTS = (7, 30, 64, 256, 896)


def base_config(model="kimi_k3", **changes):
    """A quick run: one narrow layer, few tokens, everything recorded."""
    config = compose(
        [f"model={model}", "scale.hidden_size=64", "scale.intermediate_size=16", "layers=1",
         "tokens=8", "warmup=0", "record_routing=true", "traffic_csv=false"]
    )  # fmt: skip
    return replace(config, **changes)


def random_config(random: Random, world_size: int, base) -> object:
    """One point of the space that the issue of exactness is decided on."""
    num_experts = random.choice(EXPERTS)
    shape = replace(
        base.model,
        num_experts=num_experts,
        top_k=random.randint(1, min(16, num_experts)),
        num_expert_groups=1,
        num_limited_groups=1,
    )
    tokens = [random.choice((0, 0, 1, 3, 8, 17)) for _ in range(world_size)]
    nodes = tuple(random.randrange(3) for _ in range(world_size))
    return replace(
        base,
        model=shape,
        scale=replace(
            base.scale,
            hidden_size=random.choice((32, 66, 130, 300)),
            layers=random.choice((1, 2)),
        ),
        ranks=world_size,
        tokens=tuple(tokens),
        steps=random.choice((1, 2)),
        warmup=random.choice((0, 1)),
        seed=random.randrange(10_000),
        router=RouterConfig(name=random.choice(("uniform", "learned"))),
        placement=PlacementConfig(random.choice(list(PLACEMENTS))),
        dispatcher=DispatcherConfig(random.choice(list(DISPATCHERS))),
        wire=WireConfig(random.choice(list(WIRE_FORMATS)), random.choice(list(WIRE_FORMATS))),
        topology=TopologyConfig(node_of_rank=nodes),
        dtype=random.choice(("fp32", "fp32", "bf16", "fp16")),
    )


def emulate_all(world, configs):
    """Run each configuration as the job does, its page read away: (status, page) on rank 0."""
    ends = []
    for config in configs:
        with contextlib.redirect_stdout(io.StringIO()) as page:
            status = emulate(world, config)
        ends.append((status, page.getvalue()))
    return ends


def in_folders(configs, folder: Path):
    """The same configurations, each with a folder of its own for its results."""
    return [
        replace(config, output_dir=str(folder / f"run{index}"))
        for index, config in enumerate(configs)
    ]
