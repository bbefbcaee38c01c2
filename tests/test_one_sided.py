"""one_sided, per copy and deduplicated: what arrives, what is counted, what gradients come back."""

import itertools
from dataclasses import replace

import lent_bodies
import numpy as np
import one_sided_bodies as bodies
import pytest
import torch
from gradient_bodies import Case, by_expert, plain
from model_presets import small
from test_gradients import FP32_BOUND, errors_of

from comm.meter import DIRECTIONS, KINDS, Position, TrafficMeter
from comm.spawn import RankFailure, run_ranks
from moe.experts import Experts

TWINS = {"one_sided": "all_to_all", "one_sided_dedup": "rank_dedup"}
LIKE_CASES = [
    (wire, experts, tokens, absent, dtype)
    for wire, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("bf16", torch.float32),
        ("fp16", torch.bfloat16),
        ("fp8_block128", torch.float32),
        ("mxfp8", torch.bfloat16),
    )
    for experts, tokens, absent in (
        (11, (7, 0, 90, 12), 0.3),
        (5, (0, 0, 0, 1), 0.0),  # ranks without experts where there are more than five
        (11, (300, 2), 0.0),
        (9, (5,), 1.0),
        (9, (0,), 0.0),
    )
]


@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("name", TWINS)
def test_equal_to_the_twin_over_gloo_bit_by_bit(name, world_size):
    """Every wire and type, ragged tokens that change from call to call, over one window that grows;
    the twin is held to a slow loop in test_dispatch.py."""
    ranks = run_ranks(bodies.like, world_size, (name, TWINS[name]), LIKE_CASES, deadline_s=120)
    for results, (rows, rows_of_twin) in ranks:
        for case, (mine, theirs) in zip(LIKE_CASES, results, strict=True):
            assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1]), case
            assert mine[0].dtype == theirs[0].dtype and mine[1].dtype == theirs[1].dtype
        assert np.array_equal(rows, rows_of_twin) and (world_size > 2 or rows.any())


