"""Uniform expert ids and input activations that need no model and no communication.

T tokens of a rank, E experts, K = top_k. A token is named by its global number, so the same token
meets the same experts, and enters with the same values, on 1 rank and on 224. The sources that a
run can choose its routing from are in `moe.routing`.
"""

from __future__ import annotations

import numpy as np

from moe.philox import Purpose, words_per_item
from moe.routing.draws import uniform_subsets


def topk_ids(
    seed: int,
    step: int,
    layer: int,
    first_token: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
) -> np.ndarray:
    """Choose K distinct experts for each token, every set of K equally likely.

    Floyd's sampling: for j = E-K .. E-1 draw t from 0 .. j and take t, or j where t is taken
    already. K draws per token, no rejection, so the count of words per token is fixed, as a counter
    needs. Sets are uniform; the order inside a row is not (late columns hold the large ids).

    first_token: global number of the first token
    returns: [T, K] int64, each row distinct

    >>> topk_ids(seed=0, step=0, layer=0, first_token=0, num_tokens=2, num_experts=896, top_k=4)
    array([[ 10, 215,  99, 505],
           [448, 248, 847, 883]])
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must lie in 1 .. num_experts={num_experts}")
    words = words_per_item(seed, Purpose.TOPK_IDS, layer, step, first_token, num_tokens, top_k)
    return uniform_subsets(words, num_experts)


def token_hidden(
    seed: int, step: int, first_token: int, num_tokens: int, hidden_size: int
) -> np.ndarray:
    """Input activations of the first layer: roughly standard normal, a function of the token alone.

    A value is the sum of the four 16-bit quarters of one word, centred and scaled: exact integers
    until the last multiplication, hence the same on every machine. Its largest size is 3.46.

    returns: [T, hidden_size] float32
    """
    words = words_per_item(seed, Purpose.HIDDEN, 0, step, first_token, num_tokens, hidden_size)
    quarters = np.ascontiguousarray(words).view(np.uint16).reshape(num_tokens, hidden_size, 4)
    total = quarters.sum(axis=-1, dtype=np.int32)
    # a quarter is uniform on 0 .. 65535: mean 65535 / 2, variance (65536^2 - 1) / 12
    centred = (total - 2 * 65535).astype(np.float32)
    return centred * np.float32((4 * (65536.0**2 - 1) / 12) ** -0.5)
