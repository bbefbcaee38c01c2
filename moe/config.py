"""Composes a Config from conf/ and the command line; the only user of hydra besides the entry.

    overrides --parse--> known keys --hydra--> typed values --build--> Config --validate--> Config

Hydra does the composing and the typing. Its messages run over several lines and speak of its own
parts, so every refusal is said again as one ConfigError line.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass, replace
from functools import cache, partial
from typing import Any, get_args, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING as UNSET
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from moe.combinations import useless_key
from moe.conf_files import conf_dir, options
from moe.hf_config import read_hf_config
from moe.settings import (
    DEFAULTS,
    IMAGINED,
    JOBS_OF,
    MAX_RANKS,
    UNUSED,
    USED,
    Config,
    ConfigError,
    Key,
    did_you_mean,
    keys,
    no_such,
    shown,
)
from moe.validate import validate

_ONE_AT_A_TIME = threading.Lock()

__all__ = ["Config", "ConfigError", "compose", "conf_dir", "options", "variants"]


def compose(overrides: Sequence[str], world_size: int | None = None) -> Config:
    """The validated configuration of a run.

    overrides: key=value words, the last of a key wins
    world_size: the number of ranks where something else has already started them
    Raises ConfigError, one line, for whatever cannot be run.
    """
    parsed = [_parse(word) for word in overrides]
    typed = {override.key_or_group: override for override in parsed}
    try:
        words = [typed[name].input_line or "" for name in typed]  # the last of each
        composed = _compose([*_defaults(typed), *words])
        _fill_model(composed.model, typed)
        plain = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _said_plainly(error, typed) from error
    try:
        built = _build(Config, plain)
    except ValueError as error:  # a component that checks itself
        raise ConfigError(str(error)) from error
    config = _with_world(built, world_size)
    if config.layers is not None:
        config = replace(config, scale=replace(config.scale, layers=config.layers))
    validate(config, options)
    _refuse_unused(config, typed)
    return config


def variants(word: str) -> list[str]:
    """The words with one value each that KEY=v1,v2 stands for; other words stand for themselves.

    A list [a,b] and a text in quotes are one value each; range(8,33,8) and choice(a,b) are several.
    """
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(_unreadable(word)) from error
    name = override.key_or_group
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{word}: a sweep names its values; write {name}=v1,v2")
    try:
        return [f"{name}={value}" for value in dict.fromkeys(override.sweep_string_iterator())]
    except HydraException as error:  # glob(*)
        raise ConfigError(f"{word}: a sweep names its values; write {name}=v1,v2") from error


def _defaults(typed: Mapping[str, Override]) -> list[str]:
    """Options of the job's own, of groups that nobody chose."""
    job = str(typed["job"].value()) if "job" in typed else keys()["job"].default
    return [
        f"{name}={option}" for name, option in DEFAULTS.get(job, {}).items() if name not in typed
    ]


