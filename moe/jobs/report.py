"""job=report: write report.html of a result, or of what a killed run left; no rank is started."""

from __future__ import annotations

import os
from pathlib import Path

from comm.report.answer import LABEL
from comm.report.console import WIDTH, print_lines
from comm.report.layout import labelled
from comm.report.page.charts import library_is_there
from comm.report.page.document import write_page
from comm.report.units import format_bytes
from moe.settings import Config, ConfigError, UnfitError


def launch(config: Config) -> int:
    """Write the page and say where it is; 0, whatever the run itself came to."""
    if config.result is None:
        raise ConfigError("job=report: needs result=DIR, the folder of a result")
    folder = Path(config.result)
    if folder.name == "run.json":
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"result={config.result}: is no folder{_near(folder)}")
    if not library_is_there():
        raise UnfitError("report.html needs matplotlib: pip install 'wideep[plots]'")
    try:
        written = write_page(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    what = "" if (folder / "run.json").exists() else "; the run did not finish: what it had counted"
    text = f"{written}, {format_bytes(written.stat().st_size)}{what}"
    print_lines(labelled("REPORT", text, WIDTH, LABEL, "bold"))
    return 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank writes, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0


def _near(folder: Path) -> str:
    """The newest result beside where none is, for who forgot its name."""
    beside = folder.parent if folder.parent.is_dir() else Path("results")
    results = [path.parent for path in beside.glob("*/events.rank0.jsonl")]
    newest = max(results, key=lambda path: path.stat().st_mtime, default=None)
    return f"; nearest: result={newest}" if newest else ""
