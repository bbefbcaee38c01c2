"""Outcomes of claims as plain dictionaries of words, for pages: nothing is worked out here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from comm.analytic.quantity import Quantity, in_unit, show
from comm.claims.changes import Change
from comm.claims.form import Claim
from comm.claims.judge import COUNTED, Case, Outcome
from comm.claims.scope import Line

RELATION_WORDS = {
    "equals": "",
    "at least": ">= ",
    "at most": "<= ",
    "more than": "> ",
    "less than": "< ",
}


def outcome_words(outcome: Outcome, changes: Mapping[str, Iterable[Change]]) -> dict[str, Any]:
    """Everything that a page shows of a claim.

    changes: setting -> what would turn it, where that was asked
    """
    claim = outcome.claim
    return {
        "id": claim.id,
        "row": claim.row,
        "claim": claim.claim,
        "source": claim.source,
        "said": RELATION_WORDS[claim.relation] + claim.said,
        "formula": claim.formula,
        "inputs": {name: _input(value) for name, value in claim.inputs.items()},
        "about": {"model": claim.model, "hardware": claim.hardware},
        "cases": [_case(claim, case, changes.get(case.setting, ())) for case in outcome.cases],
        "verdict": outcome.verdict,
        "recorded": claim.verdict,
        "differs": outcome.differs,
        "turns_on": claim.turns_on,
        "why": claim.why,
    }


def _input(value: Quantity | str | None) -> str:
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else show(value, value.unit, 6)


def _case(claim: Claim, case: Case, changes: Iterable[Change]) -> dict[str, Any]:
    return {
        "setting": case.label,
        "counted": case.setting == COUNTED,
        "found": f"{case.unknown} is unknown" if case.found is None else found(claim, case.found),
        "value": None if case.found is None else case.found.value,
        "holds": case.holds,
        "test": _test(claim, case),
        "lines": [_line(line) for line in case.lines],
        "changes": [_change(change) for change in changes],
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "name": line.name,
        "how": line.how,
        "inner": list(line.inner),
        "numbers": line.numbers,
        "result": show(line.found),
    }


def _change(change: Change) -> dict[str, Any]:
    unit = change.value.unit or change.value.noun
    return {
        "name": change.name,
        "value": show(change.value, unit),
        "turns_at": show(change.turns_at, unit),
        "holds": change.holds,
    }


def found(claim: Claim, figure: Quantity) -> str:
    """In the unit of what is said, or in one that fits where that would be far off.

    With as many digits as were said, four at least.
    """
    digits = max(4, len(re.sub(r"\D", "", claim.said.split()[0].partition("e")[0])))
    number = abs(in_unit(figure, claim.says.unit))
    far = not 0.1 <= number < 1e5 and figure.value and not claim.says.is_plain
    return show(figure, "" if far else claim.says.unit, digits)


def _test(claim: Claim, case: Case) -> str:
    """The comparison: found 184 rounds, said 240 rounds, tolerance 0: fails."""
    if case.found is None:
        return f"needs {case.unknown}, which nobody has published"
    room = ""
    if case.slack or claim.relation == "equals":
        slack = Quantity(case.slack, case.found.bytes, case.found.seconds)
        unit = claim.says.unit
        shown = show(slack, unit) if case.slack else "0"
        written = "" if claim.allowed.replace(" ", "") == shown.replace(" ", "") else claim.allowed
        room = f", tolerance {shown}" + (f" ({written})" if written and case.slack else "")
    answer = "holds" if case.holds else "fails"
    said = RELATION_WORDS[claim.relation] + claim.said
    return f"found {found(claim, case.found)}, said {said}{room}: {answer}"
