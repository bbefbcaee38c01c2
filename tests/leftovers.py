"""What tests look for after a run: names that stay in /dev/shm."""

import os
import time

SHARED_MEMORY = "/dev/shm"
PATIENCE_S = 20.0


def shared_names() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def stays(before: set[str]) -> set[str]:
    """Names that came since `before` and do not go: other tests, run at the same time, have some
    of their own for a moment."""
    deadline = time.monotonic() + PATIENCE_S
    left = shared_names() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= shared_names()
    return left
