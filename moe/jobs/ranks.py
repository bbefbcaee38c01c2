"""Brings a job to its ranks: forked here, or started by torchrun; and reports how they failed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comm.spawn import RankFailure, die_with_parent, is_consequence, run_ranks
from moe.fitness import memory_in_words
from moe.settings import RANK_FAILED, USAGE_ERROR, Config, ConfigError

if TYPE_CHECKING:
    from comm.notebook import Notebook
    from comm.world import World

PLAIN = ("CannotWrite", "RankSilent", "SplitMismatch")  # errors that say all without a traceback
GRACE_S = 1.0  # lets the rank that failed of itself speak before those that only lost it

PRELOAD = ("moe.measure", "moe.judge", "comm.report.console", "comm.report.store")


def launch(body: Callable[..., int], config: Config, *args: Any) -> int:
    """Run body(world, config, *args) on `config.world_size` forked ranks; its status on rank 0."""
    _announce_fault(config)
    had = memory_in_words(config, config.world_size)
    try:
        return on_ranks(body, config, *args)
    except RankFailure as failure:
        guilty = failure.guilty
        memory = f": {had}" if "SIGKILL" in (guilty.error or "") and not guilty.kind else ""
        print(f"wideep: {failure}{memory}", file=sys.stderr)
        if guilty.kind not in PLAIN:
            print(guilty.details, end="", file=sys.stderr)
        return RANK_FAILED


def on_ranks(body: Callable[..., int], config: Config, *args: Any) -> int:
    """As `launch`, but silent; raises RankFailure."""
    statuses = run_ranks(
        body,
        config.world_size,
        config,
        *args,
        preload=PRELOAD,
        needs_main=False,
        device=config.device,
        backend=config.backend,
        timeout_s=config.timeout_s,
    )
    return statuses[0]


def _announce_fault(config: Config) -> None:
    if config.fault.kind != "none":
        from moe.faults import announcement

        print(f"wideep: {announcement(config.fault)}", file=sys.stderr)


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

    from comm.notebook import Notebook
    from comm.world import join, leave

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    notes = os.environ.get("WIDEEP_NOTES")  # a folder of moe.torchrun's, which reads them
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, as by SIGTERM: others wait for it
    die_with_parent(notes if local_rank == 0 else None)
    notebook = Notebook(rank, Path(notes) if notes else None)
    if notes and local_rank == 0:
        (Path(notes) / "memory").write_text(memory_in_words(config, local_world_size))
    if rank == 0:
        _announce_fault(config)
    try:
        world = join(
            rank,
            world_size,
            init_method="env://",
            local_rank=local_rank,
            local_world_size=local_world_size,
            device=config.device,
            backend=config.backend,
            timeout_s=config.timeout_s,
            notebook=notebook,
        )
        check_same_config(world, config)
        return body(world, config, *args)
    except ConfigError as error:
        if rank == 0:
            print(f"wideep: {error}", file=sys.stderr)
        return USAGE_ERROR
    except Exception as error:  # whatever it was, it must be told with the rank's number
        _tell(error, rank, world_size, notebook, config.timeout_s)
        return RANK_FAILED
    finally:
        with contextlib.suppress(Exception):
            leave()


def _tell(
    error: Exception, rank: int, world_size: int, notebook: Notebook, timeout_s: float
) -> None:
    """Say what failed on this rank, or which other rank it waited for in vain."""
    from comm.notebook import read_note
    from comm.post_mortem import find_silent, leave_word, somebody_told

    where, consequence = str(read_note(notebook.address.note)), is_consequence(error)
    text = f"{type(error).__name__}: {error}"
    if consequence:
        silent = find_silent(rank, world_size, notebook, timeout_s)
        if silent is None or not silent.first:
            time.sleep(GRACE_S)  # torchrun ends this rank meanwhile, where another has spoken
        if somebody_told(world_size):
            return
        if silent is not None:
            leave_word(rank, told=True)
            rank, where, text = silent.rank, silent.where, str(silent)
    else:
        leave_word(rank, told=True)
    place = f", {where}" if where else ""
    lines = [f"wideep: rank {rank}{place}: {text}\n"]
    if not consequence and type(error).__name__ not in PLAIN:
        lines.append(traceback.format_exc())
    if notebook.results is not None:
        lines.append(f"wideep: what was counted until then is kept in {notebook.results}\n")
    print(end="".join(lines), file=sys.stderr, flush=True)
