"""Claims from the files of a folder, and what they may name: models and hardware of conf/.

A file is one claim, or has a list `claims`; what stands beside the list is shared by its claims.
Files of the user join those of conf/claims/, and may not use an id again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml

from comm.claims.form import Claim, ClaimError, read_claim
from moe.attention import AttentionShape, ReleasedWeights, UnknownShape
from moe.conf_files import conf_dir
from moe.model import ModelShape
from moe.parameters import active, count
from moe.pools import weights_of

T = TypeVar("T")


def read_claims(folder: Path, taken: Mapping[str, Path]) -> dict[str, tuple[Claim, Path]]:
    """Every claim of a folder's *.yaml by id, in the order of files and lines; raises ClaimError.

    taken: ids that stand in other files already
    """
    found: dict[str, tuple[Claim, Path]] = {}
    paths = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if not paths:
        raise ClaimError(f"{folder}: has no file with a claim, *.yaml")
    for path in paths:
        for entry, shared in _entries(path):
            try:
                claim = read_claim(entry, shared)
            except ClaimError as error:
                raise ClaimError(f"{path}: {error}") from error
            other = taken.get(claim.id) or found.get(claim.id, (None, None))[1]
            if other is not None:
                raise ClaimError(f"{path}: {claim.id}: the id is taken by a claim of {other}")
            found[claim.id] = claim, path
    return found


def _entries(path: Path) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The claims of a file, each with what the file shares."""
    if not path.is_file():  # a folder, a pipe, a link to nowhere
        raise ClaimError(f"{path}: is no file that can be read")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ClaimError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or "is no text in UTF-8"
        raise ClaimError(f"{path}:{line} {problem}") from error
    except RecursionError as error:
        raise ClaimError(f"{path}: is nested too deeply") from error
    except (ValueError, KeyError, AttributeError) as error:  # 2026-13-45, !!bool maybe
        raise ClaimError(f"{path}: has a value that YAML cannot read: {error}") from error
    if not isinstance(content, dict):
        raise ClaimError(f"{path}: must be a claim, or have a list claims")
    if "claims" not in content:
        yield content, {}
        return
    shared = {name: value for name, value in content.items() if name != "claims"}
    if not isinstance(content["claims"], list) or not content["claims"]:
        raise ClaimError(f"{path}: claims: must be a list of claims")
    for entry in content["claims"]:
        yield entry, shared


class _Loader(yaml.SafeLoader):
    """YAML, except that a key which stands twice is a mistake."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise yaml.constructor.ConstructorError(
            problem=f"{twice} stands twice", problem_mark=node.start_mark
        )
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def tables(model: ModelShape) -> dict[str, dict[str, Any]]:
    """Fields of every model and part of conf/ by name; `model` stands for the file of its name."""
    found: dict[str, dict[str, Any]] = {}
    for group in ("hardware", "model"):
        for path in sorted((conf_dir() / group).glob("*.yaml")):
            fields = yaml.safe_load(path.read_text(encoding="utf-8"))
            if "???" in fields.values():  # filled from elsewhere
                continue
            found[path.stem] = fields if group == "hardware" else model_fields(_shape(fields))
    return found | {model.name: model_fields(model)}


def _shape(fields: Mapping[str, Any]) -> ModelShape:
    parts = {"attention": AttentionShape, "weights": ReleasedWeights}
    built = {
        name: parts[name](**value) if name in parts else value for name, value in fields.items()
    }
    return ModelShape(**built)


def model_fields(shape: ModelShape) -> dict[str, Any]:
    """The fields of a model, and what follows from them; None where nobody described it enough.

    payload_width, num_layers; parameters.*: counts by part, those of comm.analytic.weights among
    them; attention.values: what a token leaves in a layer's cache
    """
    fields = asdict(shape) | {"payload_width": shape.payload_width}
    fields["num_layers"] = shape.num_moe_layers + shape.num_dense_layers
    fields["attention"]["values"] = _known(lambda: shape.attention.cached_values)
    described = _known(lambda: (count(shape), weights_of(shape)))
    if described is None:
        return fields | {"parameters": None}
    counted, weights = described
    stored = ("expert", "matrices", "plain", "single", "lookup", "routed")
    fields["parameters"] = counted.by_part() | {name: getattr(weights, name) for name in stored}
    fields["parameters"] |= {"total": counted.total, "active": active(shape)}
    return fields


def _known(value: Callable[[], T]) -> T | None:
    try:
        return value()
    except UnknownShape:
        return None
