"""Every format of a trace is found by its content and read back exactly."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from trace_files import (
    COUNT_FORMATS,
    COUNTS,
    EDGES,
    IDS,
    STEP_COUNTS,
    TOKEN_FORMATS,
    WEIGHTS,
    E,
    K,
    L,
    esft_archive,
    esft_text,
    sglang_stat,
)

from moe.traces import FORMATS, CountTrace, RouterTrace, read_trace
from moe.traces.write import write_logical_count, write_routed_experts, write_routing_npz


@pytest.mark.parametrize("name", TOKEN_FORMATS)
@pytest.mark.parametrize("how", ["auto", "named"])
def test_ids_come_back(name: str, how: str, tmp_path: Path) -> None:
    write, ids, weighted, numbers = TOKEN_FORMATS[name]
    trace = read_trace(
        write(tmp_path), "auto" if how == "auto" else name, num_experts=E, top_k=K, num_layers=L
    )
    assert isinstance(trace, RouterTrace)
    assert trace.topk_ids.dtype == np.int64
    np.testing.assert_array_equal(trace.topk_ids, ids)
    assert set(EDGES) <= set(trace.topk_ids.ravel().tolist())
    assert trace.layer_numbers == numbers
    assert name in trace.notes[0]
    assert (trace.topk_weights is not None) == weighted
    if trace.topk_weights is not None:
        assert trace.topk_weights.dtype == np.float32
        np.testing.assert_array_equal(trace.topk_weights, WEIGHTS)


@pytest.mark.parametrize("name", COUNT_FORMATS)
@pytest.mark.parametrize("how", ["auto", "named"])
def test_counts_come_back(name: str, how: str, tmp_path: Path) -> None:
    write, steps, numbers = COUNT_FORMATS[name]
    trace = read_trace(
        write(tmp_path), "auto" if how == "auto" else name, num_experts=E, top_k=K, num_layers=L
    )
    assert isinstance(trace, CountTrace)
    np.testing.assert_array_equal(trace.counts, COUNTS)
    np.testing.assert_array_equal(trace.step_counts, STEP_COUNTS if steps else COUNTS[None])
    assert trace.layer_numbers == numbers
    assert trace.top_k == K
    assert name in trace.notes[0]


def test_every_format_is_tried_here() -> None:
    assert set(FORMATS) == {*TOKEN_FORMATS, *COUNT_FORMATS, "sglang_stat_approx"}


def test_what_the_layers_and_ids_mean(tmp_path: Path) -> None:
    """MoE or all layers, logical or physical: said for every format."""
    axes, physical = {}, set()
    for name, (write, *_) in {**TOKEN_FORMATS, **COUNT_FORMATS}.items():
        (tmp_path / name).mkdir()
        trace = read_trace(write(tmp_path / name), num_experts=E, top_k=K)
        axes.setdefault(trace.layer_axis, set()).add(name)
        physical |= set() if trace.logical else {name}
    assert physical == {"sglang_per_token", "sglang_per_pass", "vllm_eplb"}
    assert axes["MoE layers only"] == {
        "wideep", "megatron_replay", "megatron_jsonl", "esft", "vllm_eplb",
    }  # fmt: skip
    assert axes["not said"] == {"vllm_jsonl"}


def test_dense_layers_and_unfilled_steps_are_told(tmp_path: Path) -> None:
    notes = " ".join(read_trace(sglang_stat(tmp_path)).notes)
    assert "1 of 3 steps are empty" in notes
    assert "1 of 4 layers have no counts" in notes


def test_a_folder_of_a_run_is_its_routing_file(tmp_path: Path) -> None:
    TOKEN_FORMATS["wideep"][0](tmp_path)
    trace = read_trace(tmp_path)
    assert isinstance(trace, RouterTrace)
    assert trace.num_experts == E
    assert trace.num_steps == 2


def test_a_task_of_an_archive(tmp_path: Path) -> None:
    path = esft_archive(tmp_path)
    trace = read_trace(path, top_k=K)
    np.testing.assert_array_equal(trace.topk_ids, IDS)
    with pytest.raises(ValueError, match="say which of its folders intent, law"):
        read_trace(path.parent)
    with pytest.raises(ValueError, match="'low' is none of its folders intent, law"):
        read_trace(path.parent / "low")


def test_files_of_a_folder_are_ordered_by_number(tmp_path: Path) -> None:
    """rank 10 comes after rank 2."""
    for rank in (10, 2):
        torch.save([torch.tensor([[rank, 20]])], tmp_path / f"replay_{rank}.pt")
    assert read_trace(tmp_path).topk_ids[0, :, 0].tolist() == [2, 10]


@pytest.mark.parametrize("name", ["wideep", "vllm_jsonl", "esft"])
def test_written_again_it_reads_the_same(name: str, tmp_path: Path) -> None:
    trace = read_trace(TOKEN_FORMATS[name][0](tmp_path), num_experts=E, top_k=K)
    write_routing_npz(tmp_path / "again.npz", trace)
    again = read_trace(tmp_path / "again.npz")
    np.testing.assert_array_equal(again.topk_ids, trace.topk_ids)
    np.testing.assert_array_equal(again.topk_weights, trace.topk_weights)
    assert again.layer_numbers == trace.layer_numbers
    assert again.num_steps == trace.num_steps
    with pytest.raises(ValueError, match="exists already"):
        write_routing_npz(tmp_path / "again.npz", trace)


def test_exports_for_other_stacks(tmp_path: Path) -> None:
    trace = read_trace(TOKEN_FORMATS["wideep"][0](tmp_path))
    write_routed_experts(tmp_path / "e.npy", trace)
    np.testing.assert_array_equal(read_trace(tmp_path / "e.npy", num_experts=E).topk_ids, IDS)
    counts = read_trace(COUNT_FORMATS["sglang_stat"][0](tmp_path))
    write_logical_count(tmp_path / "c.json", counts)
    np.testing.assert_array_equal(read_trace(tmp_path / "c.json").counts, COUNTS)


def test_reading_warns_of_nothing(tmp_path: Path) -> None:
    """What is odd goes into notes; Python's warnings are errors in a test anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_trace(TOKEN_FORMATS["megatron_replay"][0](tmp_path))


def test_k_of_esft_is_found_by_what_repeats(tmp_path: Path) -> None:
    """Every line has an even number of tokens, so 2 K divides them too; but two tokens share."""
    rng = np.random.default_rng(2)
    ids = np.stack([rng.choice(12, 6, replace=False) for _ in range(20)])
    text = esft_text(ids, np.ones(ids.shape), [8, 12])
    (tmp_path / "expert_weights_1.txt").write_text(text)
    trace = read_trace(tmp_path)
    assert isinstance(trace, RouterTrace)
    assert trace.topk_ids[0].tolist() == ids.tolist()
