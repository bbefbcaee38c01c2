"""Whatever is wrong with a file, the answer is one line that names the file, never a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from trace_files import (
    COUNT_FORMATS,
    TOKEN_FORMATS,
    E,
    K,
    esft,
    jsonl,
    megatron_jsonl,
    sglang_csv,
    sglang_per_pass,
    tensorrt_llm,
    tensorrt_llm_raw,
    vllm_eplb,
    wideep,
)

from moe.traces import TraceError, read_trace

WRITERS = {name: entry[0] for name, entry in {**TOKEN_FORMATS, **COUNT_FORMATS}.items()}


def refusal(path: Path, *args: object, **expected: object) -> str:
    with pytest.raises(ValueError) as caught:
        read_trace(path, *args, **expected)  # type: ignore[arg-type]
    assert isinstance(caught.value, TraceError)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 2500
    return text


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.97])
def test_cut_off_files(name: str, share: float, tmp_path: Path) -> None:
    """A file that lost its end is refused, or (text, at a line's end) is a shorter trace."""
    path = WRITERS[name](tmp_path)
    for file in files_of(path):
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])
    text = refusal(path, num_experts=E, top_k=K)
    assert str(path) in text


@pytest.mark.parametrize("name", WRITERS)
def test_overwritten_bytes_raise_nothing_but_one_line(name: str, tmp_path: Path) -> None:
    """Random bytes in the middle: refused or read, but nothing else is raised."""
    path = WRITERS[name](tmp_path)
    rng = np.random.default_rng(3)
    originals = [(file, file.read_bytes()) for file in files_of(path)]
    refused = 0
    for _ in range(25):
        for file, data in originals:
            spoiled = bytearray(data)
            for place in rng.integers(0, len(data), 3):
                spoiled[place] = rng.integers(256)
            file.write_bytes(spoiled)
        try:
            read_trace(path, num_experts=E, top_k=K)
        except TraceError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 0


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01\x02", b"{", b"[", b"[]", b"{}", b"null", b"\n"]
)
@pytest.mark.parametrize("suffix", [".npz", ".npy", ".pt", ".json", ".csv", ".jsonl"])
def test_files_that_hold_nothing(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    assert str(path) in refusal(path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no such file or folder" in refusal(tmp_path / "none.npz")
    (tmp_path / "empty").mkdir()
    assert "is a folder without a trace (it holds nothing)" in refusal(tmp_path / "empty")


def test_what_is_no_trace_lists_the_formats(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": 1}')
    text = refusal(tmp_path / "a.json")
    assert all(f"{name}: " in text for name in WRITERS)


def test_format_names(tmp_path: Path) -> None:
    path = wideep(tmp_path)
    assert "did you mean 'wideep'" in refusal(path, "wide_ep")
    text = refusal(path, "sglang_stat")
    assert "is of kind npz, format=sglang_stat reads torch" in text
    assert "wideep" in text


def test_code_in_a_torch_file_is_not_run(tmp_path: Path) -> None:
    torch.save([{"a": Path("x")}], tmp_path / "a.pt")
    assert "cannot be read as a torch file of tensors and plain values" in refusal(
        tmp_path / "a.pt"
    )


def test_pickles_in_numpy_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, None]], dtype=object), allow_pickle=True)
    assert "cannot be read as" in refusal(tmp_path / "a.npy")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.bool_, np.complex64])
def test_ids_must_be_integers(dtype: type, tmp_path: Path) -> None:
    np.savez(tmp_path / "routing.npz", topk_ids=np.zeros((1, 1, 2, 2), dtype=dtype))
    text = refusal(tmp_path / "routing.npz")
    assert "they must be integers; store them as int32" in text
    assert np.dtype(dtype).name in text


def test_ids_as_floats_in_text(tmp_path: Path) -> None:
    row = {"type": "route", "req_id": 1, "token_idx": 0, "layer": 0, "topk_ids": [1.0, 2.5]}
    assert "float64, they must be integers" in refusal(jsonl(tmp_path / "a.jsonl", [row]))
    (tmp_path / "esft").mkdir()
    (tmp_path / "esft" / "expert_weights_1.txt").write_text("1.5\t2\t\t0.5\t0.5\n")
    assert "line 1 of expert_weights_1.txt" in refusal(tmp_path / "esft")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_must_be_finite(value: float, tmp_path: Path) -> None:
    weights = np.full((1, 1, 2, 2), 0.5, dtype=np.float32)
    weights[0, 0, 1, 0] = value
    ids = np.array([[[[0, 1], [1, 0]]]])
    np.savez(tmp_path / "routing.npz", topk_ids=ids, topk_weights=weights)
    assert f"topk_weights[1, 0] = {value}, weights must be finite" in refusal(
        tmp_path / "routing.npz"
    )


