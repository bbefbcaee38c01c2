"""What a run is made of, as plain frozen values: one dataclass a component, one field a key.

The fields are the single table of the command line's keys. Their types become the schema that
refuses wrong ones (moe.config), their choices and minima are checked (moe.validate), and their
texts and defaults are what --help prints (moe.cli). This file imports neither hydra nor torch, so
that ranks which receive a Config start quickly.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from moe.hardware import HardwareConfig
from moe.keys import group, key
from moe.memory_options import CacheConfig, FabricConfig, PoolsConfig, RequestConfig
from moe.model import ModelShape, ScaleConfig
from moe.routing.options import RouterOptions

USAGE_ERROR, RANK_FAILED, UNFIT = 2, 6, 7  # exit statuses; moe.cli.STATUSES says them in words
DEFAULT_RANKS = 8
MAX_STEPS = 1_000_000  # passes, of each kind: each is kept, and none is quick
MAX_CHUNKS = 1024  # each has transports of its own
MAX_RANKS = 4096  # processes on one machine: far beyond what any of today's can start

JOBS = {
    "emulate": "run the layers on real ranks, count every byte, compare it with the predictions",
    "bench": "time dispatch and combine against the raw all-to-all of the same bytes",
    "predict": "the traffic and the least time of a run at any size, expected; no ranks",
    "pools": "memory of the machine, pool by pool, and how many accelerators it takes; no ranks",
    "request": "bytes of one request: all-to-all beside the transfer of its cache; no ranks",
    "fabric": "switch ports of a Clos fabric for so many accelerators; no ranks",
    "claims": "what others say of such networks, each worked out and judged; no ranks",
    "doctor": "what this machine lacks for the run that the other words describe; no ranks",
    "sweep": "emulate, or job=predict, for every combination of KEY=v1,v2: one table, one page",
    "compare": "two results side by side: what differs, and which setting differs",
    "export": "a result in a format of other programs: replay it, look at it, load it",
    "report": "write report.html of a result again, also of a run that was killed; no ranks",
}
RANKLESS = (  # no ranks are started, or only by the runs inside
    *("predict", "pools", "request", "fabric", "claims", "doctor"),
    *("sweep", "compare", "export", "report"),
)
IMAGINED = ("predict", "pools", "request")  # here ep_size says how many ranks to imagine
UNUSED = {  # job -> the keys, or the first parts of keys, that mean nothing to it
    "emulate": ("bench",),
    "bench": (
        "fault",
        *("scale", "router", "placement", "dispatcher", "wire", "topology", "tokens", "steps"),
        *("warmup", "layers", "dtype", "reference", "record_routing", "traffic_csv", "chunks"),
        *("kernel", "mode", "ep_size", "expert_tp", "expert_tp_mode", "hardware"),
    ),
    "doctor": ("bench", "hardware"),
    "predict": (
        *("fault", "bench", "warmup", "dtype", "device", "backend", "reference", "kernel"),
        *("record_routing", "traffic_csv", "timeout_s", "output_dir"),
    ),
}
# job -> options that it starts from instead of those of conf/config.yaml
DEFAULTS: dict[str, dict[str, str]] = {"predict": {"scale": "full"}}
# job -> all keys that it uses, for jobs that use few
USED: dict[str, tuple[str, ...]] = {
    "pools": ("model", "hardware", "ranks", "ep_size", "tokens", "cache", "pools"),
    "request": ("model", "ranks", "ep_size", "dispatcher", "wire", "cache", "request"),
    "fabric": ("hardware", "fabric"),
    "sweep": ("output_dir", "sweep"),  # its other words are those of the runs
    "compare": ("a", "b"),
    "export": ("result", "to", "export", "output_dir"),
    "report": ("result",),
    "claims": ("id", "run", "claims", "model"),
}
# key -> the jobs that it belongs to; what stands in no table any job may use
JOBS_OF: dict[str, tuple[str, ...]] = {
    "cache": ("pools", "request"),
    "pools": ("pools",),
    "request": ("request",),
    "fabric": ("fabric",),
    "sweep": ("sweep",),
    "a": ("compare",),
    "b": ("compare",),
    "report": ("emulate",),
    "result": ("export", "report"),
    "to": ("export",),
    "export": ("export",),
    "id": ("claims",),
    "run": ("claims",),
    "claims": ("claims",),
}
DTYPES = ("fp32", "bf16", "fp16")
WIRES = ("fp32", "bf16", "fp16", "fp8_block128", "mxfp8", "mxfp4", "nvfp4")
REPLICA_CHOICES = ("round_robin", "random", "nearest")
EXPERT_TP_MODES = ("gather", "all")
MODES = ("inference", "training")
PHASES = ("dispatch", "combine", "tp_gather", "tp_reduce", "rebalance", "grad_sync")
EXPORTS = ("nccl_tests", "chrome_trace", "csv", "parquet")
FAULTS = ("none", "raise", "kill", "stop", "hang", "exit", "disk_full", "split")


class ConfigError(ValueError):
    """What was asked for cannot be run; the message is one line, whatever was typed."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnfitError(RuntimeError):
    """This machine cannot run what was asked; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig(RouterOptions):
    """The name of a routing source, and the options of all of them."""

    name: str


@dataclass(frozen=True)
class PlacementConfig:
    name: str
    num_redundant_experts: int | None = key(
        None,
        "placement=balance: slots beyond one an expert; null: the fewest that fill the ranks",
        minimum=0,
    )
    replica_choice: str = key(
        "round_robin",
        "placement=balance or file: which replica of an expert serves a token",
        REPLICA_CHOICES,
    )
    path: str | None = key(None, "placement=file: 0/1 arrays, a slot map or a slot list")


@dataclass(frozen=True)
class DispatcherConfig:
    name: str
    capacity_factor: float = key(
        1.25, "dispatcher=padded: slots for each (source, expert), in mean loads"
    )
    renormalize: bool = key(
        False, "dispatcher=padded: a token's kept weights take over those of dropped experts"
    )
    deduplicate: bool = key(False, "dispatcher=one_sided: one row a rank instead of one an expert")


@dataclass(frozen=True)
class WireConfig:
    dispatch: str = key("bf16", "format of rows on their way to the experts", WIRES)
    combine: str = key("bf16", "format of rows on their way back", WIRES)
    backward: str = key("bf16", "mode=training: format of gradients, both ways", WIRES)


@dataclass(frozen=True)
class TopologyConfig:
    ranks_per_node: int | None = key(
        None, "ranks that share a node; null: as the ranks report it", minimum=1
    )
    node_of_rank: tuple[int, ...] | None = key(
        None, "the node of each rank, e.g. [0,1,0,1], for other layouts than blocks", minimum=0
    )


@dataclass(frozen=True)
class BenchConfig:
    tokens: tuple[int, ...] = key((256, 1024), "tokens a rank, one case for each", minimum=1)
    widths: tuple[int, ...] = key((256, 1024), "payload widths, one case for each", minimum=1)
    dtypes: tuple[str, ...] = key(("fp32", "bf16"), "compute and wire types", DTYPES)
    dispatchers: tuple[str, ...] = key(
        ("rank_dedup", "all_to_all", "one_sided", "two_hop", "padded", "allgather"),
        "the dispatchers to time; two_hop on two nodes of half the ranks each",
    )
    chunks: int = key(4, "the first dispatcher also in so many chunks; 1: not", minimum=1)
    iterations: int = key(20, "timed rounds of each case", minimum=2, maximum=MAX_STEPS)
    warmup: int = key(3, "rounds run first and not timed", minimum=0, maximum=MAX_STEPS)


@dataclass(frozen=True)
class SweepConfig:
    total_tokens: int | None = key(
        None,
        "so many tokens in each run, shared by its ranks; null: tokens of each rank",
        minimum=0,
    )


@dataclass(frozen=True)
class ExportConfig:
    """Which matrices to=nccl_tests writes; null takes all."""

    layer: int | None = key(None, "to=nccl_tests: this layer; null: each", minimum=0)
    phase: str | None = key(None, "to=nccl_tests: this phase; null: each")
    direction: str | None = key(None, "to=nccl_tests: forward or backward; null: both")
    kind: str | None = key(None, "to=nccl_tests: bytes of this kind; null: all together")
    width: str = key(
        "run", "to=nccl_tests: rows as wide as in the run, or as in the full model", ("run", "full")
    )


@dataclass(frozen=True)
class FaultConfig:
    """What breaks on purpose, where and when: once, as the phase begins."""

    kind: str = key("none", "break a rank on purpose, to see what is said (docs/faults.md)", FAULTS)
    rank: int = key(0, "the rank that fails", minimum=0)
    layer: int = key(0, "the layer in which it fails", minimum=0)
    phase: str = key("dispatch", "as which phase of it begins", PHASES)
    step: int = key(0, "in which measured step", minimum=0)


@dataclass(frozen=True)
class ClaimsConfig:
    path: str | None = key(None, "job=claims: a folder with claims of your own, *.yaml")
    set: tuple[str, ...] | None = key(
        None, "job=claims: other values of inputs, e.g. [context:8192,memory:141GiB]"
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. moe.config.compose builds it, and nothing else should."""

    job: str = key("emulate", "what to do; the first word without '=' sets it too", JOBS)
    model: ModelShape = group(
        "the network; hf reads the config.json at model.path, a file or its folder"
    )
    scale: ScaleConfig = group("how far widths and depth are shrunk; E and K never are")
    router: RouterConfig = group("who chooses the experts")
    placement: PlacementConfig = group("which rank owns which expert")
    dispatcher: DispatcherConfig = group("how rows reach their experts and come back")
    hardware: HardwareConfig = group(
        "the machine that figures are carried to; custom: every value by hand"
    )
    wire: WireConfig = field(default_factory=WireConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    ranks: int | None = key(
        None,
        f"processes to start; null: {DEFAULT_RANKS}, under torchrun its own number",
        minimum=1,
        maximum=MAX_RANKS,
    )
    tokens: int | tuple[int, ...] = key(
        64, "tokens of every rank, or a list with one number a rank", minimum=0
    )
    steps: int = key(1, "measured forward passes", minimum=1, maximum=MAX_STEPS)
    warmup: int = key(
        1, "forward passes run first and left out of every figure", minimum=0, maximum=MAX_STEPS
    )
    layers: int | None = key(None, "MoE layers to run; null: as many as scale says", minimum=1)
    mode: str = key("inference", "training: also backward, and gradients are synchronised", MODES)
    chunks: int = key(
        1,
        "parts of a layer's tokens, one travels while another computes",
        minimum=1,
        maximum=MAX_CHUNKS,
    )
    ep_size: int | None = key(
        None, "ranks of an expert-parallel group; null: all. Groups lie side by side", minimum=1
    )
    expert_tp: int = key(1, "ranks that share each expert, inside a group", minimum=1)
    expert_tp_mode: str = key(
        "gather",
        "tokens reach one rank that shares with the others, or all of them",
        EXPERT_TP_MODES,
    )
    seed: int = key(0, "of weights, hidden states and synthetic routing", minimum=0)
    dtype: str = key("fp32", "type of the computation", DTYPES)
    device: str = key("cpu", "where the ranks compute", ("cpu", "cuda"))
    backend: str = key(
        "auto",
        "auto: gloo on cpu, nccl on cuda; gloo on cuda goes through the host",
        ("auto", "gloo", "nccl"),
    )
    reference: bool = key(True, "check the outputs against the dense single-process network")
    kernel: bool = key(True, "check the counted bytes against the kernel's counters of TCP")
    record_routing: bool = key(False, "keep topk_ids and weights in routing.npz")
    traffic_csv: bool = key(True, "write the non-zero cells of the traffic to traffic.csv too")
    report: bool = key(True, "write report.html, the page in pictures, where matplotlib is there")
    timeout_s: float = key(60.0, "seconds that a rank waits for the others")
    output_dir: str | None = key(
        None, "a new folder for the results; null: results/<time>-<model>-<dispatcher>"
    )
    result: str | None = key(None, "a folder of results")
    to: str | None = key(None, "the format that a result is written in", EXPORTS)
    a: str | None = key(None, "the first of two folders of results")
    b: str | None = key(None, "the second of two folders of results")
    export: ExportConfig = field(default_factory=ExportConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    id: str | None = key(None, "job=claims: only this claim, or this row, in full")
    run: bool = key(False, "job=claims: small runs decide the claims that a run can decide")
    claims: ClaimsConfig = field(default_factory=ClaimsConfig)

    @property
    def world_size(self) -> int:
        return DEFAULT_RANKS if self.ranks is None else self.ranks

    @property
    def group_size(self) -> int:
        """Ranks of an expert-parallel group."""
        return self.world_size if self.ep_size is None else self.ep_size

    @property
    def num_positions(self) -> int:
        """Ranks among which a dispatcher works, and over which experts are placed."""
        return self.group_size // self.expert_tp

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """Tokens of each rank: [R]."""
        if isinstance(self.tokens, int):
            return (self.tokens,) * self.world_size
        return self.tokens


@dataclass(frozen=True)
class Key:
    """One name of the command line.

    default: dataclasses.MISSING where a file of conf/ gives the value
    """

    name: str
    type: Any
    default: Any
    text: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    group: bool = False


@cache
def keys(cls: Any = Config, prefix: str = "") -> dict[str, Key]:
    """Every key by its full name, in the order of the fields, each component before its parts."""
    found: dict[str, Key] = {}
    hints = get_type_hints(cls)
    for item in fields(cls):
        name, hint = prefix + item.name, hints[item.name]
        if not is_dataclass(hint) or "group" in item.metadata:
            about = dict(item.metadata)
            if users := about.pop("routers", ()):
                about["text"] = f"{_users(users)}: {about['text']}"
            found[name] = Key(name, hint, item.default, **about)
        if is_dataclass(hint):
            found |= keys(hint, name + ".")
    return found


def _users(routers: Sequence[str]) -> str:
    """router=markov; router=w1, w3 or w6"""
    *most, last = routers
    return "router=" + (f"{', '.join(most)} or {last}" if most else last)


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(shown, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """' (did you mean X?)' with the nearest name, or nothing where none is near.

    A name also matches by its last part: ranks_per_node finds topology.ranks_per_node; or by its
    first word: ep finds ep_size. Not those of
    fault.*, which nobody means who writes stepz.
    """
    names = list(names)
    parts = {name.rsplit(".", 1)[-1]: name for name in names if not name.startswith("fault.")}
    by_word = parts | {name: name for name in names}
    near = difflib.get_close_matches(word, by_word, n=1, cutoff=0.6)
    near = near or [name for name in by_word if name.startswith(f"{word}_")][:1]  # ep: ep_size
    return f" (did you mean {by_word[near[0]]}?)" if near else ""


def no_such(kind: str, given: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The refusal of `given` (as typed) because `value` is none of the choices."""
    names = sorted(choices)
    near = did_you_mean(str(value), names)
    return ConfigError(f"{given}: no such {kind}; choose {', '.join(names)}{near}")
