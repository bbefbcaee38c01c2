"""Every deliberate fault is found: a verdict is OUTSIDE, or the run ends in a clear error.

All faults run one after the other on one world of four ranks, each in a complete run of the job.
WIDEEP_MUTATIONS=whole plants every fault in every strategy that it is for.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from faults import DISPATCHERS, SHARED, Fault, every_fault
from faults_choices import mask_choices
from run_configs import TO_ALL, base_config

from comm.spawn import run_ranks
from moe.jobs.emulate import emulate
from moe.settings import PlacementConfig, RouterConfig, TopologyConfig, WireConfig

WORLD_SIZE = 4
EXIT_STATUS = {
    "kernel": 5,  # first: what is wrongly counted agrees with nothing
    **{"exact": 3, "conserved": 3, "expected": 3, "correctness": 4, "gradients": 4},
}


def runs_with_faults():
    """The runs that faults are planted in: 30 experts, 8 8 7 7 to a rank; top-6, latent width."""
    base = base_config()
    base = replace(
        base,
        ranks=WORLD_SIZE,
        model=replace(base.model, num_experts=30, top_k=6),
        scale=replace(base.scale, layers=2),
        tokens=(9, 5, 0, 12),
        steps=2,
        warmup=1,
        record_routing=False,
        topology=TopologyConfig(node_of_rank=(0, 1, 0, 1)),
    )
    half = replace(base, ep_size=2)
    blocks = TopologyConfig(node_of_rank=(0, 0, 1, 1))  # shards share a node, lanes do not
    return {
        "bf16": base,
        "round_robin": replace(base, placement=PlacementConfig("round_robin")),
        "fp8": replace(  # latent width 150: a partial block of 128 and one of 32
            base,
            scale=replace(base.scale, hidden_size=300),
            wire=WireConfig("fp8_block128", "mxfp8"),
        ),
        "mxfp4": replace(base, wire=WireConfig("mxfp4", "bf16")),
        "nvfp4": replace(base, wire=WireConfig("nvfp4", "bf16")),
        "rebalance": replace(base, placement=PlacementConfig("balance", num_redundant_experts=6)),
        "hot rank": replace(base, router=RouterConfig(name="hot_rank"), tokens=200),
        "groups": half,
        "chunks": replace(base, chunks=2),
        "shards": replace(base, expert_tp=2, topology=blocks),
        "shards to all": replace(base, expert_tp=2, expert_tp_mode="all", topology=blocks),
        "training": replace(base, mode="training"),
        "trained groups": replace(half, mode="training"),
    }


FAULTS = every_fault()
WHOLE = "WIDEEP_MUTATIONS" in os.environ
# Each fault in the first of its strategies and, unless all are asked for, in every other one.
CASES = [
    (name, dispatcher)
    for number, (name, fault) in enumerate(FAULTS.items())
    for place, dispatcher in enumerate(fault.on)
    if WHOLE or place == 0 or (number + place) % 2
]
# No fault: what a run must look like for a fault to stand out.
CONTROLS = {run: Fault(lambda patch: None, "", run=run) for run in runs_with_faults()}
CONTROLS["masked"] = Fault(mask_choices, "")
CONTROL_CASES = sorted(
    {(FAULTS[name].run, dispatcher) for name, dispatcher in CASES}
    | {("masked", dispatcher) for dispatcher in CONTROLS["masked"].on}
)


def run_cases(world, configs, cases):
    """On every rank: each case's error, or its record. The patches are gone after each case."""
    ends = {}
    for case in cases:
        name, dispatcher = case
        fault = (FAULTS | CONTROLS)[name]
        # The kernel is asked where it alone can tell, and where nothing is wrong.
        asked = not fault.caught_by or fault.caught_by == "kernel"
        config = replace(configs[fault.run], dispatcher=DISPATCHERS[dispatcher], kernel=asked)
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            fault.plant(patch)
            ends[case] = run_once(world, replace(config, output_dir=f"{folder}/run"))
    return ends


def run_once(world, config):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            status = emulate(world, config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if world.rank != 0:
        return None
    return {**json.loads(Path(config.output_dir, "run.json").read_text()), "returned": status}


@pytest.fixture(scope="module")
def ends():
    """By case: the record of a run, or the errors of all ranks."""
    cases = CONTROL_CASES + CASES
    by_rank = run_ranks(
        run_cases,
        WORLD_SIZE,
        runs_with_faults(),
        cases,
        preload=["moe.judge", "test_mutations"],
        timeout_s=60,
    )
    return {
        case: by_rank[0][case]
        if isinstance(by_rank[0][case], dict)
        else [ends[case] for ends in by_rank]
        for case in cases
    }


def states(record):
    return {verdict["name"]: verdict["state"] for verdict in record["verdicts"]}


@pytest.mark.parametrize(("name", "dispatcher"), CONTROL_CASES)
def test_without_a_fault_everything_agrees(ends, name, dispatcher):
    record = ends[name, dispatcher]
    assert isinstance(record, dict), record
    law = {"masked": "NOT_AVAILABLE"}.get(name, "WITHIN")
    if law == "WITHIN" and dispatcher in (*TO_ALL, "padded", "renormalized"):
        law = "EXACT"  # nothing is left to chance
    found = {"exact": "EXACT", "conserved": "EXACT", "expected": law, "correctness": "WITHIN"}
    if CONTROLS[name].run in ("training", "trained groups"):
        found["gradients"] = "WITHIN"
    found["kernel"] = "NOT_AVAILABLE" if dispatcher in SHARED else "EXACT"
    assert states(record) == found, record["verdicts"]
    assert record["status"] == record["returned"] == 0


@pytest.mark.parametrize(("name", "dispatcher"), CASES)
def test_the_fault_is_found(ends, name, dispatcher):
    fault, end = FAULTS[name], ends[name, dispatcher]
    if fault.caught_by not in EXIT_STATUS:
        assert isinstance(end, list), "the run ended as if nothing were wrong"
        errors = [error for error in end if error]  # of rank 0 alone, where the others had ended
        assert all(fault.caught_by in error for error in errors) and end[0], end
        return
    assert isinstance(end, dict), end
    outside = [verdict for verdict, state in states(end).items() if state == "OUTSIDE"]
    assert fault.caught_by in outside, (fault.plant.__doc__, end["verdicts"])
    assert (
        end["status"]
        == end["returned"]
        == next(status for name, status in EXIT_STATUS.items() if name in outside)
    )
