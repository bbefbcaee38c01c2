"""What ran, where and when: the manifest of a record."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from comm.world import World
from moe.plan import Plan
from moe.version import VERSION

# Variables that change how a run behaves; nothing else of the environment is recorded.
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_DISTRIBUTED_DEBUG",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
)


def gather_hosts(world: World) -> list[str]:
    """The host name of every rank on rank 0, an empty list elsewhere; a collective."""
    return world.gather(socket.gethostname())


def manifest(
    plan: Plan,
    world: World,
    hosts: list[str],
    started: datetime,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """The manifest of a run that ends now (docs/run_record.md explains the fields)."""
    config, finished = plan.config, datetime.now(UTC)
    return {
        "version": VERSION,
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": started.isoformat(timespec="seconds"),
        "finished": finished.isoformat(timespec="seconds"),
        "seconds": (finished - started).total_seconds(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "backend": world.backend,
        "device": str(world.device.type),
        "staging": "host memory" if world.staged else None,
        "hosts": list(dict.fromkeys(hosts)),
        "world_size": world.world_size,
        "num_nodes": plan.topology.num_nodes,
        "node_of_rank": list(plan.topology.node_of_rank),
        "node_source": node_source(plan),
        "config": asdict(config),
        "shape": asdict(plan.shape),
        "full_shape": asdict(plan.full_shape),
        "model": config.model.name,
        "scale": config.scale.name,
        "router": config.router.name,
        "router_notes": list(getattr(plan.routing, "notes", ())),
        "placement": config.placement.name,
        "dispatcher": config.dispatcher.name,
        "wire": asdict(config.wire),
        "dtype": config.dtype,
        "tokens_per_rank": plan.tokens_per_rank.tolist(),
        "steps": config.steps,
        "warmup": config.warmup,
        "seed": config.seed,
        "environment": {name: environ[name] for name in ENVIRONMENT if name in environ},
    }


def node_source(plan: Plan) -> str:
    """Who says which rank lives on which node."""
    topology = plan.config.topology
    if topology.node_of_rank is not None:
        return "configured: topology.node_of_rank"
    if topology.ranks_per_node is not None:
        return f"emulated: topology.ranks_per_node={topology.ranks_per_node}"
    return "reported by the ranks"


def commit() -> str | None:
    """The commit of the source tree, None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
