"""One row for each (token, rank): a token with several experts on a rank goes there once."""

from __future__ import annotations

from torch import Tensor

from comm import permute
from comm.dispatch.by_rank import ByRank


class RankDedup(ByRank):
    """At most min(K, R) rows a token."""

    carries = "hidden, scales, K ids and K weights, a row for each (token, rank); one count"

    def _destinations(self, slots: Tensor) -> Tensor:
        return permute.ranks_hit(slots, self._slot_rank, self.setup.world_size)
