"""The entry: words, exit statuses, who prints, and what is not imported."""

import os
import signal
import subprocess
import sys
import types
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import pytest

import moe.__main__ as entry
from moe.cli import STATUSES, WIDTH, help_text, read_words
from moe.combinations import BELONGS_TO
from moe.conf_files import options
from moe.routing.options import RouterOptions
from moe.settings import JOBS, ConfigError, keys

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No torchrun around the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job(monkeypatch):
    """Modules for moe.jobs, which note the call and return or raise what the test says."""
    calls, outcome = [], {"do": lambda: 0}

    def run(kind):
        def call(config):
            calls.append((kind, config))
            return outcome["do"]()

        return call

    for name in JOBS:
        module = types.ModuleType(f"moe.jobs.{name}")
        module.run_rank, module.launch = run("run_rank"), run("launch")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(calls=calls, outcome=outcome)


def under_torchrun(monkeypatch, rank: int, world_size: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))


def raises(error: BaseException):
    def do():
        raise error

    return do


def test_the_first_word_is_the_job():
    assert read_words(["bench", "ranks=2"]).overrides == ("job=bench", "ranks=2")
    assert read_words(["ranks=2"]).overrides == ("ranks=2",)
    assert read_words(["predict", "ep_size=16"]).overrides == ("job=predict", "ep_size=16")
    assert read_words(["--check", "emulate"]).flag == "check"
    with pytest.raises(ConfigError, match=r"^benhc: no such job; choose bench, .*mean bench\?\)$"):
        read_words(["benhc"])
    with pytest.raises(ConfigError, match=r"^--hepl: no such option \(did you mean --help\?\)"):
        read_words(["--hepl"])


def test_without_torchrun_the_job_is_launched(job):
    assert entry.main(["bench", "ranks=3"]) == 0
    [(kind, config)] = job.calls
    assert (kind, config.job, config.ranks) == ("launch", "bench", 3)


def test_a_job_that_starts_no_ranks_needs_no_memory_for_them(job):
    huge = ["tokens=1000000000", "ranks=64"]
    assert entry.main(["emulate", *huge]) == 7 and job.calls == []
    assert entry.main(["predict", *huge]) == 0
    [(kind, config)] = job.calls
    assert (kind, config.job, config.ranks) == ("launch", "predict", 64)


def test_under_torchrun_the_rank_runs_in_this_process(job, monkeypatch):
    under_torchrun(monkeypatch, rank=2, world_size=5)
    assert entry.main([]) == 0
    [(kind, config)] = job.calls
    assert (kind, config.ranks) == ("run_rank", 5)


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
def test_rank_0_alone_says_what_is_wrong(job, monkeypatch, capsys, rank, speaks):
    under_torchrun(monkeypatch, rank, world_size=2)
    assert entry.main(["ranks=3"]) == 2
    assert capsys.readouterr().err == (
        "wideep: ranks=3: 2 ranks were started; leave it out\n" if speaks else ""
    )
    assert job.calls == []


def test_check_runs_nothing_and_prints_nothing(job, capsys):
    assert entry.main(["--check", "tokens=1"]) == 0
    assert job.calls == [] and capsys.readouterr() == ("", "")
    assert entry.main(["--check", "tokens=-1"]) == 2
    assert capsys.readouterr() == ("", "wideep: tokens=-1: must be >= 0; nearest: 0\n")


@pytest.mark.parametrize("status", [0, 3, 4, 6])
def test_the_status_of_the_job_is_returned_and_left(job, monkeypatch, tmp_path, status):
    monkeypatch.setenv("WIDEEP_STATUS_FILE", str(tmp_path / "status"))
    job.outcome["do"] = lambda: status
    assert entry.main([]) == status
    assert (tmp_path / "status").read_text() == f"{status}\n"


def test_other_ranks_leave_no_status(job, monkeypatch, tmp_path):
    monkeypatch.setenv("WIDEEP_STATUS_FILE", str(tmp_path / "status"))
    under_torchrun(monkeypatch, rank=1, world_size=2)
    job.outcome["do"] = lambda: 3
    assert entry.main([]) == 3
    assert not (tmp_path / "status").exists()


