"""job=predict: the traffic of a run at any size and the least time it takes; no rank is started."""

from __future__ import annotations

import os

from comm.analytic.conventions import NCCL_TESTS_NOTE
from comm.report.console import WIDTH, print_lines
from comm.report.predict_page import page
from moe.prediction import predict
from moe.settings import Config, ConfigError
from moe.version import VERSION


def launch(config: Config) -> int:
    """Print the page; always 0."""
    try:
        figures = predict(config).as_dict()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print_lines(page(figures, VERSION, NCCL_TESTS_NOTE.partition(": ")[2], WIDTH))
    return 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank prints, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0
