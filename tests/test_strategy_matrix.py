"""Every strategy with every format, placement, router, layout and mode, pair by pair.

Complete runs of the job on ranks that stay: each must end with every cell equal to its prediction,
outputs and gradients equal to the reference's, and the law of its router kept.

    WIDEEP_MATRIX=300 pytest tests/test_strategy_matrix.py    300 more combinations, drawn at random
    WIDEEP_MATRIX=whole ...                                    all of them, which takes many hours
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from pairwise import Row, all_pairs, cover, pairs_of
from run_configs import base_config, emulate_all

from comm.balance import balance
from comm.spawn import run_ranks
from moe.rehearsal import refusal
from moe.routing import SOURCES
from moe.settings import (
    DispatcherConfig,
    PlacementConfig,
    RouterConfig,
    TopologyConfig,
    WireConfig,
)

FOLDED = 2  # layers of every run

DISPATCHERS = [
    DispatcherConfig("all_to_all"),
    DispatcherConfig("rank_dedup"),
    DispatcherConfig("allgather"),
    DispatcherConfig("two_hop"),
    DispatcherConfig("hierarchical_allgather"),
    DispatcherConfig("padded", capacity_factor=1.25),
    DispatcherConfig("padded", capacity_factor=0.6, renormalize=True),
    DispatcherConfig("one_sided"),
    DispatcherConfig("one_sided", deduplicate=True),
]
WIRES = [
    WireConfig("fp32", "fp32", "fp32"),
    WireConfig("bf16", "bf16", "bf16"),
    WireConfig("fp16", "bf16", "fp16"),
    WireConfig("fp8_block128", "bf16", "fp8_block128"),
    WireConfig("mxfp8", "bf16", "bf16"),
    WireConfig("mxfp4", "bf16", "bf16"),
    WireConfig("nvfp4", "fp16", "mxfp8"),
]
PLACED = ["contiguous", "round_robin", "balance", "balance random", "balance nearest", "file"]
# ranks, node of each, ep_size, expert_tp, expert_tp_mode
LAYOUTS = [
    (1, (0,), None, 1, "gather"),
    (4, (0, 0, 0, 0), None, 1, "gather"),
    (4, (0, 1, 0, 1), None, 1, "gather"),
    (6, (2, 2, 0, 1, 1, 1), None, 1, "gather"),
    (8, (0, 0, 0, 0, 1, 1, 1, 1), None, 1, "gather"),
    (8, (0, 0, 0, 0, 1, 1, 1, 1), 4, 1, "gather"),
    (8, (0, 0, 1, 1, 0, 0, 1, 1), 4, 2, "gather"),
    (8, (0, 0, 0, 0, 1, 1, 1, 1), None, 2, "all"),
]
MODES = [("inference", 1), ("training", 1), ("inference", 3), ("training", 2)]
EXPERTS = [(30, 6), (7, 7), (5, 2), (64, 16)]  # E, K: also K beyond a rank's experts, R beyond E
TOKENS = ["ragged", "on one rank", "none", "equal"]

FACTORS = {
    "dispatcher": DISPATCHERS,
    "wire": WIRES,
    "placement": PLACED,
    "router": list(SOURCES),
    "layout": LAYOUTS,
    "mode": MODES,
    "experts": EXPERTS,
    "tokens": TOKENS,
}
DECISIVE = ("dispatcher", "placement", "router", "layout", "experts")  # of what can be run
MAX_OVER_MEAN = {30: 1.5, 7: 1.5, 5: 2.5, 64: 1.5}  # of skew, as far as K of E allow
GROUPS = {30: (5, 3), 7: (7, 7), 5: (5, 3), 64: (8, 4)}  # of group_limited: all, and those kept


def tokens_of(name: str, ranks: int) -> tuple[int, ...]:
    return {
        "ragged": tuple((9, 0, 5, 12)[rank % 4] for rank in range(ranks)),
        "on one rank": (21, *[0] * (ranks - 1)),
        "none": (0,) * ranks,
        "equal": (8,) * ranks,
    }[name]


class Files:
    """Traces, counts and placements that some of the runs read; written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def counts(self, experts: tuple[int, int]) -> str:
        num_experts, top_k = experts
        path = self.folder / f"counts-{num_experts}-{top_k}.json"
        if not path.exists():
            random = np.random.default_rng(num_experts)
            rows = random.permuted(np.tile(np.arange(num_experts) + 5, (FOLDED, 1)), axis=1) * top_k
            path.write_text(json.dumps({"logical_count": rows.tolist()}))
        return str(path)

    def trace(self, experts: tuple[int, int]) -> str:
        """Recorded routing, with a token that has no expert."""
        num_experts, top_k = experts
        path = self.folder / f"trace-{num_experts}-{top_k}.npz"
        if not path.exists():
            random = np.random.default_rng(top_k)
            ids = np.stack(
                [
                    [random.permutation(num_experts)[:top_k] for _ in range(17)]
                    for _ in range(FOLDED)
                ]
            )
            ids[:, 3] = -1
            weights = random.random(ids.shape).astype(np.float32)
            header = json.dumps({"num_experts": num_experts, "top_k": top_k})
            np.savez(
                path, topk_ids=ids[None].astype(np.int32), topk_weights=weights[None], header=header
            )
        return str(path)

    def placement(self, num_experts: int, positions: int) -> str:
        """0/1 arrays with another redundancy in each layer."""
        path = self.folder / f"placement-{num_experts}-{positions}.npy"
        if not path.exists():
            held = np.zeros((positions, FOLDED, num_experts), np.int32)
            for layer in range(FOLDED):
                load = np.random.default_rng(layer).random(num_experts)
                more = min(layer * 3, (positions - 1) * num_experts)
                slots, first = balance(load, positions, num_experts + more)
                for position in range(positions):
                    held[position, layer, slots[first[position] : first[position + 1]]] = 1
            np.save(path, held)
        return str(path)


