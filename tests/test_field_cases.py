"""What went wrong elsewhere, in whole runs with every strategy: empty, hot, masked, replayed."""

from __future__ import annotations

import numpy as np
import pytest
import trace_files
from case_runs import runs_of_the_field
from emulate_runs import Runs
from run_configs import TO_ALL, VARIANTS

FORWARD, BACKWARD, DISPATCH, COMBINE = 0, 1, 0, 1
COPIED = ("all_to_all", "one_sided")  # a row for each choice


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return Runs(folder, runs_of_the_field(folder))


# -- empty, hot, masked, replicated ----------------------------------------------------------------


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_all_tokens_on_one_rank(runs, dispatcher):
    """Field case 15: seven of eight ranks have no token, and serve the one that has."""
    run = runs[f"tokens on one rank {dispatcher}"]
    sent = hidden_sent(run, FORWARD, DISPATCH)
    assert sent[0] > 0 and not sent[1:].any()
    assert run.status == 0 and run.states["correctness"] == "WITHIN"


def hidden_sent(run, direction, phase):
    """[src] bytes of filled rows"""
    hidden = run.traffic["kinds"].tolist().index("hidden")
    return run.traffic["bytes"][:, direction, phase, hidden].sum(axis=(0, 2))


# Rows that each rank receives in a layer when the 9, 5, 0 and 12 tokens of the ranks all choose six
# experts of rank 0; ranks 0 and 2 are a node, whose first takes in the 5 and whose second the 12.
TO_RANK_0 = {
    "all_to_all": [26 * 6, 0, 0, 0],
    "rank_dedup": [26, 0, 0, 0],
    "allgather": [26] * 4,
    "two_hop": [9 + 5 + 26, 0, 12, 0],
    "hierarchical_allgather": [9 + 5 + 26, 9 + 5 + 26, 12 + 26, 12 + 26],
    "padded": [4 * 3 * slots for slots in (8, 8, 7, 7)],  # room for 3 = 1.25 * 12 * 6 / 30
    "one_sided": [26 * 6, 0, 0, 0],
    "deduplicated": [26, 0, 0, 0],
}


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_all_routing_to_one_rank(runs, dispatcher):
    """Field case 20: the skew is told by rank, as each strategy has it."""
    run, rows = runs[f"to rank 0 {dispatcher}"], TO_RANK_0[dispatcher]
    received = run.traffic["rows"][:, FORWARD, DISPATCH].sum(axis=1)  # [layer, dst]
    assert received.tolist() == [rows] * 2
    balance = run.record["balance"]
    assert balance["rows_by_rank_max_over_mean"] == max(rows) / (sum(rows) / 4)
    assert balance["busiest_rank"] == 0
    assert run.states["exact"] == "EXACT" and run.states["correctness"] == "WITHIN"
    assert run.status == 0


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_every_token_alike(runs, dispatcher):
    run = runs[f"same experts {dispatcher}"]
    balance = run.record["balance"]
    assert balance["rows_by_expert_max_over_mean"] == 30 / 6
    assert run.status == 0 and run.states["correctness"] == "WITHIN"


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_more_ranks_than_experts(runs, dispatcher):
    """Rank 3 owns none of the 3 experts, and gets rows only where all do, or to hand them on."""
    run = runs[f"few experts {dispatcher}"]
    received = run.traffic["rows"][:, FORWARD, DISPATCH, :, 3]
    assert received.any() == (dispatcher in (*TO_ALL, "two_hop"))
    assert run.states["exact"] == "EXACT" and run.status == 0


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_more_choices_than_a_rank_has_experts(runs, dispatcher):
    """Field case 17: 16 of 30 experts, 8 or 7 to a rank; half of the experts are met."""
    run = runs[f"more choices than a rank has experts {dispatcher}"]
    assert run.record["choices"]["chosen"] == 16 * 26 * 2
    assert run.states["exact"] == "EXACT" and run.status == 0


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_masked_choices_cost_nothing(runs, dispatcher):
    """Field case 18: of 9, 5, 0 and 12 tokens 9, 4, 0 and 3 choose; the others are nobody's."""
    run, active = runs[f"masked {dispatcher}"], [9, 4, 0, 3]
    ids, slots = run.routing["topk_ids"], run.routing["slots"]
    assert np.array_equal(ids < 0, slots < 0)
    choosing = np.bincount(run.routing["token_rank"][(ids[0, 0] >= 0).all(axis=1)], minlength=4)
    assert choosing.tolist() == active
    assert run.record["choices"]["chosen"] == sum(active) * 6 * 2
    sent = run.traffic["rows"][:, FORWARD, DISPATCH].sum(axis=2)  # [layer, src]
    if dispatcher in COPIED:
        assert sent.tolist() == [[6 * tokens for tokens in active]] * 2
    elif dispatcher == "allgather":
        assert sent.tolist() == [[4 * tokens for tokens in active]] * 2
    elif dispatcher == "padded":
        filled = hidden_sent(run, FORWARD, DISPATCH).sum() / (2 * 32)  # bf16, latent width 32
        assert filled == sum(active) * 6 * 2 - run.record["choices"]["dropped"]
    assert run.states["exact"] == "EXACT" and run.states["correctness"] == "WITHIN"
    assert run.status == 0


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_replicas_share_their_expert_s_tokens(runs, dispatcher):
    """Field case 12: two ranks, four experts in six slots, top-2; each choice is computed once."""
    run = runs[f"replicas {dispatcher}"]
    routing, choices = run.routing, 2 * 8 * 2
    assert run.record["placement"]["num_redundant_experts"] == [2]
    assert routing["slot_rank"].tolist() == [[0, 0, 0, 1, 1, 1]]
    served = routing["physical_to_logical_map"][0][routing["slots"][0, 0]]
    assert np.array_equal(served, routing["topk_ids"][0, 0])
    assert len(np.unique(routing["slots"])) > 4  # both replicas of an expert have work
    if dispatcher in COPIED:
        assert run.traffic["rows"][0, FORWARD, DISPATCH].sum() == choices
    assert run.record["choices"]["chosen"] == choices
    assert run.states["exact"] == "EXACT" and run.states["correctness"] == "WITHIN"
    assert run.status == 0


