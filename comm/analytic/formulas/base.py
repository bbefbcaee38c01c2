"""What a formula of the registry is: a function with named, documented parameters and steps.

A formula yields its steps, the last one being the result, so that it can be shown how a figure
comes about. Values are in base units: bytes, seconds, or a number of what the unit names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from comm.analytic.quantity import Quantity, QuantityError, dimension_words, read_unit, scaled

TEXT = "text"  # the unit of a parameter that is a word


@dataclass(frozen=True)
class Step:
    """One line of the way to a result.

    name: what was worked out; how: the arithmetic in words and numbers; unit: a base unit or noun
    """

    name: str
    how: str
    value: float
    unit: str = ""

    @property
    def quantity(self) -> Quantity:
        return scaled(self.value, self.unit)


@dataclass(frozen=True)
class Parameter:
    """unit: what is to be given: a noun (ranks), a unit of the wanted kind (B), or TEXT

    field: of the claim's model, which is taken where nothing is given
    default: taken where that is missing, too; None: it must be given
    """

    unit: str
    text: str
    field: str = ""
    default: float | str | None = None

    def accept(self, name: str, value: Quantity | str) -> float | str:
        """The number for the function; raises QuantityError in one line."""
        if (self.unit == TEXT) != isinstance(value, str):
            wanted = "a word" if self.unit == TEXT else f"a number of {self.unit}"
            raise QuantityError(f"{name}={_shown(value)}: must be {wanted} ({self.text})")
        if isinstance(value, str):
            return value
        _, num_bytes, seconds, noun = read_unit(self.unit)
        if value.dimension != (num_bytes, seconds) or (noun and value.noun not in ("", noun)):
            given = value.noun or dimension_words(value.dimension)
            wanted = noun or dimension_words((num_bytes, seconds))
            raise QuantityError(f"{name}={_shown(value)}: {given} where {wanted} must be given")
        if not noun:
            return value.value
        if not float(value.value).is_integer() or value.value < 0:
            raise QuantityError(f"{name}={value.value}: must be a whole number of {noun}")
        return int(value.value)


def _shown(value: Quantity | str) -> str:
    if isinstance(value, str):
        return value
    factor = read_unit(value.unit)[0] if value.unit else 1
    return f"{value.value / factor:g} {value.unit}".rstrip()


@dataclass(frozen=True)
class Formula:
    """name: as a claim's file writes it; gives: unit of the result; text: what it is

    slow: takes a while, so that nobody asks for what would turn it
    """

    name: str
    parameters: Mapping[str, Parameter]
    gives: str
    text: str
    function: Callable[..., Iterator[Step]]
    slow: bool = False

    def steps(self, arguments: Mapping[str, Any]) -> tuple[Step, ...]:
        """All steps for accepted arguments; raises ValueError where the formula has no value."""
        try:
            return _worked_out(self.function, tuple(arguments.items()))
        except ArithmeticError as error:
            raise ValueError(f"formula={self.name}: has no value for these numbers") from error


@cache
def _worked_out(
    function: Callable[..., Iterator[Step]], arguments: tuple[tuple[str, Any], ...]
) -> tuple[Step, ...]:
    """Kept, since claims ask for the same figures, and to show one is to ask again."""
    return tuple(function(**dict(arguments)))


FORMULAS: dict[str, Formula] = {}


def formula(
    gives: str, slow: bool = False, **parameters: Parameter
) -> Callable[[Callable], Callable]:
    """Enter a generator of steps into the registry under its own name."""

    def enter(function: Callable[..., Iterator[Step]]) -> Callable[..., Iterator[Step]]:
        text = " ".join((function.__doc__ or "").split())
        FORMULAS[function.__name__] = Formula(
            function.__name__, parameters, gives, text, function, slow
        )
        return function

    return enter
