"""job=emulate: run the layers on real ranks, count every byte, hold the counts to the predictions.

every rank   plan -> measure --+
rank 0                         +--> judge -> files -> page
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from comm.report.store import make_result_dir, tidy
from moe.jobs import ranks
from moe.settings import Config, ConfigError

if TYPE_CHECKING:  # the process that starts the ranks has no need of torch
    from comm.world import World


def launch(config: Config) -> int:
    """Start the ranks on this machine; the exit status of the run."""
    folder = _result_dir(config)
    try:
        status = ranks.launch(emulate, config, folder)
    finally:
        tidy(folder)
    if status == ranks.RANK_FAILED and folder.exists():
        print(f"wideep: what was counted until then is kept in {folder}", file=sys.stderr)
    return status


def run(config: Config, page: bool = False) -> Path:
    """Run and leave the result in the folder that is returned; print nothing but the page, if any.

    Raises RankFailure where a rank fails; what was counted until then is kept.
    """
    folder = _result_dir(config)
    try:
        ranks.on_ranks(emulate, config, folder, page)
    finally:
        tidy(folder)
    return folder


def run_rank(config: Config) -> int:
    """Be one of torchrun's ranks; the exit status, which only rank 0's verdicts decide."""
    return ranks.run_rank(emulate, config)


def _result_dir(config: Config) -> Path:
    try:
        return make_result_dir(config.output_dir, config.model.name, config.dispatcher.name)
    except ValueError as error:  # someone else took the name since it was checked
        raise ConfigError(str(error)) from error


def emulate(world: World, config: Config, folder: Path | None = None, page: bool = True) -> int:
    """The whole job on one rank; a collective.

    folder: of the results; None: rank 0 makes it
    page: print it, and how far the run has come
    """
    from comm.report.console import render
    from comm.report.page.charts import library_is_there
    from comm.report.page.document import write_page
    from comm.report.progress import progress
    from comm.report.store import write_result
    from comm.spawn import signals_held
    from moe.check import all_gradient_errors
    from moe.judge import Case, judge
    from moe.manifest import gather_hosts, manifest
    from moe.measure import measure
    from moe.plan import make_plan

    started = datetime.now(UTC)
    plan = make_plan(config, world)
    ranks.check_same(world, plan.fingerprint, "other files (router.path, placement.path)")
    if folder is None:
        folder = cast(Path, world.share(_result_dir(config) if world.rank == 0 else None))
    if world.notebook is not None:
        world.notebook.keep_in(folder)
    hosts = gather_hosts(world)
    forward_passes = config.warmup + config.steps
    layers_to_run = plan.num_layers * (forward_passes + int(config.reference))
    with progress(layers_to_run, "layers", world.rank, shown=page) as done:
        log, held = measure(plan, world, folder, done.advance)
        logs = world.gather(log)
        case = Case.of(plan, logs) if world.rank == 0 else None
        gradients = all_gradient_errors(plan, world, held, logs, case)
        if case is None:
            return 0
        about = manifest(plan, world, hosts, started)
        report = "off" if not config.report else "written" if library_is_there() else "no library"
        judgement = judge(plan, logs, case, gradients, about, folder, done.advance, report)
    with signals_held():  # a result is written whole
        write_result(
            folder,
            judgement.record,
            judgement.traffic,
            arrays=judgement.arrays,
            csv=config.traffic_csv,
            routing=case.routing.file(plan) if config.record_routing else None,
        )
    if report == "written":
        write_page(folder)
    if page:
        render(judgement.record)
    return judgement.status
