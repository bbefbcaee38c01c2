"""The rules that a composed configuration must keep, all checked before any rank starts.

Each rule raises ConfigError with one line: the key, the value, the rule, and the nearest value that
keeps it where there is one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comm.topology import divisibility_message
from moe.model import scaled
from moe.rehearsal import refusal
from moe.settings import (
    EXPORTS,
    WIRES,
    Config,
    ConfigError,
    ExportConfig,
    Key,
    keys,
    no_such,
    shown,
)

DAY_S = 86_400
MAX_PREDICTED = 10_000_000  # steps x layers x ranks: seconds, and no gigabytes
BACKENDS = {"cpu": ("auto", "gloo"), "cuda": ("auto", "nccl", "gloo")}


def validate(config: Config, options: Callable[[str], list[str]]) -> None:
    """Raise ConfigError for the first rule that `config` breaks.

    options: the names of the files in a folder of conf/, e.g. options("dispatcher")
    """
    for key in keys().values():
        _check_key(key, _value(config, key.name))
    for name in ("router", "placement", "dispatcher"):
        _check_choices(f"{name}.name", name, getattr(config, name).name, options(name))
    timed = config.bench.dispatchers
    _check_choices("bench.dispatchers", "dispatcher", timed, options("dispatcher"))
    _check_model(config)
    _check_hardware(config)
    _check_ranks(config)
    _check_tokens(config)
    if config.job in ("emulate", "doctor", "predict") and (reason := refusal(config)):
        raise ConfigError(reason)
    _check_predicted(config)
    _check_memory(config)
    _check_results(config)
    _check_surroundings(config)
    check_output_dir(config.output_dir)


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _check_key(key: Key, value: Any) -> None:
    """The choices and the limits that the table of keys states."""
    if key.group or value is None:
        return
    if isinstance(value, tuple) and not value and key.default != ():
        raise ConfigError(f"{key.name}=[]: must not be empty")
    if key.choices:
        last = key.name.rsplit(".", 1)[-1].rstrip("s")
        kind = "wire format" if key.choices == WIRES else "format" if last == "to" else last
        _check_choices(key.name, kind, value, key.choices)
    if key.minimum is None:
        return
    entries = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(entry, int | float) for entry in entries):
        raise ConfigError(f"{key.name}={shown(value)}: must be a list of integers")
    if not min(entries) >= key.minimum:  # nan, too
        raise ConfigError(f"{key.name}={shown(value)}: must be >= {key.minimum}{_near(key, value)}")
    if max(entries) > key.maximum:
        raise ConfigError(f"{key.name}={shown(value)}: must be <= {key.maximum}{_near(key, value)}")


def _near(key: Key, value: Any) -> str:
    """The nearest value within the limits of an integer, or of each entry of a list of them."""

    def within(entry: Any) -> Any:
        return min(max(key.minimum, entry), key.maximum)  # of nan, the minimum

    nearest = tuple(map(within, value)) if isinstance(value, tuple) else within(value)
    return f"; nearest: {shown(nearest)}"


def _check_choices(name: str, kind: str, value: Any, choices: Any) -> None:
    for entry in value if isinstance(value, tuple) else (value,):
        if entry not in choices:
            raise no_such(kind, f"{name}={shown(value)}", entry, choices)


def _check_model(config: Config) -> None:
    """A network that exists, at a scale that makes sense, with as many layers as it has."""
    model = config.model
    if config.layers is not None and config.layers > model.num_moe_layers:
        raise ConfigError(
            f"layers={config.layers}: {model.name} has {model.num_moe_layers} MoE layers;"
            f" nearest: {model.num_moe_layers}"
        )
    try:
        scaled(model.validate(), config.scale).validate()
    except ValueError as error:
        of = "" if str(error).startswith("scale.") else f"model={model.name}: "
        raise ConfigError(f"{of}{error}") from error


def _check_hardware(config: Config) -> None:
    """Values that can be; what is unknown is refused by those who need it."""
    try:
        config.hardware.validate()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_ranks(config: Config) -> None:
    """One layout of nodes, and one that the ranks fill."""
    ranks, topology = config.world_size, config.topology
    if topology.ranks_per_node is not None and topology.node_of_rank is not None:
        raise ConfigError("topology.ranks_per_node and topology.node_of_rank: set only one of them")
    if topology.ranks_per_node is not None and ranks % topology.ranks_per_node:
        raise ConfigError(divisibility_message(ranks, topology.ranks_per_node))
    if topology.node_of_rank is not None and len(topology.node_of_rank) != ranks:
        raise ConfigError(
            f"topology.node_of_rank={shown(topology.node_of_rank)}: lists"
            f" {len(topology.node_of_rank)} ranks, ranks={ranks}"
        )


def _check_tokens(config: Config) -> None:
    if len(config.tokens_per_rank) != config.world_size:
        raise ConfigError(
            f"tokens={shown(config.tokens)}: lists {len(config.tokens_per_rank)} ranks,"
            f" ranks={config.world_size}"
        )


def _check_predicted(config: Config) -> None:
    """A prediction lists the tokens of every rank, layer and step."""
    layers = scaled(config.model, config.scale).num_moe_layers
    most = max(1, MAX_PREDICTED // (layers * config.world_size))
    if config.job == "predict" and config.steps > most:
        raise ConfigError(
            f"steps={config.steps}: at most {most} on {config.world_size} ranks with {layers}"
            f" layers; nearest: {most}"
        )


def _check_memory(config: Config) -> None:
    """Of the jobs that ask about memory and requests."""
    pools, ranks, asked = config.pools, config.world_size, config.request
    shared = pools.tensor_parallel
    if shared is not None and (shared > ranks or ranks % shared):
        divisor = max(number for number in range(1, shared + 1) if ranks % number == 0)
        raise ConfigError(
            f"pools.tensor_parallel={shared}: must divide the {ranks} ranks; nearest: {divisor}"
        )
    most = (ranks - 1) * config.model.num_experts
    if pools.redundant_experts > most:
        raise ConfigError(
            f"pools.redundant_experts={pools.redundant_experts}: {ranks} ranks hold each of"
            f" {config.model.num_experts} experts once at most; nearest: {most}"
        )
    if asked.cached > asked.prompt:
        raise ConfigError(
            f"request.cached={asked.cached}: a part of request.prompt={asked.prompt};"
            f" nearest: {asked.prompt}"
        )
    strategies = ("rank_dedup", "all_to_all", "allgather")
    if config.job == "request" and config.dispatcher.name not in strategies:
        raise ConfigError(
            f"dispatcher={config.dispatcher.name}: job=request counts one exchange there and back;"
            f" use {' or '.join(strategies)}"
        )


def _check_results(config: Config) -> None:
    """A job that reads results is told which."""
    for job, name, what in (
        ("export", "result", "DIR, the folder of a result"),
        ("export", "to", f"one of {', '.join(EXPORTS)}"),
        ("compare", "a", "DIR, the folder of a result"),
        ("compare", "b", "DIR, the folder of another"),
    ):
        if config.job == job and getattr(config, name) is None:
            raise ConfigError(f"job={job}: needs {name}={what}")
    if config.job == "export" and config.to != "nccl_tests" and config.export != ExportConfig():
        raise ConfigError(f"export.*: to={config.to} does not use it; it belongs to to=nccl_tests")


def _check_surroundings(config: Config) -> None:
    if config.backend not in BACKENDS[config.device]:
        allowed = " or ".join(BACKENDS[config.device])
        raise ConfigError(
            f"backend={config.backend}: device={config.device} needs backend={allowed}"
        )
    if config.job == "bench" and config.device == "cuda" and config.backend == "gloo":
        raise ConfigError(
            "backend=gloo: job=bench times the bare collective, and device=cuda would add copies"
            " to the host's memory; use backend=nccl"
        )
    if not 1 <= config.timeout_s <= DAY_S:  # false for nan, too
        raise ConfigError(f"timeout_s={config.timeout_s}: must lie in 1 .. {DAY_S} seconds")


def check_output_dir(output_dir: str | None) -> None:
    """A result never overwrites another, and can be written once the run is over.

    None: the default, a new folder inside ./results
    """
    target = Path("results" if output_dir is None else output_dir)
    given = f"output_dir={shown(output_dir)}"
    try:
        if output_dir is not None and os.path.lexists(target):
            raise ConfigError(f"{given}: exists; choose a new folder")
        parent = target.absolute()
        while not os.path.lexists(parent):
            parent = parent.parent
        # asked of the file system by doing it: permission bits say nothing to root, nor on /proc
        os.rmdir(tempfile.mkdtemp(prefix=".wideep-", dir=parent))
    except OSError as error:
        raise ConfigError(f"{given}: cannot write in {parent}: {error.strerror}") from error
