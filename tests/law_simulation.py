"""Small runs simulated: ids drawn from a law, slots chosen, and the exact traffic of that.

Plain loops, nothing of the analytic side but the oracle, which has tests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comm.analytic.law import GroupLimited, Law, Markov, Uniform, Weighted
from comm.analytic.oracle import ExactTraffic, exact_traffic
from comm.analytic.run import RunShape
from comm.topology import Topology

SCOPES = {"self": (0,), "scale_up": (1,), "scale_out": (2,), "remote": (1, 2)}


def even(num_experts: int, world_size: int) -> list[int]:
    """Experts of each rank, the first ones owning one more where it does not divide."""
    return [num_experts // world_size + (r < num_experts % world_size) for r in range(world_size)]


def run_shape(
    dispatcher: str,
    tokens: Sequence[int],
    nodes: Sequence[int],
    sizes: Sequence[int] | Sequence[Sequence[int]],
    top_k: int,
    *,
    replicas: Sequence[tuple[int, int]] = (),
    num_layers: int = 1,
    **settings: Any,
) -> RunShape:
    """A run whose lane position r owns sizes[r] neighbouring experts, and further replicas.

    sizes: of one layer, or of each; replicas: (expert, lane position) of slots added
    """
    layers = [sizes] * num_layers if np.ndim(sizes) == 1 else list(sizes)
    experts, positions = [], []
    for layer in layers:
        owner = np.repeat(np.arange(len(layer)), layer)
        slots = sorted([(int(r), e) for e, r in enumerate(owner)] + [(r, e) for e, r in replicas])
        positions.append(np.array([r for r, _ in slots]))
        experts.append(np.array([e for _, e in slots]))
    return RunShape(
        dispatcher,
        tuple(tokens),
        tuple(nodes),
        tuple(experts),
        tuple(positions),
        int(np.sum(layers[0])),
        top_k,
        **{"width": 8, **settings},
    )


def draw_ids(rng: np.random.Generator, law: Law, run: RunShape) -> NDArray[np.int64]:
    """[steps, L, tokens, K] experts as the law wants them."""
    tokens, num_experts, top_k = sum(run.tokens_per_rank), run.num_experts, run.top_k
    shape = (run.num_steps, run.num_layers, tokens)
    if isinstance(law, Uniform):
        return rng.random((*shape, num_experts)).argsort(axis=-1)[..., :top_k]
    if isinstance(law, GroupLimited):
        scores = rng.random((*shape, law.num_expert_groups, num_experts // law.num_expert_groups))
        kept = scores.max(axis=-1).argsort(axis=-1)[..., -law.num_limited_groups :]
        allowed = np.zeros(scores.shape[:-1], bool)
        np.put_along_axis(allowed, kept, True, axis=-1)
        limited = np.where(allowed[..., None], scores, -1).reshape(*shape, num_experts)
        return limited.argsort(axis=-1)[..., -top_k:]
    ids = np.empty((*shape, top_k), np.int64)
    for step, layer in np.ndindex(*shape[:2]):
        if isinstance(law, Weighted):
            subsets = np.array(list(combinations(range(num_experts), top_k)))
            chance = law.weights[law.variant[step, layer]][subsets].prod(axis=1)
            which = rng.choice(len(subsets), tokens, p=chance / chance.sum())
            ids[step, layer] = subsets[which]
        else:
            assert isinstance(law, Markov)
            for token in range(tokens):
                if token % law.sequence == 0:
                    chosen = rng.permutation(num_experts)[:top_k]
                else:
                    leaves = rng.random(top_k) >= law.reuse
                    others = np.setdiff1d(np.arange(num_experts), chosen)
                    chosen = chosen.copy()
                    chosen[leaves] = rng.permutation(others)[: leaves.sum()]
                ids[step, layer, token] = chosen
    return ids


def serve(rng: np.random.Generator, run: RunShape, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slot of each choice, -1 where there is none."""
    slots = np.full(ids.shape, -1)
    position_of = {rank: (lane, r) for lane in run.lanes for r, rank in enumerate(lane)}
    for step, layer, token, k in np.ndindex(*ids.shape):
        expert = ids[step, layer, token, k]
        if expert < 0:
            continue
        lane, source = position_of[run.token_rank[token]]
        where = run.slot_rank[layer]
        usable = np.flatnonzero(run.physical_to_logical[layer] == expert)
        if run.replica_choice == "random":
            slots[step, layer, token, k] = rng.choice(usable)
            continue
        if run.replica_choice == "nearest":
            node = [run.node_of_rank[rank] for rank in lane]
            own = [slot for slot in usable if where[slot] == source]
            near = [slot for slot in usable if node[where[slot]] == node[source]]
            usable = own or near or usable
        slots[step, layer, token, k] = usable[token % len(usable)]
    return slots


def simulate(
    rng: np.random.Generator, run: RunShape, law: Law, active: NDArray[np.int64] | None = None
) -> ExactTraffic:
    """One run; active: [steps, L, R] tokens of each rank that choose experts, its first ones."""
    ids = draw_ids(rng, law, run)
    if active is not None:
        first = np.cumsum([0, *run.tokens_per_rank])
        for step, layer, rank in np.ndindex(*active.shape):
            ids[step, layer, first[rank] + active[step, layer, rank] : first[rank + 1]] = -1
    replicated = any(len(set(e.tolist())) < len(e) for e in run.physical_to_logical)
    return exact_traffic(run, ids, serve(rng, run, ids) if replicated else None)


def tiers_of(run: RunShape) -> NDArray[np.int8]:
    """[R, R] LinkTier of each pair."""
    return Topology(tuple(run.node_of_rank)).tiers()
