"""job=compare: two results side by side; no ranks are started."""

from __future__ import annotations

import os

from comm.report.compare_page import compare_page
from comm.report.console import WIDTH, print_lines
from comm.report.store import read_record
from moe.settings import Config, ConfigError


def launch(config: Config) -> int:
    """Print the page; always 0: that two runs differ is no failure."""
    records = []
    for name in ("a", "b"):
        folder = str(getattr(config, name))
        try:
            records.append({**read_record(folder), "result_dir": folder})
        except ValueError as error:
            raise ConfigError(str(error).replace("result=", f"{name}=", 1)) from error
    print_lines(compare_page(*records, WIDTH))
    return 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank prints, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0
