"""What a run needs of this machine, estimated from shapes alone, and whether the machine has it.

memory       weights, rows in flight under even routing, what rank 0 gathers to check the outputs
open files   connections: every group of ranks joins all its ranks, so R ranks open about R x R each
GPUs         one a rank with nccl; with gloo, ranks may share them

The estimate refuses what cannot fit, and predicts no peak. `check` runs before any rank starts and
needs no torch unless a GPU is asked for; job=doctor prints the same findings.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from comm.dispatch import FORWARDING
from comm.memory import free_bytes
from comm.placement import experts_per_rank
from moe.conf_files import scale_option
from moe.model import ModelShape, ScaleConfig, scaled
from moe.settings import Config, UnfitError

GIB = 1 << 30
RANK_BYTES = 80 << 20  # an idle rank: an interpreter, torch, connections
BYTES_OF = {"fp32": 4, "bf16": 2, "fp16": 2}
ROW_COPIES = 6  # sent, received, expert input, gate and up, output, combined
GROUP_FILES = 4  # of each process group beside its connections: a listener, epoll and its like
OWN_FILES = 32  # standard streams, results, the pipe to the parent; with room for libraries
# Below the temporary folder: /pymp-12345678/listener-12345678, the socket that forks the ranks.
SOCKET_NAME, SOCKET_PATH = 32, 107
OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. state: OK, WARN or FAIL; remedy: what to type, if anything"""

    state: str
    what: str
    value: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """In one line, for those who asked nothing."""
        return f"{self.value}; {self.remedy}" if self.remedy else self.value


def check(config: Config, local_ranks: int) -> None:
    """Raise UnfitError for the first need of `local_ranks` ranks that this machine cannot meet."""
    findings = [
        memory(config, local_ranks, free_bytes()),
        open_files(config, *file_limits()),
        temporary_folder(tempfile.gettempdir()),
    ]
    if config.device == "cuda":
        import torch

        findings.append(gpus(config, local_ranks, torch.cuda.device_count()))
    for finding in findings:
        if finding.state == FAIL:
            raise UnfitError(finding.sentence)


def memory(config: Config, local_ranks: int, free: int) -> Finding:
    """free: bytes; see comm.memory"""
    needed = needed_bytes(config, local_ranks)
    value = (
        f"needs about {needed / GIB:,.1f} GiB here for {local_ranks} ranks, and"
        f" {free / GIB:,.1f} GiB are free"
    )
    if needed <= free:
        return Finding(OK, "memory", value)
    ways = smaller_runs(config, local_ranks, free)
    remedy = f"try {' or '.join(ways)}" if ways else "no one key makes it fit: change several"
    return Finding(FAIL, "memory", value, remedy)


def temporary_folder(folder: str) -> Finding:
    """A socket lies there, whose whole path the system allows about 100 bytes."""
    length, most = len(folder.encode()), SOCKET_PATH - SOCKET_NAME
    if length <= most:
        return Finding(OK, "TMPDIR", folder)
    return Finding(
        FAIL,
        "TMPDIR",
        f"{folder} has {length} characters, and the sockets in it leave room for {most}",
        "set TMPDIR to a shorter one, e.g. TMPDIR=/tmp",
    )


def memory_in_words(config: Config, local_ranks: int) -> str:
    """What to say of a rank that the system may have killed for its memory; called as it starts."""
    return (
        f"needed about {needed_bytes(config, local_ranks) / GIB:,.1f} GiB here for {local_ranks}"
        f" ranks, had {free_bytes() / GIB:,.1f} GiB"
    )


