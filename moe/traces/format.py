"""What a file of this package offers to the registry, and helpers that several formats need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe.traces.base import CountTrace, Expected, RouterTrace
from moe.traces.files import Opened, by_number
from moe.traces.rules import TraceError


@dataclass(frozen=True)
class TraceFormat:
    """One way in which a stack writes routing or load.

    kind: what files.open_any makes of such a file
    describes: for the list of formats in an error and in the docs
    matches: whether content of that kind is this format
    read: makes the trace; raises TraceError
    """

    name: str
    kind: str
    describes: str
    matches: Callable[[Any], bool]
    read: Callable[[Opened, Expected], RouterTrace | CountTrace]


def has_keys(content: Any, *keys: str) -> bool:
    return isinstance(content, Mapping) and all(key in content for key in keys)


def first(content: Mapping[str, Any]) -> Any:
    """The content of the first file of a folder, or of the only file."""
    return next(iter(content.values()), None)


def integer(source: str, where: str, row: Mapping[str, Any], key: str) -> int:
    """A whole number of a JSON object. Raises TraceError."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"{source}: {where}: {key}={value!r} must be a whole number")
    return value


def ordered(names: Iterable[str]) -> list[str]:
    return sorted(names, key=by_number)
