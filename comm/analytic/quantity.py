"""Numbers with units, as a claim's file writes them: 141 GB, 50 GB/s, 131072 tokens, 5 %, 18.

Bytes and seconds are dimensions: adding one to the other is refused. What is counted (tokens,
layers, ...) is a plain number that remembers its noun, so that a formula which asks for tokens is
not given ranks. GB = 1e9 B, GiB = 2^30 B, 1 bit = 1/8 B.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from dataclasses import dataclass

UNITS: dict[str, tuple[float, int, int]] = {  # factor, power of bytes, power of seconds
    "B": (1, 1, 0),
    **{f"{prefix}B": (1000**n, 1, 0) for n, prefix in enumerate("kMGTPE", start=1)},
    **{f"{prefix}iB": (1024**n, 1, 0) for n, prefix in enumerate("KMGTP", start=1)},
    "bits": (0.125, 1, 0),
    "Gbit": (0.125e9, 1, 0),
    "s": (1, 0, 1),
    "ms": (1e-3, 0, 1),
    "us": (1e-6, 0, 1),
    "%": (0.01, 0, 0),
    "x": (1, 0, 0),
}
NOUNS = (
    *("accelerators", "copies", "cards", "dollars", "elements", "experts", "groups"),
    *("heads", "layers", "machines", "nodes", "operations", "parameters", "ports", "ranks"),
    *("rounds", "rows", "sequences", "slots", "tiers", "tokens", "values"),
)
MAX_DIGITS = 300
NUMBER = re.compile(r"([+-]?\d[\d,_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(.*)")


class QuantityError(ValueError):
    """A number or a unit that makes no sense here; one line."""


@dataclass(frozen=True)
class Quantity:
    """value: in bytes, seconds, bytes a second or as counted; a whole number stays an int

    unit: as written, for print; noun: what is counted, "" where nothing is said of it
    """

    value: float
    bytes: int = 0
    seconds: int = 0
    noun: str = ""
    unit: str = ""

    @property
    def dimension(self) -> tuple[int, int]:
        return self.bytes, self.seconds

    @property
    def is_plain(self) -> bool:
        return self.dimension == (0, 0)


def parse(text: object) -> Quantity:
    """A number, or a text such as "141 GB"; raises QuantityError in one line."""
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise QuantityError(f"{text!r} is no number with a unit")
    if isinstance(text, int | float):
        return Quantity(_finite(text))
    found = NUMBER.fullmatch(text.strip())
    if found is None:
        raise QuantityError(f"{text!r} is no number with a unit; write e.g. 141 GB")
    digits = found[1].replace(",", "").replace("_", "")
    if len(digits) > MAX_DIGITS:
        raise QuantityError(f"a number of {len(digits)} digits; at most {MAX_DIGITS}")
    number = float(digits) if set(digits) & set(".eE") else int(digits)
    return scaled(_finite(number), found[2].strip())


def _finite(number: float) -> float:
    """Return it; raises QuantityError for nan, inf, and a whole number beyond any float."""
    if not -sys.float_info.max <= number <= sys.float_info.max:
        raise QuantityError("is no finite number")
    return number


def scaled(number: float, unit: str) -> Quantity:
    """So many of a unit."""
    factor, num_bytes, seconds, noun = read_unit(unit)
    value = number * factor if factor != 1 else number
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    return Quantity(value, num_bytes, seconds, noun, unit)


def read_unit(unit: str) -> tuple[float, int, int, str]:
    """(factor, power of bytes, power of seconds, noun) of a unit such as GB/s or B/token."""
    over, slash, under = unit.partition("/")
    factor, num_bytes, seconds, noun = _simple(over.strip(), unit)
    if not slash:
        return factor, num_bytes, seconds, noun
    below = _simple(under.strip(), unit)
    return factor / below[0], num_bytes - below[1], seconds - below[2], noun


def _simple(unit: str, whole: str) -> tuple[float, int, int, str]:
    if not unit:
        return 1, 0, 0, ""
    if unit in UNITS:
        return (*UNITS[unit], "")
    for noun in NOUNS:
        if unit in (noun, noun.removesuffix("s"), noun.removesuffix("ies") + "y"):
            return 1, 0, 0, noun
    known = [*UNITS, *NOUNS]
    near = difflib.get_close_matches(unit, known, n=1, cutoff=0.5)
    near = near or [name for name in known if name.lower() == unit.lower()]
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise QuantityError(f"{whole}: no such unit{hint}; units are {', '.join(UNITS)}, {NOUNS[0]}...")


def dimension_words(dimension: tuple[int, int]) -> str:
    """bytes, seconds, bytes/s, 1/s, a plain number."""
    known = {
        (0, 0): "a plain number",
        (1, 0): "bytes",
        (0, 1): "seconds",
        (1, -1): "bytes a second",
        (0, -1): "a number a second",
    }
    return known.get(dimension, f"bytes^{dimension[0]} seconds^{dimension[1]}")


def in_unit(quantity: Quantity, unit: str) -> float:
    """The number of units; raises QuantityError where it is of another kind."""
    factor, num_bytes, seconds, _ = read_unit(unit)
    if (num_bytes, seconds) != quantity.dimension:
        raise QuantityError(
            f"{dimension_words(quantity.dimension)} where {unit or 'a plain number'} is expected"
        )
    return quantity.value / factor


def show(quantity: Quantity, unit: str = "", digits: int = 4) -> str:
    """1.561 TB, 184 rounds, 74.2 %, 3.875 x; the largest fitting unit where none is given."""
    unit = unit or (_fitting(quantity) if not quantity.is_plain else quantity.noun)
    return f"{plain(in_unit(quantity, unit), digits)} {unit}".rstrip()


def plain(value: float, digits: int = 4) -> str:
    """Whole numbers below 10^9 whole, others with `digits` significant digits, never in between."""
    if math.isinf(value) or math.isnan(value):
        return str(value)
    if abs(value) < 1e9 and math.isclose(value, round(value), rel_tol=1e-12):
        return f"{round(value):,}"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits}g}".replace("e+", "e")
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def _fitting(quantity: Quantity) -> str:
    """A decimal unit that leaves at least 1."""
    units = {
        (1, 0): ["EB", "PB", "TB", "GB", "MB", "kB", "B"],
        (1, -1): ["TB/s", "GB/s", "MB/s", "B/s"],
        (0, 1): ["s", "ms", "us"],
        (0, -1): ["/s"],
    }.get(quantity.dimension)
    if units is None:
        raise QuantityError(f"{dimension_words(quantity.dimension)}: no unit says this")
    fits = [unit for unit in units if abs(quantity.value) >= read_unit(unit)[0]]
    return fits[0] if fits else units[-1]
