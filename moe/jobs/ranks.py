"""Brings a job to its ranks: forked here, or started by torchrun; and reports how they failed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from comm.spawn import RankFailure, is_consequence, run_ranks
from moe.settings import RANK_FAILED, USAGE_ERROR, Config, ConfigError

if TYPE_CHECKING:
    from comm.world import World

GRACE_S = 1.0  # lets the rank that failed of itself speak before those that only lost it

PRELOAD = ("moe.measure", "moe.judge", "comm.report.console", "comm.report.store")


def launch(body: Callable[..., int], config: Config, *args: Any) -> int:
    """Run body(world, config, *args) on `config.world_size` forked ranks; its status on rank 0."""
    try:
        statuses = run_ranks(
            body,
            config.world_size,
            config,
            *args,
            preload=PRELOAD,
            device=config.device,
            backend=config.backend,
            timeout_s=config.timeout_s,
        )
    except RankFailure as failure:
        print(f"wideep: {failure}", file=sys.stderr)
        print(failure.guilty.details, end="", file=sys.stderr)
        return RANK_FAILED
    return statuses[0]


def check_same_config(world: World, config: Config) -> None:
    """Raise ConfigError where torchrun was given other words on another machine; a collective.

    Such ranks would each do as they were told, and the record would describe rank 0 alone.
    """
    check_same(world, repr(replace(config, output_dir=None)), "another configuration")


def check_same(world: World, text: str, what: str) -> None:
    """Raise ConfigError where a rank has another text than rank 0; a collective.

    what: the other thing that such a rank was started with
    """
    digests = world.all_digests(text)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} was started with {what} than rank 0;"
            " give every machine the same job, keys and files"
        )


def run_rank(body: Callable[..., int], config: Config, *args: Any) -> int:
    """Be one of torchrun's ranks: meet the others, run body(world, config, *args)."""
    import torch

    from comm.world import join, leave

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank = int(os.environ["RANK"])
    try:
        world = join(
            rank,
            int(os.environ["WORLD_SIZE"]),
            init_method="env://",
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            device=config.device,
            backend=config.backend,
            timeout_s=config.timeout_s,
        )
        check_same_config(world, config)
        return body(world, config, *args)
    except ConfigError as error:
        if rank == 0:
            print(f"wideep: {error}", file=sys.stderr)
        return USAGE_ERROR
    except Exception as error:  # whatever it was, it must be told with the rank's number
        consequence = is_consequence(error)
        if consequence:
            time.sleep(GRACE_S)
        print(f"wideep: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        if not consequence:
            traceback.print_exc()
        return RANK_FAILED
    finally:
        with contextlib.suppress(Exception):
            leave()
