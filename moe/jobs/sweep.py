"""job=sweep: every combination in turn, each in a world of its own; what is done is kept.

plan (moe.sweep) --> run, run, run --> sweep.json after each --> table, sweep.csv, sweep.html
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comm.report.console import WIDTH, print_lines
from comm.report.progress import progress
from comm.report.record import plain
from comm.report.store import make_result_dir, write_whole
from comm.report.sweep_page import DONE, FAILED, REFUSED, UNREACHED, sweep_csv, sweep_page
from comm.spawn import RankFailure
from moe.settings import RANK_FAILED, Config, ConfigError, UnfitError
from moe.sweep import Planned, Sweep
from moe.version import VERSION

SCHEMA = "wideep.sweep/1"
INTERRUPTED = 130
MATPLOTLIB = 'sweep.html needs matplotlib: pip install "wideep[plots]"'


def launch(sweep: Sweep) -> int:
    """Run the sweep; the first status of its runs that is not 0. Ctrl-C keeps what is done."""
    try:
        folder = make_result_dir(sweep.own.output_dir, sweep.job, "sweep")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    started, clock = datetime.now(UTC), time.monotonic()
    entries = [_entry(sweep, run) for run in sweep.runs]
    record = {
        "schema": SCHEMA,
        "version": VERSION,
        "job": sweep.job,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": started.isoformat(timespec="seconds"),
        "axes": sweep.axes,
        "settings": sweep.settings,
        "result_dir": str(folder),
        "runs": entries,
    }
    early = 0
    try:
        with progress(len(entries), "runs") as done:
            for number, (run, entry) in enumerate(zip(sweep.runs, entries, strict=True)):
                if run.config is not None:
                    _run(sweep, run, entry, folder / _name(number, entry))
                    _save(folder, _ended(record, clock))
                done.advance()
    except KeyboardInterrupt:
        early = INTERRUPTED
        raise
    except SystemExit as stop:  # SIGTERM
        early = int(stop.code or 1)
        raise
    finally:  # what is done is kept
        finished = _with_page(folder, _ended(record, clock, early))
        _save(folder, finished)
        print_lines(sweep_page(finished, WIDTH))
    return finished["status"]


def _entry(sweep: Sweep, run: Planned) -> dict[str, Any]:
    """What sweep.json says of a combination before it is run."""
    refused = run.config is None
    return {
        "values": dict(zip(sweep.axes, run.values, strict=True)),
        "state": REFUSED if refused else UNREACHED,
        "reason": run.reason if refused else "the sweep ended before",
        "status": None,
        "folder": None,
        "seconds": None,
        "figures": {},
    }


def _name(number: int, entry: dict[str, Any]) -> str:
    """Of a run's folder; of signs that need no quotes on a command line."""
    words = [f"{name.rsplit('.', 1)[-1]}-{value}" for name, value in entry["values"].items()]
    text = re.sub(r"[^\w.-]+", "-", "_".join([f"{number:03}", *words]))
    return text[:100].rstrip("-.")


def _run(sweep: Sweep, run: Planned, entry: dict[str, Any], folder: Path) -> None:
    """Run one combination and complete its entry; a failure is told there, not raised."""
    started = time.monotonic()
    try:
        figures, status = FIGURES_OF[sweep.job](run.config, folder)
    except RankFailure as failure:
        entry |= {"state": FAILED, "reason": str(failure), "status": RANK_FAILED}
    except (ConfigError, UnfitError) as error:  # the machine has changed since it was planned
        entry |= {"state": REFUSED, "reason": str(error)}
    else:
        entry |= {"state": DONE, "reason": "", "status": status, "figures": plain(figures)}
    entry["seconds"] = time.monotonic() - started
    entry["folder"] = folder.name if folder.exists() else None


def _emulated(config: Config, folder: Path) -> tuple[dict[str, Any], int]:
    from comm.report.store import read_record
    from comm.report.sweep_figures import run_figures
    from moe.jobs.emulate import run

    record = read_record(run(replace(config, output_dir=str(folder))))
    return run_figures(record), record["status"]


def _predicted(config: Config, folder: Path) -> tuple[dict[str, Any], int]:
    """As of a run: forward, without counts messages; expected. Raises ConfigError without a law."""
    from moe.prediction import predict

    try:
        prediction = predict(config)
        traffic = prediction.traffic
    except ValueError as error:
        raise ConfigError(str(error)) from error
    figures: dict[str, Any] = {}
    if prediction.tokens:
        kinds = tuple(kind for kind in traffic.kinds if kind != "counts")
        for name, scope in (
            ("scale_up", "scale_up"),
            ("scale_out", "scale_out"),
            ("network", "remote"),
        ):
            one = prediction.of(scope, kinds=kinds, directions=("forward",))
            figures[f"{name}_bytes"] = one.mean / prediction.tokens
            figures["expected_std"] = one.std / prediction.tokens  # of the network, which is last
        figures["expected_bytes"] = figures["network_bytes"]
        figures["rows_per_token"] = prediction.as_dict()["rows_per_token"]
        if not prediction.unknown_tiers:
            figures["step_us"] = prediction.step_us
    return figures, 0


FIGURES_OF = {"emulate": _emulated, "predict": _predicted}


def _ended(record: dict[str, Any], clock: float, early: int = 0) -> dict[str, Any]:
    """The record as if the sweep ended now; early: the status of a sweep that was stopped."""
    runs = record["runs"]
    counts = {state: sum(run["state"] == state for run in runs) for state in (DONE, FAILED)}
    status = early or next((run["status"] for run in runs if run["status"]), 0)
    parts = [f"{counts[DONE]} of {len(runs)} done"]
    if counts[FAILED]:
        parts.append(f"{counts[FAILED]} failed")
    if differ := sum(run["state"] == DONE and run["status"] != 0 for run in runs):
        parts.append(f"{differ} differ from a prediction")
    return {
        **record,
        "seconds": time.monotonic() - clock,
        "status": status,
        "outcome": ", ".join(parts),
        "page": False,
        "no_page": "the sweep has not ended",
    }


def _with_page(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write sweep.html where it can be drawn, and say so in the record."""
    from comm.report.sweep_html import sweep_html

    finished = {**record, "page": True}
    try:
        page = sweep_html(finished)
    except ImportError:
        return {**record, "no_page": MATPLOTLIB}
    except ValueError as error:
        return {**record, "no_page": str(error)}
    write_whole(folder / "sweep.html", lambda file: file.write(page.encode()))
    return finished


def _save(folder: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1)
    write_whole(folder / "sweep.json", lambda file: file.write(f"{text}\n".encode()))
    table = sweep_csv(record)
    write_whole(folder / "sweep.csv", lambda file: file.write(table.encode()))
