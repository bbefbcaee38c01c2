"""What a run would do, without its ranks: expected traffic, the busiest rank, and the least time.

    config --plan--> shape, nodes, owners --law--> expected bytes --machine--> time
                                              |--> rows of each rank

The traffic is the very law that `job=emulate` holds its counts against; nothing is derived twice.
No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log, sqrt
from typing import Any

import numpy as np

from comm.analytic.by_rank import RankRows, rank_rows
from comm.analytic.law import Law, NoLaw, Weighted
from comm.analytic.project import TIERS, Links, PhaseTime, phase_time, unknown_rates, way
from comm.analytic.rows import PAYLOAD_KINDS
from comm.analytic.run import RunShape
from comm.analytic.skew import inclusion
from comm.analytic.traffic import Estimate, ExpectedTraffic, expected_traffic
from comm.balance import balance, minimum_redundant
from comm.placement import ExpertPlacement, placement_from_slots
from comm.topology import TIER_NAMES, Topology
from moe.facts import run_shape
from moe.hardware import PHASES, HardwareConfig
from moe.plan import Plan, plan_on
from moe.settings import Config

ALIKE = 1e-9  # relative difference of two sums of the same numbers in another order
ON_THE_WIRE = (*PAYLOAD_KINDS, "padding")  # what a row is made of, without what describes it


@dataclass(frozen=True)
class Busiest:
    """The largest load of any rank in one phase of one layer and step, and the mean one.

    way: "sends" or "receives"; ranks: how many are alike; mean_rows: of all ranks
    guide_rows: the largest of them in a single layer, mean + sd sqrt(2 ln ranks); None: no law of
        one rank's rows is known
    """

    direction: str
    phase: str
    tier: str
    way: str
    rank: int
    ranks: int
    rows: float
    mean_rows: float
    guide_rows: float | None


@dataclass(frozen=True)
class Prediction:
    """All that is known of a run that nobody starts. Totals are of all ranks and one step.

    law: what its router follows; expected: traffic of all its steps, or why there is none
    run: the run as the law sees it; links: what the machine's ranks can move
    """

    config: Config
    plan: Plan
    run: RunShape
    law: Law
    expected: ExpectedTraffic | NoLaw
    links: Links

    @property
    def reason(self) -> str | None:
        """Why nothing can be expected; None where it can."""
        if isinstance(self.expected, ExpectedTraffic):
            return None
        return self.expected.reason

    @property
    def traffic(self) -> ExpectedTraffic:
        """The expected traffic. Raises ValueError, with the reason, where there is none."""
        if isinstance(self.expected, NoLaw):
            raise ValueError(f"router={self.config.router.name}: {self.expected.reason}")
        return self.expected

    @property
    def num_ranks(self) -> int:
        return self.run.world_size

    @property
    def tokens(self) -> int:
        """Tokens of all ranks in a step."""
        return sum(self.run.tokens_per_rank)

    @property
    def rounds(self) -> int:
        """Logical exchanges of a step: phases times layers."""
        return len(self.traffic.directions) * len(self.traffic.phases) * self.run.num_layers

    def of(
        self,
        scope: str,
        phases: tuple[str, ...] | None = None,
        kinds: tuple[str, ...] | None = None,
        directions: tuple[str, ...] | None = None,
    ) -> Estimate:
        """Bytes of all ranks and layers in one step: of the mean step, its own deviation."""
        total = self.traffic.of(scope, None, phases, kinds, directions)
        return Estimate(total.mean / self.run.num_steps, total.std / self.run.num_steps**0.5)

    @cached_property
    def rows(self) -> list[dict[str, RankRows]]:
        """For each layer: phase -> expected rows of every rank, all steps."""
        return rank_rows(self.run, self.law, active_tokens(self.plan))

    def row_bytes(self, direction: str, phase: str, kinds: tuple[str, ...] | None = None) -> int:
        """Bytes of one row; kinds: None for all."""
        traffic = self.traffic
        d, p = traffic.directions.index(direction), traffic.phases.index(phase)
        chosen = [traffic.kinds.index(kind) for kind in kinds or traffic.kinds]
        if self.run.dispatcher == "padded" and phase in PHASES:
            chosen = [traffic.kinds.index(kind) for kind in PAYLOAD_KINDS]
        return int(sum(flow.bytes_per_row[d, p, chosen].sum() for flow in traffic.flows))

    @property
    def dropped_share(self) -> float:
        """Of all choices: those that find no room in a buffer of fixed size."""
        chosen = self.run.top_k * int(active_tokens(self.plan).sum()) / self.run.num_steps
        if self.run.dispatcher != "padded" or not chosen:
            return 0.0
        where = (("dispatch",), PAYLOAD_KINDS, ("forward",))
        kept = self.of("self", *where).mean + self.of("remote", *where).mean
        return max(0.0, 1 - kept / self.row_bytes("forward", "dispatch", PAYLOAD_KINDS) / chosen)

    @cached_property
    def busiest(self) -> list[Busiest]:
        """By direction, phase and tier, of the layer with the largest load."""
        found: dict[tuple[str, str, str], Busiest] = {}
        seen: set[int] = set()
        for layer in self.rows:
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            for direction in self.traffic.directions:
                for phase in self.traffic.phases:
                    for tier in TIERS:
                        one = _busiest(direction, phase, tier, layer[phase], self.run.num_steps)
                        key = (direction, phase, tier)
                        if one and (key not in found or one.rows > found[key].rows):
                            found[key] = one
        return list(found.values())

    @cached_property
    def layer_times(self) -> list[tuple[PhaseTime, ...]]:
        """Of each layer, its phases in the order of the ledger; layers alike are one object.

        Raises ValueError where a rate that is needed is not known.
        """
        found: dict[int, tuple[PhaseTime, ...]] = {}
        for layer in self.rows:
            if id(layer) not in found:
                found[id(layer)] = tuple(
                    phase_time(d, phase, self._bytes(d, phase, layer[phase]), self.links)
                    for d in self.traffic.directions
                    for phase in self.traffic.phases
                )
        return [found[id(layer)] for layer in self.rows]

    @property
    def unknown_tiers(self) -> list[str]:
        """Tiers that move bytes at a rate that the machine's file does not have."""
        used = {tier: self.of(tier, kinds=ON_THE_WIRE).mean for tier in TIERS}
        return unknown_rates(used, self.links)

    def _bytes(self, direction: str, phase: str, rows: RankRows) -> dict[str, float]:
        """tier -> bytes of rows that the busiest rank sends or receives in one step."""
        row = self.row_bytes(direction, phase, ON_THE_WIRE)
        most = np.maximum(rows.sent, rows.received).max(axis=1) / self.run.num_steps
        return {tier: row * float(most[TIER_NAMES.index(tier)]) for tier in TIERS}

    @cached_property
    def step_us(self) -> float:
        """The least time of a step's communication."""
        return sum(phase.us for layer in self.layer_times for phase in layer)

    def as_dict(self) -> dict[str, Any]:
        """What a page and a file show, as plain values."""
        from moe.predict_figures import as_dict  # which needs this class

        return as_dict(self)


