"""Few rows that hold every pair of values of any two factors, as far as the pair can be had.

    factors  {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
    rows     000 011 101 110            4 of the 8 combinations hold all 12 pairs

Greedy: each row is built around one pair that is still missing, and takes in as many others as a
number of seeded random completions can find.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from random import Random

Row = dict[str, int]  # factor -> index of its value
TRIES = 24  # completions of one pair


def pairs_of(row: Mapping[str, int]) -> set[tuple]:
    """((factor, value), (factor, value)) of a row, factors in order."""
    return set(itertools.combinations(row.items(), 2))


def all_pairs(sizes: Mapping[str, int]) -> list[tuple]:
    """Every pair of values of two factors."""
    return [
        ((one, i), (other, j))
        for one, other in itertools.combinations(sizes, 2)
        for i in range(sizes[one])
        for j in range(sizes[other])
    ]


def cover(
    factors: Mapping[str, Sequence], is_valid: Callable[[Row], bool], seed: int = 0
) -> tuple[list[Row], list[tuple]]:
    """Valid rows that hold all pairs, and the pairs for which no valid row was found."""
    random, sizes = Random(seed), {name: len(values) for name, values in factors.items()}
    missing = dict.fromkeys(all_pairs(sizes))
    rows: list[Row] = []
    impossible: list[tuple] = []
    while missing:
        wanted = next(iter(missing))
        found = [row for row in _completions(wanted, sizes, random) if is_valid(row)]
        if not found:
            impossible.append(wanted)
            del missing[wanted]
            continue
        best = max(found, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        rows.append(best)
        for pair in pairs_of(best):
            missing.pop(pair, None)
    return rows, impossible


def _completions(pair: tuple, sizes: Mapping[str, int], random: Random) -> list[Row]:
    fixed = dict(pair)
    return [
        {name: fixed.get(name, random.randrange(size)) for name, size in sizes.items()}
        for _ in range(TRIES)
    ]