def _parse(word: str) -> Override:
    """One word of the command line, refused unless it sets a key that exists."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(_unreadable(word)) from error
    name, known = override.key_or_group, keys()
    if override.is_add() or override.is_force_add() or override.is_delete() or override.package:
        raise ConfigError(f"{word}: write {name}=value, without + ~ or @")
    if name not in known:
        parts = [other for other in known if other.startswith(name + ".")]
        if parts:
            raise ConfigError(f"{word}: {name} has parts; set {' or '.join(parts)}")
        near = did_you_mean(name, known)
        raise ConfigError(f"{word}: no such key{near}; wideep --help lists them")
    if name in ("job", "ranks") and word.partition("=")[2] != str(override.value()).replace(
        "None", "null"
    ):
        raise ConfigError(f"{word}: write it plainly, as {name}={override.value()}")
    if override.is_sweep_override():
        raise ConfigError(f"{word}: one value expected; a list is written {name}=[a,b]")
    value = override.value()
    if known[name].type is bool and isinstance(value, (int, float)) and type(value) is not bool:
        raise ConfigError(f"{word}: must be true or false")  # OmegaConf takes any number
    if known[name].group and value not in options(name):
        raise no_such(name, word, value, options(name))
    return override


def _refuse_unused(config: Config, typed: Mapping[str, Override]) -> None:
    """A key that would silently be ignored is a mistake."""
    job = config.job
    for name, override in typed.items():
        word = f"{name}={shown(override.value())}"
        parts = {name, name.partition(".")[0]}
        if owners := next((JOBS_OF[part] for part in parts if part in JOBS_OF), None):
            if job not in owners:
                raise ConfigError(f"{word}: belongs to {' or '.join(f'job={o}' for o in owners)}")
        elif job in USED and name != "job" and not parts & set(USED[job]):
            uses = ", ".join(USED[job]) or "no key"
            raise ConfigError(f"{word}: job={job} does not use it; it uses {uses}")
        if parts & set(UNUSED.get(job, ())):
            instead = f"bench.{name}" if f"bench.{name}" in keys() else f"bench.{name}s"
            hint = f"; set {instead}" if job == "bench" and instead in keys() else ""
            raise ConfigError(f"{word}: job={job} does not use it{hint}")
        if reason := useless_key(name, config):
            raise ConfigError(f"{word}: {reason}")


def _unreadable(word: str) -> str:
    name, equals, value = word.partition("=")
    if not equals:
        near = "" if word in keys() else did_you_mean(word, keys())
        return f"{word}: expected key=value{near}"
    return f"{word}: cannot read the value; a text with such signs is written '{name}=\"{value}\"'"


def _compose(overrides: Sequence[str]) -> DictConfig:
    with (  # hydra has one state for all threads
        _ONE_AT_A_TIME,
        hydra.initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"),
    ):
        ConfigStore.instance().store(name="schema", node=_schema(Config))
        return hydra.compose("config", overrides=list(overrides))


@cache
def _schema(cls: Any) -> type:
    """`cls` with the same fields, but open to merging: OmegaConf seals what is frozen.

    A field without a default must be given; one whose type OmegaConf cannot say (a number or a list
    of them) takes anything here and is checked in _build.
    """
    hints = get_type_hints(cls)
    columns: list[tuple[str, Any, Any]] = []
    for item in fields(cls):
        hint, default = hints[item.name], item.default
        if is_dataclass(hint):
            columns.append((item.name, _schema(hint), field(default_factory=_schema(hint))))
        elif isinstance(default, tuple):
            columns.append((item.name, hint, field(default_factory=partial(list, default))))
        else:
            hint = Any if _number_or_list(hint) else hint
            default = UNSET if default is MISSING else default
            columns.append((item.name, hint, field(default=default)))
    return make_dataclass(cls.__name__, columns)


def _number_or_list(hint: Any) -> bool:
    return set(get_args(hint)) == {int, tuple[int, ...]}


def _fill_model(model: DictConfig, typed: dict[str, Override]) -> None:
    """What model=hf leaves open comes from the config.json at model.path; typed values win."""
    path = model.get("path")
    if not OmegaConf.missing_keys(model):
        if path is not None:
            raise ConfigError(f"model.path={path}: only model=hf reads a file")
        return
    if not path:
        raise ConfigError("model=hf: needs model.path=FILE, the config.json of a released model")
    try:
        released = read_hf_config(path)
    except (ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError) as error:
        where = "" if "model.path" in str(error) else f"model.path={path}: "
        raise ConfigError(f"{where}{error}") from error
    for name, value in released.items():
        parts = vars(value).items() if is_dataclass(value) else [("", value)]
        for part, entry in parts:
            full = f"{name}.{part}" if part else name
            if f"model.{full}" not in typed:
                OmegaConf.update(model, full, entry)


def _build(cls: type, plain: Any, prefix: str = "") -> Any:
    """Dictionaries -> frozen dataclasses, lists -> tuples."""
    hints = get_type_hints(cls)
    values = {}
    for item in fields(cls):
        value, name = plain[item.name], prefix + item.name
        if is_dataclass(hints[item.name]):
            value = _build(hints[item.name], value, name + ".")
        elif value == UNSET:
            raise ConfigError(f"{name}: has no value; set {name}=...")
        elif _number_or_list(hints[item.name]) and not _is_number_or_list(value):
            raise ConfigError(f"{name}={shown(value)}: must be an integer or a list of integers")
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _is_number_or_list(value: Any) -> bool:
    entries = value if isinstance(value, list) else [value]
    return all(type(entry) is int for entry in entries)  # a bool is no number here


def _with_world(config: Config, world_size: int | None) -> Config:
    """Say how many ranks there are: those already started, the given number, or the default."""
    if world_size is not None and config.ranks not in (None, world_size):
        raise ConfigError(f"ranks={config.ranks}: {world_size} ranks were started; leave it out")
    ranks, size = config.ranks, config.ep_size
    if config.job in IMAGINED and world_size is None and size is not None and size > 0:
        if ranks is not None:
            if config.job != "predict" and ranks != size:  # a machine of one group
                raise ConfigError(f"ranks={ranks}: ep_size={size} says it; leave it out")
            return config
        if config.ep_size > MAX_RANKS:
            raise ConfigError(
                f"ep_size={config.ep_size}: must be <= {MAX_RANKS}; nearest: {MAX_RANKS}"
            )
        return replace(config, ranks=config.ep_size)
    return replace(config, ranks=config.world_size if world_size is None else world_size)


def _said_plainly(error: Exception, typed: dict[str, Override]) -> ConfigError:
    """hydra's or omegaconf's refusal in one line, with the key and the value as typed."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    name = (getattr(cause, "full_key", None) or "").split("[")[0]
    key = keys().get(name)
    if key is None or name not in typed:
        return ConfigError(str(error))
    if isinstance(cause, InterpolationResolutionError):
        return ConfigError(f"{typed[name].input_line}: {str(cause).splitlines()[0]}")
    return ConfigError(f"{typed[name].input_line}: must be {_type_in_words(key)}")


def _type_in_words(key: Key) -> str:
    """What OmegaConf would have taken."""
    nullable = type(None) in get_args(key.type)
    for hint, words in (
        (tuple[int, ...], "a list of integers"),
        (tuple[float, ...], "a list of numbers"),
        (tuple[str, ...], "a list of words"),
        (bool, "true or false"),
        (int, "an integer"),
        (float, "a number"),
    ):
        if key.type is hint or key.type == hint or hint in get_args(key.type):
            return words + (" or null" if nullable else "")
    return "a word"
