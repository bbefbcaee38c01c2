"""200 random runs: counted bytes against a third count, made here from routing.npz by plain loops.

This file imports nothing of the analytic side and nothing of the measured side: it reads the files
that a run leaves, and knows the laws of the strategies only as written in docs/traffic_model.md.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from run_configs import base_config, emulate_all, in_folders, random_config

from comm.spawn import run_ranks

RUNS = {**dict.fromkeys(range(1, 13), 15), 72: 20}  # ranks -> runs: 200 in all
MODELS = ("kimi_k3", "kimi_k2", "mixtral_8x7b", "deepseek_v3")


@pytest.fixture(scope="module", params=RUNS, ids=lambda ranks: f"{ranks} ranks")
def runs(request, tmp_path_factory):
    world_size = request.param
    random = Random(world_size)
    bases = [base_config(model) for model in MODELS]
    configs = [
        random_config(random, world_size, random.choice(bases)) for _ in range(RUNS[world_size])
    ]
    folder = tmp_path_factory.mktemp(f"ranks{world_size}")
    configs = in_folders(configs, folder)
    ends = run_ranks(emulate_all, world_size, configs, preload=["moe.judge"])[0]
    return list(zip(configs, ends, strict=True))


def row_bytes(wire: str, width: int) -> dict[str, int]:
    return {
        "fp32": {"hidden": 4 * width},
        "bf16": {"hidden": 2 * width},
        "fp16": {"hidden": 2 * width},
        "fp8_block128": {"hidden": width, "scales": 4 * ((width + 127) // 128)},
        "mxfp8": {"hidden": width, "scales": (width + 31) // 32},
    }[wire]


def count_again(manifest, routing) -> Counter:
    """Bytes by (layer, phase, kind, src, dst), token by token."""
    ranks = range(manifest["world_size"])
    dispatcher, wire = manifest["dispatcher"], manifest["wire"]
    shape = manifest["shape"]
    width = shape["latent_size"] or shape["hidden_size"]
    ids, token_rank, slot_rank = routing["topk_ids"], routing["token_rank"], routing["slot_rank"]
    slots = routing["slots"]
    cells: Counter = Counter()
    for layer in range(ids.shape[1]):
        owned = Counter(slot_rank[layer].tolist())
        for step in range(ids.shape[0]):
            for src in ranks:
                for dst in ranks:
                    announced = owned[dst] if dispatcher == "all_to_all" else 1
                    cells[layer, "dispatch", "counts", src, dst] += 32 + 8 * announced
            for token, src in enumerate(token_rank.tolist()):
                chosen = [slot for slot in slots[step, layer, token].tolist() if slot >= 0]
                owners = [int(slot_rank[layer, slot]) for slot in chosen]
                if dispatcher == "rank_dedup":
                    owners = sorted(set(owners))
                elif dispatcher == "allgather":
                    owners = list(ranks) if owners else []
                for dst in owners:
                    for kind, size in row_bytes(wire["dispatch"], width).items():
                        cells[layer, "dispatch", kind, src, dst] += size
                    if dispatcher != "all_to_all":
                        cells[layer, "dispatch", "ids", src, dst] += 4 * shape["top_k"]
                        cells[layer, "dispatch", "weights", src, dst] += 4 * shape["top_k"]
                    for kind, size in row_bytes(wire["combine"], width).items():
                        cells[layer, "combine", kind, dst, src] += size
    return cells


def test_every_cell_equals_a_third_count(runs):
    for config, _ in runs:
        with np.load(f"{config.output_dir}/traffic.npz") as traffic:
            counted, names = (
                traffic["bytes"],
                {k: traffic[k].tolist() for k in ("layers", "directions", "phases", "kinds")},
            )
        with np.load(f"{config.output_dir}/routing.npz") as routing:
            record = json.loads(Path(config.output_dir, "run.json").read_text())
            third = count_again(record["manifest"], routing)
        expected = np.zeros_like(counted)
        for (layer, phase, kind, src, dst), size in third.items():
            expected[
                layer,
                names["directions"].index("forward"),
                names["phases"].index(phase),
                names["kinds"].index(kind),
                src,
                dst,
            ] = size
        assert np.array_equal(counted, expected), config


def test_owners_follow_the_named_placement(runs):
    for config, _ in runs:
        with np.load(f"{config.output_dir}/routing.npz") as routing:
            chosen, slots = routing["topk_ids"], routing["slots"]
            num_experts = config.model.num_experts
            for layer in range(chosen.shape[1]):
                rank = np.append(routing["slot_rank"][layer], -1)[slots[:, layer]]
                ids = chosen[:, layer]
                if config.placement.name == "round_robin":
                    assert np.array_equal(rank, ids % config.ranks), config
                else:
                    base, more = divmod(num_experts, config.ranks)
                    ends = np.cumsum([base + (r < more) for r in range(config.ranks)])
                    assert np.array_equal(rank, np.searchsorted(ends, ids, side="right")), config


def test_verdicts_agree(runs):
    for config, (status, page) in runs:
        record = json.loads(Path(config.output_dir, "run.json").read_text())
        states = {verdict["name"]: verdict["state"] for verdict in record["verdicts"]}
        assert states["exact"] == states["conserved"] == "EXACT", (config, page)
        assert states["correctness"] in ("WITHIN", "EXACT"), (config, page)
        law = ("WITHIN", "EXACT") if config.router.name == "uniform" else ("NOT_AVAILABLE",)
        assert states["expected"] in law, (config, page)
        assert status == record["status"] == 0


def test_weights_of_the_router_are_recorded(runs):
    for config, _ in runs:
        with np.load(f"{config.output_dir}/routing.npz") as routing:
            assert routing["topk_weights"].shape == routing["topk_ids"].shape
            distinct = [
                len(set(row)) == len(row)
                for row in routing["topk_ids"].reshape(-1, config.model.top_k).tolist()
            ]
            assert all(distinct), config
