"""One row for each (token, rank) through shared memory: with ids and weights, reduced before it is
answered, as in rank_dedup; but rows are taken from where their source laid them out.

    forth   source: rows for rank 0, 1, ... into its own region     ranks copy their run of it
    back    ranks put an answer to each row into the source's       source sums its own region
            region, where that row was

Legend: as in `comm.dispatch.hop`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from comm.dispatch.base import DispatchResult
from comm.dispatch.by_rank import ByRankHandle
from comm.dispatch.hop import Hop
from comm.dispatch.rank_dedup import RankDedup
from comm.dispatch.shared_round import SharedRound
from comm.meter import Position
from comm.transport import HEADER_FIELDS, Transport, check_headers
from comm.wire import Parts, WireFormat


@dataclass(frozen=True)
class SharedHop(Hop):
    """starts: where the rows for this rank begin in each source's region
    wires: the format of the rows in each (phase, direction)
    """

    starts: tuple[int, ...] = ()
    wires: tuple[WireFormat, WireFormat] = ()