# -- recorded routing ------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_weights_of_a_trace_are_taken_as_they_are(runs, dispatcher):
    """Field case 26: they need not sum to one, and they are applied once."""
    run = runs[f"replayed {dispatcher}"]
    with np.load(run.folder.parent / "trace.npz") as trace:
        ids, weights = trace["topk_ids"], trace["topk_weights"]  # of one layer, which serves both
    assert np.array_equal(run.routing["topk_ids"], ids.repeat(2, axis=1))
    weights = np.where(ids >= 0, weights, 0).repeat(2, axis=1)
    assert np.array_equal(run.routing["topk_weights"], weights)
    sums = run.routing["topk_weights"].sum(axis=-1)
    assert sums.max() > 10 and sums.min() < 8
    assert run.record["choices"]["chosen"] == 2 * (24 * 6 + 1)
    assert run.states["exact"] == "EXACT" and run.states["correctness"] == "WITHIN"
    assert run.status == 0


def test_a_recorded_run_replays_on_another_placement(runs):
    """Its slots are those of replicas; what is replayed are the experts."""
    first, again = runs["recorded"], runs["recorded, again"]
    assert first.record["placement"] is not None and again.record["placement"] is None
    for name in ("topk_ids", "topk_weights"):
        assert np.array_equal(first.routing[name], again.routing[name])
    assert not np.array_equal(first.routing["slots"], again.routing["slots"])
    shas = {run.record["manifest"]["routing_sha256"] for run in (first, again)}
    assert len(shas) == 1 and again.status == first.status == 0


def test_physical_ids_of_a_recorder_become_experts(runs):
    """Field cases 21, 32 and 33: a file of SGLang's with eight columns, four of them used, slots of
    replicated experts in them, and experts beyond 255 among these."""
    run = runs["recorded by others"]
    wanted = trace_files.even_then_odd(trace_files.IDS)[:2]
    assert np.array_equal(run.routing["topk_ids"][0], wanted)
    assert run.states["exact"] == "EXACT" and run.status == 0


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_backward_takes_the_pairs_of_forward(runs, dispatcher):
    """Field case 27: the same rows, the other way round; weights' gradients where weights went."""
    run = runs[f"trained {dispatcher}"]
    rows, kinds = run.traffic["rows"], run.traffic["kinds"].tolist()
    there = rows[:, FORWARD, DISPATCH]
    assert there.any()
    assert np.array_equal(rows[:, BACKWARD, COMBINE], there)
    assert np.array_equal(rows[:, BACKWARD, DISPATCH], there.swapaxes(1, 2))
    by_kind = run.traffic["bytes"].sum(axis=(0, 4, 5))  # [direction, phase, kind]
    hidden, weights, counts = (kinds.index(name) for name in ("hidden", "weights", "counts"))
    for phase in (DISPATCH, COMBINE):
        assert by_kind[BACKWARD, phase, hidden] == by_kind[FORWARD, 1 - phase, hidden] > 0
    assert by_kind[BACKWARD, DISPATCH, weights] == by_kind[FORWARD, DISPATCH, weights]
    assert not by_kind[BACKWARD, :, counts].any()
    assert run.states["gradients"] == run.states["correctness"] == "WITHIN" and run.status == 0


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_training_with_all_tokens_on_one_rank(runs, dispatcher):
    """Field case 15: seven of eight ranks have no token, and take part in both directions."""
    run = runs[f"trained on one rank {dispatcher}"]
    sent = hidden_sent(run, BACKWARD, COMBINE)
    assert sent[0] > 0 and not sent[1:].any()
    assert run.states["exact"] == run.states["conserved"] == "EXACT"
    assert run.states["gradients"] == "WITHIN" and run.status == 0


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_training_where_a_rank_receives_nothing(runs, dispatcher):
    """Field case 16: rank 1's experts have gradients of zeros, no NaN and no None."""
    run = runs[f"nothing received {dispatcher}"]
    received = run.traffic["rows"][:, FORWARD, DISPATCH].sum(axis=(0, 1))
    assert dispatcher in (*TO_ALL, "padded", "two_hop") or not received[1]
    assert run.states["exact"] == "EXACT" and run.states["gradients"] == "WITHIN"
    for layer in run.record["correctness"]["layers"]:
        assert 0 < layer["gradient_error"] < run.record["correctness"]["gradient_bound"]
    assert run.status == 0