def config_of(row: Row, files: Files, base):
    """The configuration of a row; its results have no folder yet."""
    value = {name: values[row[name]] for name, values in FACTORS.items()}
    ranks, nodes, ep_size, shards, shard_mode = value["layout"]
    experts, (mode, chunks) = value["experts"], value["mode"]
    placed, _, policy = value["placement"].partition(" ")
    positions = (ep_size or ranks) // shards
    options = {"name": value["router"]}
    if value["router"] == "replay":
        options["path"] = files.trace(experts)
    elif value["router"] == "counts":
        options["path"] = files.counts(experts)
    elif value["router"] == "group_limited":
        groups, limited = GROUPS[experts[0]]
        options |= {"num_expert_groups": groups, "num_limited_groups": limited}
        options["group_score"] = "top2_sum" if groups * 2 <= experts[0] else "max"
    elif value["router"] == "skew":
        options["max_over_mean"] = MAX_OVER_MEAN[experts[0]]
    return replace(
        base,
        ranks=ranks,
        model=replace(base.model, num_experts=experts[0], top_k=experts[1], num_moe_layers=FOLDED),
        tokens=tokens_of(value["tokens"], ranks),
        topology=TopologyConfig(node_of_rank=nodes),
        ep_size=ep_size,
        expert_tp=shards,
        expert_tp_mode=shard_mode,
        mode=mode,
        chunks=chunks,
        dispatcher=value["dispatcher"],
        wire=value["wire"],
        placement=PlacementConfig(
            placed,
            num_redundant_experts=min(5, (positions - 1) * experts[0]) if policy else None,
            replica_choice=policy or "round_robin",
            path=files.placement(experts[0], positions) if placed == "file" else None,
        ),
        router=RouterConfig(**options),
    )


@pytest.fixture(scope="module")
def base():
    small = base_config()
    return replace(
        small,
        scale=replace(small.scale, layers=FOLDED, hidden_size=66),  # latent 33: odd, no block fits
        steps=2,
        warmup=1,
        record_routing=False,
    )