def predict(config: Config) -> Prediction:
    """Plan a run without ranks. Raises ValueError, in one line, for files that do not fit."""
    plan = plan_on(config, imagined_topology(config))
    law = plan.routing.law
    if plan.rebalances:
        plan = plan.placed(_balanced(plan, law))
    run = run_shape(plan, plan.placements)
    expected = law if isinstance(law, NoLaw) else expected_traffic(run, law, active_tokens(plan))
    return Prediction(config, plan, run, law, expected, links(config.hardware, plan))


def imagined_topology(config: Config) -> Topology:
    """The nodes of ranks that nobody starts: as said, else the machine's scale-up domains.

    The last node may be smaller where the domain's size is the hardware's and does not divide.
    """
    ranks, asked = config.world_size, config.topology
    if asked.node_of_rank is not None:
        return Topology(asked.node_of_rank)
    per_node = asked.ranks_per_node or config.hardware.scale_up_domain or ranks
    return Topology(tuple(rank // per_node for rank in range(ranks)))


def active_tokens(plan: Plan) -> np.ndarray:
    """int64 [steps, L, R] tokens that choose any expert."""
    steps, layers = range(plan.config.steps), range(plan.num_layers)
    of_step = [[plan.routing.active_tokens(step, layer) for layer in layers] for step in steps]
    return np.array(of_step, np.int64)


def links(hardware: HardwareConfig, plan: Plan) -> Links:
    """What a rank of this machine can move in this layout of nodes."""
    nodes = np.bincount(np.unique(plan.topology.node_of_rank, return_inverse=True)[1].ravel())
    cards = (hardware.scale_out_GBps, hardware.nics_per_rank, hardware.oversubscription)
    out = None if None in cards else hardware.scale_out_rank_GBps
    reach = {phase: hardware.reach(phase, int(nodes.max())) for phase in PHASES}
    known = {phase: one for phase, one in reach.items() if one is not None}
    return Links(
        {"scale_up": hardware.scale_up_GBps, "scale_out": out},
        {phase: one.GBps for phase, one in known.items()},
        {phase: one.latency_us for phase, one in known.items() if one.latency_us is not None},
        next((one.ep_size for one in known.values()), None),
    )


def _balanced(plan: Plan, law: Law) -> tuple[ExpertPlacement, ...]:
    """Experts placed by the load that the law lets one expect; a run takes that of its warm-up."""
    experts, positions = plan.shape.num_experts, plan.config.num_positions
    redundant = plan.config.placement.num_redundant_experts
    if redundant is None:
        redundant = minimum_redundant(experts, positions)
    found: dict[bytes, ExpertPlacement] = {}
    placements = []
    for layer in range(plan.num_layers):
        load = _expected_load(law, layer, experts, plan.shape.top_k)
        key = load.tobytes()
        if key not in found:
            slots = balance(load, positions, experts + redundant)
            found[key] = placement_from_slots("balance", experts, *slots)
        placements.append(found[key])
    return tuple(placements)


def _expected_load(law: Law, layer: int, num_experts: int, top_k: int) -> np.ndarray:
    """[E] how often a token chooses each expert, on average over the steps."""
    if not isinstance(law, Weighted):
        return np.full(num_experts, top_k / num_experts)
    variants, steps = np.unique(law.variant[:, layer], return_counts=True)
    chosen = [inclusion(law.weights[variant], top_k) for variant in variants]
    return np.asarray(np.average(chosen, axis=0, weights=steps))


def _other(most: dict[str, float]) -> str:
    return max(most, key=lambda one: most[one])


def _busiest(
    direction: str, phase: str, tier: str, rows: RankRows, num_steps: int
) -> Busiest | None:
    """The rank with the largest load, and whether it sends or receives it; None: no rows."""
    at = TIER_NAMES.index(tier)
    ways = {"sends": rows.sent[at] / num_steps, "receives": rows.received[at] / num_steps}
    if direction == "backward":
        ways = {"sends": ways["receives"], "receives": ways["sends"]}
    # Between equals: where the experts are, for there the loads vary more.
    at_experts = "receives" if way(direction, phase) == "dispatch" else "sends"
    most = {one: float(load.max()) for one, load in ways.items()}
    which = at_experts if most[at_experts] >= max(most.values()) * (1 - ALIKE) else _other(most)
    load = ways[which]
    if most[which] <= 0:
        return None
    alike = int((load >= most[which] * (1 - ALIKE)).sum())
    rank = int((load >= most[which] * (1 - ALIKE)).argmax())
    variance = float(rows.variance[at][rank]) / num_steps
    guide = None
    if which == at_experts and np.isfinite(variance):
        guide = most[which] + sqrt(variance * 2 * log(alike))
    mean = float(load.mean())
    return Busiest(direction, phase, tier, which, rank, alike, most[which], mean, guide)
