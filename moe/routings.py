"""The choices of a whole run, as they are judged and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from comm.analytic.choices import kept_choices
from comm.analytic.run import RunShape
from comm.placement import ExpertPlacement
from moe.facts import run_shape
from moe.measure import RankLog
from moe.plan import Plan


@dataclass(frozen=True)
class Routing:
    """Who chose what, all ranks together, tokens in global order.

    topk_ids: int32 [steps, L, tokens, K]; topk_weights: fp32, same shape
    slots: int32, same shape, where experts have replicas, else None
    placements: of each layer
    """

    topk_ids: np.ndarray
    topk_weights: np.ndarray
    slots: np.ndarray | None
    placements: tuple[ExpertPlacement, ...]

    @classmethod
    def gather(cls, logs: Sequence[RankLog]) -> Routing:
        return cls(
            np.concatenate([log.topk_ids for log in logs], axis=2),
            np.concatenate([log.topk_weights for log in logs], axis=2),
            None if logs[0].slots is None else np.concatenate([log.slots for log in logs], axis=2),
            logs[0].placements,
        )

    @property
    def sha256(self) -> str:
        """Equal on any number of ranks and any machine, for a synthetic router."""
        return hashlib.sha256(self.topk_ids.astype("<i4").tobytes()).hexdigest()

    @property
    def all_slots(self) -> np.ndarray:
        """int32 [steps, L, tokens, K] the slot that served each choice, -1 for none"""
        if self.slots is not None:
            return self.slots
        layers = [
            np.append(placement.logical_to_physical, -1)[self.topk_ids[:, layer]]  # -1 stays -1
            for layer, placement in enumerate(self.placements)
        ]
        return np.stack(layers, axis=1).astype(np.int32)

    def file(self, plan: Plan) -> dict[str, Any]:
        """The contents of routing.npz, by name (docs/run_record.md)."""
        return {
            "topk_ids": self.topk_ids,
            "topk_weights": self.topk_weights,
            "token_rank": plan.token_rank,
            "slots": self.all_slots,
            "slot_rank": _padded([placement.slot_rank for placement in self.placements]),
            "physical_to_logical_map": _padded(
                [placement.physical_to_logical for placement in self.placements]
            ),
            "header": {
                "model": plan.config.model.name,
                "num_experts": plan.shape.num_experts,
                "top_k": plan.shape.top_k,
                "ranks": plan.topology.world_size,
                "ep_size": plan.config.group_size,
                "expert_tp": plan.config.expert_tp,
                "source": f"router={plan.config.router.name} seed={plan.config.seed}",
            },
        }


@dataclass(frozen=True)
class Case:
    """What there is to judge: the run as its predictions see it, and what was chosen.

    kept: bool [steps, L, tokens, K] choices that must have found room
    """

    run: RunShape
    routing: Routing
    kept: np.ndarray

    @classmethod
    def of(cls, plan: Plan, logs: Sequence[RankLog]) -> Case:
        routing = Routing.gather(logs)
        run = run_shape(plan, routing.placements)
        return cls(run, routing, kept_choices(run, routing.topk_ids, routing.slots))


def _padded(layers: Sequence[np.ndarray]) -> np.ndarray:
    """[L, S] with -1 behind where a layer has fewer slots."""
    width = max(len(layer) for layer in layers)
    return np.stack([np.pad(one, (0, width - len(one)), constant_values=-1) for one in layers])
