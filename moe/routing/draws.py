"""Draws from random words by integers and IEEE arithmetic alone: the same on every machine.

T tokens, K words of 64 bits for each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe.philox import Purpose, random_words

Words = NDArray[np.uint64]


def uniforms(words: Words) -> NDArray[np.float64]:
    """Numbers in [0, 1), multiples of 2^-53, of the same shape."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def scaled(words: Words, bound: int) -> NDArray[np.int64]:
    """floor(words * bound / 2^64), in 0 .. bound - 1; bound < 2^31."""
    shift, low_half = np.uint64(32), np.uint64(2**32 - 1)
    factor = np.uint64(bound)
    carry = ((words & low_half) * factor) >> shift
    return (((words >> shift) * factor + carry) >> shift).astype(np.int64)


def uniform_subsets(words: Words, bound: int) -> NDArray[np.int64]:
    """K distinct numbers out of 0 .. bound - 1 for each row of words, every set equally likely.

    Floyd's sampling, see moe.synthetic.topk_ids. The order inside a row is not uniform.

    words: [T, K], K <= bound
    returns: [T, K] int64
    """
    num_rows, top_k = words.shape
    # [K, T]: one contiguous row per draw, and "taken already?" is a reduction over rows
    draws = np.ascontiguousarray(words.T)
    chosen = np.empty((top_k, num_rows), dtype=np.int64)
    for column, largest in enumerate(range(bound - top_k, bound)):
        drawn = scaled(draws[column], largest + 1)
        taken = (chosen[:column] == drawn).any(axis=0)
        chosen[column] = np.where(taken, largest, drawn)
    return np.ascontiguousarray(chosen.T)


def uniform_sequences(words: Words, bound: int) -> NDArray[np.int64]:
    """K distinct numbers out of 0 .. bound - 1 for each row, every sequence equally likely.

    Unlike with `uniform_subsets`, any choice of columns is a uniform set by itself.

    words: [T, K], K <= bound
    returns: [T, K] int64
    """
    chosen = np.empty(words.shape, dtype=np.int64)
    for column in range(words.shape[1]):
        place = scaled(words[:, column], bound - column)[:, None]
        chosen[:, column] = outside(chosen[:, :column], place)[:, 0]
    return chosen


def outside(sets: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers at the given places of the ascending list of all that are not in the set.

    sets: [n, K] distinct; places: [n, K]
    returns: [n, K]

    >>> outside(np.array([[4, 1]]), np.array([[0, 1, 2, 3]]))  # not in the set: 0 2 3 5 6 ...
    array([[0, 2, 3, 5]])
    """
    # the i-th smallest of the set has `gaps` numbers outside it below itself
    gaps = np.sort(sets, axis=1) - np.arange(sets.shape[1])
    return places + (gaps[:, None, :] <= places[:, :, None]).sum(axis=2)


def seeded_order(seed: int, layer: int, count: int) -> NDArray[np.int64]:
    """A random order of 0 .. count - 1, every one equally likely, that belongs to the layer.

    Of two equal words (never seen: a chance of count^2 / 2^65) the earlier comes first.
    """
    words = random_words(seed, Purpose.HOT_ORDER, layer, 0, count)
    return np.argsort(words, kind="stable")