def smaller_runs(config: Config, local_ranks: int, free: int) -> list[str]:
    """Words that each make the run fit, with the nearest value that does."""

    def fits(smaller: Config) -> bool:
        ranks = smaller.world_size if local_ranks == config.world_size else local_ranks
        return needed_bytes(smaller, ranks) <= free

    words = []
    if config.job == "bench":
        bench = config.bench
        for name in ("tokens", "widths"):
            largest = max(getattr(bench, name))
            most = _most(
                lambda n, name=name: replace(config, bench=replace(bench, **{name: (n,)})),
                range(1, largest),
                fits,
            )
            words += [f"bench.{name}=[{most}]"] if most else []
        return words
    if isinstance(config.tokens, int):
        most = _most(lambda n: replace(config, tokens=n), range(1, config.tokens), fits)
        words += [f"tokens={most}"] if most else []
    elif fits(replace(config, tokens=(0,) * config.world_size)):
        words.append("fewer tokens")
    layers = scaled(config.model, config.scale).num_moe_layers
    most = _most(
        lambda n: replace(config, scale=replace(config.scale, layers=n)), range(1, layers), fits
    )
    words += [f"layers={most}"] if most else []
    if _plain_ranks(config) and local_ranks == config.world_size:
        most = _most(lambda n: replace(config, ranks=n), range(1, config.world_size), fits)
        words += [f"ranks={most}"] if most else []
    laptop = ScaleConfig("laptop", **scale_option("laptop"))
    if config.scale != laptop and fits(replace(config, scale=laptop)):
        words.append("scale=laptop")
    if config.reference and fits(replace(config, reference=False)):
        words.append("reference=false")
    return words


def _most(make: Callable[[int], Config], values: range, fits: Callable[[Config], bool]) -> int:
    """The largest of the values whose run fits; needs grow with it. 0: none."""
    low, high = 0, len(values)  # the first `low` fit, those from `high` on do not
    while low < high:
        middle = (low + high) // 2
        if fits(make(values[middle])):
            low = middle + 1
        else:
            high = middle
    return values[low - 1] if low else 0


def _plain_ranks(config: Config) -> bool:
    """May the number of ranks change without other keys?"""
    topology = config.topology
    return (
        (config.ep_size, config.expert_tp, topology.ranks_per_node) == (None, 1, None)
        and topology.node_of_rank is None
        and isinstance(config.tokens, int)
    )


def open_files(config: Config, soft: float, hard: float) -> Finding:
    """soft, hard: how many files a process may have open, and may ask to have open"""
    needed = rank_files(config)
    shown = "unlimited" if soft == float("inf") else f"{soft:,.0f}"
    value = (
        f"needs about {needed:,} open files in a rank, {machine_sockets(config):,} sockets in all;"
        f" the limit is {shown} a process"
    )
    if needed <= soft:
        return Finding(OK, "open files", value)
    if needed <= hard:
        return Finding(FAIL, "open files", value, f"ulimit -n {needed}")
    ranks = _most(
        lambda n: replace(config, ranks=n),
        range(1, config.world_size),
        lambda smaller: rank_files(smaller) <= hard,
    )
    fewer = f" or ranks={ranks}" if ranks and _plain_ranks(config) else ""
    return Finding(FAIL, "open files", value, f"as root: prlimit --pid $$ --nofile={needed}{fewer}")


def file_limits() -> tuple[float, float]:
    """Of this process, soft and hard."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (float("inf") if one == resource.RLIM_INFINITY else one for one in limits)
    return soft, hard


def group_sizes(config: Config) -> list[int]:
    """Ranks of each process group that a rank belongs to (comm.world, moe.assemble.Roads)."""
    ranks, positions = config.world_size, config.num_positions
    sizes = [ranks, ranks]  # control and metered traffic
    if config.job == "bench":
        return sizes + [-(-ranks // 2)]  # two_hop on two nodes
    if positions < ranks:
        sizes.append(positions)
    if config.dispatcher.name in FORWARDING:
        on_node = _ranks_of_a_node(config)
        sizes += [on_node] if on_node < positions else []  # else it is the group of before
    if config.expert_tp > 1:
        sizes.append(config.expert_tp)
        if config.expert_tp_mode == "all" and config.group_size < ranks:
            sizes.append(config.group_size)
    return sizes


def _ranks_of_a_node(config: Config) -> int:
    """The most; all of them where nothing is said."""
    topology = config.topology
    if topology.node_of_rank is not None:
        return max(Counter(topology.node_of_rank).values())
    return topology.ranks_per_node or config.world_size


def rank_files(config: Config) -> int:
    """Files that a rank has open; the process that watches over all ranks has fewer."""
    return OWN_FILES + sum(size - 1 + GROUP_FILES for size in group_sizes(config))


def machine_sockets(config: Config) -> int:
    """Sockets of all ranks together: each has one to every other rank of each of its groups."""
    return config.world_size * sum(group_sizes(config))  # one of them listens


def gpus(config: Config, local_ranks: int, num_gpus: int) -> Finding:
    """One GPU for each rank, unless their rows go through the host's memory."""
    value = f"{num_gpus} for {local_ranks} ranks here, device={config.device}"
    if config.device != "cuda":
        return Finding(OK, "GPUs", value + ": not used")
    if num_gpus == 0:
        return Finding(FAIL, "GPUs", "device=cuda: torch sees no GPU here", "device=cpu")
    if config.backend == "gloo":
        return Finding(OK, "GPUs", value + ", backend=gloo: rows go through the host's memory")
    if num_gpus < local_ranks:
        return Finding(
            FAIL,
            "GPUs",
            f"device=cuda: {num_gpus} GPUs here for {local_ranks} ranks, and nccl needs one for"
            " each rank",
            f"ranks={num_gpus}, or backend=gloo (ranks share the GPUs, rows go through the host's"
            " memory), or device=cpu",
        )
    return Finding(OK, "GPUs", value)


