"""The entry: `wideep`, `python -m moe` and `torchrun -m moe` all come here.

Under torchrun this process is one rank and joins the others; otherwise it starts them. hydra, numpy
and torch are imported only once the words of the command line are known to need them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from moe.cli import Request, help_text, read_words
from moe.settings import RANK_FAILED, RANKLESS, UNFIT, USAGE_ERROR, ConfigError, UnfitError
from moe.version import VERSION

INTERRUPTED, TERMINATED = 130, 143
GRACE_S = 2.0


def main(words: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status, which rank 0 also leaves for launch.sh."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    first = not launched or os.environ["RANK"] == "0"
    status_file = os.environ.get("WIDEEP_STATUS_FILE")
    speaks = not launched or os.environ.get("LOCAL_RANK", "0") == "0"  # once for each host
    try:
        status = _run(sys.argv[1:] if words is None else words, launched, first)
    except (ConfigError, UnfitError) as error:
        if speaks:
            print(f"wideep: {error}", file=sys.stderr)
        status = USAGE_ERROR if isinstance(error, ConfigError) else UNFIT
        if not first:  # torchrun ends all ranks at the first that leaves; rank 0 has the status
            time.sleep(GRACE_S)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as error:  # names its file; where it came from adds nothing
        print(f"wideep: {error}", file=sys.stderr)
        status = RANK_FAILED if launched else 1
    except Exception:
        print(f"rank {os.environ['RANK']}:" if launched else "wideep:", file=sys.stderr)
        traceback.print_exc()
        status = RANK_FAILED if launched else 1
    if first and status_file:
        try:
            Path(status_file).write_text(f"{status}\n", encoding="utf-8")
        except OSError as error:
            print(f"wideep: WIDEEP_STATUS_FILE={status_file}: {error.strerror}", file=sys.stderr)
    return status


def _run(words: Sequence[str], launched: bool, first: bool) -> int:
    request = read_words(words)
    if request.flag in ("help", "version"):
        if first:
            _say(help_text() if request.flag == "help" else f"wideep {VERSION}")
        return 0
    if "job=sweep" in request.overrides:
        return _sweep(request, launched)
    from moe.config import compose
    from moe.fitness import check

    world_size = _launched_world_size() if launched else None
    config = compose(request.overrides, world_size)
    if config.job not in RANKLESS:
        check(config, int(os.environ.get("LOCAL_WORLD_SIZE", config.world_size)))
    if request.flag == "check":
        return 0
    job = import_module(f"moe.jobs.{config.job}")
    return job.run_rank(config) if launched else _launch(job.launch, config)


def _sweep(request: Request, launched: bool) -> int:
    """A sweep has several values of a key, which no Config has: it reads its words itself."""
    from moe.sweep import read_sweep

    if launched:
        raise ConfigError("job=sweep starts the ranks of each run itself; start it with wideep")
    sweep = read_sweep(request.overrides)
    if request.flag == "check":
        return 0
    return _launch(import_module("moe.jobs.sweep").launch, sweep)


def _say(text: str) -> None:
    """Print, and notice here that a disk is full: Python's own flush at the end comes too late."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a reader that has seen enough
            raise OSError(f"standard output: {error.strerror}") from error


def _launched_world_size() -> int:
    """WORLD_SIZE, once what torchrun sets beside it makes sense."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            raise ConfigError(f"{name}={os.environ[name]}: must be a number, as torchrun sets it")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise ConfigError(f"RANK={rank}: must be below WORLD_SIZE={world_size}")
    return world_size


def _launch(launch: Callable[[Any], int], config: Any) -> int:
    """Start the ranks; a SIGTERM unwinds this process, so that it ends the ranks and then itself.

    Not done in a rank of torchrun: a handler would wait for the collective that the rank is in,
    while the signal's own action ends it at once.
    """

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return launch(config)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
