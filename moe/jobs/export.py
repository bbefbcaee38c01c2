"""job=export: a result in a format of other programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from comm.report.answer import LABEL
from comm.report.console import WIDTH, print_lines
from comm.report.layout import Line, labelled, line, table, title
from comm.report.units import format_bytes, format_count
from moe.settings import Config, ConfigError


def launch(config: Config) -> int:
    """Write the files and say which; always 0."""
    result = Path(str(config.result))
    if not result.is_dir():
        raise ConfigError(f"result={result}: no such folder; name that of a result")
    target = Path(config.output_dir) if config.output_dir else result
    try:
        lines = WRITERS[str(config.to)](config, result, target)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print_lines(lines)
    return 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank writes, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0


def _nccl_tests(config: Config, result: Path, target: Path) -> list[Line]:
    from comm.report.reading import Result
    from comm.report.replay import VARIABLE, Selection, matrices, write_replay

    read = Result(result)
    chosen = list(matrices(read, Selection(**asdict(config.export))))
    target = target if config.output_dir else target / "nccl_tests"
    write_replay(target, chosen)
    rows = []
    for matrix in chosen:
        lost = int((matrix.bytes - matrix.replayed).sum())
        rows.append((matrix.name, *map(format_bytes, (int(matrix.bytes.sum()), lost))))
    steps = read.manifest["steps"]
    remark = f"{format_count(len(rows), 'exchange')}, {format_count(steps, 'step')} added up"
    return [
        *title("EXPORTED", f"{remark}; bytes from each rank (line) to each (column)", WIDTH),
        *table(("file", "bytes", "rounded off"), rows),
        *labelled("  rounded off", "by alltoallv_perf, to multiples of 16 B a pair", WIDTH, LABEL),
        *labelled("  replay", f"replay.sh has the command of each; {VARIABLE}", WIDTH, LABEL),
        *_where(target),
    ]


def _chrome_trace(config: Config, result: Path, target: Path) -> list[Line]:
    from comm.report.reading import Result
    from comm.report.store import write_whole
    from comm.report.trace_events import read_events, trace

    events = read_events(result)
    finished = (result / "run.json").is_file()  # a killed run has no record of its nodes
    nodes = Result(result).manifest["node_of_rank"] if finished else None
    text = json.dumps(trace(events, nodes, result.name))
    path = target / "trace.json"
    target.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(text.encode()))
    number = format_count(sum(map(len, events.values())), "phase")
    what = f"{number} of {format_count(len(events), 'rank')}; open it at ui.perfetto.dev"
    return [*title("EXPORTED", what, WIDTH), *_where(path)]


def _csv(config: Config, result: Path, target: Path) -> list[Line]:
    from comm.report.cells import save_csv

    return _cells(save_csv, result, target / "traffic.csv")


def _parquet(config: Config, result: Path, target: Path) -> list[Line]:
    from comm.report.cells import save_parquet

    return _cells(save_parquet, result, target / "traffic.parquet")


def _cells(save: Callable, result: Path, path: Path) -> list[Line]:
    from comm.report.reading import Result

    read = Result(result)
    save(read, path)
    number = int((read.traffic.bytes != 0).sum())
    return [*title("EXPORTED", format_count(number, "non-zero cell"), WIDTH), *_where(path)]


def _where(path: Path) -> list[Line]:
    return [line(), *labelled("RESULTS", str(path), WIDTH, LABEL, "bold")]


WRITERS = {
    "nccl_tests": _nccl_tests,
    "chrome_trace": _chrome_trace,
    "csv": _csv,
    "parquet": _parquet,
}
