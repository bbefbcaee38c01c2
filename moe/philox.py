"""Counter-based random words: the same values on every rank, in any order, without a shared state.

Philox-4x64 turns (key, counter) into four words of 64 bits. The key says what is drawn, the counter
says where in the sequence, so a rank can draw the part it needs (its own tokens, its own experts)
and gets exactly what any other rank would have got there. Only the bit generator's raw words are
used: numpy promises that they never change, on any machine, which it does not for its distributions
(and torch's CPU generator reads no more than the low 32 bits of a seed, so 82,000 experts would
share some weights).

    key[0] = seed        key[1] = purpose (8 bits) | layer (16 bits) | index (40 bits)
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

WORDS_PER_BLOCK = 4  # words that Philox-4x64 makes from one value of the counter


class Purpose(IntEnum):
    """What a stream of words is for; its number is part of the key and must never be reused."""

    TOPK_IDS = 0  # index = step
    HIDDEN = 1  # index = step
    EXPERT = 2  # index = logical expert
    ROUTER = 3
    EXPERT_BIAS = 4
    LATENT_DOWN = 5
    LATENT_UP = 6
    SHARED = 7
    WEIGHTED_IDS = 8  # index = step
    MARKOV_IDS = 9  # index = step
    GROUP_SCORES = 10  # index = step
    HOT_ORDER = 11  # which experts or ranks of a layer are the hot ones
    BURSTS = 12  # index = number of a group of (step, layer) pairs


def random_words(
    seed: int, purpose: Purpose, layer: int, index: int, num_words: int, first_block: int = 0
) -> np.ndarray:
    """Draw consecutive 64-bit words of one stream.

    seed, layer, index: what the stream belongs to (see the key above)
    first_block: number of blocks of WORDS_PER_BLOCK words to skip, at no cost
    returns: [num_words] uint64
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} is outside 0 .. 2**64 - 1")
    if not (0 <= layer < 2**16 and 0 <= index < 2**40):
        raise ValueError(f"layer={layer}, index={index} exceed their 16 and 40 bits of the key")
    key = np.array([seed, (purpose << 56) | (layer << 40) | index], dtype=np.uint64)
    counter = np.array([first_block, 0, 0, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(num_words)


def words_per_item(
    seed: int, purpose: Purpose, layer: int, index: int, first_item: int, num_items: int, words: int
) -> np.ndarray:
    """Draw `words` words for each of a range of items (tokens), each from its own counter values.

    returns: [num_items, words] uint64; row i depends on first_item + i alone, so any split of the
        items over ranks gives the same rows
    """
    blocks = -(-words // WORDS_PER_BLOCK)
    drawn = random_words(
        seed, purpose, layer, index, num_items * blocks * WORDS_PER_BLOCK, first_item * blocks
    )
    return drawn.reshape(num_items, blocks * WORDS_PER_BLOCK)[:, :words]
