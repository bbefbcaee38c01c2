"""What a trace is. Legend: L layers, K = top_k, E experts, -1 = no expert.

file --> files.py (opened; no foreign traceback) --> one reader a format --> RawRouting, counts
     --> finish.py with rules.py (widened, checked, described) --> RouterTrace | CountTrace
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALL_LAYERS = "all layers"
MOE_LAYERS = "MoE layers only"
UNKNOWN_LAYERS = "not said"


@dataclass(frozen=True)
class Expected:
    """What the model says about a trace; None: nothing is known.

    skip_rows: token rows (or steps of counts) to leave out at the start, a wish of the user
    """

    num_experts: int | None = None
    top_k: int | None = None
    num_layers: int | None = None
    skip_rows: int = 0


@dataclass(frozen=True)
class RouterTrace:
    """Who chose what, in the order of the tokens.

    topk_ids: int64 [L, tokens, K] logical experts, -1 none; no expert twice in a row
    topk_weights: float32 of the same shape, 0 where there is no expert, or None if not recorded
    num_experts: E, or None where neither the file nor the model says it
    layer_numbers: [L] the file's own number of each layer kept
    layer_axis: what the file counts: ALL_LAYERS, MOE_LAYERS or UNKNOWN_LAYERS
    logical: whether the file itself had logical ids (physical ones were mapped back)
    num_steps: the tokens are those of this many steps, one step after the other
    notes: what was found and what was done about it, a sentence each
    """

    topk_ids: NDArray[np.int64]
    topk_weights: NDArray[np.float32] | None
    num_experts: int | None
    layer_numbers: tuple[int, ...]
    layer_axis: str
    logical: bool
    source: str
    num_steps: int = 1
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.topk_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[2]


@dataclass(frozen=True)
class CountTrace:
    """How often each logical expert was chosen.

    step_counts: int64 [steps, L, E]; counts: [L, E], their sum
    top_k: experts of a token, or None where neither the file nor the model says it
    The rest as in RouterTrace.
    """

    step_counts: NDArray[np.int64]
    top_k: int | None
    layer_numbers: tuple[int, ...]
    layer_axis: str
    logical: bool
    source: str
    notes: tuple[str, ...] = ()
    counts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", self.step_counts.sum(axis=0))

    @property
    def num_layers(self) -> int:
        return self.step_counts.shape[1]

    @property
    def num_experts(self) -> int:
        return self.step_counts.shape[2]


@dataclass(frozen=True)
class RawRouting:
    """What a reader found, before any rule.

    layers: for each layer [tokens_l, K], of any integer type
    weights: of the same shapes, or None
    columns_hold_k: False where the file may have more columns than K, those left over all -1
    zeros_missing: a row of K zeros was never written
    """

    layers: Sequence[Any]
    layer_numbers: Sequence[int]
    layer_axis: str
    weights: Sequence[Any] | None = None
    num_experts: int | None = None
    logical: bool = True
    num_steps: int = 1
    columns_hold_k: bool = True
    zeros_missing: bool = False
    notes: tuple[str, ...] = ()
