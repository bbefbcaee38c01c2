"""Expected traffic of a whole run under uniform routing: mean and deviation of its bytes.

The rows of one token (`fanout`) are added over tokens, sources and layers, which are independent,
so their variances add. Bytes are rows times a constant: phases and kinds move the *same* rows, so
across them standard deviations add. Tiers of one token are correlated; a scope that joins two of
them ("remote") is therefore one set of ranks with a law of its own, never a sum of two laws.

Legend: L layers, R ranks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from comm.analytic.fanout import Constant, Copies, Distinct
from comm.analytic.rows import KINDS, PHASES, check_dispatcher, counts_bytes, row_bytes
from comm.topology import LinkTier

SCOPES = {
    "self": (LinkTier.SELF,),
    "scale_up": (LinkTier.SCALE_UP,),
    "scale_out": (LinkTier.SCALE_OUT,),
    "remote": (LinkTier.SCALE_UP, LinkTier.SCALE_OUT),
}

RowLaw = Constant | Copies | Distinct
# Independent tokens: (how many, law of the rows of each).
Population = tuple[tuple[int, RowLaw], ...]


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation of a number of bytes."""

    mean: float
    std: float


@dataclass(frozen=True)
class ExpectedTraffic:
    """What uniform routing lets one expect of a run, all ranks and measured steps together.

    rows_mean, rows_var: [L, scope] dispatched rows; as many are combined
    bytes_per_row: [phase, kind] int64
    fixed_bytes: [L, phase, kind, scope] int64, the counts messages
    populations: [L][scope] tokens and their laws, for tests that need more than two moments
    """

    rows_mean: NDArray[np.float64]
    rows_var: NDArray[np.float64]
    bytes_per_row: NDArray[np.int64]
    fixed_bytes: NDArray[np.int64]
    populations: tuple[tuple[Population, ...], ...]
    scopes: tuple[str, ...] = tuple(SCOPES)
    phases: tuple[str, ...] = PHASES
    kinds: tuple[str, ...] = KINDS

    def of(
        self,
        scope: str,
        layers: Sequence[int] | None = None,
        phases: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
    ) -> Estimate:
        """Bytes of a scope, summed over the named layers, phases and kinds (None: all)."""
        s = self.scopes.index(scope)
        chosen = slice(None) if layers is None else list(layers)
        cells = np.ix_(_positions(self.phases, phases), _positions(self.kinds, kinds))
        per_row = int(self.bytes_per_row[cells].sum())
        fixed = sum(int(layer[cells].sum()) for layer in self.fixed_bytes[chosen, :, :, s])
        mean = float(self.rows_mean[chosen, s].sum()) * per_row + fixed
        return Estimate(mean, per_row * sqrt(self.rows_var[chosen, s].sum()))

    def population(self, scope: str, layers: Sequence[int] | None = None) -> Population:
        """The tokens of the named layers, equal laws brought together."""
        chosen = range(len(self.populations)) if layers is None else layers
        s = self.scopes.index(scope)
        return _merged(entry for layer in chosen for entry in self.populations[layer][s])


def expected_traffic(
    dispatcher: str,
    tokens_per_rank: Sequence[int],
    slots_per_rank: NDArray[np.integer],
    tiers: NDArray[np.integer],
    top_k: int,
    num_steps: int,
    wire_dispatch: str,
    wire_combine: str,
    width: int,
) -> ExpectedTraffic:
    """The law of a run whose router draws `top_k` distinct experts uniformly.

    tokens_per_rank: [R] tokens that start on each rank, all measured steps together
    slots_per_rank: [L, R] experts owned by each rank, every expert exactly once
    tiers: [R, R] LinkTier of each (src, dst)
    num_steps: measured steps; each announces its counts once for each layer and pair
    width: elements of a row
    """
    check_dispatcher(dispatcher)
    slots_per_rank = np.asarray(slots_per_rank)
    populations_of: dict[bytes, tuple[Population, ...]] = {}  # layers placed alike share one
    for slots in slots_per_rank:
        if slots.tobytes() not in populations_of:
            populations_of[slots.tobytes()] = _populations(
                dispatcher, tokens_per_rank, slots, tiers, top_k
            )
    populations = tuple(populations_of[slots.tobytes()] for slots in slots_per_rank)

    bytes_per_row = np.array(
        [
            list(row_bytes(dispatcher, phase, wire, width, top_k).values())
            for phase, wire in zip(PHASES, (wire_dispatch, wire_combine), strict=True)
        ],
        np.int64,
    )
    fixed_bytes = np.zeros((len(populations), len(PHASES), len(KINDS), len(SCOPES)), np.int64)
    announced = _announced_bytes(dispatcher, slots_per_rank, tiers)
    fixed_bytes[:, PHASES.index("dispatch"), KINDS.index("counts")] = num_steps * announced
    moments = np.array([[_moments(scope) for scope in layer] for layer in populations])
    return ExpectedTraffic(
        moments[..., 0], moments[..., 1], bytes_per_row, fixed_bytes, populations
    )


