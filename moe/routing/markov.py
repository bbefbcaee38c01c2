"""Routing that remembers: a token keeps some of the experts of the token before it."""

from __future__ import annotations

import numpy as np

from comm.analytic.law import Law, Markov, Uniform
from moe.philox import Purpose, words_per_item
from moe.routing.base import Choice, RoutingContext, RoutingSource
from moe.routing.draws import outside, uniform_sequences, uniforms


class MarkovChain(RoutingSource):
    """Chains of `sequence` consecutive tokens of global number, one for each step and layer.

    The first token of a chain (its number is a multiple of `sequence`) draws K experts uniformly.
    For each later one, every expert of the token before it stays with probability `reuse`, on its
    own, so the number that stays is Binomial(K, reuse). As many as left are drawn uniformly from
    the E - K experts that the token before it did not have: an expert that left cannot come back at
    once, only from the second next token on, and `reuse` is the whole share of experts in common.
    Each token by itself is uniform over all sets, whatever `reuse` is.

    Chains go by token numbers alone and may cross from rank to rank; a rank that begins inside one
    draws it from its beginning, which costs up to sequence - 1 tokens more.
    """

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        experts, top_k = context.num_experts, context.top_k
        if top_k < experts < 2 * top_k:
            raise ValueError(
                f"top_k={top_k}: router=markov needs 2 top_k <= num_experts={experts}, or all the"
                f" experts, so that each that leaves is replaced; nearest: {experts // 2}"
            )

    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> Choice:
        run, sequence = self.context, self.context.options.sequence
        experts, top_k = run.num_experts, run.top_k
        begin = first_token - first_token % sequence
        count = first_token + num_tokens - begin
        words = words_per_item(run.seed, Purpose.MARKOV_IDS, layer, step, begin, count, 2 * top_k)
        if top_k == experts:
            return Choice(uniform_sequences(words[first_token - begin :, :top_k], experts))
        # sequences and not sets: of whatever columns leave, the new ones must be a uniform set
        ids = uniform_sequences(words[:, :top_k], experts - top_k)
        ids[::sequence] = uniform_sequences(words[::sequence, :top_k], experts)
        stays = uniforms(words[:, top_k:]) < run.options.reuse
        for place in range(1, min(sequence, count)):
            here = slice(place, None, sequence)  # this place of every chain
            before = ids[place - 1 :: sequence][: len(stays[here])]
            ids[here] = np.where(stays[here], before, outside(before, ids[here]))
        return Choice(ids[first_token - begin :])

    @property
    def law(self) -> Law:
        run = self.context
        if run.top_k == run.num_experts:
            return Uniform()  # there is one set only
        return Markov(run.options.reuse, run.options.sequence)
