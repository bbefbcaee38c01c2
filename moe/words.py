"""Python values as words of the command line, so that both take the same road to a Config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

PLAIN = re.compile(r"[A-Za-z_][\w./-]*")  # a text that needs no quotes
NOT_TEXT = ("null", "true", "false", "nan", "inf")  # unless it reads as something else


def words(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`{"ranks": 4, "wire": {"dispatch": "mxfp8"}}` -> `ranks=4`, `wire.dispatch=mxfp8`.

    A dictionary sets parts of a key; its "name" is the option of a group, as in
    `router={"name": "skew", "max_over_mean": 2}`.
    """
    return list(_words(settings, prefix))


def _words(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in settings.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r}: the name of a setting is a text")
        full = prefix.rstrip(".") if prefix and name == "name" else prefix + name
        if isinstance(value, Mapping):
            yield from _words(value, full + ".")
        else:
            yield f"{full}={text_of(value)}"


def text_of(value: Any) -> str:
    """A value as hydra reads it back: null, true, 1e-06, [1,2], 'it\\'s'.

    Raises TypeError for what no word can say.
    """
    value = value.item() if hasattr(value, "item") else value  # numpy's numbers
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text_of, value)) + "]"
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise TypeError(f"{value!r}: a setting is a number, text, true or false, None, or a list")
    if PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT:
        return value
    # In quotes only a quote is escaped, and the backslashes in front of one or at the end.
    return "'" + re.sub(r"(\\*)('|$)", _escaped, value) + "'"


def _escaped(found: re.Match[str]) -> str:
    return found[1] * 2 + ("\\'" if found[2] else "")
