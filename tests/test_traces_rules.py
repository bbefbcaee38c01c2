"""What a reader does with ids that no router chose, with sizes that differ, and with warm-up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from trace_files import IDS, TOKEN_FORMATS, E, K, jsonl, sglang_per_token, sglang_stat

from moe.traces import RouterTrace, read_trace


def saved(folder: Path, layers: list, name: str = "replay.pt") -> Path:
    """A Megatron list: the plainest way to say ids."""
    torch.save([torch.as_tensor(layer) for layer in layers], folder / name)
    return folder / name


def notes_of(trace: RouterTrace) -> str:
    return "; ".join(trace.notes)


def test_rows_that_no_router_chose_become_missing(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4, 4, 4], [5, 6, 5], [-1, -1, -1], [7, -1, -1]]
    trace = read_trace(saved(tmp_path, [rows]), num_experts=8)
    assert trace.topk_ids[0].tolist() == [[1, 2, 3], [-1] * 3, [-1] * 3, [-1] * 3, [7, -1, -1]]
    assert "1 of 5 rows name one expert in every column" in notes_of(trace)
    assert "1 of 5 rows name an expert twice" in notes_of(trace)
    assert "1 of 5 rows name fewer than K experts" in notes_of(trace)


def test_rows_of_zeros_are_missing_in_vllms_buffer(tmp_path: Path) -> None:
    ids = IDS.swapaxes(0, 1).copy()
    ids[3:5, 1] = 0
    dense = np.zeros((len(ids), 1, K), dtype=ids.dtype)
    np.save(tmp_path / "a.npy", np.concatenate([dense, ids], axis=1))
    trace = read_trace(tmp_path / "a.npy", num_experts=E)
    assert (trace.topk_ids[1, 3:5] == -1).all()
    assert (trace.topk_ids[0] >= 0).all()
    assert trace.layer_numbers == (1, 2, 3)
    assert "42 of 160 rows of zeros were never written" in notes_of(trace)
    assert "1 of 4 layers hold no choice" in notes_of(trace)


def test_one_expert_a_token_is_no_duplicate(tmp_path: Path) -> None:
    trace = read_trace(saved(tmp_path, [[[0], [1], [0]]]), num_experts=2)
    assert trace.topk_ids[0].tolist() == [[0], [1], [0]]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[0, 896]], "id 896 of token row 0 in layer 0 must be 0 .. 895 (896 experts) or -1"),
        ([[0, 1], [-2, 1]], "id -2 of token row 1 in layer 0 must be 0 .. 895"),
    ],
)
def test_ids_outside_are_refused(tmp_path: Path, rows: list, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_trace(saved(tmp_path, [rows]), num_experts=896)
    assert said in str(caught.value)
    assert "take a trace of this model" in str(caught.value)


def test_a_wrapped_minus_one_is_explained(tmp_path: Path) -> None:
    path = saved(tmp_path, [torch.tensor([[0, 255]], dtype=torch.uint8)])
    with pytest.raises(ValueError, match="255 is -1 wrapped in uint8: record ids as int32"):
        read_trace(path, num_experts=64)


def test_a_wrapped_uint8_is_suspected(tmp_path: Path) -> None:
    trace = read_trace(saved(tmp_path, [[[0, 255]]]), num_experts=896)
    assert "no id exceeds 255: ids may have been stored as uint8 and wrapped" in notes_of(trace)
    quiet = read_trace(saved(tmp_path, [[[0, 256]]]), num_experts=896)
    assert "uint8" not in notes_of(quiet)
    small = read_trace(saved(tmp_path, [[[0, 255]]]), num_experts=256)
    assert "uint8" not in notes_of(small)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ids_are_widened_first(tmp_path: Path, dtype: torch.dtype) -> None:
    largest = 255 if dtype == torch.uint8 else 895
    path = saved(tmp_path, [torch.tensor([[0, largest], [254, 1]], dtype=dtype)])
    trace = read_trace(path, num_experts=896)
    assert trace.topk_ids[0].tolist() == [[0, largest], [254, 1]]
    assert trace.topk_ids.dtype == np.int64


def test_k_is_inferred_from_the_columns(tmp_path: Path) -> None:
    """The recorder has 8 columns; the model chose 4."""
    trace = read_trace(sglang_per_token(tmp_path), top_k=4)
    assert trace.top_k == 4
    assert "4 of 8 columns hold experts" in notes_of(trace)
    with pytest.raises(ValueError, match=r"has 4 experts a token, the model top_k=6"):
        read_trace(tmp_path / "ranks", top_k=6)


def test_physical_ids_without_a_map_are_refused(tmp_path: Path) -> None:
    path = sglang_per_token(tmp_path)
    for file in path.iterdir():
        content = torch.load(file)
        del content["last_physical_to_logical_map"]
        torch.save(content, file)
    with pytest.raises(ValueError, match="has no last_physical_to_logical_map, and its ids are ph"):
        read_trace(path)


def test_a_physical_id_beyond_the_map_is_refused(tmp_path: Path) -> None:
    path = sglang_per_token(tmp_path)
    file = next(path.iterdir())
    content = torch.load(file)
    content["records"][0]["topk_ids_of_layer"][0, 0, 0] = 898
    torch.save(content, file)
    with pytest.raises(ValueError, match=r"physical id 898 must be one of the map's 0 \.\. 897"):
        read_trace(path)


def test_the_model_must_fit(tmp_path: Path) -> None:
    path = TOKEN_FORMATS["wideep"][0](tmp_path)
    with pytest.raises(ValueError, match=r"has num_experts=896, the model num_experts=256"):
        read_trace(path, num_experts=256)
    with pytest.raises(ValueError, match=r"has 4 experts a token, the model top_k=8"):
        read_trace(path, top_k=8)
    with pytest.raises(ValueError, match=r"has 3 MoE layers \(0\.\.2\), the model num_layers=58"):
        read_trace(path, num_layers=58)


def test_warm_up_is_found_but_dropped_only_when_asked(tmp_path: Path) -> None:
    warm = np.tile([[3, 1, 2, 0]], (100, 1))
    path = saved(tmp_path, [np.concatenate([warm, layer]) for layer in IDS])
    trace = read_trace(path, num_experts=E)
    assert trace.num_tokens == 100 + IDS.shape[1]
    assert "the first 100 token rows name the same experts" in notes_of(trace)
    assert "skip_rows=100 leaves them out" in notes_of(trace)
    cut = read_trace(path, num_experts=E, skip_rows=100)
    np.testing.assert_array_equal(cut.topk_ids, IDS)
    assert "100 of 140 token rows at the start skipped as asked" in notes_of(cut)
    assert "name the same experts" not in notes_of(cut)
    with pytest.raises(ValueError, match=r"skip_rows=140 must lie in 0 \.\. 139"):
        read_trace(path, skip_rows=140)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="skip_rows="):
            read_trace(path, skip_rows=wrong)  # type: ignore[arg-type]


def test_steps_of_counts_are_skipped_when_asked(tmp_path: Path) -> None:
    path = sglang_stat(tmp_path)
    whole, cut = read_trace(path), read_trace(path, skip_rows=1)
    np.testing.assert_array_equal(cut.step_counts, whole.step_counts[1:])
    with pytest.raises(ValueError, match=r"skip_rows=2 must lie in 0 \.\. 1"):
        read_trace(path, skip_rows=2)


def test_counts_must_sum_to_whole_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"logical_count": torch.tensor([[[4, 4, 4], [5, 5, 1]]])}, path)
    with pytest.raises(ValueError, match=r"layer 1 in step 0 sum to 11, no multiple of top_k=2"):
        read_trace(path, top_k=2)
    rounded = read_trace(path, "sglang_stat_approx", top_k=2)
    assert "no multiple of top_k=2 (1 of 2 sums)" in "; ".join(rounded.notes)
    assert read_trace(path).top_k is None


def test_layers_of_different_length_are_cut_and_told(tmp_path: Path) -> None:
    trace = read_trace(saved(tmp_path, [[[0, 1], [1, 2], [2, 3]], [[3, 2], [1, 0]]]), num_experts=4)
    assert trace.topk_ids.tolist() == [[[0, 1], [1, 2]], [[3, 2], [1, 0]]]
    assert "layers differ in tokens, 2 (layer 1) to 3: the first 2 of each" in notes_of(trace)


def test_tokens_that_lack_a_layer_are_left_out(tmp_path: Path) -> None:
    def route(layer: int, token: int, ids: list[int]) -> dict:
        return {"type": "route", "req_id": "a", "token_idx": token, "layer": layer, "topk_ids": ids}

    rows = [route(0, 0, [1, 2]), route(0, 1, [3, 4]), route(0, 1, [5, 6]), route(2, 1, [7, 8])]
    trace = read_trace(jsonl(tmp_path / "a.jsonl", [{"type": "meta", "top_k": 2}, *rows]))
    # token 1 came twice in layer 0: the first of them belongs to the one line of layer 2
    assert trace.topk_ids.tolist() == [[[3, 4]], [[7, 8]]]
    assert "2 of 3 tokens lack a layer" in notes_of(trace)
    assert "number of experts is not known; the largest id is 8" in notes_of(trace)
    with pytest.raises(ValueError, match="no token has a line in every layer"):
        read_trace(jsonl(tmp_path / "b.jsonl", [rows[0], rows[3]]))


def test_weights_of_missing_choices_are_zero(tmp_path: Path) -> None:
    ids = np.array([[[[0, 1], [2, 2], [-1, 3]]]], dtype=np.int32)
    weights = np.array([[[[0.5, 0.25], [0.5, 0.5], [np.nan, 1]]]], dtype=np.float32)
    np.savez(tmp_path / "routing.npz", topk_ids=ids, topk_weights=weights)
    trace = read_trace(tmp_path / "routing.npz", num_experts=4)
    assert trace.topk_weights is not None
    assert trace.topk_weights[0].tolist() == [[0.5, 0.25], [0, 0], [0, 1]]


def test_a_layer_of_ours_without_choices_stays(tmp_path: Path) -> None:
    """Leaving it out would shift every layer behind it."""
    ids = np.array([[[[0, 1]], [[-1, -1]], [[2, 3]]]], dtype=np.int32)
    np.savez(tmp_path / "routing.npz", topk_ids=ids)
    assert read_trace(tmp_path / "routing.npz", num_experts=4).num_layers == 3


def test_maps_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    path = sglang_per_token(tmp_path)
    file = sorted(path.iterdir())[1]
    content = torch.load(file)
    content["last_physical_to_logical_map"][0, :2] = torch.tensor([1, 1])
    torch.save(content, file)
    with pytest.raises(ValueError, match="has another last_physical_to_logical_map than"):
        read_trace(path)
