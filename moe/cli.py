"""What the command line accepts, and the text of --help; needs nothing but the standard library."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from moe.conf_files import default_options, options
from moe.settings import JOBS, ConfigError, Key, did_you_mean, keys, no_such, shown

FLAGS = {"--help": "help", "-h": "help", "--version": "version", "--check": "check"}
WIDTH = 100

INTRO = """\
WideEP emulates wide expert parallelism: it runs mixture-of-experts layers on many ranks, really
sends every hidden state, and counts every byte. It holds the counted bytes to an exact prediction,
to the expectation of the routing law, and to the headline formula top_k x tokens x hidden x 2 B.
"""
USAGE = """\
usage:
  wideep [JOB] [KEY=VALUE ...]                               starts the ranks itself
  torchrun --nproc-per-node R -m moe [JOB] [KEY=VALUE ...]   runs in the ranks that torchrun started
  wideep --check [JOB] [KEY=VALUE ...]                       only checks, silent when all is well
  wideep --help | --version

A list is written KEY=[a,b]. The last value of a key wins. `python -m moe` is the same as `wideep`.
"""
EXAMPLES = """\
examples:
  wideep                                              the default run, 8 ranks
  wideep dispatcher=all_to_all wire.dispatch=mxfp8    one row for each (token, expert), in MXFP8
  wideep topology.ranks_per_node=4                    the ranks as two nodes of four
  wideep emulate ranks=72 tokens=16 layers=2          a whole rack
  wideep dispatcher=two_hop mode=training layers=2    forward and backward, once to each node
  wideep predict ep_size=64 topology.ranks_per_node=8 the numbers that others print, without a run
  wideep pools hardware=h200_sxm ep_size=64           memory, and how many accelerators it takes
  wideep claims id=rounds_240                         what others say, worked out and judged
  wideep sweep ep_size=8,16 dispatcher=all_to_all,two_hop layers=1    four runs, one table
  wideep compare a=results/one b=results/two          what differs, and which setting
  wideep export result=results/one to=nccl_tests      to replay it on a cluster
  wideep model=hf model.path=config.json              another model
  wideep bench bench.tokens=[256] bench.widths=[1024] one case of the benchmark
"""
LABELS = ("name", "source", "path")  # of a group: set by its file, not by hand
STATUSES = {
    0: "nothing differs from a prediction",
    2: "the command line or the configuration is wrong",
    3: "counted bytes differ from a prediction, or a claim's verdict from the recorded one",
    4: "outputs differ from the reference",
    5: "the kernel's counters do not reconcile with the counted bytes",
    6: "a rank raised, died or timed out",
    7: "the environment is unfit",
    130: "interrupted",
    143: "terminated",
    1: "anything else",
}


@dataclass(frozen=True)
class Request:
    """A command line, read: the flag that changes what happens, if any, and the overrides."""

    flag: str | None
    overrides: tuple[str, ...]


def read_words(words: Sequence[str]) -> Request:
    """Split flags from overrides; a first word without '=' is the job."""
    flag: str | None = None
    overrides: list[str] = []
    for word in words:
        if word in FLAGS:
            flag = flag or FLAGS[word]
        elif word.startswith("-"):
            raise ConfigError(
                f"{word}: no such option{did_you_mean(word, FLAGS)}; see wideep --help"
            )
        elif not overrides and word and "=" not in word:
            if word not in JOBS:
                raise no_such("job", word, word, JOBS)
            overrides.append(f"job={word}")
        else:
            overrides.append(word)
    return Request(flag, tuple(overrides))


def help_text() -> str:
    """The whole of --help."""
    statuses = [f"  {status:<4}  {text}" for status, text in STATUSES.items()]
    jobs = [f"  {name:<10}  {text}" for name, text in JOBS.items()]
    parts = (INTRO, USAGE, EXAMPLES, _section("jobs:", jobs))
    return "\n".join((*parts, _keys_section(), _section("exit status:", statuses)))


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join((title, *lines, ""))


def _keys_section() -> str:
    """Every key: its default, meaning and choices. The fields of a group share one entry."""
    groups = {name for name, key in keys().items() if key.group}
    defaults = default_options()
    lines = ["  key = default            meaning and choices"]
    for name, key in keys().items():
        if name.partition(".")[0] in groups and not key.group and not key.text:
            continue
        choices = options(name) if key.group else key.choices
        default = defaults[name] if key.group else key.default
        lines.extend(_entry(name, shown(default), key.text, choices))
    for name in ("model", "scale", "hardware"):
        parts = [part.name.partition(".")[2] for part in _parts_of(name)]
        parts = [part for part in parts if part not in LABELS]
        lines.extend(_entry(f"{name}.FIELD", None, f"one value of it: {', '.join(parts)}", ()))
    return _section("keys:", lines)


def _parts_of(group: str) -> list[Key]:
    return [key for name, key in keys().items() if name.startswith(group + ".")]


def _entry(name: str, default: str | None, text: str, choices: Sequence[str]) -> list[str]:
    head = f"  {name} = {default}" if default is not None else f"  {name}"
    body = text + (f" ({', '.join(choices)})" if choices else "")
    wrapped = textwrap.wrap(body, WIDTH - 27, break_long_words=False)
    first = [f"{head:<25}  {wrapped[0]}"] if len(head) <= 25 else [head, " " * 27 + wrapped[0]]
    return first + [" " * 27 + line for line in wrapped[1:]]
