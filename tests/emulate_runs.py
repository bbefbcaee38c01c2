"""Whole runs by name: what the ranks do for them, and what they leave behind."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import every_fault

from comm.analytic.law import NoLaw
from comm.spawn import run_ranks
from moe.jobs.emulate import emulate
from moe.routing import SOURCES
from moe.routing.base import Choice, RoutingSource
from moe.settings import TopologyConfig
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
        torch.distributed.barrier()  # the next run may read the files of this one
    return ends


def emulate_with_fault(world, config, name):
    """The job's own body, with a fault planted."""
    with pytest.MonkeyPatch.context() as patch:
        every_fault()[name].plant(patch)
        return emulate(world, config)
