"""Expected traffic of a whole run under a router's law: mean and deviation of its bytes.

    patterns    rows that a hit or a copy brings, in each scope      (geometry)
    serving     who serves a pick, where experts have replicas       (shares)
    row_laws    the law of the rows of one token                     (fanout, skew)
    populations the tokens of a layer and the law of each
    markov      what neighbouring tokens share
    traffic     all of it added up and turned into bytes

Rows that are the same rows form a *flow*: dispatch and combine, forward and backward, of all lanes.
Inside a flow bytes are rows times a constant, so standard deviations add over its phases, kinds and
directions. Between flows (rows of shards, choices beyond a capacity) they are added too: an upper
bound, whatever the correlation. Tokens, layers and steps are independent: their variances add.
Tiers of one token are correlated; a scope that joins two of them ("remote") is one law, not a sum.

Legend: L layers, D directions, P phases, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from comm.analytic.choices import capacity
from comm.analytic.law import Law, NoLaw
from comm.analytic.paths import TWO_HOPS, Paths, slots_on_rank
from comm.analytic.patterns import SCOPES, Lane, Pattern, dispatched, gathered, sums_by_receiver
from comm.analytic.populations import Destinations, LayerRows, Tokens
from comm.analytic.row_laws import Population, RowLaw
from comm.analytic.rows import KINDS, PAYLOAD_KINDS, PHASES, ROW_PHASES, counts_bytes, row_bytes
from comm.analytic.run import IntArray, RunShape
from comm.analytic.serving import Unlawful

Cell = tuple[str, str]  # direction, phase


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation of a number of bytes."""

    mean: float
    std: float


