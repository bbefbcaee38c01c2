"""What would change a verdict: for each number of a case, the nearest value at which it turns.

Each number is moved away from its value in both directions, others kept, until the case turns;
then the place between the last two values is narrowed down. Whole numbers stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from comm.analytic.formulas import FORMULAS
from comm.analytic.quantity import Quantity
from comm.claims.form import Claim, ClaimError
from comm.claims.judge import Case, evaluate, names_of
from comm.claims.scope import World, value_of

FARTHEST, NARROWINGS = 10, 40  # factors of two, halvings


@dataclass(frozen=True)
class Change:
    """A number, its value, and the nearest at which the case turns; holds: whether it then does."""

    name: str
    value: Quantity
    turns_at: Quantity
    holds: bool


def changes(claim: Claim, world: World, setting: str) -> list[Change]:
    """Of one setting of a claim, the nearest first; none where a formula is slow."""
    return [change for _, change in sorted(_turns(claim, world, setting), key=lambda one: one[0])]


def _turns(claim: Claim, world: World, setting: str) -> Iterator[tuple[float, Change]]:
    """Each change with how far it is, as a ratio."""
    if any(FORMULAS[name].slow for _, expression in claim.steps for name in expression.formulas):
        return
    values = {**claim.inputs, **claim.settings.get(setting, {}), **world.given}
    for name in dict.fromkeys(names_of([claim])):
        at = value_of(claim, world, values, name)
        if not isinstance(at, Quantity) or not at.value:
            continue
        alone = replace(claim, settings={setting: claim.settings.get(setting, {})})
        turned = _nearest_turn(at, lambda x, name=name, alone=alone: _case(alone, world, name, x))
        if turned is not None:
            value, holds = turned
            yield _distance(at, value), Change(name, at, value, holds)


def _case(claim: Claim, world: World, name: str, value: Quantity) -> Case | None:
    """The only case, with one number replaced; None where that makes no sense."""
    try:
        given = {**world.given, name: value}
        return evaluate(claim, replace(world, given=given, silent=True)).cases[0]
    except ClaimError:
        return None


Attempt = Callable[[Quantity], Case | None]


def _nearest_turn(at: Quantity, attempt: Attempt) -> tuple[Quantity, bool] | None:
    """The value nearest to `at`, by their ratio, where the case turns."""
    found = [turn for factor in (2.0, 0.5) if (turn := _turn(at, factor, attempt))]
    return min(found, key=lambda turn: _distance(at, turn[0]), default=None)


def _distance(at: Quantity, value: Quantity) -> float:
    ratio = value.value / at.value
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def _turn(at: Quantity, factor: float, attempt: Attempt) -> tuple[Quantity, bool] | None:
    start = attempt(at)
    if start is None or start.holds is None:
        return None
    near, near_case = at, start
    for _ in range(FARTHEST):
        far = _between(near, near.value * factor)
        case = attempt(far)
        if far.value == near.value or case is None or case.holds is None:
            return None
        if case.holds != start.holds or _side(case) != _side(near_case):
            return _narrow(near, far, start, attempt)
        near, near_case = far, case
    return None


def _side(case: Case) -> bool:
    """On which side of the figure that is said."""
    return case.margin > 0


def _narrow(
    near: Quantity, far: Quantity, start: Case, attempt: Attempt
) -> tuple[Quantity, bool] | None:
    """Halve the way until it turns; the first value beyond, if the case is another one there."""
    side = _side(start)
    for _ in range(NARROWINGS):
        middle = _between(near, (near.value + far.value) / 2)
        if middle.value in (near.value, far.value):
            break
        case = attempt(middle)
        if case is None:
            return None
        if case.holds == start.holds and _side(case) == side:
            near = middle
        else:
            far = middle
    case = attempt(far)
    if case is None or case.holds == start.holds or case.holds is None:
        return None
    return far, case.holds


def _between(like: Quantity, value: float) -> Quantity:
    """A value of the same kind; a whole number stays whole."""
    whole = isinstance(like.value, int) and not like.bytes and not like.seconds
    return replace(like, value=round(value) if whole else value)
