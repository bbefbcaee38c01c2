"""Polynomials whose coefficient of z^k counts k choices inside a block, cut after z^K.

A set of K experts is drawn as if each expert tossed a coin and only the outcomes with exactly K
heads were kept. A block of experts that toss with probabilities p is prod (1 - p + p z); blocks
multiply. All coefficients are non-negative: nothing cancels, and a product stays below 1.

    hits      y marks a row for each block that is hit     P(z) -> P(0) + y^c (P(z) - P(0))
    copies    y marks a row for each choice of a block     P(z) -> P(y^c z)

Legend: K top_k, m blocks, B a batch of independent products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lgamma

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def multiply(one: Floats, other: Floats) -> Floats:
    """Product of polynomials [..., K + 1], cut after K; leading axes broadcast."""
    top_k = one.shape[-1] - 1
    product = one * other[..., :1]
    for k in range(1, top_k + 1):
        product[..., k:] += one[..., : top_k + 1 - k] * other[..., k : k + 1]
    return product


def block_polynomials(chance: Floats, block_of: NDArray[np.int64], num: int, top_k: int) -> Floats:
    """[num, K + 1] product of 1 - p + p z over the experts of each block.

    chance: [E] p of each expert; block_of: [E] its block
    """
    order = np.argsort(block_of, kind="stable")
    sizes = np.bincount(block_of, minlength=num)
    first = np.cumsum(sizes) - sizes
    products = np.zeros((num, top_k + 1))
    products[:, 0] = 1
    for i in range(int(sizes.max(initial=0))):  # the i-th expert of every block at once
        there = np.flatnonzero(sizes > i)
        p = chance[order[first[there] + i]][:, None]
        grown = products[there] * (1 - p)
        grown[:, 1:] += products[there, :-1] * p
        products[there] = grown
    return products


def equal_block(size: int, chance: float, top_k: int) -> Floats:
    """[K + 1] the polynomial of `size` experts that all toss with probability `chance` < 1."""
    k = np.arange(min(size, top_k) + 1)
    log_ways = np.array([lgamma(size + 1) - lgamma(x + 1) - lgamma(size - x + 1) for x in k])
    polynomial = np.zeros(top_k + 1)
    polynomial[: len(k)] = np.exp(log_ways + k * np.log(chance) + (size - k) * np.log1p(-chance))
    return polynomial


def product(polynomials: Floats) -> Floats:
    """Product [..., K + 1] of polynomials [m, ..., K + 1]."""
    total = np.zeros_like(polynomials[0]) if len(polynomials) else np.zeros(0)
    total[..., 0] = 1
    for polynomial in polynomials:
        total = multiply(total, polynomial)
    return total


def all_but_one(polynomials: Floats, instead: Floats | None = None) -> Floats:
    """[m, B] coefficient of z^K when one of m factors is left out, for each of them.

    polynomials: [m, B, K + 1]; instead: [m, K + 1] the factor to take in its place (None: 1)

    Products from both ends, never a division: that would lose all digits.
    """
    before = np.zeros_like(polynomials)
    before[0, :, 0] = 1
    for i in range(1, len(polynomials)):
        before[i] = multiply(before[i - 1], polynomials[i - 1])
    after = np.zeros_like(polynomials[0])
    after[:, 0] = 1
    coefficients = np.empty(polynomials.shape[:2])
    for i in range(len(polynomials) - 1, -1, -1):
        rest = after if instead is None else multiply(after, instead[i])
        coefficients[i] = (before[i] * rest[:, ::-1]).sum(axis=1)
        after = multiply(after, polynomials[i])
    return coefficients


# A node of a pattern: rows when any of it is hit, (polynomial, rows when hit) of its ranks.
Node = tuple[int, Sequence[tuple[Floats, int]]]


def hits_pmf(nodes: Iterable[Node], top_k: int, most: int) -> Floats:
    """P(rows = x) for x = 0 ... most, where every block that is hit brings rows.

    most: no outcome may have more rows
    """
    total = _one(top_k, most)
    for rows_of_node, ranks in nodes:
        if not rows_of_node:
            for polynomial, rows in ranks:
                total = _with_rank(total, polynomial, rows)
            continue
        inside = _one(top_k, most)
        for polynomial, rows in ranks:
            inside = _with_rank(inside, polynomial, rows)
        missed, hit = inside[0, 0], np.zeros_like(inside)
        hit[:, rows_of_node:] = inside[:, : most + 1 - rows_of_node]
        hit[0, :] = 0  # no choice, no row
        hit[0, 0] = missed
        total = _multiply_marked(total, hit)
    return total[top_k] / total[top_k].sum()


def copies_pmf(blocks: Iterable[tuple[Floats, Floats]], top_k: int, most: int) -> Floats:
    """P(rows = x) for x = 0 ... most, where every choice brings rows.

    blocks: (polynomial [K + 1], probabilities [most + 1] of the rows that one choice brings)
    """
    total = _one(top_k, most)
    for polynomial, rows_of_choice in blocks:
        marked = np.zeros((top_k + 1, most + 1))
        rows = np.zeros(most + 1)
        rows[0] = 1
        for k in range(top_k + 1):
            marked[k] = polynomial[k] * rows
            rows = np.convolve(rows, rows_of_choice)[: most + 1]
        total = _multiply_marked(total, marked)
    return total[top_k] / total[top_k].sum()


def _one(top_k: int, most: int) -> Floats:
    """The polynomial 1 in z and y, coefficients [K + 1, most + 1]."""
    one = np.zeros((top_k + 1, most + 1))
    one[0, 0] = 1
    return one


def _with_rank(total: Floats, polynomial: Floats, rows: int) -> Floats:
    """Times P(0) + y^rows (P(z) - P(0))."""
    top_k, most = total.shape[0] - 1, total.shape[1] - 1
    grown = total * polynomial[0]
    for k in np.flatnonzero(polynomial[1:]) + 1:
        grown[k:, rows:] += polynomial[k] * total[: top_k + 1 - k, : most + 1 - rows]
    return grown


def _multiply_marked(one: Floats, other: Floats) -> Floats:
    """Product of polynomials in z and y, cut after both their lengths."""
    top_k, most = one.shape[0] - 1, one.shape[1] - 1
    total = np.zeros_like(one)
    for k, rows in np.argwhere(other).tolist():
        total[k:, rows:] += other[k, rows] * one[: top_k + 1 - k, : most + 1 - rows]
    return total
