"""The estimate refuses what cannot fit, before any rank starts, and lets the usual runs pass."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_configs import base_config

from moe.fitness import GIB, check_device, check_memory, rank_bytes, rank_zero_bytes
from moe.settings import DispatcherConfig, PlacementConfig, UnfitError


def test_a_run_that_cannot_fit_is_refused_in_one_line():
    """Field case 19: warm-up tokens by the ten thousand on every rank."""
    with pytest.raises(UnfitError, match=r"needs about [\d,.]+ GiB here for 8 ranks, and .* free"):
        check_memory(base_config("kimi_k2", tokens=10**9), 8)


def test_the_default_run_is_far_from_the_limit():
    config = base_config()
    assert 8 * rank_bytes(config) + rank_zero_bytes(config) < 2 * GIB


def test_more_of_anything_needs_more():
    config = base_config()
    for change in ({"tokens": 800}, {"scale": replace(config.scale, layers=4)}):
        assert rank_bytes(replace(config, **change)) > rank_bytes(config)
    assert rank_zero_bytes(replace(config, reference=False)) < rank_zero_bytes(config)
    assert rank_bytes(replace(config, dtype="bf16")) < rank_bytes(config)
    for name in ("allgather", "hierarchical_allgather"):
        everywhere = replace(config, dispatcher=DispatcherConfig(name))
        assert rank_bytes(everywhere) > rank_bytes(config)
    training = replace(config, mode="training")
    assert rank_bytes(training) > rank_bytes(config)
    assert rank_zero_bytes(training) > rank_zero_bytes(config)
    unchecked = [replace(one, reference=False) for one in (config, training)]
    assert rank_zero_bytes(unchecked[0]) == rank_zero_bytes(unchecked[1])


def weights(**changes):
    """What one more layer adds to a rank of eight that has no tokens."""
    one = base_config(tokens=0, ranks=8, **changes)
    return rank_bytes(replace(one, scale=replace(one.scale, layers=2))) - rank_bytes(one)


def test_experts_of_a_rank_follow_groups_shards_and_replicas():
    """896 experts of 3 x 32 x 16 values; the rest of a layer every rank holds."""
    expert, rest = 4 * 3 * 32 * 16, weights() - 112 * 4 * 3 * 32 * 16
    assert weights(ep_size=2) == 448 * expert + rest
    assert weights(expert_tp=4) == 448 * expert // 4 + rest
    assert weights(ep_size=4, expert_tp=4) == 896 * expert // 4 + rest
    replicas = PlacementConfig("balance", num_redundant_experts=64)
    assert weights(placement=replicas) == 120 * expert + rest
    assert weights(mode="training") == 2 * weights()


def test_weights_are_counted_to_the_byte_of_their_shapes():
    """One more layer costs its experts, router, projections and shared experts."""
    one = base_config(tokens=0, ranks=1)
    two = replace(one, scale=replace(one.scale, layers=2))
    hidden, latent, inner, shared = 64, 32, 16, 32
    values = 896 * 3 * latent * inner + 896 * hidden + 2 * hidden * latent + 3 * hidden * shared
    assert rank_bytes(two) - rank_bytes(one) == 4 * values


def test_exit_status_is_7():
    result = subprocess.run(
        [sys.executable, "-m", "moe", "--check", "tokens=1000000000"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        check=False,
    )
    assert result.returncode == 7
    assert result.stderr.startswith("wideep: needs about") and result.stderr.count("\n") == 1


def test_a_gpu_that_is_not_there_is_refused_before_any_rank_starts(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_device(base_config(device="cuda"), 1)
    check_device(base_config(), 8)
    with pytest.raises(UnfitError, match="1 GPUs here for 8 ranks"):
        check_device(base_config(device="cuda"), 8)
