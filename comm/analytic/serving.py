"""Which slot serves a pick of an expert, where experts have several: shares, not choices.

    one slot      the only one
    random        each slot of the expert with the same probability
    round_robin   the (token mod n)-th of its n slots: known once the token's number is
    nearest       as round_robin, among the slots on the source's own rank if there are any, else
                  those on its node, else all: depends on the source as well

Where the number of the token decides, tokens fall into classes, numbers equal modulo the least
common multiple of all n, and each class is served as if every expert had one slot.

Legend: S slots of a layer, G positions of a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

MAX_CLASSES = 64


class Unlawful(Exception):
    """A run whose averages have no closed form; the text is the reason."""


@dataclass(frozen=True)
class Layer:
    """The slots of one layer.

    expert, position: [S] what a slot holds (-1: nothing) and the lane position that has it
    """

    expert: NDArray[np.int64]
    position: NDArray[np.int64]
    num_experts: int
    num_positions: int

    @property
    def is_replicated(self) -> bool:
        """Whether any expert has more than one slot."""
        held = self.expert[self.expert >= 0]
        return len(np.unique(held)) < len(held)

    def sizes(self, slot_share: NDArray[np.float64]) -> NDArray[np.int64]:
        """[G] experts of each position, where each has one slot: shares [S] are 0 or 1."""
        sizes = np.bincount(self.position, slot_share, self.num_positions)
        return np.rint(sizes).astype(np.int64)

    def rank_share(self, slot_share: NDArray[np.float64]) -> NDArray[np.float64]:
        """[E, G] shares of the lane positions, from those of the slots [S]."""
        share = np.zeros((self.num_experts, self.num_positions))
        held = self.expert >= 0
        np.add.at(share, (self.expert[held], self.position[held]), slot_share[held])
        return share


def slot_shares(
    layer: Layer, replica_choice: str, node_of: Sequence[int], source: int
) -> NDArray[np.float64]:
    """[classes, S] probability that a slot serves a pick of its expert, for each class of tokens.

    node_of: [G] nodes of the lane's positions; source: the position that holds the token
    """
    held = np.flatnonzero(layer.expert >= 0)
    slots_of: list[NDArray[np.int64]] = (
        [held[layer.expert[held] == expert] for expert in range(layer.num_experts)]
        if layer.is_replicated
        else []
    )
    shares = np.zeros((1, len(layer.expert)))
    if not slots_of:
        shares[0, held] = 1
        return shares
    if replica_choice == "random":
        for slots in slots_of:
            shares[0, slots] = 1 / max(1, len(slots))
        return shares
    if replica_choice == "nearest":
        slots_of = [_nearest(slots, layer, np.asarray(node_of), source) for slots in slots_of]
    elif replica_choice != "round_robin":
        raise Unlawful(f"no law is known for replica_choice={replica_choice}")
    classes = lcm(*(max(1, len(slots)) for slots in slots_of))
    if classes > MAX_CLASSES:
        raise Unlawful(
            f"replicas served in turn repeat only after {classes:,} tokens; a law is computed for"
            f" {MAX_CLASSES} at most"
        )
    shares = np.zeros((classes, len(layer.expert)))
    for slots in slots_of:
        for turn in range(classes if len(slots) else 0):
            shares[turn, slots[turn % len(slots)]] = 1
    return shares


def _nearest(
    slots: NDArray[np.int64], layer: Layer, node_of: NDArray[np.integer], source: int
) -> NDArray[np.int64]:
    """Those of an expert's slots that a source may use."""
    position = layer.position[slots]
    for close in (position == source, node_of[position] == node_of[source]):
        if close.any():
            return slots[close]
    return slots