def _populations(
    dispatcher: str,
    tokens_per_rank: Sequence[int],
    slots: NDArray[np.integer],
    tiers: NDArray[np.integer],
    top_k: int,
) -> tuple[Population, ...]:
    """For each scope the tokens of one layer, grouped by what their source rank sees.

    Two sources that see equally many ranks of each block size in each tier follow one law.
    """
    num_experts = int(slots.sum())
    sizes, size_of_rank = np.unique(slots, return_inverse=True)
    one_hot = np.eye(len(sizes), dtype=np.float32)[size_of_rank]  # float: a matrix product below
    seen = np.stack([(tiers == tier) @ one_hot for tier in LinkTier], axis=1).astype(np.int64)
    views, view_of_rank = np.unique(seen, axis=0, return_inverse=True)
    num_tokens = [0] * len(views)
    for view, tokens in zip(view_of_rank.ravel().tolist(), tokens_per_rank, strict=True):
        num_tokens[view] += int(tokens)

    def law(view: NDArray[np.int64], scope: tuple[LinkTier, ...]) -> RowLaw:
        num_ranks = view[list(scope)].sum(axis=0)  # [size]
        if dispatcher == "allgather":
            return Constant(int(num_ranks.sum()))
        if dispatcher == "all_to_all":
            return Copies(int(num_ranks @ sizes), num_experts, top_k)
        blocks = zip(sizes.tolist(), num_ranks.tolist(), strict=True)
        return Distinct(tuple((s, n) for s, n in blocks if s and n), num_experts, top_k)

    entries = [(n, view) for n, view in zip(num_tokens, views, strict=True) if n]
    return tuple(_merged((n, law(view, scope)) for n, view in entries) for scope in SCOPES.values())


def _merged(entries: Iterable[tuple[int, RowLaw]]) -> Population:
    """Add up the tokens that follow the same law."""
    num_tokens: Counter[RowLaw] = Counter()
    for tokens, law in entries:
        num_tokens[law] += tokens
    return tuple((tokens, law) for law, tokens in num_tokens.items())


def _moments(population: Population) -> tuple[float, float]:
    """Mean and variance of the rows of all tokens."""
    mean = sum(tokens * law.mean for tokens, law in population)
    return mean, sum(tokens * law.variance for tokens, law in population)


def _announced_bytes(
    dispatcher: str, slots_per_rank: NDArray[np.integer], tiers: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Bytes [L, scope] of the counts messages of one step."""
    to_rank = np.array(
        [[counts_bytes(dispatcher, int(n)) for n in slots] for slots in slots_per_rank], np.int64
    )
    by_tier = np.stack([(tiers == tier).sum(axis=0) for tier in LinkTier])  # [tier, dst] sources
    by_scope = np.stack([by_tier[list(scope)].sum(axis=0) for scope in SCOPES.values()])
    announced: NDArray[np.int64] = to_rank @ by_scope.T
    return announced


def _positions(names: Sequence[str], chosen: Sequence[str] | None) -> list[int]:
    return list(range(len(names))) if chosen is None else [names.index(name) for name in chosen]