@pytest.mark.parametrize("name", TWINS)
def test_groups_smaller_than_the_world(name):
    """Two groups of which neither is a block of ranks; bytes land at global ranks."""
    parts = [[0, 2, 3], [1, 4]]
    ranks = run_ranks(bodies.like, 5, (name, TWINS[name]), LIKE_CASES[:3], parts, deadline_s=60)
    for rank, (results, (rows, rows_of_twin)) in enumerate(ranks):
        assert all(torch.equal(mine[1], theirs[1]) for mine, theirs in results)
        (group,) = (part for part in parts if rank in part)
        others = [other for other in range(5) if other not in group]
        assert np.array_equal(rows, rows_of_twin) and rows.any() and not rows[..., others].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_type_of_rows_that_are_added_up_where_they_lie(dtype):
    """Rounded to 16 bits for rows of 16 bits, and never for others; sums are in fp32."""
    for hidden, weights, output in run_ranks(bodies.weighed, 3, dtype, deadline_s=60):
        total = torch.zeros(len(hidden), 1)
        for k in range(weights.shape[1]):
            total += weights[:, k : k + 1].to(dtype).float()
        wanted = hidden.float() * total
        error = (output.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert error.max() < (1e-6 if dtype == torch.float32 else 2**-8)
        exact = hidden.float() * weights.sum(1, keepdim=True)
        off = ((output.float() - exact).norm() / exact.norm()).item()
        assert (off < 1e-6) == (dtype == torch.float32) and off < 2**-8


COUNT_CASES = [
    (dedup, wires, experts, tokens, absent)
    for dedup, (wires, experts, tokens, absent) in itertools.product(
        (False, True),
        (
            (("fp32", "bf16", "fp32"), 12, (5, 9), 0.0),
            (("mxfp8", "fp8_block128", "fp32"), 14, (1, 0, 16), 0.4),
            (("bf16", "bf16", "bf16"), 5, (3, 0, 0, 0), 0.2),
        ),
    )
]
ROW = {"fp32": (132, 0), "bf16": (66, 0), "mxfp8": (33, 2), "fp8_block128": (33, 4)}  # 33 values


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_bytes_equal_a_third_count(world_size):
    """Of three layers and two steps, cell by cell; what was put is what was taken."""
    ranks = run_ranks(bodies.count_layers, world_size, COUNT_CASES, deadline_s=120)
    for index, (dedup, wires, *_) in enumerate(COUNT_CASES):
        routing = [rank[index][0] for rank in ranks]
        meters = [rank[index][1] for rank in ranks]
        row = (ROW[wires[0]], ROW[wires[1]])
        expected = bodies.count_again(routing, world_size, 4, row, dedup)
        counted = np.stack([meter.sent[:, 0] for meter in meters], axis=3)
        assert np.array_equal(counted, expected), COUNT_CASES[index]
        received = np.stack([meter.received[:, 0] for meter in meters], axis=3)
        assert np.array_equal(received, expected.sum(2))
        rows = np.stack([meter.rows[:, 0] for meter in meters], axis=2)
        in_row = np.array([size[0] for size in row])[None, :, None, None]
        assert np.array_equal(rows * in_row, expected[:, :, KINDS.index("hidden")])
        assert all(meter.collectives == 0 for meter in meters)


def test_all_tokens_to_one_rank():
    received = run_ranks(bodies.all_to_one, 4, deadline_s=60)
    assert received == [(0, True)] * 3 + [(400, True)]


def test_several_dispatches_in_flight():
    assert run_ranks(bodies.in_flight_together, 3, 3, deadline_s=60) == [[True] * 6] * 3


@pytest.mark.parametrize(
    ("what", "numbers"),
    [
        ("layer", ("layer 1", "layer 0")),
        ("wire format", ("format 1", "expects 2")),
        ("row bytes", ("bytes 20", "expects 16")),
        ("phase", ("phase combine", "expects dispatch")),
    ],
)
def test_ranks_that_mean_different_rounds_are_both_named(what, numbers):
    with pytest.raises(RankFailure) as failure:
        run_ranks(bodies.disagree, 2, what, deadline_s=60)
    errors = sorted((report.rank, report.error) for report in failure.value.reports)
    assert all("SplitMismatch" in error and what in error for _, error in errors)
    said = " ".join(error for _, error in errors)
    assert len(errors) == 2 and all(number in said for number in numbers)


GRADIENT_CASES = {
    2: [Case("", (7, 4)), Case("", (0, 5), wires=("mxfp8", "fp8_block128", "fp32"))],
    3: [
        Case("", (3, 0, 8), num_layers=2, chunks=2, wires=("fp8_block128", "bf16", "fp32")),
        Case("", (3, 0, 8), wires=("bf16", "bf16", "mxfp8")),
        Case("", (3, 0, 8), absent=1.0),
        Case("", (3, 0, 8), num_experts=5, replicas=((3, 0, 1), (0, 3), (4, 2))),
        Case("", (3, 2, 8), ep_size=1),
    ],
    8: [
        Case("", (64, 0, 0, 0, 0, 0, 0, 0), num_experts=5),
        Case("", (1, 2, 3, 0, 5, 0, 0, 4), hot=True, placement="contiguous", top_k=2, absent=0.0),
        Case("", (1, 2, 3, 0, 5, 0, 0, 4), ep_size=4, num_layers=2),
    ],
}  # fmt: skip


@pytest.mark.parametrize("world_size", GRADIENT_CASES)
def test_gradients_equal_the_twins_and_plain_autograd(world_size):
    cases = GRADIENT_CASES[world_size]
    names = list(itertools.chain(*TWINS.items()))
    wanted = [replace(case, dispatcher=name) for name in names for case in cases]
    ranks = run_ranks(bodies.train_both, world_size, wanted, preload=bodies.PRELOAD, deadline_s=200)
    found = {
        (case.dispatcher, number % len(cases)): results
        for number, (case, results) in enumerate(zip(wanted, zip(*ranks, strict=True), strict=True))
    }
    for (name, twin), number in itertools.product(TWINS.items(), range(len(cases))):
        mine, theirs = found[name, number], found[twin, number]
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one.x, other.x) and torch.equal(one.output, other.output)
            for layer, same in zip(one.layers, other.layers, strict=True):
                assert all(torch.equal(layer[weight], same[weight]) for weight in same)
            check_backward(one.meter, other.meter)
        if cases[number].wires == ("fp32",) * 3:
            case = replace(cases[number], dispatcher=twin)
            errors = errors_of(case, list(mine), by_expert(case, plain(case)))
            assert max(errors.values()) < FP32_BOUND, (name, case, errors)