@dataclass(frozen=True)
class Flow:
    """Rows of tokens that several phases move, all of them the same rows.

    rows_mean, rows_var: [L, scope]
    bytes_per_row: [D, P, kind] int64; negative where a row takes the place of padding
    populations: [L][scope] independent tokens and their laws; None where no tail can be computed
        from them: too many rows for it to matter, correlated tokens, or a law without distribution
    apart: [L] rows by which one of the independent parts of a sum may differ from its mean
    destinations: [L] mean and covariance of the rows by destination, forward dispatch; None: no law
    bounded: the variance is only bounded, so that no test can be built on it
    """

    name: str
    rows_mean: NDArray[np.float64]
    rows_var: NDArray[np.float64]
    bytes_per_row: NDArray[np.int64]
    populations: tuple[tuple[Population | None, ...], ...]
    apart: tuple[float, ...]
    destinations: tuple[Destinations | None, ...]
    bounded: bool = False

    def phases(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the named phases [P] that move these rows."""
        moves = self.bytes_per_row.any(axis=(0, 2))
        return tuple(name for name, there in zip(names, moves, strict=True) if there)


@dataclass(frozen=True)
class ExpectedTraffic:
    """What a law lets one expect of a run: all ranks and measured steps, phases that move tokens.

    fixed_bytes: [L, D, P, kind, scope] int64, what does not vary: counts messages, padded buffers
    phases: those of dispatch, combine, tp_gather, tp_reduce that the run has. Moving experts and
        synchronising gradients are not left to chance and not here: `of` refuses them
    """

    flows: tuple[Flow, ...]
    fixed_bytes: NDArray[np.int64]
    directions: tuple[str, ...]
    phases: tuple[str, ...]
    scopes: tuple[str, ...] = tuple(SCOPES)
    kinds: tuple[str, ...] = KINDS

    def of(
        self,
        scope: str,
        layers: Sequence[int] | None = None,
        phases: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        directions: Sequence[str] | None = None,
    ) -> Estimate:
        """Bytes of a scope, summed over the named layers, phases, kinds, directions (None: all).

        Raises KeyError for a phase, kind, direction or scope that the run has no law for.
        """
        s = self._positions("scopes", [scope])[0]
        chosen = np.arange(len(self.fixed_bytes)) if layers is None else list(layers)
        cells = np.ix_(
            self._positions("directions", directions),
            self._positions("phases", phases),
            self._positions("kinds", kinds),
        )
        mean = float(sum(int(layer[cells].sum()) for layer in self.fixed_bytes[chosen, ..., s]))
        std = 0.0
        for flow in self.flows:
            per_row = int(flow.bytes_per_row[cells].sum())
            mean += float(flow.rows_mean[chosen, s].sum()) * per_row
            std += abs(per_row) * sqrt(flow.rows_var[chosen, s].sum())
        return Estimate(mean, std)

    def fixed(self, scope: str, layers: Sequence[int], phases: Sequence[str]) -> int:
        """Bytes that do not vary, all kinds and directions."""
        s, chosen = self.scopes.index(scope), self._positions("phases", phases)
        return sum(int(self.fixed_bytes[layer][:, chosen, :, s].sum()) for layer in layers)

    def population(
        self, flow: Flow, scope: str, layers: Sequence[int] | None = None
    ) -> Population | None:
        """The tokens of the named layers, equal laws brought together; None where one is None."""
        s = self.scopes.index(scope)
        chosen = range(len(flow.populations)) if layers is None else layers
        parts = [flow.populations[layer][s] for layer in chosen]
        known = [part for part in parts if part is not None]
        return merged(entry for part in known for entry in part) if known == parts else None

    def _positions(self, axis: str, chosen: Sequence[str] | None) -> list[int]:
        names = getattr(self, axis)
        for name in chosen or ():
            if name not in names:
                raise KeyError(f"{name!r} is not among the {axis} of this law: {names}")
        return list(range(len(names))) if chosen is None else [names.index(n) for n in chosen]


def expected_traffic(
    run: RunShape, law: Law, active_tokens: IntArray | None = None
) -> ExpectedTraffic | NoLaw:
    """The law of a run, or the reason why it has none.

    active_tokens: [steps, L, R] tokens that chose any expert; None: all of them
    """
    paths = Paths.of(run)
    shape = (run.num_steps, run.num_layers, run.world_size)
    active = np.broadcast_to(np.array(run.tokens_per_rank, np.int64), shape)
    if active_tokens is not None:
        active = np.asarray(active_tokens, np.int64)
        if active.shape != shape:
            raise ValueError(f"active_tokens has shape {active.shape}, the run has {shape}")
    if isinstance(law, NoLaw):
        return law
    try:
        flows = tuple(_flows(run, paths, Tokens(run, paths, law, active)))
    except Unlawful as unlawful:
        return NoLaw(str(unlawful))
    phases = tuple(phase for phase in run.phases if phase in ROW_PHASES)
    return ExpectedTraffic(flows, _fixed_bytes(run, paths), run.directions, phases)


def merged(entries: Iterable[tuple[int, RowLaw]]) -> Population:
    """Add up the tokens that follow the same law."""
    num_tokens: Counter[RowLaw] = Counter()
    for tokens, law in entries:
        num_tokens[law] += tokens
    return tuple((tokens, law) for law, tokens in num_tokens.items())


def _flows(run: RunShape, paths: Paths, tokens: Tokens) -> Iterable[Flow]:
    """The flows of a run; which (direction, phase) move each is decided here."""
    moved: list[tuple[str, tuple[str, ...], Callable[[Lane], Pattern], bool]] = []
    if run.shifts == 1:
        # Rows by destination can be tested where each goes straight to where it is computed.
        straight = run.dispatcher not in TWO_HOPS
        to_own = partial(dispatched, run, paths, shifts=1)
        moved.append(("rows", ("dispatch", "combine"), to_own, straight))
    else:
        for phase, shifts in (("dispatch", run.shifts), ("combine", 1)):
            to_lanes = partial(dispatched, run, paths, shifts=shifts)
            moved.append((f"rows of {phase}", (phase,), to_lanes, False))
    if run.expert_tp > 1:
        shards = ("tp_gather", "tp_reduce")
        moved.append(("rows of shards", shards, partial(gathered, run, paths), False))
    for name, phases, pattern_of, by_rank in moved:
        if run.dispatcher == "padded":
            flow = replace(_flow(run, name, phases, tokens.kept(pattern_of)), bounded=True)
            yield flow if phases[0] == "tp_gather" else _instead_of_padding(flow)
        else:
            yield _flow(run, name, phases, tokens.rows(pattern_of, by_rank))


def _flow(run: RunShape, name: str, phases: Sequence[str], layers: Sequence[LayerRows]) -> Flow:
    return Flow(
        name,
        np.array([layer.mean for layer in layers]),
        np.array([layer.variance for layer in layers]),
        _bytes_per_row(run, phases),
        tuple(layer.populations for layer in layers),
        tuple(layer.apart for layer in layers),
        tuple(layer.destinations for layer in layers),
    )


def _instead_of_padding(flow: Flow) -> Flow:
    """Rows with a token turn padding into payload: the sum of all kinds does not vary."""
    payload = [KINDS.index(kind) for kind in PAYLOAD_KINDS]
    bytes_per_row = flow.bytes_per_row.copy()
    bytes_per_row[..., KINDS.index("padding")] = -bytes_per_row[..., payload].sum(axis=-1)
    return replace(flow, bytes_per_row=bytes_per_row)


def _bytes_per_row(run: RunShape, phases: Sequence[str]) -> NDArray[np.int64]:
    """[D, P, kind] of one row in the named phases, as far as the run has them."""
    present = [phase for phase in run.phases if phase in ROW_PHASES]
    table = np.zeros((len(run.directions), len(present), len(KINDS)), np.int64)
    for d, direction in enumerate(run.directions):
        for p, phase in enumerate(present):
            if phase not in phases:
                continue
            there = phase in ("dispatch", "tp_gather")
            wire = run.wire_dispatch if there else run.wire_combine
            row = row_bytes(
                run.dispatcher,
                phase,
                wire if direction == "forward" else run.wire_backward,
                run.width,
                run.top_k,
                direction=direction,
                deduplicate=run.deduplicate,
            )
            table[d, p] = [row[kind] for kind in KINDS]
    return table


def _fixed_bytes(run: RunShape, paths: Paths) -> NDArray[np.int64]:
    """[L, D, P, kind, scope] counts messages, and the buffers of dispatcher=padded."""
    present = [phase for phase in run.phases if phase in ROW_PHASES]
    shape = (run.num_layers, len(run.directions), len(present), len(KINDS), len(SCOPES))
    fixed = np.zeros(shape, np.int64)
    counts, padding = KINDS.index("counts"), KINDS.index("padding")
    # Who sends to a rank is the same in all layers; what it owns is not.
    announced = _announced(run, paths)
    senders = {phase: announced[phase] for phase in present if phase in announced}
    payload = _bytes_per_row(run, PHASES)[..., [KINDS.index(kind) for kind in PAYLOAD_KINDS]]
    row = payload.sum(axis=-1)  # [D, P]
    rooms = []
    if run.dispatcher == "padded":
        room = run.num_steps * capacity(run).sum(axis=0)
        group = np.arange(run.world_size) // run.group_size
        asked = group if run.shifts > 1 else paths.lane
        rooms = [sums_by_receiver(paths, part, room) for part in (asked, paths.lane)]
    for layer in range(run.num_layers):
        slots = slots_on_rank(run, paths, layer)
        values, of_rank = np.unique(slots, return_inverse=True)
        for phase, by_receiver in senders.items():
            sizes = [
                counts_bytes(run.dispatcher, int(n), phase=phase, deduplicate=run.deduplicate)
                for n in values
            ]
            message = run.num_steps * run.chunks * np.array(sizes, np.int64)[of_rank.ravel()]
            fixed[layer, 0, present.index(phase), counts] = by_receiver @ message
        for p, by_receiver in enumerate(rooms):  # dispatch, combine
            fixed[layer, :, p, padding] = row[:, p, None] * (by_receiver @ slots)
    return fixed


def _announced(run: RunShape, paths: Paths) -> dict[str, NDArray[np.int64]]:
    """[scope, dst] counts messages that reach a rank in each phase, the one that computes."""
    rank, one = np.arange(run.world_size), np.ones(run.world_size, np.int64)
    own_lane = sums_by_receiver(paths, paths.lane, one)
    # n dispatches reach every rank of the group, one dispatch those of the lane.
    group = sums_by_receiver(paths, rank // run.group_size, one)
    asked = group if run.shifts > 1 else own_lane
    if run.dispatcher in TWO_HOPS:  # a second time inside the node
        own_node = np.unique(paths.lane * paths.num_nodes + paths.node, return_inverse=True)[1]
        asked = asked + sums_by_receiver(paths, own_node.ravel(), one)
    mates = sums_by_receiver(paths, rank // run.expert_tp, one)
    return {"dispatch": asked, "combine": own_lane, "tp_gather": mates}
