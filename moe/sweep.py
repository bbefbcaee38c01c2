"""What a sweep runs: every combination of its values, and why some of them cannot be run.

ep_size=8,16 dispatcher=all_to_all,two_hop tokens=32 --> 4 runs, each a Config or a reason
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe.config import compose, variants
from moe.fitness import check
from moe.settings import RANKLESS, Config, ConfigError, UnfitError, shown

SWEPT = ("emulate", "predict")
MAX_RUNS = 1000
OWN = ("output_dir", "sweep")  # keys of the sweep itself; all others are those of its runs


@dataclass(frozen=True)
class Planned:
    """One combination.

    values: its value of each axis, as typed
    config: what to run; None where `reason` says why it cannot be run
    """

    values: tuple[str, ...]
    config: Config | None
    reason: str = ""


@dataclass(frozen=True)
class Sweep:
    """own: the configuration of the sweep itself, output_dir and sweep.*
    job: what its runs are; axes: each key with several values; settings: words that all share
    """

    own: Config
    job: str
    axes: dict[str, tuple[str, ...]]
    settings: tuple[str, ...]
    runs: tuple[Planned, ...]


def read_sweep(words: Sequence[str]) -> Sweep:
    """The sweep that words of the command line describe, `job=sweep` among them or not.

    Raises ConfigError where a word is wrong, or where not one combination can be run.
    """
    typed = {word.partition("=")[0]: word for word in words}  # the last of a key wins
    own = [word for name, word in typed.items() if name.partition(".")[0] in OWN]
    jobs = [w.partition("=")[2] for w in words if w.startswith("job=") and w != "job=sweep"]
    job = jobs[-1] if jobs else "emulate"
    if job not in SWEPT:
        raise ConfigError(f"job={job}: a sweep runs {' or '.join(SWEPT)}; nearest: emulate")
    given = [word for name, word in typed.items() if word not in own and name != "job"]
    several = {word: variants(word) for word in given}
    axes = {word: values for word, values in several.items() if len(values) > 1}
    settings = tuple(values[0] for values in several.values() if len(values) == 1)
    number = math.prod(len(values) for values in axes.values())
    if number > MAX_RUNS:
        raise ConfigError(f"{' '.join(axes)}: {number:,} combinations; at most {MAX_RUNS:,}")
    config = compose(["job=sweep", *own])
    total = config.sweep.total_tokens
    if total is not None and "tokens" in typed:
        raise ConfigError(f"{typed['tokens']}: sweep.total_tokens={total} says it; leave it out")
    runs = tuple(
        _planned(job, settings, combination, total)
        for combination in itertools.product(*axes.values())
    )
    if all(run.config is None for run in runs):
        reasons = list(dict.fromkeys(run.reason for run in runs))
        others = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
        raise ConfigError(f"{reasons[0]}{others}")
    names = {word.partition("=")[0]: values for word, values in axes.items()}
    return Sweep(
        config,
        job,
        {name: tuple(map(_value, values)) for name, values in names.items()},
        settings,
        runs,
    )


def _value(word: str) -> str:
    return word.partition("=")[2]


def _planned(
    job: str, settings: Sequence[str], combination: Sequence[str], total: int | None
) -> Planned:
    values = tuple(map(_value, combination))
    try:
        quick = ["report=false"] if job == "emulate" else []  # the sweep has a page of its own
        words = _with_ranks(job, [*quick, *settings, *combination])
        config = compose([f"job={job}", *words])
        if total is not None:
            config = compose([f"job={job}", *words, _shared(total, config)])
        if job not in RANKLESS:
            check(config, config.world_size)
    except (ConfigError, UnfitError) as error:
        return Planned(values, None, str(error))
    return Planned(values, config)


def _with_ranks(job: str, words: Sequence[str]) -> list[str]:
    """EP 16 is 16 ranks, where nobody says how many ranks there are."""
    named = [word.partition("=")[0] for word in words]
    if job == "predict" or "ranks" in named or "ep_size" not in named:
        return list(words)
    return [
        word.replace("ep_size=", "ranks=", 1) if word.startswith("ep_size=") else word
        for word in words
    ]


def _shared(total: int, config: Config) -> str:
    """`tokens=` for a total that the ranks share, the first of them taking what is left over."""
    ranks = config.world_size
    each, more = divmod(total, ranks)
    if not more:
        return f"tokens={each}"
    return f"tokens={shown([each + 1] * more + [each] * (ranks - more))}"