def spoiled_shapes() -> dict[str, Callable[[Path], tuple[Path, str]]]:
    """A file of a known format in which one thing is wrong, and what must be said."""

    def ours(folder: Path, **arrays: np.ndarray) -> Path:
        np.savez(folder / "routing.npz", **arrays)
        return folder / "routing.npz"

    ids = np.array([[[[0, 1], [1, 0]]]])

    def counts(folder: Path, value: object) -> Path:
        (folder / "a.json").write_text(json.dumps({"logical_count": value}))
        return folder / "a.json"

    def jsonl_of(folder: Path, **change: object) -> Path:
        row = {
            "step": 0,
            "layer": 0,
            "rank": 0,
            "num_tokens": 1,
            "topk": 2,
            "top_indices": [[0, 1]],
        }
        return jsonl(folder / "a.jsonl", [row, row | change])

    return {
        "rank 3 ids": lambda f: (ours(f, topk_ids=ids[0]), "must be [steps, layers, tokens, K]"),
        "no ids": lambda f: (ours(f, topk_ids=ids[:, :, :0]), "hold no choice"),
        "weights of another shape": lambda f: (
            ours(f, topk_ids=ids, topk_weights=np.zeros((1, 1, 2, 3))), "they must be equal",
        ),
        "broken header": lambda f: (ours(f, topk_ids=ids, header=np.asarray("{")), "JSON"),
        "header experts": lambda f: (
            ours(f, topk_ids=ids, header=np.asarray('{"num_experts": "x"}')), "num_experts='x'",
        ),
        "ragged counts": lambda f: (counts(f, [[1, 2], [3]]), "rows differ in length"),
        "negative counts": lambda f: (counts(f, [[1, -2]]), "count -2 must be at least 0"),
        "counts as floats": lambda f: (counts(f, [[1.5, 2]]), "they must be integers"),
        "no counts": lambda f: (counts(f, [[0, 0]]), "every count is 0"),
        "counts of one layer": lambda f: (counts(f, [1, 2]), "they must be [layers, experts]"),
        "wrong num_tokens": lambda f: (jsonl_of(f, num_tokens=3), "num_tokens=3, but top_indices"),
        "wrong topk": lambda f: (jsonl_of(f, topk=3), "topk=3, but top_indices"),
        "a lacking step": lambda f: (jsonl_of(f, layer=1, step=1), "differ in the steps"),
        "layer as text": lambda f: (jsonl_of(f, layer="1"), "layer='1' must be a whole number"),
        "ragged indices": lambda f: (jsonl_of(f, top_indices=[[0], [1, 2]]), "differ in length"),
    }  # fmt: skip


@pytest.mark.parametrize("what", spoiled_shapes())
def test_one_thing_wrong(what: str, tmp_path: Path) -> None:
    path, said = spoiled_shapes()[what](tmp_path)
    assert said in refusal(path)


def test_csv_lines(tmp_path: Path) -> None:
    path = sglang_csv(tmp_path)
    file = path / "counts_1.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], "1,x,3"]))
    assert "counts_1.csv: line 4 is '1,x,3'" in refusal(path)
    file.write_text("layer_id,expert_id,count\n1,-4,3\n")
    assert "expert_id=-4 must be at least 0" in refusal(path)
    file.write_text("layer_id,expert_id,count\n1,900,3\n")
    assert "expert_id=900 must lie in 0 .. 895" in refusal(path, num_experts=896)


def test_esft_halves_and_sequences(tmp_path: Path) -> None:
    esft(tmp_path)
    file = tmp_path / "expert_weights_2.txt"
    good = file.read_text()
    file.write_text(good.replace("\t\t", "\t", 1))
    assert "line 1 of expert_weights_2.txt must be ids, an empty field" in refusal(tmp_path)
    file.write_text(good.split("\n", 1)[1])
    assert "the same sequence in every layer" in refusal(tmp_path)
    file.write_text(good.replace("\t\t", "\t3\t\t", 1))
    assert "ids and" in refusal(tmp_path)


