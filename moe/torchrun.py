"""torchrun, quieter and with the run's own exit status: python -m moe.torchrun ARGUMENTS

torchrun turns every failure of a rank into status 1 and prints a report and a traceback of its own
after those of the ranks. Here rank 0 leaves its status in a file (see moe.__main__), and torchrun
says only what no rank could say itself: that a signal killed it, and where it was by its last note.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moe.settings import RANK_FAILED, UNFIT, USAGE_ERROR


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with `arguments`; return the status of rank 0, or why there is none."""
    logging.disable(logging.ERROR)  # in this process: the ranks speak for themselves
    with tempfile.TemporaryDirectory(prefix="wideep-") as folder:
        left = Path(folder) / "status"
        os.environ["WIDEEP_STATUS_FILE"] = str(left)
        os.environ["WIDEEP_NOTES"] = folder
        tempfile.tempdir = folder  # of this process: torchrun leaves its folder of logs behind
        status = _torchrun(sys.argv[1:] if arguments is None else arguments, Path(folder))
        if status:
            _tidy(Path(folder))
        if status not in (RANK_FAILED, UNFIT, USAGE_ERROR) or not left.exists():
            return status
        return int(left.read_text(encoding="utf-8")) or status  # 0: another rank failed, later


def _torchrun(arguments: Sequence[str], notes: Path) -> int:
    """0, what the first rank to fail says of it, or 128 + the signal that ended torchrun itself."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(list(arguments))
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"wideep: {_killed(rank, failure.exitcode, notes)}", file=sys.stderr)
            if (kept := _tidy(notes)) is not None:
                print(f"wideep: what was counted until then is kept in {kept}", file=sys.stderr)
        # What all ranks refuse, they refuse alike: true of a machine without rank 0, too.
        return failure.exitcode if failure.exitcode in (USAGE_ERROR, UNFIT) else RANK_FAILED
    return 0


def _tidy(notes: Path) -> Path | None:
    """The folder of results, without half a file where rank 0, which writes, was one of ours."""
    from comm.report.store import tidy

    if not (told := notes / "results").exists():
        return None
    results = Path(told.read_text(encoding="utf-8"))
    if (notes / "note.rank0").exists():  # its node may be another, and it may still write
        tidy(results)
    return results if results.exists() else None


def _killed(rank: int, exitcode: int, notes: Path) -> str:
    """What is known of a rank that a signal ended."""
    from comm.notebook import read_note

    name, memory = signal.Signals(-exitcode).name, notes / "memory"
    where = ", ".join(filter(None, (f"rank {rank}", str(read_note(notes / f"note.rank{rank}")))))
    if name != "SIGKILL" or not memory.exists():
        return f"{where}: killed by {name}"
    return f"{where}: killed by {name}, perhaps out of memory: {memory.read_text()}"


if __name__ == "__main__":
    sys.exit(main())
