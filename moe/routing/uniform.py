"""The two plain sources: every set of experts equally likely, and the layer's own router."""

from __future__ import annotations

from comm.analytic.law import Law, NoLaw, Uniform
from moe.routing.base import Choice, RoutingSource
from moe.synthetic import topk_ids


class UniformSubsets(RoutingSource):
    """K distinct experts for each token, every set equally likely, tokens independent."""

    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> Choice:
        run = self.context
        return Choice(
            topk_ids(run.seed, step, layer, first_token, num_tokens, run.num_experts, run.top_k)
        )

    @property
    def law(self) -> Law:
        return Uniform()


class Learned(RoutingSource):
    """The layer's own router chooses, from the hidden states that it gets."""

    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> None:
        return None

    @property
    def law(self) -> Law:
        return NoLaw("a learned router follows no law that is known in advance")
