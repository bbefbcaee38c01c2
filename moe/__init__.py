"""The network and the run: a mixture-of-experts model whose dispatch and combine are measured.

`from moe import emulate, predict, load` is WideEP in Python (moe.api, docs/python.md).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comm

if TYPE_CHECKING:
    from moe.api import emulate as emulate
    from moe.api import load as load
    from moe.api import predict as predict

# Where Jupyter's package of that name was found first, ours joins it; see comm/__init__.py.
_ours = str(Path(__file__).resolve().parent.parent / "comm")
if _ours not in map(str, comm.__path__):
    comm.__path__.append(_ours)

# Looked up when they are asked for: importing moe must stay light. No module of this package may
# have one of these names, for importing it would hide the function.
EXPORTS = {
    "emulate": "moe.api",
    "predict": "moe.api",
    "load": "moe.api",
    "ConfigError": "moe.settings",
    "UnfitError": "moe.settings",
    "RankFailure": "comm.spawn",
}
__all__ = list(EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})
