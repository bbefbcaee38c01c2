"""Works claims out: figures from formulas, verdicts from figures. Pure; nothing is read or run.

    claim x settings --> a case each: steps, figure, does it hold?  --> verdict --> as recorded?

    holds          in every setting the figure stands to `says` as the relation asks
    fails          in none
    depends        in some
    not checkable  a number that the formula needs is unknown

A run of the emulator, where there was one, is one more case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from comm.analytic.expressions import BUILT_IN, Expression, ExpressionError, Value, nearest
from comm.analytic.formulas import FORMULAS, Parameter, Step
from comm.analytic.quantity import Quantity, QuantityError, dimension_words, scaled, show
from comm.claim_form import TABLES, Claim, ClaimError, Input

__all__ = ["ClaimError", "World", "evaluate", "with_run"]

COUNTED = "counted by a run"
ROUNDING = 1e-9  # of floating point, relative
SUFFIXES: Mapping[str, tuple[float, int, int]] = {  # units in names of fields
    "_GB": (1e9, 1, 0),
    "_MiB": (2**20, 1, 0),
    "_GBps": (1e9, 1, -1),
    "_us": (1e-6, 0, 1),
    "_bytes": (1, 1, 0),  # of what a run has counted
}
Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class World:
    """What claims may refer to by name.

    tables: fields by the name of a model or a part of hardware
    given: values from the command line, in the place of those of the files
    silent: only figures are wanted, and no lines that tell how they came about
    """

    tables: Tables
    given: Mapping[str, Input] = field(default_factory=dict)
    silent: bool = False


@dataclass(frozen=True)
class Line:
    """A step as it is shown: a name, the arithmetic, the same with numbers, the result.

    inner: the steps of the formulas that it calls
    """

    name: str
    how: str
    inner: tuple[str, ...]
    numbers: str
    found: Quantity


@dataclass(frozen=True)
class Case:
    """A claim in one setting.

    label: the setting, and what the command line has changed in it
    found: the figure; None where it cannot be known, then `unknown` says which number is missing
    slack: how far from `says` it may lie
    """

    setting: str
    label: str
    found: Quantity | None
    slack: float
    holds: bool | None
    lines: tuple[Line, ...] = ()
    unknown: str = ""
    margin: float = 0  # found - said


@dataclass(frozen=True)
class Outcome:
    """A claim with what was found."""

    claim: Claim
    cases: tuple[Case, ...]

    @property
    def verdict(self) -> str:
        """Computed from the cases alone."""
        held = {case.holds for case in self.cases}
        if None in held:
            return "not checkable"
        return "depends" if len(held) > 1 else "holds" if held == {True} else "fails"

    @property
    def differs(self) -> bool:
        """Whether the verdict is another one than recorded."""
        return self.verdict != self.claim.verdict


class Unknown(Exception):
    """A number that nobody has published; the text is its name."""


def evaluate(claim: Claim, world: World) -> Outcome:
    """Every setting of a claim; raises ClaimError in one line."""
    try:
        evaluated = [
            _evaluate_case(claim, world, name, values)
            for name, values in _settings(claim, world).items()
        ]
        cases = tuple(case for case, _ in evaluated)
        if not any(case.holds is None for case in cases):
            _refuse_unused(claim, set().union(*(names for _, names in evaluated)))
    except (ExpressionError, QuantityError, ValueError) as error:
        if isinstance(error, ClaimError):
            raise
        raise ClaimError(f"{claim.id}: {' '.join(str(error).split())}") from error
    return Outcome(claim, cases)


def with_run(outcome: Outcome, figures: Mapping[str, Mapping[str, float]]) -> Outcome:
    """The outcome with what runs have counted as one more case.

    figures: for each command of the claim's run, its figures by name
    """
    claim = outcome.claim
    assert claim.run is not None
    tables = {name: dict(values) for name, values in figures.items()}
    scope = _Scope(replace(claim, model=None, hardware=None), World(tables), {})
    try:
        found = scope.work(claim.run.counted)
        line = scope.told("counted", claim.run.counted, found)
        case = _judge(claim, COUNTED, COUNTED, found, scope, (line,))
    except (ExpressionError, QuantityError) as error:
        raise ClaimError(f"{claim.id}: run.counted: {error}") from error
    return replace(outcome, cases=(*outcome.cases, case))


def _settings(claim: Claim, world: World) -> dict[str, dict[str, Input]]:
    """Setting -> what differs in it; the command line wins over all. Checked for names."""
    known = set(claim.inputs)
    for name, values in claim.settings.items():
        for changed in values:
            if changed not in known and changed.partition(".")[0] not in {*TABLES, *world.tables}:
                raise ExpressionError(
                    f"settings.{name}.{changed}: no such input{nearest(changed, known)}"
                )
    return {
        name: {**claim.inputs, **values, **world.given}
        for name, values in (claim.settings or {"": {}}).items()
    }


def _evaluate_case(
    claim: Claim, world: World, setting: str, values: Mapping[str, Input]
) -> tuple[Case, set[str]]:
    scope = _Scope(claim, world, values)
    lines, found = [], None
    changed = [name for name in claim.settings.get(setting, {}) if name in world.given]
    label = ", with ".join(
        [setting, *(f"{name} {_written(world.given[name])}" for name in changed)]
    )
    try:
        for name, expression in claim.steps:
            found = scope.work(expression)
            if not world.silent:
                lines.append(scope.told(name, expression, found))
            scope.steps[name] = found
        assert found is not None
        case = _judge(claim, setting, label, found, scope, tuple(lines))
    except Unknown as missing:
        case = Case(setting, label, None, 0, None, tuple(lines), str(missing))
    return case, scope.used


def _written(value: Input) -> str:
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else show(value, value.unit)


def _judge(
    claim: Claim, setting: str, label: str, found: Quantity, scope: _Scope, lines: tuple[Line, ...]
) -> Case:
    if found.dimension != claim.says.dimension:
        raise QuantityError(
            f"says={show(claim.says, claim.says.unit)}: the formula gives"
            f" {dimension_words(found.dimension)}"
        )
    if isinstance(claim.tolerance, Expression):
        slack_found = claim.tolerance.evaluate(scope.lookup, scope.call)
        slack = slack_found.value
        dimension = slack_found.dimension
    elif claim.relative:
        slack, dimension = claim.tolerance.value * abs(claim.says.value), found.dimension
    else:
        slack, dimension = claim.tolerance.value, claim.tolerance.dimension
    if dimension != found.dimension and slack:
        raise QuantityError(f"tolerance: {dimension_words(dimension)}, and says is not")
    holds = compare(claim, found.value, slack)
    return Case(setting, label, found, slack, holds, lines, margin=found.value - claim.says.value)


def compare(claim: Claim, found: float, slack: float) -> bool:
    """Whether the figure stands to what is said as the relation asks."""
    said, room = claim.says.value, slack + ROUNDING * max(abs(found), abs(claim.says.value))
    return {
        "equals": abs(found - said) <= room,
        "at least": found >= said - room,
        "at most": found <= said + room,
        "more than": found > said + slack,
        "less than": found < said - slack,
    }[claim.relation]


def _refuse_unused(claim: Claim, used: set[str]) -> None:
    for name in claim.inputs:
        if name not in used:
            raise ExpressionError(f"inputs.{name}: nothing uses it")


class _Scope:
    """The names of one case: steps, inputs, fields of tables, formulas."""

    def __init__(self, claim: Claim, world: World, values: Mapping[str, Input]) -> None:
        self.claim, self.world, self.values = claim, world, values
        self.steps: dict[str, Quantity] = {}
        self.used: set[str] = set()
        self.inner: list[Step] = []

    def work(self, expression: Expression) -> Quantity:
        """The result of one step."""
        self.inner = []
        return expression.evaluate(self.lookup, self.call)

    def told(self, name: str, expression: Expression, found: Quantity) -> Line:
        """How the step before came about."""
        inner = [f"{one.name} = {one.how} = {show(one.quantity)}" for one in self.inner]
        numbers = expression.with_numbers(self.lookup, self.call)
        return Line(name, expression.text, tuple(dict.fromkeys(inner)), numbers, found)

    def lookup(self, name: str) -> Value:
        """The value of a name; raises Unknown or ExpressionError."""
        if name in self.steps:
            return self.steps[name]
        if name in self.values:
            self.used.add(name)
            return self._known(name, self.values[name])
        if "." not in name:
            known = (*self.steps, *self.claim.inputs)
            raise ExpressionError(f"{name}: no such input{nearest(name, known)}")
        table, _, path = name.partition(".")
        return self._known(name, self._field(name, table, path))

    def _known(self, name: str, value: Input) -> Value:
        if value is None:
            raise Unknown(name)
        if isinstance(value, str) and "." in value:
            return self.lookup(value)
        return value

    def _field(self, name: str, table: str, path: str) -> Input:
        """A field of a table; `model` and `hardware` are those that the claim is about."""
        chosen = table
        if table in TABLES:
            stated = self.values.get(table) or getattr(self.claim, table)
            if not isinstance(stated, str):
                raise ExpressionError(f"{name}: the claim names no {table}")
            if f"{stated}.{path}" in self.values:
                return self.values[f"{stated}.{path}"]
            chosen, self.used = stated, self.used | {table}
        elif getattr(self.claim, "model", None) == table and f"model.{path}" in self.values:
            return self.values[f"model.{path}"]
        tables = self.world.tables
        if chosen not in tables:
            raise ExpressionError(f"{chosen}: no such model or hardware{nearest(chosen, tables)}")
        value: Any = tables[chosen]
        for part in path.split("."):
            if value is None:  # a whole part of the model that nobody has described
                return None
            if not isinstance(value, Mapping) or part not in value:
                known = value if isinstance(value, Mapping) else ()
                raise ExpressionError(f"{name}: {chosen} has no such field{nearest(part, known)}")
            value = value[part]
        return _as_input(name, value)

    def call(self, name: str, arguments: dict[str, Value]) -> Quantity:
        """A formula of the registry; what is not passed comes from the inputs or the model."""
        if name not in FORMULAS:
            known = (*FORMULAS, *BUILT_IN)
            raise ExpressionError(f"{name}: no such formula{nearest(name, known)}")
        formula = FORMULAS[name]
        for given in arguments:
            if given not in formula.parameters:
                near = nearest(given, formula.parameters)
                raise ExpressionError(f"{name} has no parameter {given}{near}")
        values = {
            one: parameter.accept(one, self._argument(name, one, parameter, arguments))
            for one, parameter in formula.parameters.items()
        }
        steps = formula.steps(values)
        self.inner += steps
        return steps[-1].quantity

    def _argument(
        self, formula: str, name: str, parameter: Parameter, given: Mapping[str, Value]
    ) -> Value:
        if name in given:
            return given[name]
        if name in self.values or name in self.steps:
            return self.lookup(name)
        if parameter.field and (self.claim.model or "model" in self.values):
            return self.lookup(f"model.{parameter.field}")
        if parameter.default is not None:
            default = parameter.default
            return default if isinstance(default, str) else scaled(default, parameter.unit)
        raise ExpressionError(
            f"formula={formula}: needs the input {name}, a number of {parameter.unit}"
            f" ({parameter.text})"
        )


def _as_input(name: str, value: Any) -> Input:
    """A field of a table, some of which have their units in their names."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Quantity):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExpressionError(f"{name}: is no single number")
    for suffix, (factor, num_bytes, seconds) in SUFFIXES.items():
        if name.endswith(suffix):
            in_bytes = value * factor
            whole = math.isfinite(in_bytes) and float(in_bytes).is_integer()
            return Quantity(int(in_bytes) if whole else in_bytes, num_bytes, seconds)
    return Quantity(value)


def names_of(claims: Sequence[Claim]) -> Iterator[str]:
    """What the command line may set: inputs, and the fields that expressions name."""
    for claim in claims:
        yield from claim.inputs
        for _, expression in claim.steps:
            yield from (name for name in expression.names if "." in name)
            for formula in expression.formulas:
                for parameter in FORMULAS[formula].parameters.values():
                    if parameter.field and claim.model:
                        yield f"model.{parameter.field}"


def value_of(claim: Claim, world: World, values: Mapping[str, Input], name: str) -> Input:
    """The value of a name in one setting; None where it has none."""
    try:
        return _Scope(claim, world, values).lookup(name)
    except (Unknown, ExpressionError, QuantityError):
        return None
