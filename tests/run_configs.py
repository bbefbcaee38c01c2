"""Small configurations for whole runs, and the runs themselves on ranks that are already there."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from comm.dispatch import DISPATCHERS
from comm.wire import WIRE_FORMATS
from moe.config import compose
from moe.jobs.emulate import emulate
from moe.rehearsal import refusal
from moe.settings import DispatcherConfig, PlacementConfig, RouterConfig, TopologyConfig, WireConfig

VARIANTS = {
    "all_to_all": DispatcherConfig("all_to_all"),
    "rank_dedup": DispatcherConfig("rank_dedup"),
    "allgather": DispatcherConfig("allgather"),
    "two_hop": DispatcherConfig("two_hop"),
    "hierarchical_allgather": DispatcherConfig("hierarchical_allgather"),
    "padded": DispatcherConfig("padded", capacity_factor=1.25),
    "one_sided": DispatcherConfig("one_sided"),
    "deduplicated": DispatcherConfig("one_sided", deduplicate=True),
}
TO_ALL = ("allgather", "hierarchical_allgather")  # a token goes everywhere, whatever it chose

EXPERTS = (7, 30, 64, 256, 896)
PLACED = ("contiguous", "round_robin", "balance", "file")
REPLICAS = ("round_robin", "random", "nearest")
LAWFUL = ("uniform", "zipf", "w5", "hot_experts")  # routers with a law, whoever serves their picks


def base_config(model="kimi_k3", **changes):
    """A quick run: one narrow layer, few tokens, everything recorded."""
    config = compose(
        [f"model={model}", "scale.hidden_size=64", "scale.intermediate_size=16", "layers=1",
         "tokens=8", "warmup=0", "record_routing=true", "traffic_csv=false",
         "report=false"]
    )  # fmt: skip
    return replace(config, **changes)


def random_config(random: Random, world_size: int, base, folder: Path):
    """One point of the space that exactness is decided on, as far as it can be run.

    folder: takes the placements that are read from files
    """
    while True:
        config = _any_config(random, world_size, base, folder)
        if refusal(config) is None:
            return config


def _any_config(random: Random, world_size: int, base, folder: Path):
    num_experts = random.choice(EXPERTS)
    shape = replace(
        base.model,
        num_experts=num_experts,
        top_k=random.randint(1, min(16, num_experts)),
        num_expert_groups=1,
        num_limited_groups=1,
    )
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    ep_size = random.choice((None, None, random.choice(divisors)))
    positions = ep_size or world_size
    layers = random.choice((1, 2))
    # gradients of 72 ranks are summed elsewhere
    mode = random.choice(
        ("inference", "inference", "training" if world_size <= 12 else "inference")
    )
    return replace(
        base,
        model=shape,
        scale=replace(base.scale, hidden_size=random.choice((32, 66, 130, 300)), layers=layers),
        ranks=world_size,
        tokens=tuple(random.choice((0, 0, 1, 3, 8, 17)) for _ in range(world_size)),
        steps=random.choice((1, 2)),
        warmup=random.choice((0, 1)),
        seed=random.randrange(10_000),
        router=RouterConfig(name=random.choice(("uniform", "uniform", "learned", "w4", *LAWFUL))),
        placement=_any_placement(random, positions, layers, num_experts, folder),
        dispatcher=_any_dispatcher(random, shape),
        wire=_any_wire(random),
        topology=TopologyConfig(node_of_rank=_any_nodes(random, world_size)),
        dtype=random.choice(("fp32", "fp32", "bf16", "fp16")),
        mode=mode,
        chunks=random.choice((1, 1, 2, 3)),
        ep_size=ep_size,
    )


def _any_wire(random: Random) -> WireConfig:
    return WireConfig(*(random.choice(list(WIRE_FORMATS)) for _ in range(3)))


def _any_nodes(random: Random, world_size: int) -> tuple[int, ...]:
    """Ragged nodes in any order, or ranks dealt out to them one by one."""
    count = random.randint(1, 3)
    if random.random() < 0.3:
        return tuple(rank % count for rank in range(world_size))
    return tuple(random.randrange(count) for _ in range(world_size))


def _any_dispatcher(random: Random, model) -> DispatcherConfig:
    name = random.choice(list(DISPATCHERS))
    if name == "padded":  # with the last factor each slot has room for every token
        factor = random.choice((0.4, 0.75, 1.25, 2.0, model.num_experts / model.top_k))
        return DispatcherConfig(name, factor, renormalize=random.random() < 0.5)
    return DispatcherConfig(name, deduplicate=name == "one_sided" and random.random() < 0.5)


def _any_placement(
    random: Random, positions: int, layers: int, num_experts: int, folder: Path
) -> PlacementConfig:
    name = random.choice(PLACED)
    if name not in ("balance", "file"):
        return PlacementConfig(name)
    more = random.choice((None, min(random.randrange(9), (positions - 1) * num_experts)))
    return PlacementConfig(
        name,
        num_redundant_experts=more if name == "balance" else None,
        replica_choice=random.choice(REPLICAS),
        path=_placement_file(random, positions, layers, num_experts, folder)
        if name == "file"
        else None,
    )


def _placement_file(
    random: Random, positions: int, layers: int, num_experts: int, folder: Path
) -> str:
    """0/1 arrays: every expert somewhere, some of them twice, more of those in later layers."""
    held = np.zeros((positions, layers, num_experts), np.int32)
    for layer in range(layers):
        for expert in range(num_experts):
            held[random.randrange(positions), layer, expert] = 1
            if random.random() < 0.1 * layer:
                held[random.randrange(positions), layer, expert] = 1
    path = folder / f"placement{random.randrange(10**9)}.npy"
    np.save(path, held)
    return str(path)


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
