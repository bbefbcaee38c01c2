"""From a router's law and a pattern to the law of the rows of one token.

    every expert has one rank        uniform          `fanout`, exact in integers
    experts shared, or weighted      uniform, skewed  `skew`, the general formula
    counted blocks are the groups    group-limited    `fanout`, min(M, D)

Legend: G lane positions, N nodes, n counts of rows asked for at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from comm.analytic.fanout import (
    Constant,
    Copies,
    Distinct,
    copies_covariance,
    miss_probability,
)
from comm.analytic.law import GroupLimited
from comm.analytic.nested import GroupHits, NestedHits, WeightedCopies
from comm.analytic.serving import Unlawful
from comm.analytic.skew import SkewedCopies, SkewedHits

RowLaw = (
    Constant
    | Copies
    | Distinct
    | WeightedCopies
    | NestedHits
    | GroupHits
    | SkewedCopies
    | SkewedHits
)
# Independent tokens: (how many, law of the rows of each).
Population = tuple[tuple[int, RowLaw], ...]
Rows = NDArray[np.integer]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LawSet:
    """The laws of n counts, equal ones once.

    of: [n] the law of each count; mean, variance: of each law
    """

    laws: tuple[RowLaw, ...]
    of: Ints
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]

    @classmethod
    def from_list(cls, laws: Sequence[RowLaw], of: Ints | None = None) -> LawSet:
        """of: [n] place in `laws`, None where there is one law for each count."""
        number = {law: i for i, law in enumerate(dict.fromkeys(laws))}
        places = np.array([number[law] for law in laws], np.int64)
        moments = [(law.mean, law.variance) for law in number]
        mean, variance = np.array(moments).reshape(-1, 2).T
        return cls(tuple(number), places if of is None else places[of], mean, variance)


def every_block(rows: Rows) -> LawSet:
    """All blocks count as hit; rows: [n, blocks]."""
    totals, of = np.unique(rows.sum(axis=1), return_inverse=True)
    return LawSet.from_list([Constant(int(total)) for total in totals], of.ravel())


def uniform_rows(kind: str, rows: Rows, sizes: Ints, node_of: Ints, top_k: int) -> LawSet:
    """The law of each count under uniform routing, every expert on one rank.

    rows: [n, G + N]; sizes: [G] experts of each rank
    """
    num_ranks = len(sizes)
    if kind == "hits" and rows[:, num_ranks:].any():
        return _nested(rows, sizes, node_of, top_k)
    views, of = _views(rows[:, :num_ranks], sizes)
    if kind == "copies":
        return LawSet.from_list([_copies(view, top_k) for view in views], of)
    return LawSet.from_list([_hits(((0, view, 1),), top_k) for view in views], of)


def uniform_by_rank(
    kind: str, sizes: Ints, top_k: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(mean [G], covariance [G, G]) of the rows of a token to each rank, under uniform routing."""
    num_experts = int(sizes.sum())
    values, size_of = np.unique(sizes, return_inverse=True)
    of_pair = np.empty((len(values), len(values)))
    if kind == "copies":
        for i, size in enumerate(values.tolist()):
            for j, other in enumerate(values.tolist()):
                others = min(other, num_experts - size)  # a pair that is not there, if cut
                of_pair[i, j] = copies_covariance(size, others, num_experts, top_k)
        own = [Copies(size, num_experts, top_k) for size in values.tolist()]
    else:
        own = [Distinct.of([size], num_experts, top_k) for size in values.tolist()]
        for i, size in enumerate(values.tolist()):
            for j, other in enumerate(values.tolist()):
                together = min(num_experts, size + other)
                both = miss_probability(num_experts, top_k, together)
                apart = miss_probability(num_experts, top_k, size)
                apart *= miss_probability(num_experts, top_k, other)
                of_pair[i, j] = float(both - apart)
    kinds = size_of.ravel()
    covariance = of_pair[np.ix_(kinds, kinds)]
    np.fill_diagonal(covariance, np.array([law.variance for law in own])[kinds])
    return np.array([law.mean for law in own])[kinds], covariance


# A rank's part in a count: (experts of the rank, rows, ranks like this).
_View = tuple[tuple[int, int, int], ...]


