"""Every token to every rank, and partial outputs back, all by `all_to_all_single`.

gloo's own all-gather is a ring that refuses ragged input, and its reduce-scatter moves twice the
logical bytes; sent pair by pair, ragged tokens work and each pair carries what the law says.
"""

from __future__ import annotations

from torch import Tensor

from comm.dispatch.by_rank import ByRank


class AllGather(ByRank):
    """R rows a token, whatever it chose; none for a token that chose nothing."""

    carries = "hidden, scales, K ids and K weights, a row for each token and rank; one count"

    def _destinations(self, slots: Tensor) -> Tensor:
        active = (slots < self.setup.placement.num_slots).any(1)
        return active.expand(self.setup.world_size, -1).contiguous()
