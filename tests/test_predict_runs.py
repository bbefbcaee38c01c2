"""What is predicted without ranks is what a run expects of itself, and the run keeps to it.

Random small runs of every strategy, wire, placement and layout of nodes; 6 of them, or as many as
WIDEEP_PREDICT_RUNS says (50 took two minutes when this was written).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from run_configs import base_config, emulate_all, in_folders, random_config

from comm.spawn import run_ranks
from comm.topology import TIER_NAMES
from moe.prediction import predict

WORLDS = (4,) if "WIDEEP_PREDICT_RUNS" not in os.environ else (1, 3, 4, 6, 8)
RUNS = int(os.environ.get("WIDEEP_PREDICT_RUNS", "6"))
SCOPES = {**{tier: tier for tier in TIER_NAMES}, "network": "remote"}


def drawn(world_size, folder):
    """Runs with a law whose experts stay where the configuration puts them."""
    random, base, found = Random(900 + world_size), base_config(), []
    quick = {"reference": False, "kernel": False, "record_routing": False}
    base = replace(base, **quick)
    while len(found) < RUNS // len(WORLDS):
        config = random_config(random, world_size, base, folder)
        # A balanced placement depends on the choices that a run's warm-up happens to make.
        moves = config.placement.name == "balance"
        if not moves and sum(config.tokens) and predict(config).reason is None:
            found.append(config)
    return in_folders(found, folder)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda ranks: f"{ranks} ranks")
def runs(request, tmp_path_factory):
    """(prediction, record, page) of each run; the predictions are made before."""
    folder = tmp_path_factory.mktemp(f"predicted{request.param}")
    configs = drawn(request.param, folder)
    predictions = [predict(replace(config, job="predict")) for config in configs]
    ends = run_ranks(emulate_all, request.param, configs, preload=["moe.judge"])[0]
    records = [json.loads(Path(one.output_dir, "run.json").read_text()) for one in configs]
    return list(zip(predictions, records, [status for status, _ in ends], strict=True))


def test_every_figure_is_the_runs_own(runs):
    """Each layer, phase, direction, tier and kind: mean and deviation, bit by bit."""
    compared = 0
    for prediction, record, _ in runs:
        expected = prediction.traffic
        for entry in record["layers"]:
            if entry["phase"] not in expected.phases:
                continue  # gradients are not left to chance
            where = {"layers": [entry["layer"]], "phases": [entry["phase"]]}
            where["directions"] = [entry["direction"]]
            cells = [(cell["tier"], [cell["kind"]], cell) for cell in entry["cells"]]
            for scope, kinds, cell in [*cells, ("network", None, entry["network"])]:
                told = expected.of(SCOPES[scope], kinds=kinds, **where)
                assert (told.mean, told.std) == (cell["expected_bytes"], cell["expected_std"])
                compared += 1
    assert compared > 20 * len(runs)


def test_the_runs_keep_to_it(runs):
    """Counted bytes lie within z of the prediction, by the run's own bound for its many tests."""
    for prediction, record, status in runs:
        verdicts = {one["name"]: one for one in record["verdicts"]}
        assert status == 0 and verdicts["expected"]["state"] in ("WITHIN", "EXACT")
        for phase in prediction.traffic.phases:
            told = prediction.traffic.of("remote", phases=[phase])
            counted = sum(
                entry["network"]["measured_bytes"]
                for entry in record["layers"]
                if entry["phase"] == phase
            )
            # six deviations and one row: a run of a few tokens is no bell
            row = max(prediction.row_bytes("forward", phase), 1)
            assert abs(counted - told.mean) <= 6 * told.std + row, (phase, prediction.config)


def test_rows_of_the_ranks_add_up_to_the_traffic(runs):
    """A second derivation: sums over ranks, beside sums over tokens."""
    for prediction, _, _ in runs:
        capped = prediction.run.dispatcher == "padded" and prediction.run.expert_tp > 1
        for layer, phases in enumerate(prediction.rows if not capped else []):
            for phase, rows in phases.items():
                row = prediction.row_bytes("forward", phase)
                for at, tier in enumerate(TIER_NAMES):
                    where = {"layers": [layer], "phases": [phase], "directions": ["forward"]}
                    told = prediction.traffic.of(tier, **where).mean
                    told -= prediction.traffic.of(tier, kinds=["counts"], **where).mean
                    assert rows.sent[at].sum() * row == pytest.approx(told, rel=1e-9, abs=1e-6)
                    assert rows.received[at].sum() * row == pytest.approx(told, rel=1e-9, abs=1e-6)