def needed_bytes(config: Config, local_ranks: int) -> int:
    """Bytes that so many ranks of the run take on this machine, rank 0 among them."""
    return local_ranks * rank_bytes(config) + rank_zero_bytes(config)


def rank_bytes(config: Config) -> int:
    """Bytes of one rank, the one with the most experts."""
    if config.job == "bench":
        largest = max(config.bench.tokens) * config.model.top_k * max(config.bench.widths)
        return RANK_BYTES + largest * 4 * ROW_COPIES
    shape = scaled(config.model, config.scale)
    size = BYTES_OF[config.dtype]
    redundant = config.placement.num_redundant_experts or 0
    most = int(experts_per_rank(shape.num_experts + redundant, config.num_positions)[0])
    expert = 3 * shape.payload_width * shape.intermediate_size * size // config.expert_tp
    weights = shape.num_moe_layers * (most * expert + _replicated_bytes(shape, size))
    tokens = sum(config.tokens_per_rank)
    rows = -(-tokens * shape.top_k // config.world_size) * config.expert_tp
    widest = max(shape.payload_width, 2 * shape.intermediate_size)
    in_flight = ROW_COPIES * rows * widest * size
    if "allgather" in config.dispatcher.name:  # every token of every rank arrives everywhere
        in_flight += ROW_COPIES * tokens * shape.payload_width * 4
    if config.mode == "training":  # gradients beside weights, and what each layer keeps for them
        return RANK_BYTES + 2 * weights + shape.num_moe_layers * in_flight
    return RANK_BYTES + weights + in_flight


def rank_zero_bytes(config: Config) -> int:
    """What rank 0 holds besides: every rank's routing and, for the reference, its outputs."""
    if config.job == "bench":
        return 0
    shape = scaled(config.model, config.scale)
    tokens = sum(config.tokens_per_rank) * shape.num_moe_layers
    routing = 2 * 8 * tokens * config.steps * shape.top_k  # pickled, then stacked
    if not config.reference:
        return routing
    outputs = 2 * 4 * tokens * (2 * shape.hidden_size + shape.payload_width)
    one_layer = 4 * sum(config.tokens_per_rank) * shape.top_k * shape.payload_width
    if config.mode == "training":  # the experts' gradients of one layer, gathered and worked out
        expert = 3 * shape.payload_width * shape.intermediate_size
        one_layer += 4 * 4 * shape.num_experts * expert
    return routing + outputs + one_layer


def _replicated_bytes(shape: ModelShape, size: int) -> int:
    """Weights of one layer that every rank holds: router, latent projections, shared experts."""
    latent = 2 * shape.hidden_size * (shape.latent_size or 0)
    shared = 3 * shape.hidden_size * shape.shared_intermediate_size
    return 4 * shape.num_experts * shape.hidden_size + size * (latent + shared)
