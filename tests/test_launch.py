"""launch.sh with an interpreter that only notes how it was called, and the wrapper of torchrun."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "launch.sh"
# Says whether its packages will do, checks and makes a .venv (of a copy of itself), notes the rest.
FAKE_PYTHON = f"""#!/usr/bin/env bash
case "$*" in
  "- "*) exit "${{FAKE_SATISFIED:-0}}" ;;
  *--check*) exec {shlex.quote(sys.executable)} "$@" ;;
  "-c import sys"*) exit "${{FAKE_TOO_OLD:-0}}" ;;
  "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" || exit 1 ;;
esac
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $*" >> "$NOTES"
case "$*" in *"${{FAKE_BROKEN:-nothing}}"*) exit 1 ;; esac
exit "${{FAKE_STATUS:-0}}"
"""


@pytest.fixture
def launch(tmp_path):
    """Runs launch.sh in an active environment made of the fake; returns the process, notes."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    notes = tmp_path / "notes"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_")}
    outer = ("NNODES", "PET_NNODES", "RDZV_ENDPOINT", "SLURM_JOB_ID")
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CONDA_PREFIX", *outer):
        clean.pop(name, None)

    def run(*words: str, script: Path = SCRIPT, **environment: str):
        notes.write_text("")
        settings = {"VIRTUAL_ENV": str(tmp_path), "PYTHON": str(fake), "NOTES": str(notes)}
        done = subprocess.run(
            [script, *words],
            cwd=tmp_path,
            env=clean | settings | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, notes.read_text()

    return run


@pytest.mark.parametrize("script", [SCRIPT, ROOT / ".ci" / "run"])
def test_the_scripts_are_executable_bash(script):
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0


def test_help_is_the_header_and_the_keys():
    shown = subprocess.run(
        [SCRIPT, "--help"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Sets up what WideEP needs")
    for words in ("./launch.sh test", "WIDEEP_TORCH_INDEX", "\nkeys:\n", "\nexit status:\n"):
        assert words in shown.stdout
    assert "set -euo" not in shown.stdout


def test_a_job_runs_under_torchrun_with_its_ranks(launch):
    done, notes = launch("ranks=4", "tokens=8")
    assert done.returncode == 0, done.stderr
    torchrun = "-m moe.torchrun --standalone --nproc-per-node"
    assert notes == f"OMP_NUM_THREADS=1 {torchrun} 4 -m moe ranks=4 tokens=8\n"
    done, notes = launch(OMP_NUM_THREADS="2")
    assert notes == f"OMP_NUM_THREADS=2 {torchrun} 8 -m moe\n"


def test_bench_starts_its_ranks_itself(launch):
    for words in (["bench", "ranks=2"], ["ranks=2", "job=bench"]):
        done, notes = launch(*words)
        assert done.returncode == 0, done.stderr
        assert notes == f"OMP_NUM_THREADS=1 -m moe {' '.join(words)}\n"


def test_nodes_and_machines_have_starters_of_their_own(launch):
    _, notes = launch("dispatcher=two_hop", "nodes=2x4")
    assert notes == "OMP_NUM_THREADS=1 -m moe.nodes dispatcher=two_hop nodes=2x4\n"
    _, notes = launch("rate=1gbit")  # which moe.nodes refuses
    assert notes == "OMP_NUM_THREADS=1 -m moe.nodes rate=1gbit\n"
    for name in ("NNODES", "PET_NNODES", "RDZV_ENDPOINT", "SLURM_JOB_ID"):
        _, notes = launch("ranks=4", **{name: "2"})
        assert notes == "OMP_NUM_THREADS=1 -m moe.machines ranks=4\n", name
        _, notes = launch("predict", "ep_size=4", **{name: "2"})
        assert notes == "OMP_NUM_THREADS=1 -m moe predict ep_size=4\n", name
    _, notes = launch("sweep", "ranks=2,4", "job=predict", SLURM_JOB_ID="2")
    assert notes == "OMP_NUM_THREADS=1 -m moe sweep ranks=2,4 job=predict\n"


def test_a_copy_that_slurm_made_finds_its_folder(launch, checkout, tmp_path):
    copy = tmp_path / "spool" / "slurm_script"
    copy.parent.mkdir()
    shutil.copy(SCRIPT, copy)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "   Command={checkout} ranks=2"\n')
    scontrol.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done, notes = launch("ranks=2", script=copy, SLURM_JOB_ID="7", PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert notes == "OMP_NUM_THREADS=1 -m moe.machines ranks=2\n"


def test_a_wrong_configuration_starts_no_rank(launch):
    done, notes = launch("tokens=-1")
    assert (done.returncode, done.stdout, notes) == (2, "", "")
    assert done.stderr == "wideep: tokens=-1: must be >= 0; nearest: 0\n"


def test_the_status_of_the_run_is_returned(launch):
    done, _ = launch("ranks=2", FAKE_STATUS="4")
    assert done.returncode == 4


def test_tests_run_by_pytest(launch):
    _, notes = launch("test", "-k", "two words")
    assert notes == "OMP_NUM_THREADS=1 -m pytest -k two words\n"


@pytest.fixture
def checkout(tmp_path):
    """launch.sh in a folder of its own, so that no real .venv is touched."""
    folder = tmp_path / "check out"
    folder.mkdir()
    for name in ("launch.sh", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder / "launch.sh"


def test_a_satisfied_environment_is_left_alone(launch, checkout):
    done, notes = launch("setup", script=checkout)
    assert (done.returncode, notes) == (0, "") and not (checkout.parent / ".venv").exists()


def test_set_up_installs_once_and_again_when_the_lock_changes(launch, checkout):
    folder, unmet = checkout.parent, {"FAKE_SATISFIED": "1", "script": checkout}
    done, notes = launch("setup", **unmet)
    assert done.returncode == 0, done.stderr
    pip = "OMP_NUM_THREADS=1 -m pip --disable-pip-version-check install --quiet"
    assert notes.splitlines() == [
        f"OMP_NUM_THREADS=1 -m venv --clear {folder}/.venv",
        f"{pip} -r {folder}/requirements.lock",
        f"{pip} --no-deps --no-build-isolation -e {folder}",
    ]
    assert launch("setup", **unmet)[1] == ""
    with (folder / "requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert len(launch("setup", **unmet)[1].splitlines()) == 3


def test_a_set_up_that_failed_is_done_again(launch, checkout):
    unmet = {"FAKE_SATISFIED": "1", "script": checkout}
    done, notes = launch("setup", FAKE_BROKEN="requirements.lock", **unmet)
    assert done.returncode == 7 and "launch.sh: cannot install requirements.lock" in done.stderr
    assert len(launch("setup", **unmet)[1].splitlines()) == 3


def test_torch_comes_first_and_from_the_index_that_is_asked_for(launch, checkout):
    index = {"WIDEEP_TORCH_INDEX": "https://torch.example/cpu", "FAKE_SATISFIED": "1"}
    _, notes = launch("setup", script=checkout, **index)
    line = notes.splitlines()[1]
    assert " --index-url https://torch.example/cpu torch==" in line and " -r " not in line


def test_no_python_is_said(launch, checkout):
    done, notes = launch("ranks=2", script=checkout, FAKE_SATISFIED="1", FAKE_TOO_OLD="1")
    assert (done.returncode, notes) == (7, "")
    assert "launch.sh: needs Python 3.11 or later" in done.stderr


RANK = """
import os, signal, sys
from pathlib import Path
rank, what = os.environ["RANK"], sys.argv[1]
if rank == "0" and what.isdigit():
    Path(os.environ["WIDEEP_STATUS_FILE"]).write_text(what)
    sys.exit(int(what))
if rank == "1" and what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [("3", 3, ""), ("kill", 6, "wideep: rank 1: killed by SIGKILL\n")],
)
def test_torchrun_returns_the_status_of_rank_0(tmp_path, what, status, said):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "moe.torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
            script,
            what,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)
