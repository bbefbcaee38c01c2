"""Runs whose bytes the kernel is asked about, and witnesses that cannot see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from run_configs import VARIANTS, base_config

from comm import kernel, tcp
from comm.kernel import KernelWitness
from comm.world import LAZY, RankGroup, connected_group
from moe.settings import PlacementConfig, TopologyConfig, WireConfig

TOKENS = (9, 5, 0, 12, 1, 0, 3, 7)


def kernel_runs():
    """30 experts, two layers; ranks dealt out to two nodes, tokens ragged, none on two ranks."""
    base = base_config()
    base = replace(
        base,
        ranks=8,
        model=replace(base.model, num_experts=30, top_k=6),
        scale=replace(base.scale, layers=2),
        tokens=TOKENS,
        record_routing=False,
        topology=TopologyConfig(node_of_rank=(0, 1) * 4),
    )
    dispatched = {
        name: replace(base, dispatcher=VARIANTS[name])
        for name in VARIANTS
        if name != "deduplicated"
    }

    def on(ranks, **changes):
        return replace(base, ranks=ranks, topology=TopologyConfig(), **changes)

    two_hop = dispatched["two_hop"]
    return dispatched | {
        "fp8 in chunks": replace(base, wire=WireConfig("fp8_block128", "bf16"), chunks=2, warmup=1),
        "balanced": replace(base, placement=PlacementConfig("balance"), warmup=1),
        "groups in training": replace(two_hop, ep_size=4, mode="training", steps=2),
        "shared experts": replace(base, expert_tp=2),
        "shared by all": replace(base, expert_tp=2, expert_tp_mode="all"),
        "groups of one": replace(base, ep_size=1, mode="training"),
        "not asked": replace(base, kernel=False),
        "alone": on(1, tokens=4),
        "two ranks": on(2, tokens=(3, 0), warmup=1),
        "three ranks": on(3, tokens=(0, 7, 2)),
        "sixteen ranks": on(16, tokens=TOKENS * 2, layers=1),
    }


def lazily(world):
    """The log of a witness of a group whose ranks are connected when they first send."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LAZY, "1")
        ranks = tuple(range(world.world_size))
        made = connected_group(ranks, world.rank, "gloo", world.timeout)
        one = KernelWitness(world, [RankGroup(ranks, world.rank, made[0], 1, made[1])])
        one.begin()
        return one.end()


def witness(world, fail):
    """The log of a witness of all ranks, of which rank 1 fails in some way."""
    with pytest.MonkeyPatch.context() as patch:
        group = world.everyone
        if world.rank == 1:
            if fail == "short":
                patch.setattr(tcp, "INFO_BYTES", 1000)
            if fail == "hidden":
                group = replace(group, sockets=())
            if fail == "elsewhere":
                patch.setattr(tcp.sys, "platform", "darwin")
        one = KernelWitness(world, [group])
        one.begin()
        if fail == "stuck" and world.rank == 1:
            stuck = tcp.TcpInfo(unacked=1, acked=0, received=0, unsent=7)
            patch.setattr(tcp, "read_info", lambda *_, **__: stuck)
            patch.setattr(kernel.read_settled, "__defaults__", (0.05,))
        log = one.end()
        dist.barrier()
        return log
