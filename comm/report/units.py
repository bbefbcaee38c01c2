"""Numbers to words. Traffic is decimal (kB = 1e3 B), memory binary (GiB = 2^30 B)."""

from __future__ import annotations

BYTE_UNITS: tuple[str, ...] = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
COUNT_UNITS: tuple[str, ...] = ("", "k", "M", "G", "T")
GIB = 2**30


def format_significant(value: float, digits: int = 4) -> str:
    """`value` with `digits` significant digits and no exponent: 4.872, 48.72, 1,234, 0.02913."""
    if value == 0:
        return "0"
    exponent = int(f"{abs(value):.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def format_bytes(num_bytes: float, digits: int = 4) -> str:
    """Traffic in the largest decimal unit that leaves at least 1: 512 B, 44.37 kB, 4.872 MB.

    A whole number of bytes below 1 kB is printed whole; everything else has `digits`
    significant digits.
    """
    unit = 0
    while unit + 1 < len(BYTE_UNITS) and _reaches(num_bytes, 1000 ** (unit + 1), digits):
        unit += 1
    if unit == 0 and float(num_bytes).is_integer():
        return f"{int(num_bytes)} B"
    return f"{format_significant(num_bytes / 1000**unit, digits)} {BYTE_UNITS[unit]}"


def format_memory(num_bytes: float) -> str:
    """Memory in GiB: 141.0 GiB."""
    return f"{format_significant(num_bytes / GIB)} GiB"


def format_count(number: int, noun: str) -> str:
    """1 layer, 92 layers."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """1.234 s, 12.34 ms, 123.4 us."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{format_significant(seconds * factor)} {unit}"
    return f"{format_significant(seconds * 1e6)} us"


def format_fixed(num_bytes: int, unit: int, decimals: int) -> str:
    """`num_bytes` in the table's common unit; "-" for none, "<0.1" for some that round to none."""
    if num_bytes == 0:
        return "-"
    value = f"{num_bytes / 1000**unit:,.{decimals}f}"
    if float(value.replace(",", "")) == 0:
        return f"<{10**-decimals:.{decimals}f}"
    return value


def _reaches(value: float, unit_bytes: int, digits: int) -> bool:
    """Whether the value, rounded as it will be printed, is at least one unit (999.96 kB is)."""
    return float(f"{abs(value):.{digits - 1}e}") >= unit_bytes
