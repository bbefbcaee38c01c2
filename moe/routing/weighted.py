"""Sets of K experts, each as likely as the product of its experts' weights, drawn exactly.

Put the experts in any order; S_k(i) is the sum, over all sets of k of the last i experts, of the
products of their weights (an elementary symmetric polynomial). Where k experts are still to be
drawn from the last i, the chance that all k lie among the last j is S_k(j) / S_k(i). So one uniform
number and one search in the row S_k find the foremost of the k, for all tokens at once: K words for
each token, no rejection.

S spans far more than a double can hold (the 16-subsets of 896 ones number 1e34, with weights from
1 to 1e-6 the smallest products are 1e-96), so numbers here are pairs (exponent, mantissa), stored
as complex ones, which numpy orders lexicographically. Sums, products, frexp and ldexp are exact or
correctly rounded under IEEE 754, so all machines draw the same sets from the same weights.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moe.routing.draws import uniforms

FloatArray = NDArray[np.float64]

_ZERO = -(2**40)  # exponent of 0: below that of any product of weights
_SHIFT = -2000  # a summand so much smaller than the other changes nothing


def rounded(weights: FloatArray, bits: int = 24) -> FloatArray:
    """Weights with few significant bits, so that no last-bit difference of pow or exp remains."""
    mantissa, exponent = np.frexp(weights)
    return np.ldexp(np.rint(mantissa * 2.0**bits), exponent - bits)


def weighted_subsets(weights: FloatArray, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Draw K distinct experts for each row of words; P(set) ~ product of the set's weights.

    weights: [E] finite, >= 0, at least K positive; an expert of weight 0 is never drawn
    words: [T, K]
    returns: [T, K] int64, heavier experts first
    """
    num_tokens, top_k = words.shape
    check_weights(weights, top_k)
    order = np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)]
    # equal weights in another order share one table: an order for each layer costs nothing
    table = _tail_table(weights[order].tobytes(), top_k)
    draws = uniforms(np.ascontiguousarray(words.T))
    chosen = np.empty((top_k, num_tokens), dtype=np.int64)
    left = np.full(num_tokens, len(order))  # how many experts are not decided yet
    for column in range(top_k):
        row = table[top_k - column]
        # the shortest tail whose sum exceeds the limit begins with the expert that is drawn; its
        # sum exceeds the next shorter one's, so that its weight and its chance are positive
        tail = np.searchsorted(row, _product(draws[column], row[left]), side="right")
        chosen[column] = order[len(order) - tail]
        left = tail - 1
    return np.ascontiguousarray(chosen.T)


def check_weights(weights: FloatArray, top_k: int) -> None:
    """Raise ValueError unless sets of top_k experts can be drawn with these weights."""
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("weights of experts must be finite and at least 0")
    if np.count_nonzero(weights) < top_k:
        raise ValueError(
            f"top_k={top_k}: only {np.count_nonzero(weights)} experts have a weight above 0;"
            f" nearest: {np.count_nonzero(weights)}"
        )


@lru_cache(maxsize=64)
def _tail_table(packed: bytes, top_k: int) -> NDArray[np.complex128]:
    """S_k(i) = row k, column i: [K + 1, n + 1] for the n weights in `packed`, rows ascending."""
    mantissas, exponents = np.frexp(np.frombuffer(packed))
    table = np.empty((top_k + 1, len(mantissas) + 1), dtype=np.complex128)
    mantissa, exponent = np.zeros(top_k + 1), np.full(top_k + 1, _ZERO)
    mantissa[0], exponent[0] = 0.5, 1
    table.real[:, 0], table.imag[:, 0] = exponent, mantissa
    for column, index in enumerate(range(len(mantissas) - 1, -1, -1), start=1):
        # sets with this expert, S_(k-1) of the shorter tail times its weight, join those without
        joined, joined_exponent = mantissa[:-1] * mantissas[index], exponent[:-1] + exponents[index]
        top = np.maximum(exponent[1:], joined_exponent)
        total = np.ldexp(mantissa[1:], np.maximum(exponent[1:] - top, _SHIFT))
        total += np.ldexp(joined, np.maximum(joined_exponent - top, _SHIFT))
        mantissa[1:], shift = np.frexp(total)
        exponent[1:] = np.where(total > 0, top + shift, _ZERO)
        table.real[:, column], table.imag[:, column] = exponent, mantissa
    table.flags.writeable = False  # it is shared by all that ask for it
    return table


def _product(draws: FloatArray, sums: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """draws * sums, [T] each; below sums for every draw below 1, however it is rounded."""
    mantissa, shift = np.frexp(draws * sums.imag)
    product = np.empty_like(sums)
    product.real = np.where(mantissa > 0, sums.real + shift, _ZERO)
    product.imag = mantissa
    return product


def inclusion(weights: FloatArray, top_k: int) -> FloatArray:
    """[E] the chance that an expert is in a token's set; the sum is K.

    The set is what independent coins give, expert e with chance p_e = c w_e / (1 + c w_e), on
    condition that K of them fall on heads: pi_e = p_e P(K-1 of the others) / P(K of all). With the
    c that makes K their mean, both are as large as they can be, and a sum over roots of unity gives
    them without cancellation. Good to about 1e-12.
    """
    check_weights(weights, top_k)
    positive = np.flatnonzero(weights)
    result = np.zeros(len(weights))
    if len(positive) == top_k:
        result[positive] = 1.0
        return result
    chance = _tilted(np.log(weights[positive]), top_k)
    # more than K + points heads have no chance worth a double; an odd number of points keeps away
    # from -1, where a fair coin has a factor of 0
    points = min(len(positive) + 1, 2 * top_k + 64) | 1
    roots = np.exp(2j * np.pi * np.arange(points) / points)
    factors = 1 - chance[:, None] + chance[:, None] * roots
    whole = np.prod(factors, axis=0)
    all_heads = (whole * roots ** -float(top_k)).mean().real
    others = ((whole / factors) * roots ** -float(top_k - 1)).mean(axis=1).real
    result[positive] = chance * others / all_heads
    return result


def _tilted(log_weights: FloatArray, top_k: int) -> FloatArray:
    """Chances c w / (1 + c w) whose sum is top_k, by bisecting log c."""
    low, high = -log_weights.max() - 50.0, -log_weights.min() + 50.0
    for _ in range(64):
        middle = (low + high) / 2
        if _logistic(log_weights + middle).sum() < top_k:
            low = middle
        else:
            high = middle
    return _logistic(log_weights + low)


def _logistic(x: FloatArray) -> FloatArray:
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1 + small)
