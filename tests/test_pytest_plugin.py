"""Tests on ranks, as a user's pytest runs them: what passes, what is said of what fails, what it
costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from moe.pytest_plugin import _misuse

ROOT = Path(__file__).parent.parent
SUITE = (Path(__file__).parent / "suites" / "bodies.py").read_text()
LIMIT_S = 10  # for twenty tests on eight ranks, on two cores that have nothing else to do

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


def run(folder: Path, *words: str, alone: bool = True) -> subprocess.CompletedProcess[str]:
    """pytest with this plugin, in a folder of its own. alone: with no other plugin that is there"""
    environment = {name: os.environ[name] for name in os.environ if "PYTEST" not in name}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder)])
    if alone:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "moe.pytest_plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "--strict-markers", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def write(folder: Path, text: str, name: str = "test_it.py") -> Path:
    (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """For each test of the suite, its outcome, what is said of it and what its ranks printed."""
    folder = write(tmp_path_factory.mktemp("suite"), SUITE)
    done = run(folder, "-W", "error", "--junitxml=out.xml", "-o", "junit_logging=all")
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(folder / "out.xml").iter("testcase"):
        results = [one for one in case if one.tag in ("failure", "error", "skipped")]
        printed = "".join(one.text or "" for one in case if one.tag == "system-out")
        outcome = results[0].tag if results else "passed"
        text = (results[0].text or results[0].get("message")) if results else ""
        found[case.get("name")] = outcome, text, printed
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("values_of_fixtures", "after_that", "method", "nothing_is_left", "counting"),
        *("folder_and_environment", "each_number[2ranks-<lambda>0]"),
        *("each_number[3ranks-<lambda>1]", "random_numbers_are_the_same_in_each_test[1]"),
    ],
)
def test_passes(suite, name):
    outcome, text, _ = suite[f"test_{name}"]
    assert outcome == "passed", text


def test_the_rank_that_failed_is_shown_with_its_place_and_values(suite):
    outcome, text, printed = suite["test_one_is_wrong"]
    assert outcome == "failure"
    assert text.startswith("rank 2 of 4 failed: AssertionError: assert [1, 2, 2] == [1, 2, 3]")
    assert ">           assert [1, 2, rank] == [1, 2, 3]" in text and "At index 2 diff" in text
    assert text.rstrip().endswith("ranks 0-1, 3: still at work when the others had failed")
    assert "on rank 2" in printed and "on rank 0" in printed


def test_ranks_that_say_the_same_are_named_together(suite):
    text = suite["test_all_are_wrong"][1]
    assert "- ranks 0-3 -" in text and text.count("assert 4.0 == 5") == 2


def test_ranks_that_say_different_things_are_all_shown(suite):
    text = suite["test_two_are_wrong"][1]
    assert text.startswith("ranks 1-2 of 3 failed: KeyError")
    assert "KeyError: 1" in text and "KeyError: 2" in text


def test_a_rank_that_hangs_shows_where(suite):
    text = suite["test_one_hangs"][1]
    assert text.startswith("ranks 0-2 of 3 failed: TimeoutError: no end within 1 s")
    alone, others = text.partition("- rank 1 -")[2], text.partition("- ranks 0, 2 -")[2]
    assert re.search(r'test_it.py", line \d+ in test_one_hangs', alone)
    assert "in barrier" in others and "0x" not in text and "rank_server" not in text
    assert "The body has ended here" in suite["test_one_stays_away"][1]


def test_a_rank_that_is_killed_comes_first(suite):
    text = suite["test_one_is_killed"][1]
    assert text.startswith("rank 3 of 4 failed: killed by SIGKILL")
    assert "rank 0" not in text.partition("- rank 3 -")[0]


def test_skipped_and_expected_to_fail(suite):
    assert suite["test_skips"][0] == suite["test_known_to_fail"][0] == "skipped"
    outcome, text, _ = suite["test_expects_to_fail"]
    assert outcome == "skipped" and "not yet" in text
    outcome, text, _ = suite["test_raises_an_error_without_a_text"]
    assert outcome == "failure" and "ranks 0-1 of 2 failed: Mute: (its text raises" in text
    outcome, text, _ = suite["test_one_skips"]
    assert outcome == "failure" and "rank 0 skipped and the others did not" in text
    assert "UserWarning: as in pytest itself" in suite["test_warnings_are_errors"][1]


def test_what_cannot_be_had_is_said(suite):
    assert "fixture maker cannot be sent" in suite["test_closure_as_a_fixture"][1]
    assert "capsys works in pytest's process only" in suite["test_capsys"][1]
    assert suite["test_rank_without_ranks"][0] == "error"
    assert "rank needs @pytest.mark.ranks(n)" in suite["test_rank_without_ranks"][1]


WRONG = {
    (): "the mark is ranks(n) or ranks([n, ...])",
    ("8",): "ranks('8'): a number of ranks is a whole number from 1 to 250",
    (0,): "ranks(0): a number of ranks",
    ((2, 2),): "ranks([2, 2]): at least one number, and none twice",
    ((),): "ranks([]): at least one number",
    (2, ("timeout", 0)): "timeout=0): seconds, more than 0",
    (2, ("time", 3)): "with timeout=seconds if need be",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_the_mark_may_not_be(given):
    mark = SimpleNamespace(args=given[:1], kwargs=dict(given[1:]))
    item = SimpleNamespace(get_closest_marker=lambda name: mark)
    assert WRONG[given] in _misuse(item)


def test_misuse_is_one_line(tmp_path):
    text = "import pytest\n@pytest.mark.ranks([2, 0])\ndef test_it(): pass\n"
    done = run(write(tmp_path, text), "-q")
    assert done.returncode == 4
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ERROR: test_it.py::test_it: ranks(0): a number of ranks is a whole")


def test_an_unused_plugin_imports_nothing(tmp_path):
    """Nor does collecting: torch is imported when the first marked test is about to run."""
    text = (
        "import sys, pytest\n"
        "def test_light(): assert not {'torch', 'numpy', 'hydra'} & set(sys.modules)\n"
        "@pytest.mark.ranks(2)\n"
        "def test_heavy(): pass\n"
    )
    done = run(write(tmp_path, text), "-k", "light")
    assert done.returncode == 0, done.stdout
    done = run(tmp_path, "--collect-only", "-q", "--durations=0")
    assert done.returncode == 0 and "2 tests collected" in done.stdout


def test_an_installed_plugin_that_is_also_named_is_loaded_once(tmp_path):
    """pytest would refuse a module that it gets under two names."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = tmp_path / "wideep-1.dist-info"
    about.mkdir()
    write(about, "Metadata-Version: 2.1\nName: wideep\nVersion: 1\n", "METADATA")
    ((name, module),) = entries["pytest11"].items()
    write(about, f"[pytest11]\n{name} = {module}\n", "entry_points.txt")
    text = "def test_it(pytestconfig): assert pytestconfig.getini('ranks_timeout') == '60'\n"
    write(tmp_path, text)
    done = run(tmp_path, alone=False)
    assert done.returncode == 0 and "wideep-1" in done.stdout, done.stdout + done.stderr


