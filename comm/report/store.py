"""Writes a result: the folder, run.json and the arrays; reads a record back.

A file appears under its name whole or not at all. run.json is written last, so a folder that
has one has everything.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np

from comm.report.record import SCHEMA
from comm.topology import TIER_NAMES, Topology

RESULTS = Path("results")
ROUTING_ARRAYS = (
    "topk_ids",
    "topk_weights",
    "token_rank",
    "slots",
    "slot_rank",
    "physical_to_logical_map",
)
CSV_HEADER = ("layer", "direction", "phase", "kind", "src", "dst", "tier", "bytes")


class CannotWrite(OSError):
    """A full disk, most often: which file it was, and why."""

    def __init__(self, path: Any, cause: OSError) -> None:
        super().__init__(f"{path}: {cause.strerror or cause}")


def make_result_dir(
    output_dir: str | os.PathLike[str] | None,
    model: str,
    dispatcher: str,
    now: datetime | None = None,
) -> Path:
    """Make the folder of a result: `output_dir`, or results/<time>-<model>-<dispatcher>.

    An `output_dir` that exists is refused; the default gets a suffix where its name is taken.
    """
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^\w.-]+", "-", f"{stamp}-{model}-{dispatcher}")  # a model may hold a "/"
    path = Path(output_dir) if output_dir else RESULTS / name
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # another run chose the same second
            if output_dir or not path.is_dir():
                raise ValueError(
                    f"output_dir={path} exists already; nearest: output_dir={_free_name(path)}"
                ) from None
            path = _free_name(path)
        except OSError as error:
            raise ValueError(f"output_dir={path} cannot be made: {error.strerror}") from error


def tidy(folder: Path) -> None:
    """A rank that was killed leaves no half a file, and a run that counted nothing no folder."""
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it has something in it
        folder.rmdir()
        if folder.parent == RESULTS:
            folder.parent.rmdir()


def write_result(
    folder: Path,
    record: Mapping[str, Any],
    traffic: Any,
    csv: bool = False,
    routing: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write run.json, traffic.npz and, if asked for, traffic.csv and routing.npz.

    traffic: comm.meter.Traffic
    arrays: more of traffic.npz, by name (docs/run_record.md has their shapes)
    routing: ROUTING_ARRAYS by name (docs/run_record.md has their shapes) and "header", a
        dictionary that is stored as JSON text
    """
    files: dict[str, Callable[[IO[bytes]], Any]] = {}
    if routing is not None:
        files["routing.npz"] = lambda file: _save_routing(file, routing)
    files["traffic.npz"] = lambda file: _save_traffic(file, traffic, arrays or {})
    if csv:
        tiers = Topology(tuple(record["manifest"]["node_of_rank"])).tiers()
        files["traffic.csv"] = lambda file: write_csv(file, traffic, tiers)
    text = json.dumps(record, indent=1, allow_nan=False)
    files["run.json"] = lambda file: file.write(f"{text}\n".encode())
    try:
        for name, write in files.items():
            write_whole(folder / name, write)
    except BaseException:  # all of them or none
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a result: its folder, or its run.json."""
    path = Path(path)
    file = path / "run.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"result={path} must be a folder with a run.json, or such a file")
    try:
        record = json.loads(file.read_text())
    except ValueError as error:  # half a file, or another one
        raise ValueError(f"{file}: is no JSON: {error}") from error
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{file}: schema={schema!r} must be {SCHEMA!r}")
    for name, kind in (("manifest", dict), ("verdicts", list)):
        if not isinstance(record.get(name), kind):
            raise ValueError(f"{file}: has no {name}; it was changed after the run")
    return record


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a file of another name beside `path`, and rename it when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if (cause := _os_error(error)) is not None:
            raise CannotWrite(path, cause) from error
        raise


def _os_error(error: BaseException | None) -> OSError | None:
    """What the system said: zipfile fails again while it closes a file that it could not write."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _free_name(path: Path) -> Path:
    """`path` with the first suffix -2, -3, ... that is not taken."""
    number = 2
    while os.path.lexists(candidate := path.with_name(f"{path.name}-{number}")):
        number += 1
    return candidate


def _save_traffic(file: IO[bytes], traffic: Any, arrays: Mapping[str, np.ndarray]) -> None:
    np.savez_compressed(
        file,
        bytes=traffic.bytes,
        rows=traffic.rows,
        layers=np.asarray(traffic.layers),
        directions=np.asarray(traffic.directions),
        phases=np.asarray(traffic.phases),
        kinds=np.asarray(traffic.kinds),
        **arrays,
    )


def _save_routing(file: IO[bytes], routing: Mapping[str, Any]) -> None:
    arrays: dict[str, Any] = {name: np.asarray(routing[name]) for name in ROUTING_ARRAYS}
    np.savez_compressed(file, **arrays, header=np.asarray(json.dumps(routing["header"])))


def write_csv(file: IO[bytes], traffic: Any, tiers: np.ndarray) -> None:
    """`traffic_cells`, one a line, below CSV_HEADER."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    writer.writerows(traffic_cells(traffic, tiers))
    text.flush()
    text.detach()


def traffic_cells(traffic: Any, tiers: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """The non-zero cells in the order of the axes, each with the columns of CSV_HEADER.

    traffic: comm.meter.Traffic, or what was read of one; tiers: [R, R] LinkTier of every pair
    """
    for layer, cells in zip(traffic.layers, traffic.bytes, strict=True):
        for d, p, k, src, dst in np.argwhere(cells).tolist():
            yield (
                layer,
                traffic.directions[d],
                traffic.phases[p],
                traffic.kinds[k],
                src,
                dst,
                TIER_NAMES[tiers[src, dst]],
                int(cells[d, p, k, src, dst]),
            )
