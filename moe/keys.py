"""How a field of a component says that the command line sets it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any


def key(
    default: Any,
    text: str,
    choices: Iterable[str] = (),
    minimum: float | None = None,
    maximum: float = 2**63 - 1,
) -> Any:
    """A field that is set on the command line: its default, what it means, what it may be.

    choices: the only values allowed, of the field or of each entry of a list
    minimum, maximum: of the field or of each entry of a list of numbers
    """
    limits = {"choices": tuple(choices), "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata={"text": text, **limits})


def group(text: str) -> Any:
    """A field filled from one file of conf/<field>/; conf/config.yaml names the default one."""
    return field(metadata={"text": text, "group": True})
