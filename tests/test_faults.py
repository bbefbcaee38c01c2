"""Every way in which a rank can fail: what is said, the status, and that nothing is left behind.

WIDEEP_FAULTS=20 repeats all of it so many times (docs/faults.md).
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from leftovers import shared_names, stays

from comm import spawn
from comm.meter import Position
from comm.notebook import Note, Notebook, read_note
from comm.report.events import EventLog
from comm.report.store import CannotWrite, write_whole
from moe.__main__ import main
from moe.config import ConfigError, compose

ROOT = Path(__file__).parent.parent
SMALL = ["emulate", "model=mixtral_8x7b", "scale.hidden_size=64", "scale.intermediate_size=16",
         "layers=2", "tokens=8", "steps=2", "output_dir=out", "report=false"]  # fmt: skip
AT = ["fault.rank=1", "fault.layer=1", "fault.step=1", "fault.phase=combine"]
WHERE = "rank 1, step 1, layer 1, forward combine: "
CONSEQUENCE = r" \(2 other ranks failed in consequence\)"
MEMORY = r": needed about [\d.]+ GiB here for 3 ranks, had [\d.]+ GiB"
HANGS = r"hangs: the others waited for it \(timeout_s=2\); stacks of all ranks are in out/stacks.*"
FAULTS = {  # kind -> what is said of the rank
    "raise": r"InjectedFault: fault.kind=raise" + CONSEQUENCE,
    "kill": r"killed by SIGKILL, perhaps out of memory" + CONSEQUENCE + MEMORY,
    "exit": r"ended without a word, exit status 3" + CONSEQUENCE,
    "hang": HANGS,
    "stop": HANGS,
    "disk_full": r"CannotWrite: out/events.rank1.jsonl: No space left on device" + CONSEQUENCE,
}
SPLIT = (
    r"SplitMismatch: layer 1, forward dispatch: rank (\d) announces row bytes (\d+), rank (\d)"
    r" expects (\d+)"
)
again = pytest.mark.parametrize("time_", range(int(os.environ.get("WIDEEP_FAULTS", "1"))))


@pytest.fixture
def place(tmp_path_factory, monkeypatch):
    """A folder to run in, and one for what is temporary: nothing may be left in it.

    A short path, since that of a socket has about 100 characters at most.
    """
    folder = tmp_path_factory.mktemp("run")
    temporary = folder / "tmp"
    temporary.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = shared_names()
    yield folder
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("pymp-")]
    assert left == []  # pymp: of the fork server, which the tests keep
    assert stays(before) == set()
    ranks = [child for child in psutil.Process().children(recursive=True) if child.ppid() != OURS]
    assert not [child for child in ranks if child.status() != psutil.STATUS_ZOMBIE]


OURS = os.getpid()


def broken_run(capfd, kind, *words):
    """Status, what was said after the announcement, and what the folder has."""
    status = main([*SMALL, "ranks=3", f"fault.kind={kind}", *AT, *words])  # the last of a key wins
    out, err = capfd.readouterr()
    announced, *said = err.splitlines()
    assert out == "" and announced.startswith(f"wideep: fault.kind={kind}: rank 1 is broken on")
    return status, said, sorted(path.name for path in Path("out").iterdir())


@again
@pytest.mark.parametrize("kind", FAULTS)
def test_a_rank_that_fails_is_named_with_its_place(place, capfd, kind, time_):
    status, said, files = broken_run(capfd, kind, "timeout_s=2")
    assert status == 6
    assert re.fullmatch(f"wideep: {WHERE}{FAULTS[kind]}", said[0]), said[0]
    assert said[-1] == "wideep: what was counted until then is kept in out"
    if kind == "raise":
        assert said[1].startswith("Traceback") and said[-2].startswith("moe.faults.InjectedFault")
    else:
        assert len(said) == 2
    events = [f"events.rank{rank}.jsonl" for rank in range(3)]
    stacks = [f"stacks.rank{rank}.txt" for rank in range(3)] if kind in ("hang", "stop") else []
    assert files == events + stacks
    for name in events:  # whole lines: the phases that had ended
        lines = [json.loads(line) for line in Path("out", name).read_text().splitlines()]
        phases = (["dispatch", "combine"] * 4)[: len(lines)]
        assert [line["phase"] for line in lines] == phases
        assert len(lines) == 7 or (kind == "disk_full" and len(lines) == 8)
    if kind == "hang":
        texts = [Path("out", name).read_text() for name in stacks]
        assert "in _break" in texts[1] and "faults.py" in texts[1]
        assert all("Timed out" in text or "Connection closed" in text for text in texts[::2])


@again
@pytest.mark.parametrize("dispatcher", ["rank_dedup", "all_to_all", "one_sided"])
def test_ranks_that_mean_different_splits_are_both_named(place, capfd, dispatcher, time_):
    status, said, _ = broken_run(
        capfd, "split", "fault.phase=dispatch", f"dispatcher={dispatcher}", "steps=2", "timeout_s=5"
    )
    assert status == 6 and len(said) == 2
    found = re.search(SPLIT, said[0])
    assert found, said[0]
    source, theirs, rank, meant = map(int, found.groups())
    assert 1 in (source, rank) and source != rank and abs(theirs - meant) == 1
    assert re.match(rf"wideep: rank {rank}, step 1, layer 1, forward dispatch: ", said[0])


@again
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_the_same_in_shared_memory(place, capfd, kind, time_):
    status, said, _ = broken_run(capfd, kind, "dispatcher=one_sided", "timeout_s=2")
    assert status == 6 and len(said) == 2
    assert re.fullmatch(f"wideep: {WHERE}{FAULTS[kind]}", said[0]), said[0]


@again
def test_a_hang_in_training_in_one_of_two_groups(place, capfd, time_):
    words = ["mode=training", "fault.phase=grad_sync", "ep_size=2", "ranks=4", "timeout_s=4"]
    status, said, _ = broken_run(capfd, "hang", *words)
    assert status == 6
    where = "wideep: rank 1, step 1, layer 1, backward grad_sync: hangs: the others waited for it"
    assert said[0].startswith(where), said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["fault.kind=kil"], "fault.kind=kil: no such kind; choose .*(did you mean kill?)"),
        (["fault.rank=1"], "fault.rank=1: fault.kind=none does not use it"),
        (["fault.kind=kill", "fault.rank=8"], "fault.rank=8: there are 8 ranks; nearest: 7"),
        (["fault.kind=kill", "fault.layer=4"], "fault.layer=4: there are 4 layers; nearest: 3"),
        (["fault.kind=kill", "fault.step=1"], "fault.step=1: there are 1 steps; nearest: 0"),
        (["fault.kind=kill", "fault.rank=-1"], "fault.rank=-1: must be >= 0"),
        (["fault.kind=kill", "fault.phase=x"], "fault.phase=x: no such phase; choose"),
        (
            ["fault.kind=kill", "fault.phase=grad_sync"],
            "fault.phase=grad_sync: this run has dispatch, combine; nearest: dispatch",
        ),
        (
            ["fault.kind=split", "fault.phase=combine"],
            "fault.phase=combine: fault.kind=split has dispatch; nearest: dispatch",
        ),
        (["bench", "fault.kind=kill"], "fault.kind=kill: job=bench does not use it"),
        (["predict", "fault.kind=kill"], "fault.kind=kill: job=predict does not use it"),
    ],
)
def test_a_fault_that_cannot_come_is_refused(words, line):
    words = [f"job={words[0]}", *words[1:]] if "=" not in words[0] else words
    with pytest.raises(ConfigError) as refusal:
        compose(words)
    start, _, end = line.partition(".*")
    assert str(refusal.value).startswith(start) and end in str(refusal.value)


# -- from outside ----------------------------------------------------------------------------------


def start(folder, *words):
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE", "WIDEEP_NOTES")
    }
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(condition, seconds=40):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


QUIET = ["-m", "moe.torchrun", "--standalone", "--nproc-per-node", "2", "-m", "moe", *SMALL]
OWN = ["-m", "moe", *SMALL, "ranks=2"]


def family_of(process):
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(family):
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [one for one in alive if one.is_running() and one.status() != "zombie"]


@again
def test_a_hanging_rank_of_torchrun_is_named_once(place, time_):
    """The other rank leaves word, asks for the stacks, and torchrun ends the one that hangs."""
    process = start(place, *QUIET, "fault.kind=stop", *AT, "timeout_s=2")
    _, err = process.communicate(timeout=60)
    announced, said, kept = err.splitlines()
    assert process.returncode == 6
    assert re.fullmatch(f"wideep: {WHERE}{HANGS}", said)
    assert kept == "wideep: what was counted until then is kept in out"
    for rank in range(2):
        assert "File " in (place / "out" / f"stacks.rank{rank}.txt").read_text()


@again
@pytest.mark.parametrize("words", [OWN, QUIET], ids=["own ranks", "torchrun"])
def test_ranks_and_temporary_files_end_with_a_killed_parent(place, words, time_):
    process = start(place, *words, "steps=1000000")
    try:
        events = [place / "out" / f"events.rank{rank}.jsonl" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.stat().st_size for file in events))
        family = family_of(process)
    finally:
        process.kill()
    process.communicate(timeout=20)
    assert_gone(family)
    wait_until(lambda: list((place / "tmp").iterdir()) == [], 5)
    assert not (place / "out" / "run.json").exists()


@again
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_while_its_ranks_start_leaves_nothing(place, sent, status, time_):
    process = start(place, *OWN)
    wait_until(lambda: len(family_of(process)) >= 2)  # fork server, still importing torch
    family = family_of(process)
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as the terminal does: everybody hears it
    else:
        process.send_signal(sent)
    out, err = process.communicate(timeout=40)
    assert (process.returncode, out, err) == (status, "", "")
    assert_gone(family)
    assert [path.name for path in place.iterdir()] == ["tmp"]
    assert list((place / "tmp").iterdir()) == []


# -- full disks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--help"], "wideep: standard output: No space left on device\n"),
        (["predict"], "wideep: standard output: No space left on device\n"),
    ],
)
def test_a_page_that_cannot_be_printed_is_one_line(place, words, line):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "moe", *words]
        done = subprocess.run(
            command,
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (1, line)


def test_a_file_that_does_not_fit_is_named_and_taken_back(tmp_path):
    def too_much(file):
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file.fileno())
        os.close(full)
        np.savez(file, words=np.zeros(1 << 16))

    with pytest.raises(CannotWrite, match=f"{tmp_path}/traffic.npz: No space left on device"):
        write_whole(tmp_path / "traffic.npz", too_much)
    assert list(tmp_path.iterdir()) == []


def test_an_event_that_does_not_fit_is_taken_back(tmp_path, monkeypatch):
    log = EventLog(tmp_path, 0, [0, 1], ("hidden",))
    event = {"layer": 0, "phase": "dispatch", "rows": np.array([1, 2]), "seconds": 1.0}
    log.append(step=0, sent=np.array([[10, 20]]), **event)
    before = (tmp_path / "events.rank0.jsonl").read_bytes()

    class Short:
        """Takes ten bytes, then the disk is full."""

        name = log._file.name
        tell, fileno = log._file.tell, log._file.fileno

        def write(self, data, file=log._file):
            if file.tell() > len(before):
                raise OSError(28, "No space left on device")
            return file.write(data[:10])

    monkeypatch.setattr(log, "_file", Short())
    with pytest.raises(CannotWrite, match=r"events.rank0.jsonl: No space left on device"):
        log.append(step=1, sent=np.array([[10, 20]]), **event)
    assert (tmp_path / "events.rank0.jsonl").read_bytes() == before
    monkeypatch.undo()
    log.close()


# -- notes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_a_note_says_where_a_rank_is(tmp_path, named):
    book = Notebook(3, tmp_path if named else None)
    assert read_note(book.address.note) == Note(0) and str(Note(0)) == ""
    book.warmup, book.step = True, 1
    book.begin(Position(2, "combine", "backward"))
    note = read_note(book.address.note)
    assert note == Note(1, True, 1, Position(2, "combine", "backward"))
    assert str(note) == "warm-up step 1, layer 2, backward combine"
    book.rest()
    assert read_note(book.address.note) == Note(0)
    assert len(list(tmp_path.iterdir())) == 2 * named
    book.close()


def test_a_note_of_a_rank_that_left_none(tmp_path):
    assert read_note(tmp_path / "none") == Note(0)


def test_who_is_to_blame():
    """Not who lost its connection; who failed itself before what others say of the silent."""
    reports = [
        spawn.RankReport(0, 1.0, error="closed", caused_by_others=True),
        spawn.RankReport(1, 2.0, error="is gone", kind=spawn.SILENT),
        spawn.RankReport(2, 3.0, error="killed"),
        spawn.RankReport(3, 4.0, error="KeyError"),
    ]
    assert [report.rank for report in sorted(reports, key=spawn.guilt)] == [2, 3, 1, 0]
