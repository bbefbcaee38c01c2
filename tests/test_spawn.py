"""Ranks started here: order of results, the guilty rank first, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import rank_bodies

from comm.spawn import RankFailure, describe_exit, run_ranks


def test_results_come_in_rank_order():
    assert run_ranks(rank_bodies.who_am_i, 5) == [(rank, 5) for rank in range(5)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "KeyError: 'the cause'"),
        ("kill", "SIGKILL, perhaps out of memory"),
        ("exit", "3"),
    ],
)
def test_the_guilty_rank_is_named_first(how, words):
    with pytest.raises(RankFailure) as failure:
        run_ranks(rank_bodies.fail_on, 4, 2, how, deadline_s=60)
    assert failure.value.guilty.rank == 2
    assert str(failure.value).startswith("rank 2: ") and words in str(failure.value)
    if how == "raise":
        assert "rank_bodies.py" in failure.value.guilty.details


def test_a_hanging_rank_times_out():
    with pytest.raises(RankFailure, match="TimeoutError|imed out"):
        run_ranks(rank_bodies.fail_on, 3, 1, "hang", deadline_s=5)
    assert_no_ranks_left()


def test_no_process_is_left():
    for pid in run_ranks(rank_bodies.pids, 3):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    assert_no_ranks_left()


def assert_no_ranks_left():
    children = psutil.Process().children(recursive=True)
    # the fork server and the resource tracker stay, with no child of their own
    assert not [child for child in children if child.parent().pid != os.getpid()]


def test_ranks_die_with_a_killed_parent(tmp_path):
    code = (
        "import sys; from pathlib import Path; import rank_bodies;"
        "from comm.spawn import run_ranks;"
        "run_ranks(rank_bodies.hang_and_tell, 2, Path(sys.argv[1]))"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": path}
    )
    try:
        files = [tmp_path / "0.pid", tmp_path / "1.pid"]
        assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    ranks = [int(file.read_text()) for file in files]
    assert wait_until(lambda: not any(map(running, ranks)), 10)


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_exits_in_words():
    assert describe_exit(-9) == "killed by SIGKILL, perhaps out of memory"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert describe_exit(7) == "ended without a word, exit status 7"
