"""Sources whose sets are as likely as the product of their experts' weights.

A source says which weights hold in a layer of a step; the draw and the law follow from that.
Weights differ between layers and steps only by what a source documents, tokens are independent.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from comm.analytic.law import Law, Weighted
from moe.philox import Purpose, words_per_item
from moe.routing.base import Choice, RoutingContext, RoutingSource
from moe.routing.draws import seeded_order
from moe.routing.options import check_range
from moe.routing.weighted import FloatArray, rounded, weighted_subsets


class ProductSource(RoutingSource):
    """Draws sets of experts by their weights, exactly."""

    @abstractmethod
    def weights(self, step: int, layer: int) -> FloatArray:
        """[E] weights of the experts, rounded; 0 = never chosen, at least K are positive."""

    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> Choice:
        run = self.context
        words = words_per_item(
            run.seed, Purpose.WEIGHTED_IDS, layer, step, first_token, num_tokens, run.top_k
        )
        return Choice(weighted_subsets(self.weights(step, layer), words))

    @property
    def law(self) -> Law:
        run = self.context
        number: dict[bytes, int] = {}  # equal weights are one variant
        variants: list[FloatArray] = []
        variant = np.zeros((run.num_steps, run.num_layers), dtype=np.int64)
        for step, layer in np.ndindex(*variant.shape):
            weights = self.weights(step, layer)
            packed = weights.tobytes()
            if packed not in number:
                number[packed] = len(variants)
                variants.append(weights)
            variant[step, layer] = number[packed]
        return Weighted(np.array(variants).reshape(-1, run.num_experts), variant)

    def order(self, layer: int, count: int) -> np.ndarray:
        """0 .. count - 1, hottest first: drawn for the layer, or as numbered (options.order)."""
        if self.context.options.order == "id":
            return np.arange(count)
        return seeded_order(self.context.seed, layer, count)

    def hot_weights(self, hot: np.ndarray, factor: float) -> FloatArray:
        """[E] weight `factor` for the experts in `hot`, 1 for all others."""
        weights = np.ones(self.context.num_experts)
        weights[hot] = factor
        return rounded(weights)


class Zipf(ProductSource):
    """The n-th most popular expert weighs n ** -exponent.

    The order of popularity is drawn for each layer, the same in all steps; with order=id it is the
    order of the experts' numbers. The chance of an expert to be in a set is not proportional to
    its weight: it cannot exceed 1, and hot experts do.
    """

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        popularity = np.arange(1.0, context.num_experts + 1)
        self._falling = rounded(popularity**-context.options.exponent)

    def weights(self, step: int, layer: int) -> FloatArray:
        weights = np.empty_like(self._falling)
        weights[self.order(layer, len(weights))] = self._falling
        return weights


class HotRank(ProductSource):
    """The experts of position `hot_rank` of every expert-parallel group weigh `factor`, others 1.

    The same position in all layers and steps; an expert belongs to the rank with its first slot.
    """

    uses_ranks = True

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        hot = context.options.hot_rank
        check_range("hot_rank", hot, 0, context.group_size - 1)
        with_experts = set(range(context.group_size))
        for layer in context.expert_rank:
            with_experts &= set(layer.tolist())
        if hot not in with_experts:
            nearest = min(with_experts, key=lambda rank: abs(rank - hot), default="none")
            raise ValueError(
                f"router.hot_rank={hot}: must hold an expert in every layer; nearest: {nearest}"
            )

    def weights(self, step: int, layer: int) -> FloatArray:
        options = self.context.options
        mine = self.context.expert_rank[layer] == options.hot_rank
        return self.hot_weights(mine, options.factor)


class HotCount(ProductSource):
    """A source with a number of hot experts: options.hot_count, or a sixteenth of all."""

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        given = context.options.hot_count
        self.hot_count = max(1, context.num_experts // 16) if given is None else given
        check_range("hot_count", self.hot_count, 1, context.num_experts)


class HotExperts(HotCount):
    """`hot_count` experts weigh `factor`, the others 1, the same in all steps.

    Which ones is drawn for each layer. With order=id it is those of the lowest numbers, which share
    rank 0 under a contiguous placement: the worst case for that rank.
    """

    def weights(self, step: int, layer: int) -> FloatArray:
        hot = self.order(layer, self.context.num_experts)[: self.hot_count]
        return self.hot_weights(hot, self.context.options.factor)