def _views(rows: Rows, sizes: Ints) -> tuple[list[_View], Ints]:
    """(what counts see of the ranks, how many of each (size, rows); [n] the view of each count)."""
    values, size_of = np.unique(sizes, return_inverse=True)
    one_hot = np.eye(len(values), dtype=np.float32)[size_of.ravel()]  # float: a matrix product
    levels = range(int(rows.max(initial=0)) + 1)
    seen = np.concatenate(
        [(rows == level).astype(np.float32) @ one_hot for level in levels], axis=1
    )
    labels = [(int(size), level) for level in levels for size in values]
    counts, of = np.unique(np.rint(seen).astype(np.int64), axis=0, return_inverse=True)
    return [_labelled(row, labels) for row in counts.tolist()], of.ravel()


def _labelled(counts: list[int], labels: list[tuple[int, int]]) -> _View:
    some = [(size, rows, n) for (size, rows), n in zip(labels, counts, strict=True) if n and size]
    return tuple(sorted(some))


def _copies(ranks: _View, top_k: int) -> RowLaw:
    values: dict[int, int] = {}
    for size, rows, count in ranks:
        values[rows] = values.get(rows, 0) + size * count
    if set(values) <= {0, 1}:
        return Copies(values.get(1, 0), sum(values.values()), top_k)
    return WeightedCopies(tuple(sorted(values.items())), top_k)


def _hits(nodes: tuple[tuple[int, _View, int], ...], top_k: int) -> RowLaw:
    every = [(size, rows, n * count) for _, ranks, count in nodes for size, rows, n in ranks]
    if all(not rows for rows, _, _ in nodes) and all(rows in (0, 1) for _, rows, _ in every):
        num_experts = sum(size * n for size, _, n in every)
        return Distinct(tuple((size, n) for size, rows, n in every if rows), num_experts, top_k)
    return NestedHits(nodes, top_k)


def _nested(rows: Rows, sizes: Ints, node_of: Ints, top_k: int) -> LawSet:
    """Counts with rows for nodes: what each count sees of each node, nodes alike counted once."""
    num_ranks, num_nodes = len(sizes), rows.shape[1] - len(sizes)
    kinds: dict[tuple[int, _View], int] = {}
    kind_of = np.empty((len(rows), num_nodes), np.int64)
    for node in range(num_nodes):
        members = np.flatnonzero(node_of == node)
        views, of = _views(rows[:, members], sizes[members])
        pairs, pair_of = np.unique(
            np.stack([rows[:, num_ranks + node], of], axis=1), axis=0, return_inverse=True
        )
        names = [(node_rows, views[view]) for node_rows, view in pairs.tolist()]
        ids = np.array([kinds.setdefault(name, len(kinds)) for name in names], np.int64)
        kind_of[:, node] = ids[pair_of.ravel()]
    seen = np.stack([(kind_of == i).sum(axis=1) for i in range(len(kinds))], axis=1)
    counts, of = np.unique(seen, axis=0, return_inverse=True)
    laws = []
    for row in counts.tolist():
        nodes = sorted((*name, count) for name, count in zip(kinds, row, strict=True) if count)
        laws.append(_hits(tuple(nodes), top_k))
    return LawSet.from_list(laws, of.ravel())


def group_limited_rows(
    kind: str, rows: Rows, share: NDArray[np.float64], node_of: Ints, top_k: int, law: GroupLimited
) -> LawSet:
    """The law of each count where every counted block is one expert group.

    share: [E, G] 1 where a rank serves an expert; raises Unlawful with the reason otherwise
    """
    if law.group_score != "max":
        raise Unlawful(
            f"groups ranked by group_score={law.group_score} have no closed form: it depends on the"
            " law of the scores"
        )
    if kind == "copies":
        raise Unlawful("group-limited routing has a law for the blocks hit, none for copies")
    num_experts, groups = len(share), law.num_expert_groups
    group_of = np.arange(num_experts) * groups // num_experts
    num_nodes = rows.shape[1] - len(node_of)
    held = np.concatenate([share, share @ np.eye(num_nodes)[node_of]], axis=1)  # [E, block]
    part = np.eye(groups)[group_of].T @ held * groups / num_experts  # of a group, in a block
    laws: list[RowLaw] = []
    for row in rows:
        counted = np.flatnonzero(row)
        whole = part[:, counted]
        if not (np.isin(whole, (0, 1)).all() and (whole.sum(axis=0) == 1).all()):
            raise Unlawful(
                "group-limited routing has a law only where each rank (with two hops also each"
                " node) owns exactly one expert group"
            )
        by_group = (whole @ row[counted]).astype(np.int64)
        values = tuple(sorted(Counter(by_group.tolist()).items()))
        laws.append(GroupHits(values, num_experts, top_k, law.num_limited_groups))
    return LawSet.from_list(laws)
