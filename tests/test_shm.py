"""The window and its barrier: nobody reads what is being written, and nobody waits for the dead."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import one_sided_bodies as bodies
import psutil
import pytest
from leftovers import shared_names, stays

from comm import barrier, shm
from comm.barrier import Barrier, Peer, RankLost
from comm.spawn import RankFailure, run_ranks

ROOT = Path(__file__).parent.parent


def barriers(size, timeout_s=30.0):
    """All sides of one barrier, for threads of this process."""
    memory = mmap.mmap(-1, 4096)
    peers = [Peer.myself(10 + place) for place in range(size)]
    return [Barrier(memory, 0, place, peers, timeout_s) for place in range(size)]


def test_nobody_passes_before_all_have_arrived():
    arrived, early = [], []
    sides = barriers(5)

    def run(place):
        for number in range(200):
            arrived.append((number, place))
            sides[place].arrive()
            sides[place].wait()
            early.extend([number] * (sum(one[0] == number for one in list(arrived)) != 5))

    threads = [threading.Thread(target=run, args=(place,)) for place in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(arrived) == 1000 and not early


def test_counters_pass_the_end_of_their_words():
    sides = barriers(3)
    for side in sides:
        side._arrived_at = side._waited_for = 2**32 - 2
        side._arrivals.value, side._generation.value = 3 * (2**32 - 2) % 2**32, 2**32 - 2
    for _ in range(5):
        for side in sides:
            side.arrive()
        for side in sides:
            side.wait()
    assert sides[0]._generation.value == 3


def test_who_does_not_come_is_named_and_who_came_is_not():
    sides = barriers(4, timeout_s=0.3)
    for place in (0, 2):
        sides[place].arrive()
    with pytest.raises(RankLost, match=r"ranks 11, 13 did not come within 0.3 s where rank 10"):
        sides[0].wait()


def test_arriving_twice_or_waiting_unasked_is_a_mistake():
    (side,) = barriers(1)
    with pytest.raises(AssertionError, match="without arriving"):
        side.wait()
    side.arrive()
    with pytest.raises(AssertionError, match="without waiting"):
        side.arrive()


def test_a_process_has_ended_when_it_is_a_corpse_or_another():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = Peer(0, child.pid, barrier._stat(child.pid)[19])
    assert not peer.ended() and not Peer.myself(0).ended()
    assert Peer(0, child.pid, "1").ended()  # the number is used again
    child.kill()
    deadline = time.monotonic() + 10
    while not peer.ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE and peer.ended()
    child.communicate()
    assert peer.ended()


def test_futex_adds_atomically():
    word, futex = ctypes.c_uint32(), barrier._Futex()
    threads = [
        threading.Thread(target=lambda: [futex.add(word, 3) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert word.value == 4 * 2000 * 3


@pytest.mark.parametrize(("name", "value"), [("platform", "darwin"), ("machine", "sparc")])
def test_other_systems_are_refused_in_words(monkeypatch, name, value):
    monkeypatch.setattr(barrier.sys, "platform", value if name == "platform" else "linux")
    if name == "machine":
        monkeypatch.setattr(barrier.platform, "machine", lambda: value)
    assert value in barrier.refusal()
    with pytest.raises(ValueError, match=value):
        shm.open_window(None, 1.0)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_nobody_reads_what_another_writes(world_size):
    """Ragged rounds, rows of several sizes, writers and takers that are late at random."""
    assert run_ranks(bodies.rounds, world_size, 150, deadline_s=120) == [0] * world_size


@pytest.mark.parametrize("at", ["between", "before publish", "before meet"])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_ends_is_named_by_the_others(how, at):
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(bodies.end_in_round, 4, how, at, deadline_s=60)
    assert time.monotonic() - started < 20
    assert failure.value.guilty.rank == 1
    others = {report.rank: report.error for report in failure.value.reports if report.rank != 1}
    for rank, error in others.items():
        assert error == f"RankLost: rank 1 ended while rank {rank} waited"
    assert sorted(others) == [0, 2, 3]


def test_a_rank_that_hangs_is_named_when_the_time_is_up():
    with pytest.raises(RankFailure) as failure:
        run_ranks(bodies.end_in_round, 3, "hang", "before publish", timeout_s=2, deadline_s=30)
    assert failure.value.guilty.rank == 1
    assert failure.value.guilty.error == "hangs: the others waited for it (timeout_s=2)"


def test_the_others_help_who_dies_between_the_last_arrival_and_saying_so():
    with pytest.raises(RankFailure) as failure:
        run_ranks(bodies.killed_in_the_barrier, 3, deadline_s=30)
    errors = {report.rank: report.error for report in failure.value.reports}
    assert "killed by SIGKILL" in errors[1]
    assert "first round over" in errors[0] and "first round over" in errors[2]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("machine", "rank 1 is on another machine than rank 0"),
        ("memory", "WindowError: shared memory: rank 0: [Errno 12] Cannot allocate memory"),
        ("map", "WindowError: shared memory: rank 1: [Errno 12] no room for a map"),
        ("free", "need 12 MiB more here, and 5 MiB are free"),
        ("worst", "rows of 1024 B do not fit"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(what, words):
    for text in run_ranks(bodies.refused, 3, what, deadline_s=60):
        assert words in text


def test_memory_ends_with_its_transport():
    for before, during, after in run_ranks(bodies.memory_is_given_back, 2, deadline_s=60):
        assert before == after == (0, 0)
        assert during[0] == 3 and during[1] >= 3


def test_regions_do_not_overlap():
    """Of both copies and all areas, whatever the size of a row."""
    for size, row_bytes in ((1, 8), (3, 4096 + 12), (72, 7168), (4096, 52)):
        ends = [0]
        for copy in shm._divide(1 << 40, size, 4096):
            for area in copy.values():
                stride = area.region // row_bytes
                assert area.start >= ends[-1]
                ends.append(area.start + size * stride * row_bytes)
                assert size * stride * row_bytes <= size * area.region
                assert area.start + size * area.region <= 1 << 40


KILLED = """
import sys
from pathlib import Path
import one_sided_bodies as bodies
from comm.spawn import run_ranks
if __name__ == "__main__":
    run_ranks(bodies.dispatch_for_ever, 4, Path(sys.argv[1]), preload=bodies.PRELOAD)
"""


def windows():
    """Processes that have a window's memory open or mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if "wideep-window" in maps.read_text():
                found.add(int(maps.parent.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.parametrize("victim", ["rank", "parent", "all", "starting"])
def test_nothing_is_left_behind_by_sigkill(tmp_path, victim):
    before = shared_names()
    folder = tmp_path / "pids"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: len(list(folder.glob("*.pid" if victim == "starting" else "*.busy"))) == 4)
        time.sleep(int.from_bytes(os.urandom(1)) / 256)
        ranks = [int(path.read_text() or 0) for path in sorted(folder.glob("*.pid"))]
        assert victim == "starting" or set(ranks) <= windows()
        for pid in {"rank": ranks[2:3], "all": [*ranks, process.pid]}.get(victim, [process.pid]):
            os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    if victim == "rank":
        assert "rank 2: killed by SIGKILL" in err and "3 other ranks failed in consequence" in err
    wait_for(lambda: not any(alive(pid) for pid in ranks))
    assert not windows() & set(ranks)
    assert stays(before) == set()
    left = [path for path in tmp_path.iterdir() if path not in (folder, script)]
    assert all(path.name.startswith(("wideep-", "pymp-")) for path in left)  # the rendezvous only


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
