"""What can be set about a router: one flat table, each value used by the routers it names.

The limits that need nothing but the value are checked here; those that depend on the network or on
the ranks are checked by the source that uses them, when it is built.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import Any

from moe.model import GROUP_SCORES

ORDERS = ("seeded", "id")
UNITS = ("rank", "expert")

_HOT = ("hot_experts", "w1", "w3", "w6", "w7")
_REPLAY = ("replay", "counts")


def option(
    default: Any,
    text: str,
    routers: tuple[str, ...],
    choices: tuple[str, ...] = (),
    minimum: int | None = None,
    maximum: int = 2**63 - 1,
) -> Any:
    """A field of RouterOptions; None, where it is the default, is always allowed.

    routers: the sources that use it, all others ignore it
    choices: the only values allowed; minimum, maximum: inclusive limits of a number
    """
    limits = {"choices": choices, "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata={"text": text, "routers": routers, **limits})


@dataclass(frozen=True)
class RouterOptions:
    """Every parameter of every router. Raises ValueError for a value outside its limits."""

    reuse: float = option(
        0.295, "chance that an expert of a token serves the next one too", ("markov",), (), 0, 1
    )
    sequence: int = option(
        64, "tokens of a chain; each chain begins afresh", ("markov",), (), 1, 65_536
    )
    exponent: float = option(
        1.0, "the expert of popularity n weighs n ** -exponent", ("zipf",), (), 0, 4
    )
    factor: float = option(
        8.0,
        "weight of a hot expert; the others weigh 1",
        ("hot_rank", "w2", *_HOT),
        minimum=1,
        maximum=1_000_000,
    )
    hot_rank: int = option(
        0, "whose experts are hot: position in the expert-parallel group", ("hot_rank", "w2"), (), 0
    )
    hot_count: int | None = option(
        None, "number of hot experts; null: a sixteenth of all, at least 1", _HOT, (), 1
    )
    max_over_mean: float = option(
        1.5, "picks of the busiest rank or expert, over the mean of all", ("skew",), (), 1
    )
    by: str = option("rank", "whose picks max_over_mean compares", ("skew",), UNITS)
    order: str = option(
        "seeded",
        "which are hot: drawn anew for each layer, or those of the lowest number",
        ("zipf", "hot_experts", "skew", "w5"),
        ORDERS,
    )
    num_expert_groups: int | None = option(
        None, "equal groups of experts; null: the model's", ("group_limited",), (), 1
    )
    num_limited_groups: int | None = option(
        None, "groups that a token may use; null: the model's", ("group_limited",), (), 1
    )
    group_score: str | None = option(
        None,
        "a group counts by its best expert or its two best; null: the model's",
        ("group_limited",),
        GROUP_SCORES,
    )
    path: str | None = option(None, "the file of recorded routing", _REPLAY)
    format: str = option("auto", "how that file is written; auto: by its looks", _REPLAY)
    skip_rows: int = option(0, "tokens to leave out at the beginning", _REPLAY, (), 0)

    def __post_init__(self) -> None:
        for one in fields(RouterOptions):  # not those of a subclass
            value = getattr(self, one.name)
            if value is None and one.default is None:
                continue
            if one.metadata["choices"]:
                _check_choice(one.name, value, one.metadata["choices"])
            if one.metadata["minimum"] is not None:
                check_range(one.name, value, one.metadata["minimum"], one.metadata["maximum"])


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Raise ValueError unless least <= value <= most; name: an option's, without "router."."""
    if least <= value <= most:
        return
    nearest = most if value > most else least  # nan lands on least
    limits = f"at least {least}" if most == 2**63 - 1 else f"in {least} .. {most}"
    raise ValueError(f"router.{name}={value}: must be {limits}; nearest: {nearest}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
    raise ValueError(
        f"router.{name}={value!r}: must be one of {', '.join(choices)}; nearest: {near[0]}"
    )