def test_eplb_window_of_one_rank(tmp_path: Path) -> None:
    path = vllm_eplb(tmp_path)
    with np.load(path) as saved:
        window, table = saved["expert_load_window"], saved["physical_to_logical_map"]
    np.savez(path, expert_load_window=window[..., :449], physical_to_logical_map=table)
    assert "it holds 449 of 898 slots: put the windows of all ranks" in refusal(path)
    both = np.stack([window[..., :449], window[..., 449:]])
    np.savez(path, expert_load_window=both, physical_to_logical_map=table)
    assert read_trace(path).num_experts == E


def test_tensorrt_llm_folders(tmp_path: Path) -> None:
    path = tensorrt_llm(tmp_path)
    meta = path / "meta_info.json"
    meta.write_text('{"num_experts": 128, "num_experts_per_token": 4}')
    assert "has shape [896], meta_info says num_experts=128" in refusal(path)
    meta.write_text('{"num_experts": 896}')
    assert "num_experts_per_token=None must be at least 1" in refusal(path)
    meta.write_text('{"num_experts": 896, "num_experts_per_token": 4}')
    for file in path.glob("rank*"):
        file.unlink()
    assert "has meta_info.json but no rank" in refusal(path)


def test_tensorrt_llm_ids_of_another_k(tmp_path: Path) -> None:
    path = tensorrt_llm_raw(tmp_path)
    (path / "meta_info.json").write_text('{"num_experts": 896, "num_experts_per_token": 8}')
    assert "ids have 4 columns, meta_info says num_experts_per_token=8" in refusal(path)


def test_a_missing_package_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tensorrt_llm(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'wideep[traces]'" in refusal(path)


def test_passes_of_different_shape(tmp_path: Path) -> None:
    path = sglang_per_pass(tmp_path)
    file = next(path.iterdir())
    content = torch.load(file)
    record = content["records"][0]
    record["global_physical_count"] = record["global_physical_count"][:, :-1]
    torch.save(content, file)
    assert "differ in" in refusal(path)


def test_lines_that_are_cut_say_which(tmp_path: Path) -> None:
    path = megatron_jsonl(tmp_path)
    file = sorted(path.glob("*.jsonl"))[0]
    file.write_text(file.read_text()[:-10])
    assert "line 6 is no JSON" in refusal(path)


def test_zeros_and_ones_are_a_placement(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.eye(6, dtype=np.int32)[None].repeat(2, axis=0))
    assert "give it as placement.path" in refusal(tmp_path / "a.npy")


def test_layers_of_different_k_are_no_trace_of_one_model(tmp_path: Path) -> None:
    """They would be cut to one K, or pass for choices that were lost."""
    torch.save([torch.arange(20).view(5, 4), torch.arange(10).view(5, 2)], tmp_path / "a.pt")
    said = "layer 0 has K = 4 experts a token, layer 1 K = 2; all layers of a run share one K"
    assert said in refusal(tmp_path / "a.pt")
    lines = [
        {"step": 0, "rank": 0, "layer": 3, "top_indices": [[0, 1]]},
        {"step": 0, "rank": 0, "layer": 4, "top_indices": [[0, 1, 2]]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "layer 3 has K = 2 experts a token, layer 4 K = 3" in refusal(tmp_path / "a.jsonl")


@pytest.mark.parametrize("largest", [2**62, 2**63 - 1])
def test_counts_whose_sum_would_wrap_are_refused(largest: int, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"logical_count": [[largest, largest, 4, 4]]}))
    assert f"counts as large as {largest} must sum to {2**53} at most" in refusal(path)
    path.write_text(json.dumps({"logical_count": [[2**50, 2**50, 4, 4]]}))
    assert read_trace(path, top_k=4).counts.max() == 2**50


def test_what_is_no_trace_says_what_it_holds_and_the_likely_formats(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"expert_counts": [1], "model": "x"}')
    text = refusal(tmp_path / "a.json")
    assert "holds no known trace (it holds expert_counts, model)" in text
    assert "those of its kind first: sglang_stat_json: " in text
    torch.save([1, 2, 3], tmp_path / "a.pt")  # a list, but none of router replay
    assert "holds no known trace (it holds a list of 3)" in refusal(tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.zeros((2, 2), np.int32))
    assert "(it holds an array of int32, [2, 2])" in refusal(tmp_path / "a.npy")
