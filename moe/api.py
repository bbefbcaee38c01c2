"""WideEP in Python: `from moe import emulate, predict, load`.

The same keys, rules and results as on the command line, but nothing is printed, and what goes wrong
is raised: ConfigError, which is a ValueError, for what cannot be asked for; UnfitError where the
machine is too small; RankFailure where a rank fails. A finished run that differs from a prediction
is no error: `result.status` and `result.verdicts` say so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe.settings import Config, ConfigError
from moe.words import words

if TYPE_CHECKING:
    from comm.report.reading import Result

Settings = str | Mapping[str, Any]


def emulate(*settings: Settings, show: bool = False, **keys: Any) -> Result:
    """Run the layers on ranks of this machine; no torchrun is needed. Returns the result.

    settings: words as on the command line, "wire.dispatch=mxfp8", or dictionaries
    keys: settings by name, ranks=8, dispatcher="two_hop"; parts in a dictionary,
        wire={"dispatch": "mxfp8"}, and with the name of the option where it is one of a group,
        router={"name": "skew", "max_over_mean": 2}
    show: print the page of the run
    The files are in `result.folder`: output_dir, or a new folder in ./results; with report=True
    report.html, too.
    """
    from comm.report.reading import Result
    from moe.fitness import check
    from moe.jobs.emulate import run

    config = _config("emulate", ("report=false", *settings), keys)  # the last of a key wins
    check(config, config.world_size)
    return Result(run(config, page=show))


def predict(*settings: Settings, **keys: Any) -> Any:
    """What is to be expected of such a run, at the model's full size unless scale says otherwise.

    Takes the keys of `wideep predict` as `emulate` does; starts no rank. Returns a Prediction.
    """
    from moe.prediction import predict

    return predict(_config("predict", settings, keys))


def load(folder: str | os.PathLike[str]) -> Result:
    """The result of a run that has finished. Raises ValueError for a folder without one."""
    from comm.report.reading import Result

    return Result(folder)


def _config(job: str, settings: tuple[Settings, ...], keys: Mapping[str, Any]) -> Config:
    from moe.config import compose

    given: list[str] = []
    for one in (*settings, keys):
        if not isinstance(one, str | Mapping):
            raise TypeError(f"{one!r}: expected a word, KEY=VALUE, or a dictionary")
        given += [one] if isinstance(one, str) else words(one)
    if any(word.partition("=")[0] == "job" for word in given):
        raise ConfigError(f"{job}() is the job itself; leave job out")
    return compose([f"job={job}", *given])
