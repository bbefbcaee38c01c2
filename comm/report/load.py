"""How fast the bytes moved and how evenly they were spread. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from comm.report.tally import phases_in_order


def bandwidths(pair_bytes: np.ndarray, seconds: float) -> dict[str, float | None]:
    """GB/s of one phase from its bytes [R, R] and the slowest rank's time; null without a time.

    algbw: mean bytes a rank sends, its own included, over the time; busbw: that x (R-1)/R, both
    as nccl-tests has them. wirebw: bytes off the diagonal of the busiest rank, in or out.
    """
    if seconds <= 0:
        return {"algbw_GBps": None, "busbw_GBps": None, "wirebw_GBps": None}
    world_size = len(pair_bytes)
    algbw = float(pair_bytes.sum()) / world_size / seconds / 1e9
    wire = pair_bytes - np.diag(np.diag(pair_bytes))
    busiest = int(max(wire.sum(axis=0).max(), wire.sum(axis=1).max()))
    return {
        "algbw_GBps": algbw,
        "busbw_GBps": algbw * (world_size - 1) / world_size,
        "wirebw_GBps": busiest / seconds / 1e9,
    }


def timing(traffic: Any, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Seconds of the slowest rank over all layers and steps, and what they amount to.

    By phase; those of the backward direction as "backward dispatch" and so on. With chunks it is
    the time that was not hidden behind the experts.
    traffic.seconds: [R, L, D, P]; seconds: times of other parts ("experts", "step") by name
    """
    pair_bytes = traffic.bytes.sum(axis=(0, 3))  # [D, P, R, R]
    slowest = traffic.seconds.sum(axis=1).max(axis=0)  # [D, P]
    phases = {}
    for d, direction in enumerate(traffic.directions):
        for p in phases_in_order(direction, traffic.phases):
            name = traffic.phases[p] if direction == "forward" else f"backward {traffic.phases[p]}"
            spent = float(slowest[d, p])
            phases[name] = {"seconds": spent, **bandwidths(pair_bytes[d, p], spent)}
    return {**phases, **{f"{part}_seconds": value for part, value in seconds.items()}}


def balance(traffic: Any, expert_rows: np.ndarray, copies: np.ndarray) -> dict[str, Any]:
    """Largest over mean, in the layer where it is worst: time follows the busiest, layer by layer.

    Ranks are judged by the dispatched rows they receive, experts by the choices they get.
    expert_rows: [L, E] choices of each logical expert, all ranks and measured steps
    copies: [L, src, dst] choices served by each rank
    """
    forward, dispatch = traffic.directions.index("forward"), traffic.phases.index("dispatch")
    received = traffic.rows[:, forward, dispatch].sum(axis=1)  # [L, R]
    figures: dict[str, Any] = {}
    for owner, rows in (("rank", received), ("expert", np.asarray(expert_rows))):
        ratio, layer, index = _worst(rows)
        figures[f"rows_by_{owner}_max_over_mean"] = ratio
        figures[f"busiest_{owner}"] = index
        figures[f"busiest_{owner}_layer"] = None if layer is None else traffic.layers[layer]
    figures["layers"] = [
        {
            "layer": layer,
            "by_rank_max_over_mean": _ratio(received[index]),
            "choices_by_rank_max_over_mean": _ratio(copies[index].sum(axis=0)),
            "by_expert_max_over_mean": _ratio(np.asarray(expert_rows)[index]),
        }
        for index, layer in enumerate(traffic.layers)
    ]
    return figures


def _ratio(rows: np.ndarray) -> float | None:
    """Largest over mean; None where there is nothing."""
    return float(rows.max() / rows.mean()) if rows.any() else None


def _worst(rows: np.ndarray) -> tuple[float | None, int | None, int | None]:
    """Largest max/mean among the layers of `rows` [L, N], its layer and its column."""
    mean = rows.mean(axis=1)
    if not mean.any():
        return None, None, None
    ratio = rows.max(axis=1) / np.where(mean == 0, np.inf, mean)
    layer = int(ratio.argmax())
    return float(ratio[layer]), layer, int(rows[layer].argmax())