def test_stops_at_the_first_failure_and_leaves_nobody(tmp_path):
    before = {process.pid for process in psutil.process_iter()}
    text = (
        "import os, pytest\n"
        "@pytest.mark.ranks(3)\n"
        "@pytest.mark.parametrize('place', [0, 1, 2])\n"
        "def test_it(place, rank):\n"
        "    print(f'pid={os.getpid()}')\n"
        "    assert not place\n"
    )
    done = run(write(tmp_path, text), "-x", "-s")
    assert "1 failed, 1 passed" in done.stdout and "[rank 2] pid=" in done.stdout
    pids = {int(pid) for pid in re.findall(r"pid=(\d+)", done.stdout)}
    assert len(pids) == 3, "the same ranks ran both bodies"
    assert not {pid for pid in pids - before if psutil.pid_exists(pid)}


def test_workers_of_xdist_have_ranks_of_their_own(tmp_path):
    pytest.importorskip("xdist")
    text = (
        "import pytest, torch, torch.distributed as dist\n"
        "@pytest.mark.ranks(2)\n"
        "@pytest.mark.parametrize('place', range(4))\n"
        "def test_it(place, rank):\n"
        "    total = torch.tensor([rank + place]); dist.all_reduce(total)\n"
        "    assert total.item() == 1 + 2 * place + (place == 3)\n"
    )
    done = run(write(tmp_path, text), "-p", "xdist", "-n", "2")
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    assert "ranks 0-1 of 2 failed" in done.stdout


def test_twenty_tests_on_eight_ranks_cost_little(tmp_path):
    text = (
        "import pytest, torch, torch.distributed as dist\n"
        "@pytest.mark.ranks(8)\n"
        "@pytest.mark.parametrize('place', range(20))\n"
        "def test_it(place, rank):\n"
        "    rows = torch.full((8, 16), float(rank)); got = torch.empty(8, 16)\n"
        "    dist.all_to_all_single(got, rows)\n"
        "    assert got[:, 0].tolist() == list(range(8))\n"
    )
    done = run(write(tmp_path, text), "--durations=0", "-vv")
    assert "20 passed" in done.stdout, done.stdout
    seconds = [float(one) for one in re.findall(r"([\d.]+)s call", done.stdout)]
    whole = float(re.search(r"20 passed in ([\d.]+)s", done.stdout)[1])
    busy = os.getloadavg()[0] > 4  # with other work than this
    assert len(seconds) == 20
    assert busy or (whole < LIMIT_S and sum(seconds[1:]) < LIMIT_S / 5), (whole, seconds)
