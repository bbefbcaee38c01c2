"""Experts moved by a rebalance, and gradients summed after a step."""

from dataclasses import replace

import numpy as np
import pytest
from random_runs import bytes_of, rows_of, simple_run

from comm.analytic.oracle import exact_traffic
from comm.analytic.rows import KINDS


def test_moved_experts() -> None:
    moves = np.array([[1, 3, 1, 0], [1, 2, 1, 0], [0, 0, 0, 1]])
    run = simple_run("rank_dedup", 2, 4, num_layers=2, num_steps=3, moves=moves, expert_bytes=100)
    exact = exact_traffic(run, np.full((3, 2, 2, 1), -1))
    moved = exact.bytes[:, 0, exact.phases.index("rebalance"), KINDS.index("expert_weights")]
    assert moved.tolist() == [[[0, 100], [0, 0]], [[0, 0], [200, 0]]]  # once, not in every step
    assert rows_of(exact, "rebalance").tolist() == [[0, 1], [2, 0]]
    for column, message in enumerate(
        ("layer 9..9, valid are 0..1", "expert 9", "source rank 9", "destination rank 9")
    ):
        wrong = np.zeros((1, 4), int)
        wrong[0, column] = 9
        with pytest.raises(ValueError, match=f"moves holds {message}"):
            exact_traffic(replace(run, moves=wrong), np.full((3, 2, 2, 1), -1))


def test_groups_do_not_meet() -> None:
    run = simple_run("allgather", 6, 4, ep_size=2, training=True, expert_values=6, shared_values=3)
    exact = exact_traffic(run, np.zeros((1, 1, 6, 1), int))
    lanes = np.kron(np.eye(3, dtype=int), np.ones((2, 2), int))
    assert rows_of(exact, "dispatch").tolist() == lanes.tolist()
    gradients = bytes_of(exact, "grad_sync", "gradients", "backward")
    # 3 shared values on 6 ranks: one each on the first three; 2 experts of 24 B with two others
    assert gradients[0].tolist() == [8, 8, 8 + 48, 4, 4 + 48, 4]
    assert gradients[5].tolist() == [4, 4 + 48, 4, 0 + 48, 0, 0]
