"""A printed page taken apart again: its lines, its notes, and the rows of its table."""

from __future__ import annotations

import itertools
import re
from typing import Any

from report_samples import sample

from comm.report.answer import LABEL
from comm.report.console import page
from comm.report.layout import plain_text

# Phases of the table's last rows, which are in no sum.
ONLY_BESIDE = ("rebalance", "grad_sync")


def text_of(record: dict[str, Any]) -> list[str]:
    return [plain_text(spans) for spans in page(record)]


def table_rows(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Words of the column line, and each row of the table as words, labels included."""
    lines = text_of(record)
    start = next(i for i, text in enumerate(lines) if text.startswith("BY LAYER"))
    rules = [i for i, text in enumerate(lines) if i > start and set(text.strip()) == {"-"}][:2]
    end = next(i for i, text in enumerate(lines) if text.startswith("  network  "))
    rows = [
        text.split() for i, text in enumerate(lines[rules[0] : end], rules[0]) if i not in rules
    ]
    return lines[start + 3].split(), rows


def number(cell: str) -> float:
    return 0.0 if cell == "-" else float(cell.replace(",", "").removeprefix("<"))


def joined(record: dict[str, Any]) -> str:
    """The page as one line, wrapped sentences put together again."""
    return " ".join(" ".join(text_of(record)).split())


def note(name: str, label: str) -> str:
    """A note of the page of a sample, without its label; "" where it has none."""
    lines = text_of(sample(name))
    starts = [i for i, text in enumerate(lines) if re.match(rf"[ !] {label} ", text)]
    if not starts:
        return ""
    rest = itertools.takewhile(lambda text: text[:LABEL].isspace(), lines[starts[0] + 1 :])
    return " ".join(" ".join([lines[starts[0]][LABEL:], *rest]).split())
