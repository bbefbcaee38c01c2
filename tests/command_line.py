"""The program, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def wideep(folder: Path, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a job in a folder; what it returned and printed."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, "-m", "moe", *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
