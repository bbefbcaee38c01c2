"""The runs of test_emulate.py: what is placed where, steps and files, odd shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from emulate_runs import NODES, small_run
from run_configs import VARIANTS, base_config
from test_hf_config import DEEPSEEK_V2_LITE

from moe.conf_files import options
from moe.config import compose
from moe.settings import PlacementConfig, RouterConfig, TopologyConfig, WireConfig

TOKENS_IN_ALL = 56  # divided by 2, 4, 7 and 8 ranks


def runs_of_every_shape():
    base = base_config(record_routing=False)
    remainder = replace(
        base, ranks=8, model=replace(base.model, num_experts=30, top_k=6), record_routing=True
    )
    return {
        **same_tokens(replace(base, tokens=7)),
        **four_ranks(base),
        "remainder": remainder,
    }


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


def preset_runs(folder: Path):
    """One layer of every model at laptop scale, hf with a released file of its own."""
    path = folder / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V2_LITE))
    models = {name: [f"model={name}"] for name in options("model")}
    models["hf"] += [f"model.path={path}"]
    return {
        name: compose(
            [*words, "scale=laptop", "layers=1", "ranks=2", "tokens=4", "warmup=0", "report=false"]
            + [f"output_dir={folder / name}"]
        )
        for name, words in models.items()
    }
