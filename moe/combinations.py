"""Which choices go together: `why_not` has the reasons, and every test that crosses them asks it.

A key that belongs to a choice that was not made is refused as well (`useless_key`): it would be
ignored in silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from moe.routing.options import RouterOptions
from moe.settings import Config

# With expert_tp_mode=all a row goes to every shard by the same road, so it must be one exchange.
ONE_EXCHANGE = ("all_to_all", "rank_dedup", "allgather")
MAX_EXPERTS = 1 << 20
REPLICATING = ("balance", "file")  # placements in which an expert may have several slots

# key -> (the key that decides, its values for which the first means something)
BELONGS_TO: dict[str, tuple[str, tuple[str, ...]]] = {
    "dispatcher.capacity_factor": ("dispatcher", ("padded",)),
    "dispatcher.renormalize": ("dispatcher", ("padded",)),
    "dispatcher.deduplicate": ("dispatcher", ("one_sided",)),
    "placement.num_redundant_experts": ("placement", ("balance",)),
    "placement.replica_choice": ("placement", REPLICATING),
    "placement.path": ("placement", ("file",)),
    "wire.backward": ("mode", ("training",)),
    **{f"router.{one.name}": ("router", one.metadata["routers"]) for one in fields(RouterOptions)},
}


def why_not(config: Config) -> str | None:
    """Why this configuration cannot be run, in one line; None when it can."""
    return next(filter(None, (rule(config) for rule in RULES)), None)


def useless_key(name: str, config: Config) -> str | None:
    """Why a key that was set would be ignored; None when it is used."""
    if name == "expert_tp_mode" and config.expert_tp == 1:
        return "expert_tp=1 does not use it; it belongs to expert_tp=2 or more"
    if name.startswith("fault.") and config.fault.kind == "none":
        return "fault.kind=none does not use it; it belongs to a fault.kind"
    decider, values = BELONGS_TO.get(name, ("", ()))
    if not decider:
        return None
    chosen = getattr(config, decider)
    chosen = getattr(chosen, "name", chosen)
    if chosen in values:
        return None
    return f"{decider}={chosen} does not use it; it belongs to {_or(values, decider)}"


def _or(values: Iterable[str], key: str) -> str:
    return " or ".join(f"{key}={value}" for value in values)


def _groups(config: Config) -> str | None:
    ranks, size, shards = config.world_size, config.group_size, config.expert_tp
    if ranks % size:
        return f"ep_size={size}: must divide the {ranks} ranks; nearest: {_divisor(ranks, size)}"
    if size % shards:
        return (
            f"expert_tp={shards}: must divide the {size} ranks of an expert-parallel group;"
            f" nearest: {_divisor(size, shards)}"
        )
    return None


def _divisor(of: int, near: int) -> int:
    """The divisor of `of` that lies nearest to `near`."""
    divisors = [n for n in range(1, of + 1) if of % n == 0]
    return min(divisors, key=lambda n: (abs(n - near), n))


def _shards(config: Config) -> str | None:
    if config.expert_tp == 1:
        return None
    width = config.model.intermediate_size
    width = min(width, config.scale.intermediate_size or width)
    if config.expert_tp > width:
        return f"expert_tp={config.expert_tp}: an expert's inner width is {width}; nearest: {width}"
    if config.expert_tp_mode == "all" and config.dispatcher.name not in ONE_EXCHANGE:
        return (
            f"expert_tp_mode=all: dispatcher={config.dispatcher.name} is not one exchange; use"
            f" expert_tp_mode=gather or {_or(ONE_EXCHANGE, 'dispatcher')}"
        )
    if config.placement.name == "balance" and width % config.expert_tp:
        return (
            f"placement=balance: experts move in equal shards; expert_tp={config.expert_tp} must"
            f" divide their inner width {width}; nearest: {_divisor(width, config.expert_tp)}"
        )
    return None


def _placement(config: Config) -> str | None:
    placement = config.placement
    if placement.name == "file" and not placement.path:
        return "placement=file: needs placement.path=FILE"
    if placement.name != "balance":
        return None
    if not config.warmup:
        return "placement=balance: the load is measured in the warm-up; set warmup=1 or more"
    most = (config.num_positions - 1) * config.model.num_experts
    redundant = placement.num_redundant_experts
    if redundant is not None and redundant > most:
        return (
            f"placement.num_redundant_experts={redundant}: {config.num_positions} ranks hold each"
            f" of {config.model.num_experts} experts once at most; nearest: {most}"
        )
    return None


def _router(config: Config) -> str | None:
    if config.router.name in ("replay", "counts") and not config.router.path:
        return f"router={config.router.name}: needs router.path=FILE"
    return None


def _size(config: Config) -> str | None:
    if config.model.num_experts > MAX_EXPERTS:  # plans list every expert of every layer
        given = config.model.num_experts
        return f"model.num_experts={given}: a run has at most {MAX_EXPERTS}; nearest: {MAX_EXPERTS}"
    return None


def _dispatcher(config: Config) -> str | None:
    dispatcher = config.dispatcher
    if not 0 < dispatcher.capacity_factor < float("inf"):  # false for nan, too
        factor = dispatcher.capacity_factor
        return f"dispatcher.capacity_factor={factor}: must be a positive number; nearest: 1.0"
    most = config.model.num_experts  # room for all tokens of a rank in every slot, and more
    if dispatcher.name == "padded" and dispatcher.capacity_factor > most:
        factor = dispatcher.capacity_factor
        return f"dispatcher.capacity_factor={factor}: must be <= {most} experts; nearest: {most}"
    if dispatcher.name == "one_sided" and config.device != "cpu":
        return "dispatcher=one_sided: works in the memory that ranks share; use device=cpu"
    return None


def _fault(config: Config) -> str | None:
    """A fault that would never come is a test that cannot fail."""
    fault, layers = config.fault, config.model.num_moe_layers
    if fault.kind == "none":
        return None
    layers = min(layers, config.scale.layers or layers)
    for name, most, of in (
        ("rank", config.world_size, "ranks"),
        ("layer", layers, "layers"),
        ("step", config.steps, "steps"),
    ):
        if (given := getattr(fault, name)) >= most:
            return f"fault.{name}={given}: there are {most} {of}; nearest: {most - 1}"
    phases = _phases(config)
    if fault.kind == "split":  # the header is in front of the counts
        phases = tuple(phase for phase in phases if phase in ("dispatch", "tp_gather"))
    if fault.phase not in phases:
        what = f"fault.kind={fault.kind}" if fault.kind == "split" else "this run"
        return f"fault.phase={fault.phase}: {what} has {', '.join(phases)}; nearest: {phases[0]}"
    if fault.phase == "rebalance" and fault.step:
        return f"fault.step={fault.step}: rebalance comes before the first step; nearest: 0"
    return None


def _phases(config: Config) -> tuple[str, ...]:
    """The phases that the run has."""
    gathers = config.expert_tp > 1 and config.expert_tp_mode == "gather"
    have = {
        "tp_gather": gathers,
        "tp_reduce": config.expert_tp > 1,
        "rebalance": config.placement.name == "balance",
        "grad_sync": config.mode == "training",
    }
    return ("dispatch", "combine", *(phase for phase, there in have.items() if there))


RULES = (_size, _groups, _shards, _placement, _router, _dispatcher, _fault)
