"""Moves tokens between ranks, counts every byte, and predicts the same bytes independently.

Knows nothing of neural networks: that is the `moe` package, which `comm` never imports.

Jupyter brings a package of this name, too. Where both are installed they share it: modules of the
other are found beside those here, and so is what the other has at its top.
"""

from __future__ import annotations

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType
from typing import Any

__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and (other := _other()) and hasattr(other, name):
        return getattr(other, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _other() -> ModuleType | None:
    """The first other package of this name; None where there is none."""
    own = Path(__file__).resolve().parent
    for folder in map(Path, __path__):
        if folder.resolve() != own:
            # No package of its own: what it imports as `.name` is `comm.name`.
            spec = spec_from_file_location(
                f"{__name__}.other", folder / "__init__.py", submodule_search_locations=None
            )
            assert spec is not None and spec.loader is not None, folder
            spec.loader.exec_module(other := module_from_spec(spec))
            return other
    return None
