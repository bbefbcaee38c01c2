"""The tokens of every layer and the law of the rows of each.

Tokens of one source that are served alike follow one law. How many there are: all measured steps in
which the router's variant holds, the token's class where replicas take turns, and only the tokens
that chose any expert.

Legend: L layers, R ranks, G lane positions, N nodes of a lane, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from comm.analytic.choices import capacity
from comm.analytic.law import GroupLimited, Law, Markov, Uniform, Weighted
from comm.analytic.markov import FORGOTTEN, Chain, Sequences, bilinear
from comm.analytic.padding import expected_dropped, kept_variance
from comm.analytic.paths import TWO_HOPS, Paths
from comm.analytic.patterns import SCOPES, Lane, Pattern, sources_alike
from comm.analytic.row_laws import (
    LawSet,
    Population,
    RowLaw,
    every_block,
    group_limited_rows,
    uniform_by_rank,
    uniform_rows,
)
from comm.analytic.run import IntArray, RunShape
from comm.analytic.serving import Layer, Unlawful, slot_shares
from comm.analytic.skew import NO_VARIANCE, Picks, SkewedHits, inclusion, skewed_rows
from comm.analytic.tail import RARE_EVENTS

MAX_DESTINATIONS = 256  # ranks up to which rows by destination are tested: their covariance is R^2
MAX_LAWS = 512  # assignments of experts to ranks that may differ between the tokens of a layer

# (mean [R], covariance [R, R]) of the rows that each rank receives.
Destinations = tuple[NDArray[np.float64], NDArray[np.float64]]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerRows:
    """Rows of one layer, all tokens together; mean, variance, populations: [scope]

    apart: rows by which the part of one token, or of tokens that resemble each other, may differ
        from its mean
    """

    mean: Floats
    variance: Floats
    populations: tuple[Population | None, ...]
    apart: float
    destinations: Destinations | None = None


@dataclass
class _Sum:
    """A LayerRows while it grows."""

    mean: Floats = field(default_factory=lambda: np.zeros(len(SCOPES)))
    variance: Floats = field(default_factory=lambda: np.zeros(len(SCOPES)))
    tokens: list[dict[RowLaw, int]] = field(default_factory=lambda: [{} for _ in SCOPES])
    most: int = 1  # rows that no token exceeds

    def add(self, scope: int, laws: LawSet, tokens: Ints) -> None:
        """tokens: [n] of each count that `laws` was made for"""
        of_law = np.zeros(len(laws.laws), np.int64)
        np.add.at(of_law, laws.of, tokens)
        self.mean[scope] += of_law @ laws.mean
        self.variance[scope] += of_law @ laws.variance
        for law, n in zip(laws.laws, of_law.tolist(), strict=True):
            if n:
                self.tokens[scope][law] = self.tokens[scope].get(law, 0) + n

    def population(self, scope: int) -> Population | None:
        """None where no distribution is known, or too many events are certain for it to matter.

        Of x rows above the least, no more than m, E[x^2] <= m E[x]: at least variance / m events.
        """
        laws = self.tokens[scope]
        no_pmf = any(isinstance(law, SkewedHits) and not law.has_pmf for law in laws)
        many = self.variance[scope] >= RARE_EVENTS * self.most
        if no_pmf or many:
            return None
        return tuple((n, law) for law, n in laws.items())


@dataclass(frozen=True)
class Served:
    """Tokens of a lane that are served alike.

    slot_share: [S] probability that a slot serves a pick of its expert
    sources: bool [G]; per_step: [G] how many of each source's tokens, None for all that are active
    """

    slot_share: Floats
    sources: NDArray[np.bool_]
    per_step: Ints | None


class Tokens:
    """Who the tokens of a run are; answers with the rows of every layer.

    active: [steps, L, R] tokens that chose any expert
    """

    def __init__(self, run: RunShape, paths: Paths, law: Law, active: IntArray) -> None:
        self.run, self.paths, self.law = run, paths, _simplest(law)
        self.active = np.asarray(active, np.int64)
        self.all_active = bool((self.active == np.array(run.tokens_per_rank)).all())
        self.lanes = [Lane.of(paths, index) for index in range(len(paths.rank_at))]
        self.layers = [
            Layer(
                np.asarray(experts, np.int64),
                np.asarray(positions, np.int64),
                run.num_experts,
                paths.rank_at.shape[1],
            )
            for experts, positions in zip(run.physical_to_logical, run.slot_rank, strict=True)
        ]
        self._picks: dict[tuple[bytes, ...], Picks] = {}
        self._laws: dict[tuple[bytes, ...], LawSet] = {}
        self._serving: dict[tuple[bytes, ...], list[Served]] = {}
        self._variances: dict[tuple[bytes, ...], Floats] = {}
        self._inclusion: dict[int, Floats] = {}
        self._sources: dict[tuple[bytes, bytes], tuple[Ints, Ints]] = {}

    def rows(self, pattern_of: Callable[[Lane], Pattern], by_rank: bool) -> list[LayerRows]:
        """The rows of every layer; by_rank: also by destination, for patterns without hops."""
        patterns = [pattern_of(lane) for lane in self.lanes]
        found: dict[tuple[bytes, ...], LayerRows] = {}
        rows = []
        for layer in range(len(self.layers)):
            key = self.key(layer)
            if key not in found:
                found[key] = self._layer_rows(layer, patterns, by_rank)
            rows.append(found[key])
        return rows

    def key(self, layer: int) -> tuple[bytes, ...]:
        """Equal for layers whose rows follow equal laws."""
        place = self.layers[layer]
        variant = self.law.variant[:, layer] if isinstance(self.law, Weighted) else np.zeros(0)
        return (
            place.expert.tobytes(), place.position.tobytes(),
            variant.tobytes(), self.active[:, layer].tobytes(),
        )  # fmt: skip

    def _layer_rows(self, layer: int, patterns: Sequence[Pattern], by_rank: bool) -> LayerRows:
        total = _Sum(most=max(1, self.run.top_k * max(map(_rows_of_pick, patterns))))
        if isinstance(self.law, Markov) and patterns[0].kind != "every":
            return self._markov_rows(layer, patterns, total)
        size = self.run.world_size
        chance = isinstance(self.law, GroupLimited) or patterns[0].kind == "every"
        by_rank = by_rank and size <= MAX_DESTINATIONS and not chance
        mean, covariance = np.zeros(size), np.zeros((size, size) if by_rank else (0, 0))
        for lane, pattern in zip(self.lanes, patterns, strict=True):
            if pattern.kind == "every":
                tokens = self.active[:, layer, lane.ranks].sum(axis=0)
                sources, tokens = self._kinds(lane, np.zeros_like(tokens), tokens)
                for scope, rows in enumerate(pattern.of(sources)):
                    total.add(scope, every_block(rows), tokens)
                continue
            for served, variant, tokens in self.alike(layer, lane):
                sizes = None
                if self.is_plain(served):
                    sizes = self.layers[layer].sizes(served.slot_share)
                sources, of_kind = self._kinds(lane, sizes, tokens)
                for scope, rows in enumerate(pattern.of(sources)):
                    laws = self._law_set(layer, lane, served, variant, pattern.kind, rows)
                    total.add(scope, laws, of_kind)
                if by_rank:
                    here, spread = self._by_rank(layer, lane, served, variant, pattern.kind)
                    mean[lane.ranks] += tokens.sum() * here
                    covariance[np.ix_(lane.ranks, lane.ranks)] += tokens.sum() * spread
        return LayerRows(
            total.mean,
            total.variance,
            tuple(total.population(scope) for scope in range(len(SCOPES))),
            total.most,
            (mean, covariance) if by_rank else None,
        )

    def _kinds(self, lane: Lane, sizes: Ints | None, tokens: Ints) -> tuple[Ints, Ints]:
        """(a source of each kind [n], tokens [n] of all that are like it), none without tokens.

        sizes: [G] experts of each rank where these alone decide; None: each source is its own kind
        tokens: [G] of each source
        """
        kinds, of = np.arange(len(tokens)), np.arange(len(tokens))
        if sizes is not None and self.run.expert_tp == 1:
            key = (lane.ranks.tobytes(), sizes.tobytes())
            if key not in self._sources:
                hops = self.run.dispatcher in TWO_HOPS
                self._sources[key] = sources_alike(self.paths, lane, sizes, hops)
            kinds, of = self._sources[key]
        of_kind = np.zeros(len(kinds), np.int64)
        np.add.at(of_kind, of, tokens)
        some = np.flatnonzero(of_kind)
        return kinds[some], of_kind[some]

    def alike(self, layer: int, lane: Lane) -> Iterator[tuple[Served, int, Ints]]:
        """(how they are served, variant of the router, tokens [G] of each source) of a lane."""
        for variant, steps in self._variants(layer):
            for served in self._served(layer, lane):
                if served.per_step is None:
                    tokens = self.active[steps, layer][:, lane.ranks].sum(axis=0) * served.sources
                else:
                    tokens = served.per_step * int(steps.sum())
                if tokens.any():
                    yield served, variant, tokens

    def _variants(self, layer: int) -> list[tuple[int, NDArray[np.bool_]]]:
        """(variant, [steps] where it holds) of a layer."""
        if not isinstance(self.law, Weighted):
            return [(0, np.ones(self.run.num_steps, bool))]
        variant = np.asarray(self.law.variant)[:, layer]
        return [(int(v), variant == v) for v in np.unique(variant)]

    def _served(self, layer: int, lane: Lane) -> list[Served]:
        place = self.layers[layer]
        key = (place.expert.tobytes(), place.position.tobytes(), lane.ranks.tobytes())
        if key not in self._serving:
            self._serving[key] = list(self._serve(place, lane))
            if len(self._serving[key]) > MAX_LAWS:
                raise Unlawful(
                    f"replicas are served in {len(self._serving[key])} different ways,"
                    f" a law is computed for {MAX_LAWS} at most"
                )
        return self._serving[key]

    def _serve(self, place: Layer, lane: Lane) -> Iterator[Served]:
        """The tokens of a lane by how they are served, those served alike together."""
        num_ranks = len(lane.ranks)
        differ = self.run.replica_choice == "nearest" and place.is_replicated
        ends = np.cumsum(self.run.tokens_per_rank)[lane.ranks]
        starts = ends - np.array(self.run.tokens_per_rank)[lane.ranks]
        found: dict[tuple[bytes, bool], Served] = {}
        for source in range(num_ranks if differ else 1):
            shares = slot_shares(place, self.run.replica_choice, lane.node_of, source)
            sources = np.arange(num_ranks) == source if differ else np.ones(num_ranks, bool)
            classes = len(shares)
            if classes > 1 and not self.all_active:
                raise Unlawful(
                    "replicas served in turn have a law only where every token chooses experts"
                )
            for turn, share in enumerate(shares):
                # Numbers below x that leave the turn over: (x - turn + classes - 1) // classes
                counts = [(x - turn + classes - 1) // classes for x in (starts, ends)]
                per_step = (counts[1] - counts[0]) * sources if classes > 1 else None
                key = (share.tobytes(), classes > 1)
                if (old := found.get(key)) is not None:
                    sources_too = old.sources | sources
                    if per_step is not None and old.per_step is not None:
                        per_step = per_step + old.per_step
                    found[key] = Served(share, sources_too, per_step)
                else:
                    found[key] = Served(share, sources, per_step)
        return iter(found.values())

    def picks_of(self, layer: int, lane: Lane, served: Served, variant: int) -> Picks:
        share = self.layers[layer].rank_share(served.slot_share)
        key = (share.tobytes(), lane.node_of.tobytes(), str(variant).encode())
        if key not in self._picks:
            self._picks[key] = Picks(self._weights(variant), share, lane.node_of, self.run.top_k)
        return self._picks[key]

    def _weights(self, variant: int) -> Floats:
        if isinstance(self.law, Weighted):
            weights: Floats = np.asarray(self.law.weights, np.float64)[variant]
            return weights
        return np.ones(self.run.num_experts)

    def _law_set(
        self, layer: int, lane: Lane, served: Served, variant: int, kind: str, rows: IntArray
    ) -> LawSet:
        place, run = self.layers[layer], self.run
        key = (
            served.slot_share.tobytes(), place.expert.tobytes(), place.position.tobytes(),
            lane.node_of.tobytes(), str((variant, kind)).encode(), rows.tobytes(),
        )  # fmt: skip
        if key in self._laws:
            return self._laws[key]
        if isinstance(self.law, GroupLimited):
            share = place.rank_share(served.slot_share)
            laws = group_limited_rows(kind, rows, share, lane.node_of, run.top_k, self.law)
        elif self.is_plain(served):
            sizes = place.sizes(served.slot_share)
            laws = uniform_rows(kind, rows, sizes, lane.node_of, run.top_k)
        else:
            picks = self.picks_of(layer, lane, served, variant)
            laws = LawSet.from_list(skewed_rows(picks, kind, rows))
        self._laws[key] = laws
        return laws

    def _by_rank(
        self, layer: int, lane: Lane, served: Served, variant: int, kind: str
    ) -> tuple[Floats, Floats]:
        """(mean [G], covariance [G, G]) of the rows of a token to each rank."""
        place = self.layers[layer]
        if self.is_plain(served):
            return uniform_by_rank(kind, place.sizes(served.slot_share), self.run.top_k)
        picks = self.picks_of(layer, lane, served, variant)
        if kind == "copies":
            return picks.copies
        missed, covariance = picks.misses
        ranks = slice(0, len(lane.ranks))
        return 1 - missed[ranks], covariance[ranks, ranks]

    def is_plain(self, served: Served) -> bool:
        """Uniform routing, and one rank for each expert: what `fanout` knows exactly."""
        one_slot = bool(np.isin(served.slot_share, (0, 1)).all())
        return one_slot and isinstance(self.law, Uniform | Markov)

    def _markov_rows(self, layer: int, patterns: Sequence[Pattern], total: _Sum) -> LayerRows:
        """Means as under uniform routing, variances along the chains, which cross ranks."""
        run, place, law = self.run, self.layers[layer], self.law
        assert isinstance(law, Markov)
        if place.is_replicated or not self.all_active:
            raise Unlawful(
                "tokens that resemble the one before have a law only with one slot for each expert"
                " and with experts for every token"
            )
        try:
            chain = Chain(law.reuse, run.num_experts, run.top_k)
        except ValueError as refusal:
            raise Unlawful(str(refusal)) from refusal
        for lane, pattern in zip(self.lanes, patterns, strict=True):
            for served, _, tokens in self.alike(layer, lane):
                for scope, rows in enumerate(pattern.rows):
                    laws = self._law_set(layer, lane, served, 0, pattern.kind, rows)
                    total.add(scope, laws, tokens)
        sizes = np.bincount(place.position, minlength=place.num_positions)
        num_tokens = max(1, sum(run.tokens_per_rank))
        variance = run.num_steps * self._along_chains(chain, law.sequence, patterns, sizes)
        settled = variance < num_tokens * run.num_steps * NO_VARIANCE
        mean = np.where(settled, np.rint(total.mean), total.mean)
        nothing: tuple[Population | None, ...] = (None,) * len(SCOPES)
        # Tokens four times further apart than a set lives have little in common: exp(-4).
        alike = min(Sequences(run.tokens_per_rank, law.sequence).longest, chain.memory(4))
        return LayerRows(mean, np.where(settled, 0.0, variance), nothing, total.most * alike)

    def _along_chains(
        self, chain: Chain, sequence: int, patterns: Sequence[Pattern], sizes: Ints
    ) -> Floats:
        """[scope] variance of the rows of one step."""
        key = (str(chain).encode(), sizes.tobytes(), *(p.rows.tobytes() for p in patterns))
        if key in self._variances:  # layers placed alike
            return self._variances[key]
        sequences = Sequences(self.run.tokens_per_rank, sequence)
        lags = int(min(max(0, sequences.longest - 1), chain.memory(FORGOTTEN)))
        earlier, later, pairs = sequences.pairs(lags)
        twice = np.where(np.arange(lags + 1) > 0, 2, 1)  # a pair and its mirror image
        lane, position = self.paths.lane, self.paths.position
        variance = np.zeros(len(SCOPES))
        for one, other in {*zip(lane[earlier].tolist(), lane[later].tolist(), strict=True)}:
            these = (lane[earlier] == one) & (lane[later] == other)
            for scope in range(len(SCOPES)):
                sides = [
                    (patterns[i].rows[scope, position[ranks[these]]], self.lanes[i].blocks)
                    for i, ranks in ((one, earlier), (other, later))
                ]
                covariance = bilinear(chain, patterns[one].kind, sides[0], sides[1], sizes, lags)
                variance[scope] += (covariance * pairs[these] * twice).sum()
        self._variances[key] = variance
        return variance

    def kept(self, pattern_of: Callable[[Lane], Pattern]) -> list[LayerRows]:
        """Rows of the choices that find a row, with dispatcher=padded; variances are upper bounds.

        Choices compete: one slot more means another less, covariances are not positive. Inactive
        tokens are taken to be spread evenly over the chunks.
        """
        if isinstance(self.law, Markov):
            raise Unlawful("how many of correlated choices find a row is not known")
        patterns = [pattern_of(lane) for lane in self.lanes]
        found: dict[tuple[bytes, ...], LayerRows] = {}
        for layer in range(self.run.num_layers):
            if self.key(layer) not in found:
                found[self.key(layer)] = self._kept_rows(layer, patterns)
        return [found[self.key(layer)] for layer in range(self.run.num_layers)]

    def _kept_rows(self, layer: int, patterns: Sequence[Pattern]) -> LayerRows:
        run, place, room = self.run, self.layers[layer], capacity(self.run)
        mean, variance = np.zeros(len(SCOPES)), np.zeros(len(SCOPES))
        tokens = np.array(run.tokens_per_rank, np.int64)
        found: dict[tuple[bytes, bytes, int], tuple[Floats, Floats]] = {}
        for lane, pattern in zip(self.lanes, patterns, strict=True):
            rows = pattern.rows[:, :, place.position]  # [scope, G, S]
            for step in range(run.num_steps):
                chance, share_of_tokens = self._wanted(layer, lane, step)
                for chunk, here in enumerate(run.tokens_per_chunk):
                    active = self.active[step, layer] * here / np.maximum(1, tokens)
                    for g, rank in enumerate(lane.ranks.tolist()):
                        wanting = np.rint(share_of_tokens[g] * active[rank]).astype(np.int64)
                        rows_of = (wanting.tobytes(), chance[g].tobytes(), int(room[chunk, rank]))
                        if rows_of not in found:
                            found[rows_of] = _kept(wanting, chance[g], rows_of[2])
                        kept, spread = found[rows_of]
                        mean += rows[:, g] @ kept
                        variance += rows[:, g].astype(np.float64) ** 2 @ spread
        nothing: tuple[Population | None, ...] = (None,) * len(SCOPES)
        return LayerRows(mean, variance, nothing, 0)

    def _wanted(self, layer: int, lane: Lane, step: int) -> tuple[Floats, Floats]:
        """For each source [G] and slot [S]: chance that a token picks it, share of such tokens."""
        place, shape = self.layers[layer], (len(lane.ranks), len(self.layers[layer].expert))
        law = self.law
        variant = int(law.variant[step, layer]) if isinstance(law, Weighted) else 0
        if variant not in self._inclusion:
            self._inclusion[variant] = inclusion(self._weights(variant), self.run.top_k)
        of_expert = np.append(self._inclusion[variant], 0.0)[place.expert]
        chance, share_of_tokens = np.zeros(shape), np.zeros(shape)
        for served in self._served(layer, lane):
            picked = served.slot_share > 0
            tokens = np.array(self.run.tokens_per_rank)[lane.ranks]
            share = served.sources * 1.0
            if served.per_step is not None:
                share = served.per_step / np.maximum(1, tokens)
            share_of_tokens += share[:, None] * picked
            chance = np.maximum(chance, served.sources[:, None] * of_expert * served.slot_share)
        return chance, share_of_tokens


def _rows_of_pick(pattern: Pattern) -> int:
    """The most rows that one pick brings, in any scope."""
    some = pattern.of(np.arange(min(1, pattern.num_ranks)))
    ranks = pattern.num_ranks
    return int(some[..., :ranks].max()) + int(some[..., ranks:].max(initial=0))


def _kept(wanting: Ints, chance: Floats, room: int) -> tuple[Floats, Floats]:
    """(mean [S], variance [S]) of the choices that find one of `room` rows of their slot."""
    pairs, slot_of = np.unique(np.stack([wanting, chance]), axis=1, return_inverse=True)
    kept = [
        (n * p - expected_dropped(int(n), p, room), kept_variance(int(n), p, room))
        for n, p in pairs.T.tolist()
    ]
    moments = np.array(kept)[slot_of.ravel()]
    return moments[:, 0], moments[:, 1]


def _simplest(law: Law) -> Law:
    """Equal weights, and a limit that keeps all groups, are uniform routing."""
    equal = isinstance(law, Weighted) and (law.weights == law.weights[:, :1]).all()
    no_limit = isinstance(law, GroupLimited) and law.num_limited_groups >= law.num_expert_groups
    return Uniform() if equal or no_limit else law
