"""The eight workloads that dispatchers are tried with in the field, w0 to w7.

    w0 balanced (Balanced)   w2 hot rank (HotRank)       w4 ragged sources   w6 rotating hot spot
    w1 hot expert set        w3 spread hot experts       w5 zero experts     w7 burst

w0 and w2 are the sources of those names; the others are here. H is options.hot_count, a sixteenth
of the E experts where it is None; hot experts weigh options.factor, the others 1.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from comm.analytic.law import Law, Uniform
from moe.philox import Purpose, random_words
from moe.routing.base import Choice, IntArray, RoutingSource
from moe.routing.product import HotCount, ProductSource
from moe.routing.weighted import FloatArray
from moe.synthetic import topk_ids

BURST_PERIOD = 4  # one in so many (step, layer) pairs bursts
BURST_FACTOR = 8  # the hot set of a burst weighs so many times options.factor


class HotSet(HotCount):
    """w1: experts 0 .. H-1 are hot in all layers and steps.

    Neighbours: a contiguous placement has them on few ranks, a round-robin one on many.
    """

    def weights(self, step: int, layer: int) -> FloatArray:
        return self.hot_weights(np.arange(self.hot_count), self.context.options.factor)


class SpreadHotSet(HotCount):
    """w3: H experts at equal distances, numbers floor(i E / H), are hot in all layers and steps.

    Under a contiguous placement every rank has the same number of them, give or take one: skewed by
    expert, balanced by rank.
    """

    def weights(self, step: int, layer: int) -> FloatArray:
        hot = np.arange(self.hot_count) * self.context.num_experts // self.hot_count
        return self.hot_weights(hot, self.context.options.factor)


class RaggedSources(RoutingSource):
    """w4: the later a rank, the fewer of its tokens have experts; those that have are uniform.

    Of the T tokens of rank r of R, the first ceil(T (R - r) / R) choose K experts, every set
    equally likely; the others choose none: their ids are -1. All of rank 0's tokens choose, and at
    least one of any rank that has tokens. The same tokens in all layers and steps.
    """

    uses_ranks = True

    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> Choice:
        run = self.context
        ids = topk_ids(run.seed, step, layer, first_token, num_tokens, run.num_experts, run.top_k)
        ids[~self._active[first_token : first_token + num_tokens]] = -1
        return Choice(ids)

    @property
    def law(self) -> Law:
        return Uniform()

    def active_tokens(self, step: int, layer: int) -> IntArray:
        ranks = self.context.world_size
        tokens = np.array(self.context.tokens_per_rank, dtype=np.int64)
        return -(-tokens * (ranks - np.arange(ranks)) // ranks)

    @cached_property
    def _active(self) -> np.ndarray:
        """bool [tokens of all ranks] whether a token has experts."""
        pairs = zip(self.active_tokens(0, 0), self.context.tokens_per_rank, strict=True)
        parts = [np.arange(tokens) < active for active, tokens in pairs]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


class ZeroExperts(ProductSource):
    """w5: a quarter of the experts, floor(E / 4), is never chosen; all others are alike.

    Which ones is drawn for each layer, the same in all steps; with order=id those of the lowest
    numbers, so that whole ranks stay idle under a contiguous placement. Where fewer than K experts
    would remain, as many as K do.
    """

    def weights(self, step: int, layer: int) -> FloatArray:
        experts, top_k = self.context.num_experts, self.context.top_k
        weights = np.ones(experts)
        weights[self.order(layer, experts)[: min(experts // 4, experts - top_k)]] = 0
        return weights


class RotatingHotSpot(HotCount):
    """w6: H neighbouring experts are hot, and which ones moves on with every layer and every step.

    Of the ceil(E / H) blocks of H experts, number (step + layer) modulo their count is hot: experts
    block * H .. block * H + H - 1, the last block going on at expert 0.
    """

    def weights(self, step: int, layer: int) -> FloatArray:
        experts = self.context.num_experts
        block = (step + layer) % -(-experts // self.hot_count)
        hot = (block * self.hot_count + np.arange(self.hot_count)) % experts
        return self.hot_weights(hot, self.context.options.factor)


class Burst(HotCount):
    """w7: uniform, but in one of four (step, layer) pairs nearly all tokens meet one hot set.

    The pairs have numbers n = step * L + layer. Of each four, 4 i .. 4 i + 3, one is drawn in which
    all tokens meet a burst: H neighbouring experts weigh 8 * factor, the others 1. Which of the
    ceil(E / H) blocks of H experts (cut as in w6) is hot is drawn for each burst.
    """

    def weights(self, step: int, layer: int) -> FloatArray:
        number = step * self.context.num_layers + layer
        group, place = divmod(number, BURST_PERIOD)
        drawn = random_words(self.context.seed, Purpose.BURSTS, 0, group, 2)
        if int(drawn[0]) % BURST_PERIOD != place:
            return np.ones(self.context.num_experts)
        experts = self.context.num_experts
        block = int(drawn[1]) % -(-experts // self.hot_count)
        hot = (block * self.hot_count + np.arange(self.hot_count)) % experts
        return self.hot_weights(hot, BURST_FACTOR * self.context.options.factor)
