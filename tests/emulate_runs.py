"""The runs of test_emulate.py and test_law.py, by name, and what the ranks do for them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import faults_counting  # noqa: F401  enters its faults in FAULTS
import numpy as np
import pytest
import trace_files
from faults import FAULTS
from run_configs import TO_ALL, VARIANTS, base_config
from test_hf_config import DEEPSEEK_V2_LITE

from comm.analytic.law import NoLaw
from comm.spawn import run_ranks
from moe.conf_files import options
from moe.config import compose
from moe.jobs.emulate import emulate
from moe.routing import SOURCES
from moe.routing.base import Choice, RoutingSource
from moe.settings import PlacementConfig, RouterConfig, TopologyConfig, WireConfig
from moe.synthetic import topk_ids

NODES = {
    4: (0, 1, 0, 1),  # placed cyclically
    7: (0, 0, 1, 1, 1, 2, 2),
    8: tuple(rank // 4 for rank in range(8)),
    16: tuple(rank // 8 for rank in range(16)),
    72: tuple(rank // 8 for rank in range(72)),
}
TOKENS_IN_ALL = 56  # divided by 2, 4, 7 and 8 ranks


@dataclass(frozen=True)
class Run:
    """One finished run: what the job returned and printed, and the files that it left."""

    folder: Path
    status: int
    page: str

    @cached_property
    def record(self):
        return json.loads((self.folder / "run.json").read_text())

    @cached_property
    def traffic(self):
        with np.load(self.folder / "traffic.npz") as file:
            return {name: file[name] for name in file.files}

    @cached_property
    def routing(self):
        with np.load(self.folder / "routing.npz") as file:
            return {name: file[name] for name in file.files}

    @property
    def states(self):
        return {verdict["name"]: verdict["state"] for verdict in self.record["verdicts"]}

    def events(self, rank):
        lines = (self.folder / f"events.rank{rank}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def csv(self):
        with (self.folder / "traffic.csv").open() as file:
            return list(csv.DictReader(file))

    def rows_per_token(self, phase="dispatch"):
        """tier -> counted rows of one token in one layer"""
        manifest = self.record["manifest"]
        tokens = sum(manifest["tokens_per_rank"]) * manifest["steps"]
        entries = [entry for entry in self.record["layers"] if entry["phase"] == phase]
        totals = {
            tier: sum(entry["rows"][tier] for entry in entries) for tier in entries[0]["rows"]
        }
        return {tier: rows / (tokens * len(entries)) for tier, rows in totals.items()}


def network(tiers):
    """What leaves a rank."""
    return tiers["scale_up"] + tiers["scale_out"]


class Runs:
    """Runs by name; all that need as many ranks are run together, when the first is asked for."""

    def __init__(self, folder: Path, configs) -> None:
        self._folder = folder
        self._configs = configs
        self._done: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._done:
            self._run(self._configs[name].ranks)
        return self._done[name]

    @staticmethod
    def read(folder: Path) -> Run:
        """A run of which only the files are there."""
        return Run(folder, -1, "")

    def _run(self, world_size: int) -> None:
        configs = {
            name: replace(config, output_dir=str(self._folder / name.replace(" ", "-")))
            for name, config in self._configs.items()
            if config.ranks == world_size
        }
        ends = run_ranks(emulate_named, world_size, configs, preload=["moe.judge", "emulate_runs"])
        for name, (status, page) in ends[0].items():
            self._done[name] = Run(Path(configs[name].output_dir), status, page)


def runs_of_the_law():
    base = base_config(record_routing=False)
    return {
        **law_runs(base),
        **router_runs(base),
        **{f"laptop {name}": at_laptop_scale(name) for name in VARIANTS},
        **{
            f"two nodes {name}": at_laptop_scale(name, TopologyConfig(ranks_per_node=4))
            for name in ("two_hop", "rank_dedup", "hierarchical_allgather")
        },
    }


def runs_of_every_shape(folder: Path):
    """folder: takes the files that some of the runs read"""
    base = base_config(record_routing=False)
    return {
        **same_tokens(replace(base, tokens=7)),
        **four_ranks(base),
        **each_strategy(base),
        **field_cases(base),
        **replayed(base, folder),
    }


def law_runs(base):
    """Judgement 3: the uniform router, each strategy, on worlds that divide 896 and on some not."""
    runs = {}
    for ranks, nodes in NODES.items():
        law = replace(
            base,
            ranks=ranks,
            scale=replace(base.scale, layers=2 if ranks < 72 else 1),
            tokens=48 if ranks < 72 else 8,
            topology=TopologyConfig(node_of_rank=nodes),
            reference=ranks == 4,
        )
        for name in law_dispatchers(ranks):
            runs[f"law {ranks} {name}"] = replace(law, dispatcher=VARIANTS[name])
    return runs


def law_dispatchers(ranks):
    """Not all on 72 ranks: an all-gather and a padded buffer leave nothing to chance, and in shared
    memory go as many rows as through the collectives."""
    return list(VARIANTS) if ranks < 72 else ["all_to_all", "rank_dedup", "two_hop"]


# Those whose choices follow a law that is known beside `uniform`.
LAWFUL_ROUTERS = {
    "zipf": RouterConfig(name="zipf"),
    "hot_rank": RouterConfig(name="hot_rank", hot_rank=3, factor=5.0),
    "skew": RouterConfig(name="skew", max_over_mean=2.0),
    "markov": RouterConfig(name="markov", reuse=0.5),
    "w1": RouterConfig(name="w1"),
    "w5": RouterConfig(name="w5"),
}
ROUTED = ("all_to_all", "rank_dedup", "two_hop", "padded", "deduplicated")


def router_cases():
    """Of correlated choices it is not known how many find a row."""
    return [
        (router, name)
        for router in LAWFUL_ROUTERS
        for name in ROUTED
        if (router, name) != ("markov", "padded")
    ]


def router_runs(base):
    """Eight ranks on two nodes, each router with each of several strategies."""
    eight = replace(
        base,
        ranks=8,
        scale=replace(base.scale, layers=2),
        tokens=48,
        topology=TopologyConfig(node_of_rank=NODES[8]),
        reference=False,
    )
    return {
        f"router {router} {name}": replace(
            eight, router=LAWFUL_ROUTERS[router], dispatcher=VARIANTS[name]
        )
        for router, name in router_cases()
    }


def at_laptop_scale(name, topology=None):
    """Judgement 4: the default run, in every detail that routing and widths depend on."""
    config = compose(["ranks=8", "warmup=0", "reference=false", "traffic_csv=false"])
    return replace(
        config, dispatcher=VARIANTS[name], topology=topology or config.topology, output_dir=None
    )


def same_tokens(base):
    """As many tokens in all on 2, 4 and 8 ranks, also placed and sent in other ways."""
    runs = {
        f"same on {ranks}": replace(base, ranks=ranks, tokens=TOKENS_IN_ALL // ranks)
        for ranks in (2, 4, 8)
    }
    on_four = runs["same on 4"]
    return runs | {
        "same, dealt out": replace(on_four, placement=PlacementConfig("round_robin")),
        "same, per copy": replace(on_four, dispatcher=VARIANTS["all_to_all"]),
        "same, over nodes": replace(
            on_four,
            dispatcher=VARIANTS["two_hop"],
            topology=TopologyConfig(node_of_rank=NODES[4]),
        ),
        "same, unevenly": replace(on_four, tokens=(50, 0, 6, 0)),
        "same, in groups": replace(on_four, ep_size=2),
        "other seed": replace(on_four, seed=1),
    }


def small_run(base):
    """30 experts on four ranks, two layers, one rank without tokens."""
    return replace(
        base,
        ranks=4,
        model=replace(base.model, num_experts=30, top_k=6),
        scale=replace(base.scale, layers=2),
        tokens=(9, 5, 0, 12),
        topology=TopologyConfig(node_of_rank=NODES[4]),
    )


def four_ranks(base):
    small = replace(small_run(base), traffic_csv=True)
    trained = replace(small, mode="training", dispatcher=VARIANTS["two_hop"])
    return {
        "one step": small,
        "two steps": replace(small, steps=2, record_routing=True),
        "warmed up": replace(small, warmup=2),
        "no reference": replace(small, reference=False),
        "learned": replace(small, router=RouterConfig(name="learned")),
        "blocks": replace(small, topology=TopologyConfig(ranks_per_node=2)),
        "one node": replace(small, topology=TopologyConfig()),
        "no tokens at all": replace(small, tokens=0),
        "ragged nodes": replace(
            small,
            topology=TopologyConfig(node_of_rank=(3, 3, 1, 3)),
            placement=PlacementConfig("round_robin"),
            dispatcher=VARIANTS["two_hop"],
        ),
        "fp8": replace(
            small,
            model=replace(small.model, hidden_size=256, latent_size=128),
            scale=replace(small.scale, hidden_size=256),
            wire=WireConfig("fp8_block128", "bf16"),
        ),
        "trained": trained,
        "trained, warmed up": replace(trained, warmup=1),
        "everything": replace(  # every phase that there is
            trained,
            expert_tp=2,
            warmup=1,
            chunks=2,
            placement=PlacementConfig("balance", num_redundant_experts=3),
            topology=TopologyConfig(node_of_rank=(0, 0, 1, 1)),
        ),
    }


def each_strategy(base):
    """Routers and networks that leave little room, with every strategy."""
    small, runs = small_run(base), {}
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
    for shape, config in shapes.items():
        for name, dispatcher in VARIANTS.items():
            runs[f"{shape} {name}"] = replace(config, dispatcher=dispatcher)
    return runs


def field_cases(base):
    """All tokens on one of eight ranks; experts that eight does not divide; replicas."""
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
    runs = {
        "remainder": replace(
            base,
            ranks=8,
            model=replace(base.model, num_experts=30, top_k=6),
            record_routing=True,
        ),
    }
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
    """26 tokens of one layer, weights that sum to anything, a token with one expert, one with none.
    """
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


def preset_runs(folder: Path):
    """One layer of every model at laptop scale, hf with a released file of its own."""
    path = folder / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V2_LITE))
    models = {name: [f"model={name}"] for name in options("model")}
    models["hf"] += [f"model.path={path}"]
    return {
        name: compose(
            [*words, "scale=laptop", "layers=1", "ranks=2", "tokens=4", "warmup=0"]
            + [f"output_dir={folder / name}"]
        )
        for name, words in models.items()
    }


class ToRankZero(RoutingSource):
    """Of 30 experts, only those of rank 0."""

    law = NoLaw("a few experts get everything")

    def choose(self, step, layer, first_token, num_tokens):
        run = self.context
        return Choice(topk_ids(run.seed, step, layer, first_token, num_tokens, 8, run.top_k))


class SameExperts(RoutingSource):
    """Every token meets the experts of token 0, as identical rows would."""

    law = NoLaw("a few experts get everything")

    def choose(self, step, layer, first_token, num_tokens):
        run = self.context
        chosen = topk_ids(run.seed, step, layer, 0, 1, run.num_experts, run.top_k)
        return Choice(np.repeat(chosen, num_tokens, axis=0))


HOT_ROUTERS = {
    "to rank 0": ("emulate_runs", "ToRankZero"),
    "same experts": ("emulate_runs", "SameExperts"),
}


def emulate_named(world, configs):
    """Every configuration in turn on ranks that stay: name -> (status, page)."""
    ends = {}
    for name, config in configs.items():
        with pytest.MonkeyPatch.context() as patch:
            for router, place in HOT_ROUTERS.items():
                patch.setitem(SOURCES, router, place)
            with contextlib.redirect_stdout(io.StringIO()) as page:
                ends[name] = (emulate(world, config), page.getvalue())
    return ends


def emulate_with_fault(world, config, name):
    """The job's own body, with a fault planted."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name].plant(patch)
        return emulate(world, config)
