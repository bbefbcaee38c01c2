"""The page of job=claims: one table of all claims, or one claim with the steps of its figure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from comm.report.answer import LABEL, labelled_facts
from comm.report.layout import Line, labelled, line, paragraph, title, wrap

Outcome = Mapping[str, Any]

HEADER = ("claim", "said", "found", "verdict", "why")
COLUMNS = (18, 12, 19, 13, 28)  # two blanks between them, two before the first: 100 in all
STYLES = {"holds": "green", "fails": "red", "depends": "yellow", "not checkable": "yellow"}
MOST_CHANGES = 4  # for each setting: the nearest ones
HOLDS = {True: "holds", False: "fails", None: "unknown"}
DIFFERS = "! "  # before a verdict that is another one than recorded


def claims_page(outcomes: Sequence[Outcome], width: int) -> list[Line]:
    """The table of all claims and what it comes to."""
    lines = title(
        "CLAIMS", "wideep claims id=NAME shows one with the steps of its arithmetic", width
    )
    lines += _table_lines([HEADER], "bold")
    lines.append(line("  " + "-" * (width - 2), "dim"))
    for outcome in outcomes:
        lines += _row(outcome)
    return [*lines, line(), *_summary(outcomes, width)]


def _row(outcome: Outcome) -> list[Line]:
    """One claim: each cell wrapped in its column."""
    row, cases = f"{outcome['row']} " if outcome["row"] else "", outcome["cases"]
    verdict = outcome["verdict"]
    if outcome["differs"]:
        verdict = f"{DIFFERS}{verdict}, recorded: {outcome['recorded']}"
    cells = (row + outcome["id"], outcome["said"], "", verdict, outcome["why"])
    found = list(_found(sorted(cases, key=lambda case: case["value"] or 0)))
    style = "bold red" if outcome["differs"] else STYLES[outcome["verdict"]]
    return _table_lines([cells], "", found, style)


def _found(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The figures, from the least to the largest; apart where settings decide differently, and what
    a run has counted."""
    split = len({case["holds"] for case in cases}) > 1
    for holds in (True, False, None):
        mark = f": {HOLDS[holds]}" if split else ""
        alike = [case for case in cases if case["holds"] is holds]
        figures = [case["found"] for case in alike if not case["counted"]]
        if figures:
            yield _range(figures) + mark
        yield from (f"run: {case['found']}{mark}" for case in alike if case["counted"])


def _range(figures: Sequence[str]) -> str:
    """7.408 to 11.06 TB; in the order of the cases, which are sorted by their figures."""
    first, last = figures[0], figures[-1]
    if first == last:
        return first
    number, _, unit = first.partition(" ")
    return f"{number} to {last}" if last.endswith(f" {unit}") else f"{first} to {last}"


def _table_lines(
    rows: Sequence[Sequence[str]], style: str, found: Sequence[str] = (), verdict_style: str = ""
) -> list[Line]:
    """Rows whose cells are wrapped; `found` takes the place of the third cell, one entry a line."""
    lines = []
    for cells in rows:
        parts = [_wrapped(cell, size) for cell, size in zip(cells, COLUMNS, strict=True)]
        if found:
            parts[2] = [part for entry in found for part in _wrapped(entry, COLUMNS[2])]
        for at in zip_longest(*parts, fillvalue=""):
            spans = [("  ", "")]
            for i, (part, size) in enumerate(zip(at, COLUMNS, strict=True)):
                gap = "" if i == len(at) - 1 else "  "
                spans.append((f"{part:<{size}}{gap}", verdict_style if i == 3 else style))
            lines.append(tuple(spans))
    return lines


def _wrapped(text: str, size: int) -> list[str]:
    """Broken at blanks, and names at an underscore."""
    lines, now = [], ""
    for word in text.split(" "):
        for i, piece in enumerate(re.split(r"(?<=_)", word)):
            gap = " " if now and i == 0 else ""
            if now and len(now + gap + piece) > size:
                lines.append(now)
                now, gap = "", ""
            now += gap + piece
    return [part for one in [*lines, now] for part in wrap(one, size) or [""]]


def _summary(outcomes: Sequence[Outcome], width: int) -> list[Line]:
    counts = Counter(outcome["verdict"] for outcome in outcomes)
    told = ", ".join(f"{counts[name]} {name}" for name in STYLES if counts[name])
    wrong = [outcome["id"] for outcome in outcomes if outcome["differs"]]
    lines = labelled("VERDICTS", f"{len(outcomes)} claims: {told}", width, LABEL, "bold")
    words = "every verdict is the recorded one (status 0)"
    if wrong:
        words = f"another verdict than recorded (status 3): {', '.join(wrong)}"
    return lines + labelled("  recorded", words, width, LABEL, "bold" if wrong else "")


def claim_page(outcome: Outcome, width: int) -> list[Line]:
    """One claim in full."""
    row = f", row {outcome['row']}" if outcome["row"] else ""
    lines = title("CLAIM", outcome["id"] + row, width)
    facts = {"statement": outcome["claim"], "source": outcome["source"], "said": outcome["said"]}
    facts |= {name: value for name, value in outcome["about"].items() if value}
    if outcome["inputs"]:
        facts["inputs"] = ", ".join(f"{name} {text}" for name, text in outcome["inputs"].items())
    lines += labelled_facts(facts | {"formula": outcome["formula"]}, width)
    shown: set[tuple[str, str]] = set()
    for case in outcome["cases"]:
        lines += _case_lines(case, shown, width)
        shown |= {(step["name"], step["numbers"]) for step in case["lines"]}
    return [*lines, line(), *_verdict_lines(outcome, width)]


def _case_lines(case: Mapping[str, Any], shown: set[tuple[str, str]], width: int) -> list[Line]:
    """The steps of one setting, but for those that are the same as in one before it."""
    again = sum((step["name"], step["numbers"]) in shown for step in case["lines"])
    remark = f" ({again} step{'s' * (again > 1)} as above)" if again else ""
    lines = title("STEPS", (case["setting"] or "of the arithmetic") + remark, width)
    for step in case["lines"]:
        if (step["name"], step["numbers"]) in shown:
            continue
        lines += paragraph(f"{step['name']} = {step['how']}", width)
        for inner in step["inner"]:
            lines += paragraph(inner, width, indent=10)
        if step["numbers"] not in (step["how"], step["result"]):
            lines += paragraph(f"= {step['numbers']}", width, indent=6)
        lines += paragraph(f"= {step['result']}", width, indent=6)
    lines += paragraph(case["test"], width, style="bold")
    turns = [
        f"with {change['name']} {change['turns_at']} instead of {change['value']}"
        for change in case["changes"][:MOST_CHANGES]
    ]
    if turns:
        then = "would hold" if case["changes"][0]["holds"] else "would fail"
        lines += labelled(f"  {then}", "; or ".join(turns), width, LABEL)
    return lines


def _verdict_lines(outcome: Outcome, width: int) -> list[Line]:
    style = "bold red" if outcome["differs"] else "bold"
    recorded = f"recorded: {outcome['recorded']}"
    lines = labelled("VERDICT", f"{outcome['verdict']} ({recorded})", width, LABEL, style)
    settings = {
        "holds": [case["setting"] for case in outcome["cases"] if case["holds"]],
        "fails": [case["setting"] for case in outcome["cases"] if case["holds"] is False],
    }
    facts = {"why": outcome["why"]}
    if outcome["verdict"] == "depends":
        facts |= {name: "; ".join(named) for name, named in settings.items()}
    if outcome["turns_on"]:
        facts["turns on"] = outcome["turns_on"]
    return lines + labelled_facts(facts, width)
