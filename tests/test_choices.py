"""Recorded choices: the slots that serve them, the order of admission, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from random_runs import bytes_of, random_run, rows_of, simple_run

from comm.analytic import choices
from comm.analytic.choices import capacity, kept_choices
from comm.analytic.oracle import count_copies, exact_traffic
from comm.analytic.rows import DISPATCHERS


def test_fixed_slots_send_empty_rows() -> None:
    """T = 65536, K = 4, E = 256: room for 1024 rows for each (source, expert); 1.25: for 1280."""
    run = simple_run("padded", 2, 256, tokens_per_rank=(65536, 100), top_k=4)
    assert capacity(run).tolist() == [[1024, 1024]]
    assert capacity(replace(run, capacity_factor=1.25, chunks=2)).tolist() == [[640] * 2] * 2
    ids = np.tile(np.arange(4), (1, 1, 65636, 1))
    exact = exact_traffic(run, ids)
    assert rows_of(exact, "dispatch").tolist() == [[128 * 1024] * 2] * 2
    useful = bytes_of(exact, "dispatch", "hidden") // 32
    assert useful.tolist() == [[4 * 1024, 0], [4 * 100, 0]]
    padding = bytes_of(exact, "dispatch", "padding") // 32
    np.testing.assert_array_equal(useful + padding, rows_of(exact, "dispatch"))
    kept = kept_choices(run, ids)[0, 0]
    assert kept[:1024].all() and not kept[1024:65536].any() and kept[65536:].all()


@pytest.mark.parametrize(
    ("factor", "tokens", "rows"),
    # 0.1 x 30 x 8 / 24 is 1 exactly, which no binary 0.1 says; one token is never refused
    [(0.1, 10, 1), (0.1, 30, 1), (0.1, 31, 2), (1.0, 3, 1), (0.0, 1, 1), (1.0, 0, 0)],
)
def test_capacity_is_exact(factor: float, tokens: int, rows: int) -> None:
    run = simple_run("padded", 2, 24, tokens_per_rank=(0, tokens), top_k=8, capacity_factor=factor)
    assert capacity(run).tolist() == [[rows, rows]]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_batches_do_not_show(dispatcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ids, slots = random_run(7, dispatcher, tokens_per_rank=(50,), node_of_rank=(0,),
        ep_size=None, expert_tp=1, expert_tp_mode="gather", num_experts=6, top_k=4,
        physical_to_logical=(np.arange(6),), slot_rank=(np.zeros(6, int),), chunks=3,
        capacity_factor=0.5, num_steps=2, moves=np.zeros((0, 4), int))  # fmt: skip
    whole, kept = exact_traffic(run, ids, slots), kept_choices(run, ids, slots)
    assert (kept == (ids >= 0)).all() == (dispatcher != "padded")
    monkeypatch.setattr(choices, "_BATCH_CHOICES", 12)
    np.testing.assert_array_equal(whole.bytes, exact_traffic(run, ids, slots).bytes)
    np.testing.assert_array_equal(kept, kept_choices(run, ids, slots))


def test_narrow_id_types_are_lossless() -> None:
    ids = np.array([[[[255, 256, -1, 257, 301, 895]]]], np.int16)
    tokens = tuple(int(rank == 200) for rank in range(896))
    run = simple_run("rank_dedup", 896, 896, tokens_per_rank=tokens, top_k=6)
    rows = rows_of(exact_traffic(run, ids), "dispatch")
    assert np.argwhere(rows).tolist() == [[200, e] for e in (255, 256, 257, 301, 895)]


def test_foreign_choices_are_refused() -> None:
    run = simple_run("all_to_all", 2, 4, top_k=2, num_steps=1)
    good = np.array([[[[0, 1], [2, -1]]]])
    assert exact_traffic(run, good).rows.sum() == 2 * 3
    for wrong, message in [
        (np.array([[[[0, 4], [2, -1]]]]), r"topk_ids holds -1\.\.4, valid are 0\.\.3 and -1"),
        (np.array([[[[0, -2], [2, -1]]]]), "topk_ids holds -2"),
        (good[:, :, :1], r"topk_ids has shape \(1, 1, 1, 2\), the run has .* = \(1, 1, 2, 2\)"),
        (good[..., :1], "topk_ids has shape"),
        (np.concatenate([good, good]), r"topk_ids has shape \(2, 1, 2, 2\)"),
    ]:
        for function in (exact_traffic, kept_choices, count_copies):
            with pytest.raises(ValueError, match=message):
                function(run, wrong)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1], [2, 3]], "token 1: expert -1 is served by slot 3, which holds expert 3"),
        ([[0, -1], [2, -1]], "token 0: expert 1 is served by slot -1, which is none"),
        ([[0, 1], [3, -1]], "token 1: expert 2 is served by slot 3, which holds expert 3"),
        ([[0, 1], [4, -1]], "token 1: expert 2 is served by slot 4, which does not exist"),
        ([[0, 1], [-2, -1]], "token 1: expert 2 is served by slot -2, which does not exist"),
        ([[0, 1], [2, -2]], "token 1: expert -1 is served by slot -2, which does not exist"),
    ],
)
def test_a_slot_must_hold_the_expert_that_was_chosen(
    slots: list[list[int]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simple_run("all_to_all", 2, 4, top_k=2, num_layers=2, num_steps=2)
    good = np.tile(np.array([[0, 1], [2, -1]]), (2, 2, 1, 1))
    np.testing.assert_array_equal(  # experts 0..3 in slots 0..3
        exact_traffic(run, good, good).bytes, exact_traffic(run, good).bytes
    )
    wrong = good.copy()
    wrong[1, 1] = slots
    monkeypatch.setattr(choices, "_BATCH_CHOICES", 2)  # the token is named across batches
    with pytest.raises(ValueError, match=f"step 1, layer 1, {message}"):
        exact_traffic(run, good, wrong)


def test_replicas_need_the_slots_that_served() -> None:
    run = simple_run(
        "all_to_all",
        1,
        2,
        physical_to_logical=(np.array([0, 1, 1]),),
        slot_rank=(np.zeros(3, int),),
    )
    with pytest.raises(ValueError, match="layer 0: expert 1 has 2 slots"):
        exact_traffic(run, np.array([[[[0]]]]))
    lost = replace(run, physical_to_logical=(np.array([0, -1, -1]),))
    assert rows_of(exact_traffic(lost, np.array([[[[0]]]])), "dispatch").sum() == 1
    with pytest.raises(ValueError, match="token 0: expert 1 is served by slot -1, which is none"):
        exact_traffic(lost, np.array([[[[1]]]]))
    with pytest.raises(ValueError, match="token 0: expert -1 is served by slot 2, which holds"):
        exact_traffic(lost, np.array([[[[-1]]]]), np.array([[[[2]]]]))
