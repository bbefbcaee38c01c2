"""A headless Chromium: what a page looks like to it, and what it complains about."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
WHY_NOT = "" if FOUND else "no chromium: apt-get install chromium"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--enable-logging=stderr", "--virtual-time-budget=5000"),
)


def chromium(page: Path, *flags: str) -> tuple[str, list[str]]:
    """What it prints for a page, and the lines of the page's console."""
    done = subprocess.run(
        [FOUND, *FLAGS, f"--user-data-dir={page.parent}/profile", *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, re.findall(r":CONSOLE[:(].*", done.stderr)
