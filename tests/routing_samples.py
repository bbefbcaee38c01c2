"""Small runs for the tests of moe.routing, and the statistics that these tests need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe.routing import SOURCES, build_source
from moe.routing.base import RoutingContext, RoutingSource
from moe.routing.options import RouterOptions

# those that choose by themselves: no file, no network
SYNTHETIC = tuple(name for name in SOURCES if name not in ("learned", "replay", "counts"))
_OPTIONS = {one.name for one in dataclasses.fields(RouterOptions)}


def context(
    *,
    seed: int = 5,
    num_experts: int = 24,
    top_k: int = 4,
    layers: int = 3,
    steps: int = 2,
    tokens: Sequence[int] = (20, 20, 20, 20),
    group_size: int | None = None,
    expert_rank: Any = None,
    **options: Any,
) -> RoutingContext:
    """A run with contiguous placement, unless expert_rank [E] or [L, E] says otherwise."""
    group_size = len(tokens) if group_size is None else group_size
    if expert_rank is None:
        expert_rank = np.arange(num_experts) * group_size // num_experts
    return RoutingContext(
        seed=seed,
        num_experts=num_experts,
        top_k=top_k,
        num_layers=layers,
        num_steps=steps,
        tokens_per_rank=tuple(tokens),
        expert_rank=np.broadcast_to(expert_rank, (layers, num_experts)),
        group_size=group_size,
        options=RouterOptions(**options),
    )


def source(name: str, **run: Any) -> RoutingSource:
    return build_source(name, context(**run))


def rows(name: str, step: int = 0, layer: int = 0, **run: Any) -> np.ndarray:
    """[tokens, K] the choices of all ranks."""
    one = source(name, **run)
    return one.choose(step, layer, 0, one.context.num_tokens).topk_ids


def chi_square_z(counts: Sequence[float], wanted: Sequence[float]) -> float:
    """Normal deviate of a chi-square against wanted counts, by Wilson and Hilferty's cube root."""
    freedom = len(counts) - 1
    chi_square = sum((c - w) ** 2 / w for c, w in zip(counts, wanted, strict=True))
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
