"""job=bench: dispatch + combine of each dispatcher against the raw collective of the same bytes."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from moe.jobs import ranks
from moe.settings import Config

if TYPE_CHECKING:  # the process that starts the ranks has no need of torch
    from comm.world import World


def launch(config: Config) -> int:
    """Start the ranks on this machine; the exit status of the run."""
    return ranks.launch(bench, config)


def run_rank(config: Config) -> int:
    """Be one of torchrun's ranks."""
    return ranks.run_rank(bench, config)


def bench(world: World, config: Config) -> int:
    """The whole job on one rank; a collective."""
    from comm.report.bench_page import bench_page, bench_record
    from comm.report.console import WIDTH, print_lines
    from comm.report.progress import progress
    from comm.report.store import make_result_dir, write_whole
    from moe.contest import UNMETERED, Case, in_chunks

    options, started = config.bench, datetime.now(UTC)
    cases = [
        Case(*choice)
        for choice in itertools.product(options.tokens, options.widths, options.dtypes)
    ]
    rounds = len(cases) * (options.iterations + options.warmup)
    with progress(rounds, "iterations", world.rank) as done:
        records = [_run_case(case, world, config, done.advance) for case in cases]
    if world.rank != 0:
        return 0
    first = options.dispatchers[0]
    measured = bench_record(
        _manifest(world, config, started),
        records,
        first,
        f"{first}, {UNMETERED}",
        (options.chunks, in_chunks(first, options.chunks)),
    )
    folder = make_result_dir(config.output_dir, config.model.name, "bench")
    record = {**measured, "result_dir": str(folder)}
    text = json.dumps(record, indent=1)
    write_whole(folder / "bench.json", lambda file: file.write(f"{text}\n".encode()))
    print_lines(bench_page(record, WIDTH))
    return 0


def _run_case(case: Any, world: World, config: Config, advance: Any) -> dict[str, Any]:
    from comm.report.bench_page import case_record
    from moe.contest import compete, contenders

    options = config.bench
    field = contenders(
        case,
        world,
        options.dispatchers,
        config.model.num_experts,
        config.model.top_k,
        config.seed,
        options.chunks,
    )
    seconds = compete(world, field, options.iterations, options.warmup, advance)
    sent = world.gather(np.stack([contender.sent_bytes for contender in field]))
    if world.rank != 0:
        return {}
    place = {
        "tokens": case.tokens,
        "width": case.width,
        "dtype": case.dtype,
        "world_size": world.world_size,
    }
    names = [contender.name for contender in field]
    return case_record(place, names, np.stack(sent, axis=1), seconds)


def _manifest(world: World, config: Config, started: datetime) -> dict[str, Any]:
    import torch

    from moe.manifest import commit
    from moe.version import VERSION

    return {
        "version": VERSION,
        "commit": commit(),
        "torch": str(torch.__version__),
        "backend": world.backend,
        "device": world.device.type,
        "world_size": world.world_size,
        "num_experts": config.model.num_experts,
        "top_k": config.model.top_k,
        "model": config.model.name,
        "seed": config.seed,
        "iterations": config.bench.iterations,
        "started": started.isoformat(timespec="seconds"),
        "seconds": (datetime.now(UTC) - started).total_seconds(),
    }