@pytest.mark.parametrize(("launched", "status"), [(False, 1), (True, 6)])
def test_an_error_shows_its_traceback(job, monkeypatch, capsys, launched, status):
    if launched:
        under_torchrun(monkeypatch, rank=1, world_size=2)
    job.outcome["do"] = raises(RuntimeError("broken"))
    assert entry.main([]) == status
    said = capsys.readouterr().err
    assert said.startswith("rank 1:\n" if launched else "wideep:\n")
    assert said.endswith("RuntimeError: broken\n")


def test_interrupted_and_terminated(job):
    job.outcome["do"] = raises(KeyboardInterrupt())
    assert entry.main([]) == 130
    before = signal.getsignal(signal.SIGTERM)
    unwound = []

    def terminated():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            unwound.append(True)

    job.outcome["do"] = terminated
    assert entry.main([]) == 143
    assert unwound and signal.getsignal(signal.SIGTERM) is before


def test_help_names_every_key_choice_and_status():
    text = help_text()
    for name, key in keys().items():
        head, _, field = name.partition(".")
        group_field = field and keys().get(head, key).group
        assert group_field or f"\n  {name} = " in text, name
        assert group_field or key.text, f"{name} has no text"
        for choice in options(name) if key.group else key.choices:
            assert choice in text
    for status in STATUSES:
        assert f"\n  {status} " in text
    assert max(map(len, text.splitlines())) <= WIDTH


def entry_of(name: str) -> str:
    """What --help says of one key, as one line."""
    lines = help_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"  {name} = "))
    rest = takewhile(lambda line: line.startswith(" " * 27), lines[start + 1 :])
    return " ".join(" ".join([lines[start], *rest]).split())


def test_help_says_who_uses_an_option():
    for one in fields(RouterOptions):
        users = one.metadata["routers"]
        assert all(user in entry_of(f"router.{one.name}") for user in users)
        assert "router=" in entry_of(f"router.{one.name}")
    for name, (decider, values) in BELONGS_TO.items():
        if not name.startswith("router.") and name != "wire.backward" and len(values) == 1:
            assert f"{decider}={values[0]}: " in entry_of(name), name


def test_help_names_every_job_with_what_it_does():
    text = help_text()
    for name, words in JOBS.items():
        assert f"\n  {name:<10}  {words}\n" in text


def test_help_and_version_import_nothing_heavy():
    look = (
        "import sys, moe.__main__ as entry; entry.main(sys.argv[1:]);"
        "sys.exit(sorted({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    for flag, start in (("--help", "WideEP emulates"), ("--version", "wideep 0.")):
        shown = subprocess.run(
            [sys.executable, "-c", look, flag], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert shown.stdout.startswith(start)
        assert shown.stderr.strip() == "[]"


def test_composing_imports_no_torch():
    look = (
        "import sys; from moe.config import compose; compose([]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", look], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WORLD_SIZE", "x", "WORLD_SIZE=x: must be a number, as torchrun sets it"),
        ("LOCAL_WORLD_SIZE", "-1", "LOCAL_WORLD_SIZE=-1: must be a number"),
        ("RANK", "5", "RANK=5: must be below WORLD_SIZE=2"),
    ],
)
def test_ranks_numbered_wrongly_are_refused(monkeypatch, capsys, name, value, message):
    for variable, usual in {"RANK": "0", "WORLD_SIZE": "2", name: value}.items():
        monkeypatch.setenv(variable, usual)
    assert entry.main(["--check"]) == 2
    assert capsys.readouterr().err.startswith(f"wideep: {message}")


def test_a_status_file_that_cannot_be_written_does_not_change_the_status(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("WIDEEP_STATUS_FILE", str(tmp_path / "missing" / "status"))
    assert entry.main(["--check"]) == 0
    assert "WIDEEP_STATUS_FILE" in capsys.readouterr().err
