"""Routing and placements of real systems, where they lie beside the checkout (not part of it)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe.placement_files import read_placement
from moe.routing.replay import fit_weights, target_chances
from moe.routing.weighted import inclusion
from moe.traces import RouterTrace, read_trace

TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"
ESFT = TRACES / "deepseek_v2_lite_esft"
OMNI = TRACES / "dsv3_placements_omni"
ARCHIVE = ESFT / "expert_scores_all_4x26.tar.xz"

needs_esft = pytest.mark.skipif(not ARCHIVE.is_file(), reason="the ESFT records are not here")
needs_omni = pytest.mark.skipif(not OMNI.is_dir(), reason="the omni placements are not here")

# task: tokens, mean distinct ranks a token and largest received max/mean of 26 layers, R = 8
TASKS = {
    "law": (8327, 4.553, 2.32),
    "intent": (8222, 4.558, 1.73),
    "summary": (8479, 4.563, 1.78),
    "translation": (8251, 4.539, 2.28),
}
FILES = {  # start of the name: ranks, slots a layer, slots a rank
    "A2_900": (8, {256}, {32}),
    "A3_500": (8, {264}, {33}),
    "DSV3_0427": (32, {256, 288}, {8, 9}),
    "DSV3_RedFullLays": (64, {320}, {5}),
    "ep_qwen3": (16, {256}, {16}),
    "placement_pattern_20250724": (16, {272}, {17}),
}


def distinct_ranks(trace: RouterTrace) -> np.ndarray:
    """[L, tokens] ranks that a token goes to, 64 experts on 8 ranks in order."""
    ranks = np.sort(trace.topk_ids // 8, axis=2)
    return 1 + (np.diff(ranks, axis=2) > 0).sum(axis=2)


def received_max_over_mean(trace: RouterTrace) -> float:
    """Assignments that the busiest rank receives over the mean, worst layer."""
    counts = np.stack([np.bincount(ids.ravel() // 8, minlength=8) for ids in trace.topk_ids])
    return float((counts.max(axis=1) / counts.mean(axis=1)).max())


@needs_esft
@pytest.mark.parametrize("task", TASKS)
def test_all_layers_of_the_archive(task: str) -> None:
    tokens, distinct, skew = TASKS[task]
    trace = read_trace(ARCHIVE / task, num_experts=64, top_k=6, num_layers=26)
    assert isinstance(trace, RouterTrace)
    assert trace.topk_ids.shape == (26, tokens, 6)
    assert trace.layer_numbers == tuple(range(1, 27))
    assert not any("missing" in note for note in trace.notes)
    assert distinct_ranks(trace).mean() == pytest.approx(distinct, abs=5e-4)
    assert received_max_over_mean(trace) == pytest.approx(skew, abs=5e-3)
    assert trace.topk_weights is not None
    assert 0.33 <= trace.topk_weights.sum(axis=2).mean() <= 0.40


@needs_esft
@pytest.mark.parametrize("task", ["law", "translation"])
def test_a_folder_holds_three_of_those_layers(task: str) -> None:
    whole, part = read_trace(ARCHIVE / task), read_trace(ESFT / task)
    assert isinstance(whole, RouterTrace) and isinstance(part, RouterTrace)
    assert part.layer_numbers == (1, 13, 26)
    assert part.num_experts == 64  # from summary.json
    np.testing.assert_array_equal(part.topk_ids, whole.topk_ids[[0, 12, 25]])
    mean = distinct_ranks(part).mean()
    assert mean == pytest.approx({"law": 4.585, "translation": 4.399}[task], abs=5e-4)


@needs_esft
def test_weights_that_give_real_counts() -> None:
    trace = read_trace(ESFT / "law")
    assert isinstance(trace, RouterTrace)
    for ids in trace.topk_ids:
        counts = np.bincount(ids.ravel(), minlength=64)
        chances, notes = target_chances(counts, 6)
        assert not notes
        weights = fit_weights(chances, 6)
        assert np.abs(inclusion(weights, 6) - counts / len(ids)).max() < 2e-9


@needs_esft
def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="has num_experts=64, the model num_experts=896"):
        read_trace(ESFT / "law", num_experts=896, top_k=6)
    with pytest.raises(ValueError, match="say which of its folders intent, law, summary, transl"):
        read_trace(ARCHIVE)


@needs_omni
@pytest.mark.parametrize("start", FILES)
def test_every_placement_loads(start: str) -> None:
    ranks, slots, slots_of_rank = FILES[start]
    (path,) = OMNI.glob(f"{start}*.npy.xz")
    layers = read_placement(path, 58, 256, ranks)
    assert len(layers) == 58
    assert {len(table) for table, _ in layers} == slots
    assert {int(n) for _, first in layers for n in np.diff(first)} == slots_of_rank
    for table, first in layers:
        assert first[0] == 0 and first[-1] == len(table)
        assert set(table.tolist()) == set(range(256))


@needs_omni
def test_redundancy_differs_by_layer() -> None:
    (path,) = OMNI.glob("DSV3_0427*")
    sizes = [len(table) for table, _ in read_placement(path, 58, 256, 32)]
    assert (sizes.count(256), sizes.count(288)) == (48, 10)


@needs_omni
def test_the_file_of_another_model_is_refused() -> None:
    """Named for a model of 94 layers and 128 experts."""
    (path,) = OMNI.glob("ep_qwen3_235b*")
    with pytest.raises(ValueError) as caught:
        read_placement(path, 94, 128, 16)
    assert "(16, 58, 256)" in str(caught.value)
    assert "(16, 94, 128)" in str(caught.value)
