"""A claim as its file writes it, checked field by field; nothing is worked out here.

id, row      the name, and where the list of claims has it
claim        the statement in our words
source       article, paper, address
says         the figure it gives, with a unit: 240 rounds
relation     how the figure that is found must stand to it: equals, at least, at most, ...
tolerance    how far off still counts: 0, 2 %, 0.5 TB, or an expression of the claim's names
inputs       named numbers with units; `unknown` where nobody has published one
settings     named cases, each with other values of inputs or of the model
formula      a name of the registry, or arithmetic with `expression` or `steps`
run          runs of the emulator that decide it, and the expression of what they counted
verdict      as recorded: holds, fails, depends, not checkable
turns_on     what a verdict of depends turns on
why          one sentence
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comm.analytic.expressions import BUILT_IN, Expression, ExpressionError, nearest
from comm.analytic.formulas import FORMULAS
from comm.analytic.quantity import Quantity, QuantityError, parse

VERDICTS = ("holds", "fails", "depends", "not checkable")
RELATIONS = ("equals", "at least", "at most", "more than", "less than")
ARITHMETIC, UNKNOWN = "arithmetic", "unknown"
NEEDED = ("id", "claim", "source", "says", "verdict", "why")
FIELDS = (
    *NEEDED,
    *("row", "relation", "tolerance", "inputs", "settings", "model", "hardware", "formula"),
    *("expression", "steps", "run", "turns_on"),
)
STRUCTURED = ("inputs", "settings", "steps", "run")
ID = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
DOTTED = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*)*")
TABLES = ("model", "hardware")


class ClaimError(ValueError):
    """A claim that cannot be read or worked out; one line that begins with its id."""


# A number, a word that a formula asks for, or None: nobody has published it.
Input = Quantity | str | None


@dataclass(frozen=True)
class RunPlan:
    """commands: for each name, the words of one `wideep emulate`; counted: of their figures"""

    commands: Mapping[str, tuple[str, ...]]
    counted: Expression


@dataclass(frozen=True)
class Claim:
    """One claim; see the head of this file.

    said, allowed: figure and tolerance as written
    steps: (name, expression), the last one is the figure; a named formula is one call
    tolerance: a share of `says` (of a text with %), a number in its unit, or an expression
    """

    id: str
    row: str
    claim: str
    source: str
    says: Quantity
    said: str
    relation: str
    tolerance: Quantity | Expression
    relative: bool
    allowed: str
    inputs: Mapping[str, Input]
    settings: Mapping[str, Mapping[str, Input]]
    model: str | None
    hardware: str | None
    formula: str
    steps: tuple[tuple[str, Expression], ...]
    run: RunPlan | None
    verdict: str
    turns_on: str
    why: str


def read_claim(entry: Any, shared: Mapping[str, Any] | None = None) -> Claim:
    """A claim from what YAML made of it; raises ClaimError.

    shared: fields that the whole file gives, such as its source; the claim's own win
    """
    if not isinstance(entry, Mapping):
        raise ClaimError(f"{reprlib.repr(entry)}: a claim is a list of fields, id first")
    name = entry.get("id")
    if not isinstance(name, str) or not ID.fullmatch(name):
        raise ClaimError(f"id={name}: must be a word of letters, digits and _")
    try:
        return _read({**(shared or {}), **entry})
    except (QuantityError, ExpressionError, _Wrong) as error:
        raise ClaimError(f"{name}: {' '.join(str(error).split())}") from error


class _Wrong(ValueError):
    """What is wrong with a field, without the id of the claim."""


def _read(entry: Mapping[str, Any]) -> Claim:
    for field in entry:
        if field not in FIELDS:
            raise _Wrong(f"{field}: no such field{nearest(str(field), FIELDS)}")
        if field not in STRUCTURED and isinstance(entry[field], list | dict):
            raise _Wrong(f"{field}={reprlib.repr(entry[field])}: must be a text or a number")
    if missing := [field for field in NEEDED if entry.get(field) in (None, "")]:
        hint = f" (verdict is one of {', '.join(VERDICTS)})" if "verdict" in missing else ""
        are = "are" if len(missing) > 1 else "is"
        raise _Wrong(f"{', '.join(missing)}: {are} missing{hint}")
    verdict = _one_of("verdict", entry["verdict"], VERDICTS)
    settings = _settings(entry.get("settings"))
    turns_on = str(entry.get("turns_on") or "")
    if verdict == "depends" and (not turns_on or len(settings) < 2):
        raise _Wrong("verdict=depends: needs turns_on, and two settings or more that differ in it")
    formula, steps = _steps(entry)
    tolerance, relative = _tolerance(entry.get("tolerance", 0))
    return Claim(
        id=entry["id"],
        row=str(entry.get("row") or ""),
        claim=_words(entry["claim"]),
        source=_words(entry["source"]),
        says=_quantity("says", entry["says"]),
        said=_words(entry["says"]),
        relation=_one_of("relation", entry.get("relation", "equals"), RELATIONS),
        tolerance=tolerance,
        relative=relative,
        allowed=_words(entry.get("tolerance", 0)),
        inputs=_inputs("inputs", entry.get("inputs")),
        settings=settings,
        model=_optional_word("model", entry.get("model")),
        hardware=_optional_word("hardware", entry.get("hardware")),
        formula=formula,
        steps=steps,
        run=_run(entry.get("run")),
        verdict=verdict,
        turns_on=turns_on,
        why=_words(entry["why"]),
    )


def _words(text: object) -> str:
    return " ".join(str(text).split())


def _one_of(field: str, value: object, known: tuple[str, ...]) -> str:
    if value not in known:
        choices = ", ".join(known)
        raise _Wrong(f"{field}={value}: choose {choices}{nearest(str(value), known)}")
    return str(value)


def _optional_word(field: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not NAME.fullmatch(value)):
        raise _Wrong(f"{field}={value}: must be the name of a file of conf/{field}/")
    return value


def _quantity(field: str, value: object) -> Quantity:
    if isinstance(value, list | dict):
        raise _Wrong(f"{field}={reprlib.repr(value)}: must be a number with a unit")
    try:
        return parse(value)
    except QuantityError as error:
        raise _Wrong(f"{field}={value}: {error}") from error


def read_input(field: str, value: object) -> Input:
    """A number with its unit, a word, the name of a field (h100_sxm.memory_GB), or `unknown`."""
    if isinstance(value, str) and value.strip() == UNKNOWN:
        return None
    if isinstance(value, str) and DOTTED.fullmatch(value.strip()):
        return value.strip()
    return _quantity(field, value)


def _inputs(field: str, entries: object) -> dict[str, Input]:
    """Of a claim: plain names."""
    inputs = _named(field, entries)
    for name in inputs:
        if not NAME.fullmatch(name) or name in TABLES or name in BUILT_IN:
            raise _Wrong(f"{field}.{name}: cannot be a name; take letters, digits and _")
    return inputs


def _named(field: str, entries: object) -> dict[str, Input]:
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        raise _Wrong(f"{field}: must be names with values, as in 'memory: 141 GB'")
    return {str(name): read_input(f"{field}.{name}", value) for name, value in entries.items()}


def _settings(entries: object) -> dict[str, dict[str, Input]]:
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        raise _Wrong("settings: must be names, each with the inputs that differ in it")
    return {str(name): _named(f"settings.{name}", values) for name, values in entries.items()}


def _read_expression(text: object) -> Expression:
    """Arithmetic that calls only formulas that there are."""
    expression = Expression.read(text)
    for called in expression.formulas:
        if called not in FORMULAS:
            raise _Wrong(f"{called}: no such formula{nearest(called, (*FORMULAS, *BUILT_IN))}")
    return expression


def _steps(entry: Mapping[str, Any]) -> tuple[str, tuple[tuple[str, Expression], ...]]:
    """The formula's name, and its arithmetic: a named formula is a call without arguments."""
    name, expression, steps = (entry.get(field) for field in ("formula", "expression", "steps"))
    if name is None:
        raise _Wrong("formula: is missing; name one of the registry, or arithmetic")
    if name != ARITHMETIC:
        known = (*FORMULAS, ARITHMETIC)
        if name not in FORMULAS:
            raise _Wrong(f"formula={name}: no such formula{nearest(str(name), known)}")
        if expression is not None or steps is not None:
            raise _Wrong(f"formula={name}: an expression belongs to formula=arithmetic")
        return name, ((name, Expression.read(f"{name}()")),)
    if (expression is None) == (steps is None):
        raise _Wrong("formula=arithmetic: needs either an expression or steps")
    if expression is not None:
        return name, (("figure", _read_expression(expression)),)
    if not isinstance(steps, Mapping) or not steps:
        raise _Wrong("steps: must be names with expressions, the last one is the figure")
    for step in steps:
        if not NAME.fullmatch(str(step)):
            raise _Wrong(f"steps.{step}: cannot be a name; take letters, digits and _")
    return name, tuple((str(step), _read_expression(text)) for step, text in steps.items())


def _tolerance(value: object) -> tuple[Quantity | Expression, bool]:
    try:
        tolerance = parse(value)
    except QuantityError as error:
        if not isinstance(value, str):
            raise _Wrong(f"tolerance={value}: {error}") from error
        return _read_expression(value), False
    if tolerance.value < 0:
        raise _Wrong(f"tolerance={value}: must not be negative")
    return tolerance, tolerance.unit == "%"


def _run(entry: object) -> RunPlan | None:
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or set(entry) != {"commands", "counted"}:
        raise _Wrong("run: needs commands, names with the words of a run, and counted")
    commands = entry["commands"]
    if not isinstance(commands, Mapping) or not commands:
        raise _Wrong("run.commands: must be names with the words of a run")
    for name in commands:
        if not NAME.fullmatch(str(name)):
            raise _Wrong(f"run.commands.{name}: cannot be a name; take letters, digits and _")
    words = {str(name): tuple(str(text).split()) for name, text in commands.items()}
    return RunPlan(words, _read_expression(entry["counted"]))
