"""How many ranks a token reaches: counted from what it chose, and in closed form.

The ranks are those of the token's own lane that serve at least one of its choices, its own rank
included, whatever the dispatcher sends. Choices that `padded` drops reach their rank here, too.

Legend: R ranks, L layers, K top_k.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comm.analytic.choices import check_routing, served_ranks
from comm.analytic.fanout import Distinct
from comm.analytic.law import Law, Markov, NoLaw, Uniform
from comm.analytic.paths import Paths
from comm.analytic.run import IntArray, RunShape


def reached(run: RunShape, topk_ids: IntArray, slots: IntArray | None = None) -> NDArray[np.int64]:
    """int64 [R + 1] tokens that reach 0, 1, ... R ranks, all layers and steps together.

    Arguments as for `exact_traffic`.
    """
    check_routing(run, topk_ids, slots)
    tokens = np.zeros(run.world_size + 1, np.int64)
    paths = Paths.of(run)
    for layer in range(run.num_layers):
        for ranks in served_ranks(run, paths, topk_ids, slots, layer):
            ranks = np.sort(ranks, axis=1)
            first = ranks >= 0
            first[:, 1:] &= ranks[:, 1:] != ranks[:, :-1]
            tokens += np.bincount(first.sum(axis=1), minlength=len(tokens))
    return tokens


def expected_reach(
    run: RunShape, law: Law, active_tokens: IntArray | None = None
) -> NDArray[np.float64] | NoLaw:
    """float64 [R + 1] tokens to be expected at 0, 1, ... R ranks, or why there is no closed form.

    active_tokens: [steps, L, R] tokens that chose any expert; None: all of them
    """
    if isinstance(law, NoLaw):
        return law
    if not isinstance(law, Uniform | Markov):
        return NoLaw("only for routers that choose uniformly, one token by itself")
    shape = (run.num_steps, run.num_layers, run.world_size)
    everyone = np.broadcast_to(np.array(run.tokens_per_rank, np.int64), shape)
    active = everyone if active_tokens is None else np.asarray(active_tokens, np.int64)
    expected = np.zeros(run.world_size + 1)
    expected[0] = (everyone - active).sum()
    for layer, (experts, positions) in enumerate(
        zip(run.physical_to_logical, run.slot_rank, strict=True)
    ):
        held = np.asarray(experts)
        used = held >= 0
        if np.bincount(held[used], minlength=run.num_experts).max() > 1:
            return NoLaw("an expert with replicas is not always served by the same rank")
        sizes = np.bincount(np.asarray(positions)[used]).tolist()
        pmf = Distinct.of(sizes, run.num_experts, run.top_k).pmf()
        expected[: len(pmf)] += pmf * active[:, layer].sum()
    return expected
