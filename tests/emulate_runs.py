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
from faults import FAULTS
from run_configs import DISPATCHERS, base_config
from test_hf_config import DEEPSEEK_V2_LITE

from comm.spawn import run_ranks
from moe.conf_files import options
from moe.config import compose
from moe.jobs.emulate import emulate
from moe.settings import DispatcherConfig, PlacementConfig, RouterConfig, TopologyConfig, WireConfig
from moe.synthetic import ROUTERS, RouterKind, topk_ids

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
    return {**law_runs(base), **{f"laptop {name}": at_laptop_scale(name) for name in DISPATCHERS}}


def runs_of_every_shape():
    base = base_config(record_routing=False)
    return {
        **same_tokens(replace(base, tokens=7)),
        **four_ranks(base),
        **field_cases(base),
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
            runs[f"law {ranks} {name}"] = replace(law, dispatcher=DispatcherConfig(name))
    return runs


def law_dispatchers(ranks):
    """An all-gather leaves nothing to chance, so 72 ranks need not show it."""
    return [name for name in DISPATCHERS if ranks < 72 or name != "allgather"]


def at_laptop_scale(dispatcher):
    """Judgement 4: the default run, in every detail that routing and widths depend on."""
    return compose(["ranks=8", f"dispatcher={dispatcher}", "warmup=0", "reference=false"])


def same_tokens(base):
    """As many tokens in all on 2, 4 and 8 ranks, also placed and sent in other ways."""
    runs = {
        f"same on {ranks}": replace(base, ranks=ranks, tokens=TOKENS_IN_ALL // ranks)
        for ranks in (2, 4, 8)
    }
    on_four = runs["same on 4"]
    return runs | {
        "same, dealt out": replace(on_four, placement=PlacementConfig("round_robin")),
        "same, per copy": replace(on_four, dispatcher=DispatcherConfig("all_to_all")),
        "same, unevenly": replace(on_four, tokens=(50, 0, 6, 0)),
        "other seed": replace(on_four, seed=1),
    }


def four_ranks(base):
    """Small runs of 30 experts with two layers, one rank without tokens."""
    small = replace(
        base,
        ranks=4,
        model=replace(base.model, num_experts=30, top_k=6),
        scale=replace(base.scale, layers=2),
        tokens=(9, 5, 0, 12),
        topology=TopologyConfig(node_of_rank=NODES[4]),
        traffic_csv=True,
    )
    return {
        "one step": small,
        "two steps": replace(small, steps=2, record_routing=True),
        "warmed up": replace(small, warmup=2),
        "no reference": replace(small, reference=False),
        "learned": replace(small, router=RouterConfig("learned")),
        "blocks": replace(small, topology=TopologyConfig(ranks_per_node=2)),
        "one node": replace(small, topology=TopologyConfig()),
        "no tokens at all": replace(small, tokens=0),
        "ragged nodes": replace(
            small,
            topology=TopologyConfig(node_of_rank=(3, 3, 1, 3)),
            placement=PlacementConfig("round_robin"),
        ),
        "fp8": replace(
            small,
            model=replace(small.model, hidden_size=256, latent_size=128),
            scale=replace(small.scale, hidden_size=256),
            wire=WireConfig("fp8_block128", "bf16"),
        ),
        **{
            f"{hot} {name}": replace(
                small, router=RouterConfig(hot), dispatcher=DispatcherConfig(name)
            )
            for name in DISPATCHERS
            for hot in HOT_ROUTERS
        },
        **{
            f"few experts {name}": replace(
                small,
                model=replace(small.model, num_experts=3, top_k=2),
                dispatcher=DispatcherConfig(name),
            )
            for name in DISPATCHERS
        },
    }


def field_cases(base):
    alone = replace(base, ranks=8, tokens=(64, *[0] * 7))
    """Eight ranks: all tokens on one of them; experts that eight does not divide."""
    return {
        **{
            f"tokens on one rank {name}": replace(alone, dispatcher=DispatcherConfig(name))
            for name in DISPATCHERS
        },
        "remainder": replace(
            base,
            ranks=8,
            model=replace(base.model, num_experts=30, top_k=6),
            record_routing=True,
        ),
    }


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


def to_rank_0(seed, step, layer, first_token, num_tokens, num_experts, top_k):
    """Of 30 experts on 4 ranks, only those of rank 0."""
    return topk_ids(seed, step, layer, first_token, num_tokens, 8, top_k)


def same_experts(seed, step, layer, first_token, num_tokens, num_experts, top_k):
    """Every token meets the experts of token 0, as identical rows would."""
    chosen = topk_ids(seed, step, layer, 0, 1, num_experts, top_k)
    return np.repeat(chosen, num_tokens, axis=0)


HOT_ROUTERS = {"to rank 0": to_rank_0, "same experts": same_experts}


def emulate_named(world, configs):
    """Every configuration in turn on ranks that stay: name -> (status, page)."""
    ends = {}
    for name, config in configs.items():
        with pytest.MonkeyPatch.context() as patch:
            for router, choose in HOT_ROUTERS.items():
                patch.setitem(ROUTERS, router, RouterKind(choose, law=None))
            with contextlib.redirect_stdout(io.StringIO()) as page:
                ends[name] = (emulate(world, config), page.getvalue())
    return ends


def emulate_with_fault(world, config, name):
    """The job's own body, with a fault planted."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name].plant(patch)
        return emulate(world, config)
