"""What a claim's arithmetic may name, and the values behind the names, with their units.

a name            a step before it, an input of the claim, or `given` on the command line
model.FIELD       of the claim's model or hardware, or of any by its own name
FORMULA(...)      of the registry; what is not passed is an input, a field or a default
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from comm.analytic.expressions import BUILT_IN, Expression, ExpressionError, Value, nearest
from comm.analytic.formulas import FORMULAS, Parameter, Step
from comm.analytic.quantity import Quantity, QuantityError, scaled, show
from comm.claims.form import TABLES, Claim, Input

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


class Unknown(Exception):
    """A number that nobody has published; the text is its name."""


class Scope:
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


def value_of(claim: Claim, world: World, values: Mapping[str, Input], name: str) -> Input:
    """The value of a name in one setting; None where it has none."""
    try:
        return Scope(claim, world, values).lookup(name)
    except (Unknown, ExpressionError, QuantityError):
        return None
