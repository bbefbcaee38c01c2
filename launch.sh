#!/usr/bin/env bash
# Sets up what WideEP needs, then runs it; from any folder, on Linux and macOS.
#
#   ./launch.sh [job] [key=value ...]     run a job (default: emulate) on ranks=8 processes here
#   ./launch.sh nodes=2x4 [rate=1gbit] [key=value ...]
#                                         2 nodes of 4 ranks here, each a network namespace with a
#                                         link of its own (Linux; see docs/nodes.md)
#   sbatch launch.sh [job] [key=value ...]     in Slurm; srun, too
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./launch.sh [job] [key=value ...]
#                                         on each of several machines; or RDZV_ENDPOINT=host:port
#   ./launch.sh test [pytest arguments]   run the tests
#   ./launch.sh setup                     set up, and nothing else
#   ./launch.sh --help                    this text, the jobs and the keys
#
# An active virtual or conda environment that has what pyproject.toml asks for is used as it is.
# Otherwise .venv is made beside this file, once, with the versions of requirements.lock.
#
#   PYTHON               the interpreter to make .venv from (default: the first one of 3.11 or later)
#   WIDEEP_TORCH_INDEX   where torch comes from, e.g. https://download.pytorch.org/whl/cpu for the
#                        build without CUDA, which is much smaller on Linux
#
# The exit status is the run's own (see --help); 7 when the set-up fails.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
if [ ! -e "$root/pyproject.toml" ] && [ -n "${SLURM_JOB_ID:-}" ]; then # sbatch runs a copy
  root=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\(.*\)\/launch\.sh.*/\1/p')
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

fail() {
  echo "launch.sh: $1" >&2
  exit 7
}

find_python() { # prints the first interpreter that is new enough
  local candidates=(python3 python3.14 python3.13 python3.12 python3.11 python) candidate
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "needs Python 3.11 or later, found none as ${candidates[*]}; set PYTHON to one"
}

satisfied() { # whether interpreter $1 has what pyproject.toml asks for
  "$1" - "$root/pyproject.toml" 2> /dev/null << 'END'
import sys, tomllib
from importlib.metadata import version
from packaging.requirements import Requirement
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for line in project["dependencies"] + project["optional-dependencies"]["test"]:
    wanted = Requirement(line)
    assert wanted.specifier.contains(version(wanted.name), prereleases=True), line
END
}

set_up() { # leaves the interpreter to use in $python
  local active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" stamp="$root/.venv/ready" wanted base
  python="$active/bin/python"
  if [ -n "$active" ] && satisfied "$python"; then return; fi
  python="$root/.venv/bin/python"
  wanted="$root $(cat "$root/requirements.lock" "$root/pyproject.toml" | cksum)"
  if [ -x "$python" ] && [ "$(cat "$stamp" 2> /dev/null)" = "$wanted" ]; then return; fi
  base=$(find_python)
  echo "launch.sh: setting up $root/.venv, once; this takes a minute or more" >&2
  "$base" -m venv --clear "$root/.venv" || fail "cannot make .venv with $base"
  local install=("$python" -m pip --disable-pip-version-check install --quiet)
  if [ -n "${WIDEEP_TORCH_INDEX:-}" ]; then
    "${install[@]}" --index-url "$WIDEEP_TORCH_INDEX" "$(grep '^torch==' "$root/requirements.lock")" ||
      fail "cannot install torch from WIDEEP_TORCH_INDEX=$WIDEEP_TORCH_INDEX"
  fi
  "${install[@]}" -r "$root/requirements.lock" || fail "cannot install requirements.lock"
  "${install[@]}" --no-deps --no-build-isolation -e "$root" || fail "cannot install WideEP itself"
  echo "$wanted" > "$stamp" # last, so that an interrupted set-up is done again
}

several_machines() { # whether the surroundings say that there are more than this one
  [ -n "${NNODES:-}${PET_NNODES:-}${RDZV_ENDPOINT:-}${SLURM_JOB_ID:-}" ]
}

run_job() {
  local word ranks=8 job=emulate
  for word in "$@"; do
    case $word in
      ranks=null) ranks=8 ;;
      ranks=*) ranks=${word#ranks=} ;;
      nodes=* | rate=*) exec "$python" -m moe.nodes "$@" ;;
      job=*) job=${word#job=} ;;
    esac
  done
  case ${1:-} in *=*) ;; ?*) job=$1 ;; esac
  case "$job" in sweep | compare | export | report) exec "$python" -m moe "$@" ;; esac # one machine's
  if [ "$job" != predict ] && several_machines; then exec "$python" -m moe.machines "$@"; fi
  "$python" -m moe --check "$@" || exit # with the status of the check, before any rank starts
  # Forked ranks share one torch: quicker to come, for bench, and the only way to have many here.
  case "$job" in bench | predict | doctor) exec "$python" -m moe "$@" ;; esac
  if [ "$ranks" -gt 16 ]; then exec "$python" -m moe "$@"; fi
  exec "$python" -m moe.torchrun --standalone --nproc-per-node "$ranks" -m moe "$@"
}

case ${1:-} in
  -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
    echo
    python=$(find_python)
    exec "$python" -m moe --help
    ;;
  -*)
    set_up
    exec "$python" -m moe "$@"
    ;;
  setup) set_up ;;
  test)
    set_up
    shift
    cd "$root"
    # All tests: two workers, each with files of its own, for many tests wait more than they compute.
    # In the order of their names: by number of tests, long files of few tests would come last.
    [ $# -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder
    exec "$python" -m pytest "$@"
    ;;
  *)
    set_up
    run_job "$@"
    ;;
esac
