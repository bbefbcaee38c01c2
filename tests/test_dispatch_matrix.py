"""Random runs: counted bytes and rows against a third count, made from routing.npz by loops."""

from __future__ import annotations

import json
from collections import Counter
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np
import pytest
from run_configs import LAWFUL, base_config, emulate_all, in_folders, random_config
from third_count import ThirdCount

from comm.spawn import run_ranks

RUNS = {1: 6, **dict.fromkeys((2, 4, 5, 8, 12), 10), 72: 1}  # ranks -> runs
MODELS = ("kimi_k3", "kimi_k2", "mixtral_8x7b", "deepseek_v3")


class Done:
    """A run that is over, as it lies in its folder."""

    def __init__(self, config, end) -> None:
        self.config, (self.status, self.page) = config, end

    @cached_property
    def record(self):
        return json.loads(Path(self.config.output_dir, "run.json").read_text())

    @cached_property
    def traffic(self):
        return self._file("traffic")

    @cached_property
    def routing(self):
        return self._file("routing")

    @cached_property
    def third(self) -> ThirdCount:
        return ThirdCount(self.record["manifest"], self.routing)

    def _file(self, name):
        with np.load(f"{self.config.output_dir}/{name}.npz") as file:
            return {key: file[key] for key in file.files}


def drawn(world_size, folder):
    random, bases = Random(600 + world_size), [base_config(model) for model in MODELS]
    return [
        random_config(random, world_size, random.choice(bases), folder)
        for _ in range(RUNS[world_size])
    ]


@pytest.fixture(scope="module", params=RUNS, ids=lambda ranks: f"{ranks} ranks")
def runs(request, tmp_path_factory):
    world_size = request.param
    folder = tmp_path_factory.mktemp(f"ranks{world_size}")
    configs = in_folders(drawn(world_size, folder), folder)
    ends = run_ranks(emulate_all, world_size, configs, preload=["moe.judge"])[0]
    return list(map(Done, configs, ends))


def in_its_place(traffic, name, cells):
    """A third count as an array in the shape of the counted one."""
    axes = [traffic[axis].tolist() for axis in ("layers", "directions", "phases", "kinds")]
    expected = np.zeros_like(traffic[name])
    for (*place, src, dst), number in cells.items():
        indices = [axis.index(label) for axis, label in zip(axes, place, strict=False)]
        expected[(*indices, src, dst)] = number
    return expected


def test_every_cell_equals_a_third_count(runs):
    for run in runs:
        for name in ("bytes", "rows"):
            expected = in_its_place(run.traffic, name, getattr(run.third, name))
            assert np.array_equal(run.traffic[name], expected), (name, run.config)
        assert run.record["choices"]["dropped"] == run.third.dropped, run.config


def test_owners_follow_the_named_placement(runs):
    for run in runs:
        routing, size = run.routing, run.config.ep_size or run.config.ranks
        for layer in range(routing["topk_ids"].shape[1]):
            ids, slots = routing["topk_ids"][:, layer], routing["slots"][:, layer]
            assert np.array_equal(slots < 0, ids < 0)
            served = np.append(routing["physical_to_logical_map"][layer], -1)[slots]
            assert np.array_equal(served, ids), run.config
            rank = np.append(routing["slot_rank"][layer], -1)[slots][ids >= 0]
            ids = ids[ids >= 0]
            if run.config.placement.name == "round_robin":
                assert np.array_equal(rank, ids % size), run.config
            elif run.config.placement.name == "contiguous":
                base, more = divmod(run.config.model.num_experts, size)
                ends = np.cumsum([base + (position < more) for position in range(size)])
                assert np.array_equal(rank, np.searchsorted(ends, ids, side="right")), run.config
            elif run.config.placement.name == "file":
                held = np.load(run.config.placement.path)  # [position, layer, expert]
                assert held[rank, layer, ids].all(), run.config


def test_verdicts_agree(runs):
    for run in runs:
        states = {verdict["name"]: verdict["state"] for verdict in run.record["verdicts"]}
        assert states["exact"] == states["conserved"] == "EXACT", (run.config, run.page)
        trained = ("gradients",) if run.config.mode == "training" else ()
        for name in ("correctness", *trained):
            assert states[name] in ("WITHIN", "EXACT"), (run.config, run.page)
        law = ("NOT_AVAILABLE",)
        if run.config.router.name in LAWFUL:
            law = ("WITHIN", "EXACT")
        elif run.config.router.name == "w4":  # none where replicas are served in turn
            law = ("WITHIN", "EXACT", "NOT_AVAILABLE")
        assert states["expected"] in law, (run.config, run.page)
        assert run.status == run.record["status"] == 0


def test_weights_of_the_router_are_recorded(runs):
    for run in runs:
        ids = run.routing["topk_ids"]
        assert run.routing["topk_weights"].shape == ids.shape
        chosen = [[e for e in row if e >= 0] for row in ids.reshape(-1, ids.shape[-1]).tolist()]
        assert all(len(set(row)) == len(row) for row in chosen), run.config


FEATURES = (
    *("all_to_all", "rank_dedup", "allgather", "two_hop", "hierarchical_allgather", "padded"),
    *("one_sided", "deduplicated", "no room", "groups", "chunks", "training", "balance", "file"),
)


def test_the_choice_of_runs_leaves_nothing_out(tmp_path):
    """Each of these is among what is drawn, often enough to matter."""
    configs = [config for ranks in RUNS for config in drawn(ranks, tmp_path)]
    seen = Counter(name for config in configs for name in features(config))
    assert min(seen[name] for name in FEATURES) >= 3, seen


def features(config):
    dispatcher = config.dispatcher
    yield "deduplicated" if dispatcher.deduplicate else dispatcher.name
    yield config.mode
    yield config.placement.name
    if dispatcher.name == "padded" and dispatcher.capacity_factor < 1:
        yield "no room"
    if config.ep_size not in (None, config.ranks):
        yield "groups"
    if config.chunks > 1:
        yield "chunks"
