"""Works claims out: figures from formulas, verdicts from figures. Pure; nothing is read or run.

    claim x settings --> a case each: steps, figure, does it hold?  --> verdict --> as recorded?

    holds          in every setting the figure stands to `says` as the relation asks
    fails          in none
    depends        in some
    not checkable  a number that the formula needs is unknown

A run of the emulator, where there was one, is one more case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from comm.analytic.expressions import Expression, ExpressionError, nearest
from comm.analytic.formulas import FORMULAS
from comm.analytic.quantity import Quantity, QuantityError, dimension_words, show
from comm.claims.form import TABLES, Claim, ClaimError, Input
from comm.claims.scope import Line, Scope, Unknown, World

COUNTED = "counted by a run"
ROUNDING = 1e-9  # of floating point, relative


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


def evaluate(claim: Claim, world: World) -> Outcome:
    """Every setting of a claim; raises ClaimError in one line."""
    try:
        _refuse_unknown_tables(claim, world)
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
    scope = Scope(replace(claim, model=None, hardware=None), World(tables), claim.inputs)
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
    scope = Scope(claim, world, values)
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
    claim: Claim, setting: str, label: str, found: Quantity, scope: Scope, lines: tuple[Line, ...]
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


def _refuse_unknown_tables(claim: Claim, world: World) -> None:
    for field in TABLES:
        name = getattr(claim, field)
        if name is not None and name not in world.tables:
            near = nearest(name, world.tables)
            raise ExpressionError(f"{field}={name}: no such file in conf/{field}/{near}")


def _refuse_unused(claim: Claim, used: set[str]) -> None:
    for name in claim.inputs:
        if name not in used:
            raise ExpressionError(f"inputs.{name}: nothing uses it")


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