def check_backward(mine, twin):
    """Bytes and rows backward are those of the twin, in every cell; received as well."""
    backward = DIRECTIONS.index("backward")
    assert np.array_equal(mine.sent[:, backward], twin.sent[:, backward])
    assert np.array_equal(mine.rows[:, backward], twin.rows[:, backward])
    assert np.array_equal(mine.received[:, backward], twin.received[:, backward])
    assert not mine.sent[:, backward, :, KINDS.index("counts")].any()


def test_what_is_laid_out_is_counted_by_the_tensors():
    meter = TrafficMeter(1, 3)
    parts = [("ids", torch.zeros(2, 4, dtype=torch.uint8)), ("hidden", torch.zeros(2, 10).byte())]
    meter.put(Position(0, "dispatch"), parts, [5, 7], np.array([0, 2]))
    meter.put(Position(0, "dispatch"), [("counts", torch.zeros(1, 8).byte())], [1, 2, 3])
    meter.taken(Position(0, "dispatch"), 14, [2, 9], np.array([1, 2]))
    assert meter.sent[0, 0, 0, KINDS.index("hidden")].tolist() == [50, 0, 70]
    assert meter.sent[0, 0, 0, KINDS.index("ids")].tolist() == [20, 0, 28]
    assert meter.sent[0, 0, 0, KINDS.index("counts")].tolist() == [8, 16, 24]
    assert meter.sent.sum() == 168 + 48 and meter.rows[0, 0, 0].tolist() == [5, 0, 7]
    assert meter.received[0, 0, 0].tolist() == [0, 28, 126] and meter.collectives == 0
    meter.enabled = False
    meter.put(Position(0, "dispatch"), parts, [1, 1, 1])
    meter.taken(Position(0, "dispatch"), 14, [1, 1, 1])
    assert meter.sent.sum() == 168 + 48 and meter.received.sum() == 154


@pytest.mark.parametrize("deduplicate", [False, True])
def test_what_cannot_work_is_refused_when_built(deduplicate):
    messages = run_ranks(bodies.refused_when_built, 1, deduplicate)[0]
    assert "use device=cpu, not cuda" in messages[0]
    assert "needs Linux" in messages[1] and "darwin" in messages[1]


def test_inference_and_training_share_a_window():
    assert run_ranks(bodies.in_every_mode, 2, deadline_s=60) == [[True] * 14] * 2


@pytest.mark.parametrize(("world_size", "num_experts"), [(1, 4), (3, 12), (3, 2)])
def test_rows_are_lent_where_the_answers_will_lie(world_size, num_experts):
    """Given back as they are, changed in place or copied; grown; on a rank without experts too."""
    for right in run_ranks(lent_bodies.lent_memory, world_size, num_experts, deadline_s=60):
        assert len(right) == 24 and all(right.values()), right


@pytest.mark.parametrize(("world_size", "num_experts"), [(1, 4), (3, 12)])
def test_memory_that_is_in_use_again_is_refused(world_size, num_experts):
    for right in run_ranks(lent_bodies.outdated_memory, world_size, num_experts, deadline_s=60):
        assert len(right) == 10 and all(value is True for value in right.values()), right


def test_what_somebody_keeps_or_converts_is_not_lent():
    names = ("no grad", "training", "converted forth", "converted back")
    assert run_ranks(lent_bodies.not_lent, 2, deadline_s=60) == [dict.fromkeys(names, False)] * 2


@pytest.mark.parametrize("chunks", [1, 3])
def test_each_chunk_is_lent_its_own(chunks):
    assert run_ranks(lent_bodies.lent_to_chunks, 3, chunks, deadline_s=60) == [True] * 3


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0, 0]])
def test_experts_write_over_their_rows_in_inference_only(counts):
    experts = Experts(small("kimi_k3"), [0, 1, 2], seed=0, layer=0)
    rows = torch.randn(sum(counts), experts.down.shape[1])
    with torch.no_grad():
        kept, wanted = rows.clone(), experts(rows, torch.tensor(counts))
    assert torch.equal(rows, kept)
    with torch.inference_mode():
        output = experts(rows, torch.tensor(counts))
    assert output.data_ptr() == rows.data_ptr() and torch.equal(output, wanted)


def test_the_option_chooses():
    assert run_ranks(bodies.chosen, 1)[0] == ["OneSided", "OneSidedDedup"]
