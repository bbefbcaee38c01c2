"""Which replica serves a token: from logical experts to physical slots.

Every policy picks the (turn mod n)-th of n candidate slots of the expert; they differ in both:

    policy        candidates, ascending by slot               turn
    round_robin   all replicas                                number of the token
    random        all replicas                                hash of (seed, layer, token, expert)
    nearest       the replica on the source's own rank, else  number of the token
                  those on its node, else all replicas

A turn depends on the global number of the token, never on who holds it, so `round_robin` and
`random` choose equally on any number of ranks that share a placement, and on any machine.

The hash is splitmix64, twice: a generator whose 64-bit outputs are well spread even for inputs that
count up by one. Its lowest bit is dropped, as torch has no unsigned remainder; of the 2**63 values
that are left, no replica gets more than one more than another. int64 arithmetic wraps around in
torch on every device.

Legend: T tokens of this rank, K choices, E logical experts, S slots, n replicas of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from comm.permute import check_topk_ids
from comm.placement import ExpertPlacement

REPLICA_POLICIES = ("round_robin", "random", "nearest")

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # splitmix64: 2**64 over the golden ratio, and two odd multipliers
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class ReplicaChooser:
    """The choice of one layer and one source rank; keeps tables, no state.

    policy: one of REPLICA_POLICIES
    seed, layer: of `random`; layers choose independently of each other
    rank: of the source, as the placement counts ranks; of `nearest`
    node_of_rank: [R] the node of each of the placement's ranks, in any numbering; of `nearest`
    Raises ValueError for an unknown policy, a rank that does not exist, missing or too few nodes.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        policy: str,
        *,
        seed: int = 0,
        layer: int = 0,
        rank: int = 0,
        node_of_rank: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if policy not in REPLICA_POLICIES:
            raise ValueError(f"replica_choice={policy}: choose {', '.join(REPLICA_POLICIES)}")
        self.placement = placement
        self.policy = policy
        self._key = _mixed_number(_mixed_number(seed & _MASK) ^ layer)
        allowed = placement.replicas >= 0
        if policy == "nearest":
            allowed = _nearest(placement, rank, node_of_rank)
        # Row 0 is for -1 (no expert), whose only slot is S; row e + 1 for expert e.
        count = np.append(1, allowed.sum(axis=1))
        candidates = np.full((placement.num_experts + 1, count.max()), placement.num_slots)
        candidates[np.arange(count.max()) < count[:, None]] = np.append(
            placement.num_slots, placement.replicas[allowed]
        )
        self._count = torch.from_numpy(count).to(device)
        self._candidates = torch.from_numpy(candidates).to(device)

    def slots(self, topk_ids: Tensor, token_number: Tensor) -> Tensor:
        """The slot that serves each choice: int64 [T, K], S where there is no expert.

        topk_ids: int64 [T, K] logical experts; -1 means no expert
        token_number: int64 [T], the global number of each token, not negative
        Raises ValueError for wrong shapes or types and for numbers out of range.
        """
        self._check(topk_ids, token_number)
        row = (topk_ids + 1).flatten()
        width = self._candidates.shape[1]
        if width > 1:
            turn = self._turns(topk_ids, token_number).flatten()
            row = row * width + turn % self._count.index_select(0, row)
        return self._candidates.flatten().index_select(0, row).view(topk_ids.shape)

    def _turns(self, topk_ids: Tensor, token_number: Tensor) -> Tensor:
        """int64 [T, K], not negative"""
        if self.policy != "random":
            return token_number[:, None].expand(topk_ids.shape)
        token = _mixed(token_number ^ _signed(self._key))
        return _shifted(_mixed(token[:, None] ^ topk_ids), 1)

    def _check(self, topk_ids: Tensor, token_number: Tensor) -> None:
        check_topk_ids(topk_ids, self.placement.num_experts)
        if token_number.dtype != torch.int64:
            raise ValueError(f"token_number is {token_number.dtype}, must be torch.int64")
        if topk_ids.dim() != 2:
            raise ValueError(f"topk_ids is {tuple(topk_ids.shape)}, must be [tokens, top_k]")
        if token_number.shape != topk_ids.shape[:1]:
            raise ValueError(
                f"token_number is {tuple(token_number.shape)}, must be ({len(topk_ids)},)"
            )
        if not topk_ids.numel():
            return
        if (lowest := int(token_number.min())) < 0:
            raise ValueError(f"token_number holds {lowest}; tokens are numbered from 0")


def _nearest(
    placement: ExpertPlacement, rank: int, node_of_rank: Sequence[int] | None
) -> np.ndarray:
    """Which replicas a source may use: bool, in the shape of placement.replicas."""
    if not 0 <= rank < placement.world_size:
        raise ValueError(f"rank={rank} is not among the {placement.world_size} of the placement")
    if node_of_rank is None or len(node_of_rank) != placement.world_size:
        given = "none" if node_of_rank is None else str(len(node_of_rank))
        raise ValueError(
            "replica_choice=nearest needs the node of each of the placement's"
            f" {placement.world_size} ranks; node_of_rank has {given}"
        )
    exists = placement.replicas >= 0
    holder = placement.slot_rank[placement.replicas]  # of a -1: any rank, masked by `exists`
    node = np.asarray(node_of_rank)
    allowed = exists
    for closer in (exists & (node[holder] == node[rank]), exists & (holder == rank)):
        allowed = np.where(closer.any(axis=1, keepdims=True), closer, allowed)
    return allowed


def _mixed_number(value: int) -> int:
    """One step of splitmix64 from the state `value`, on a Python number in 0 .. 2**64 - 1."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mixed(values: Tensor) -> Tensor:
    """The same on each value of an int64 tensor, taken as unsigned."""
    values = values + _signed(_GAMMA)
    values = (values ^ _shifted(values, 30)) * _signed(_FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(_SECOND)
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Unsigned shift to the right; torch's own copies the sign."""
    return (values >> bits) & (_MASK >> bits)


def _signed(word: int) -> int:
    """The int64 with the same bits as a number in 0 .. 2**64 - 1."""
    return word - 2**64 if word >> 63 else word
