"""Memory that this process may still take: of the machine, and of every control group around it.

Inside a container or a batch job the kernel ends who takes more than the group may have, however
much the machine still has.
"""

from __future__ import annotations

from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")


def free_bytes(own: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> int:
    """Bytes. own: says in which group this process is; groups: where the groups are mounted"""
    free = psutil.virtual_memory().available
    try:
        name = own.read_text(encoding="utf-8").rpartition("0::")[2].strip().strip("/")
    except OSError:  # no control groups here
        return free
    folder = groups / name
    for group in (folder, *folder.parents):
        if not group.is_relative_to(groups):
            break
        free = min(free, _left(group, free))
    return free


def _left(group: Path, free: int) -> int:
    """What a group still may take; `free` where it has no limit."""
    try:
        limit = int((group / "memory.max").read_text())  # or "max", or no such file
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(stat["inactive_file"]) + int(stat["active_file"])  # given up when needed
    except (OSError, ValueError, KeyError):
        return free
    return limit - used + cache
