"""Small runs of the emulator that decide claims, and what they counted."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from comm.analytic.rows import PAYLOAD_KINDS
from comm.claims.form import ClaimError
from moe.config import compose
from moe.fitness import check
from moe.jobs import ranks
from moe.jobs.emulate import emulate
from moe.settings import Config, ConfigError

if TYPE_CHECKING:
    from comm.world import World

ALWAYS = ("record_routing=true", "traffic_csv=false", "kernel=false")
SMALL = 64  # ranks: such a run ends in seconds

Words = tuple[str, ...]


def figures_of(commands: Iterable[Words]) -> dict[Words, dict[str, float]]:
    """What each run counted; equal commands run once. Raises ClaimError where one cannot be."""
    with tempfile.TemporaryDirectory(prefix="wideep-claims-") as scratch:
        return {
            words: _run(words, Path(scratch) / str(number))
            for number, words in enumerate(dict.fromkeys(commands))
        }


def _run(words: Words, folder: Path) -> dict[str, float]:
    try:
        asked = compose(words)
        if asked.job != "emulate" or asked.world_size > SMALL:
            raise ConfigError(f"must be an emulation of at most {SMALL} ranks")
        config = compose([*words, *ALWAYS, f"output_dir={folder}"])
        check(config, config.world_size)
    except ConfigError as error:
        raise ClaimError(f"run.commands: {' '.join(words)}: {error}") from error
    folder.mkdir()
    status = ranks.launch(_quietly, config, folder)
    if status:
        raise RuntimeError(f"the run of {' '.join(words)} ended with status {status}")
    return counted(folder)


def _quietly(world: World, config: Config, folder: Path) -> int:
    """The run without its page."""
    with contextlib.redirect_stdout(io.StringIO()):
        return emulate(world, config, folder)


def counted(folder: Path) -> dict[str, float]:
    """The figures that a claim's `counted` may name, from a result folder.

    ranks, tokens, moe_layers, steps, top_k: of the run; tokens of all ranks
    rounds: exchanges of tokens that moved any byte: a phase of a layer in a step
    payload_bytes: hidden and scales of all phases, rows that stay on their rank included
    network_payload_bytes, network_dispatch_bytes: those that left it, and of these the dispatch's
    expert_weight_bytes: weights of experts, in any phase, to any rank
    dispatched_rows: rows of dispatch, those that stay on their rank included
    most_ranks_of_a_token: the most ranks that the experts of one token lie on
    headline_bytes: top_k x tokens x hidden x 2 B, of all layers and steps
    """
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    about = record["manifest"]
    with np.load(folder / "traffic.npz") as traffic, np.load(folder / "routing.npz") as routing:
        num_bytes, rows = traffic["bytes"], traffic["rows"]  # [L, D, P, kind, src, dst]
        kinds, phases = traffic["kinds"].tolist(), traffic["phases"].tolist()
        most = _most_ranks(routing["slots"], routing["slot_rank"])
    remote = ~np.eye(num_bytes.shape[-1], dtype=bool)
    payload = num_bytes[:, :, :, [kinds.index(kind) for kind in PAYLOAD_KINDS]]
    dispatch = phases.index("dispatch")
    return {
        "ranks": about["world_size"],
        "tokens": sum(about["tokens_per_rank"]),
        "moe_layers": num_bytes.shape[0],
        "steps": about["steps"],
        "top_k": about["shape"]["top_k"],
        "rounds": int((rows.sum(axis=(-1, -2)) > 0).sum()) * about["steps"],
        "payload_bytes": int(payload.sum()),
        "network_payload_bytes": int(payload[..., remote].sum()),
        "network_dispatch_bytes": int(payload[:, 0, dispatch][..., remote].sum()),
        "expert_weight_bytes": int(num_bytes[:, :, :, kinds.index("expert_weights")].sum()),
        "dispatched_rows": int(rows[:, 0, dispatch].sum()),
        "most_ranks_of_a_token": most,
        "headline_bytes": record["headline"]["headline_bytes"],
    }


def _most_ranks(slots: np.ndarray, slot_rank: np.ndarray) -> int:
    """slots: [steps, L, T, K] that serve each choice; slot_rank: [L, S]"""
    most = 0
    for layer, rank_of in enumerate(slot_rank):
        owners = np.sort(rank_of[slots[:, layer]], axis=-1)
        most = max(most, int((np.diff(owners, axis=-1) > 0).sum(axis=-1).max()) + 1)
    return most