def rows_to_run(is_valid) -> tuple[list[Row], list[tuple]]:
    """All pairs, and whatever more WIDEEP_MATRIX asks for."""
    rows, impossible = cover(FACTORS, is_valid)
    asked, sizes = os.environ.get("WIDEEP_MATRIX", "0"), [range(len(v)) for v in FACTORS.values()]
    if asked == "whole":
        every = (dict(zip(FACTORS, choice, strict=True)) for choice in itertools.product(*sizes))
        return [row for row in every if is_valid(row)], impossible
    random = Random(1)
    drawn = ({n: random.randrange(len(v)) for n, v in FACTORS.items()} for _ in itertools.count())
    return rows + list(itertools.islice(filter(is_valid, drawn), int(asked))), impossible


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """(configuration, status, page) of every row, and the pairs that cannot be had."""
    files = Files(tmp_path_factory.mktemp("files"))
    known: dict[tuple, bool] = {}

    def is_valid(row: Row) -> bool:
        decisive = tuple(value for name, value in row.items() if name in DECISIVE)
        if decisive not in known:
            known[decisive] = refusal(config_of(row, files, base)) is None
        return known[decisive]

    rows, impossible = rows_to_run(is_valid)
    folder = tmp_path_factory.mktemp("runs")
    configs = [
        replace(config_of(row, files, base), output_dir=str(folder / f"run{index}"), seed=index)
        for index, row in enumerate(rows)
    ]
    ends = {}
    for ranks in sorted({config.ranks for config in configs}):
        chosen = [config for config in configs if config.ranks == ranks]
        found = run_ranks(emulate_all, ranks, chosen, preload=["moe.judge"], timeout_s=60)[0]
        ends |= dict(zip((config.output_dir for config in chosen), found, strict=True))
    done = [(config, *ends[config.output_dir]) for config in configs]
    return rows, done, impossible


def test_every_run_agrees_with_every_prediction(runs):
    wrong = []  # all of them are told, the first one in full
    for config, status, page in runs[1]:
        record = json.loads(Path(config.output_dir, "run.json").read_text())
        states = {verdict["name"]: verdict["state"] for verdict in record["verdicts"]}
        assert states["exact"] == states["conserved"] == "EXACT", (config, page)
        assert set(states) >= {"expected", "correctness"}
        assert ("gradients" in states) == (config.mode == "training")
        if status != 0 or status != record["status"]:
            wrong.append((config, states, page))
    assert not wrong, f"{len(wrong)} of {len(runs[1])}: {wrong[0]}"


def test_every_pair_that_can_be_had_is_there(runs, base):
    rows, _, impossible = runs
    there = set().union(*map(pairs_of, rows))
    sizes = {name: len(values) for name, values in FACTORS.items()}
    assert there | set(impossible) == set(all_pairs(sizes))
    for (one, i), (other, j) in impossible:
        # a pair is given up only where the two alone rule each other out
        assert {one, other} & {"layout", "router"}, (one, i, other, j)
    assert len(impossible) <= 9, impossible


def test_something_happened_in_the_runs(runs):
    """Rows moved, experts moved, choices were dropped, gradients flowed: no row is a formality."""
    seen = Counter()
    for config, _, _ in runs[1]:
        record = json.loads(Path(config.output_dir, "run.json").read_text())
        seen["network"] += record["totals"]["tiers"]["network"]["measured_bytes"] > 0
        seen["dropped"] += record["choices"]["dropped"] > 0
        seen["moved"] += bool(record["placement"] and record["placement"]["moved_experts"])
        seen["backward"] += bool(record["totals"]["backward"])
        seen[record["verdicts"][2]["state"]] += 1
        assert record["choices"]["dropped"] == record["choices"]["predicted_dropped"], config
    assert min(seen[what] for what in ("network", "dropped", "moved", "backward")) >= 5, seen
    assert seen["WITHIN"] >= 20 and seen["EXACT"] >= 5, seen
