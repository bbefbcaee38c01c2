#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one: tests/gpu.sh [pytest arguments]
#
#   PYTHON   an interpreter with torch built for CUDA and pytest (default: python3)
#
# Says what the machine lacks, then runs the tests marked `gpu`. Status 7 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
  echo "gpu.sh: torch sees no GPU here" >&2
  exit 7
fi
"$python" -m moe doctor device=cuda ranks="$gpus"
"$python" -m moe doctor device=cuda backend=gloo ranks=4
exec "$python" -m pytest -m gpu -v "$@"
