"""Placements of other stacks: read slot by slot, refused where they do not fit."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from moe.placement_files import read_placement

E, R = 6, 3
# two layers, 8 and 9 slots; rank 1 of layer 1 holds an expert more
HELD = ((([0, 1, 5], [2, 3], [4, 5, 0])), (([0, 1], [2, 3, 4, 1], [5, 0, 2])))
EVEN = np.array([[0, 1, 2, 3, 4, 5, 0, 2, 4], [5, 4, 3, 2, 1, 0, 5, 3, 1]])  # 3 slots a rank


def zeros_and_ones() -> np.ndarray:
    array = np.zeros((R, 2, E), dtype=np.int32)
    for layer, ranks in enumerate(HELD):
        for rank, experts in enumerate(ranks):
            array[rank, layer, experts] = 1
    return array


def write_array(path: Path) -> Path:
    if path.suffix == ".xz":
        with lzma.open(path, "wb") as file:
            np.save(file, zeros_and_ones())
    elif path.suffix == ".npz":
        np.savez(path, zeros_and_ones())
    else:
        np.save(path, zeros_and_ones())
    return path


@pytest.mark.parametrize("name", ["a.npy", "a.npy.xz", "a.npz"])
def test_zeros_and_ones(name: str, tmp_path: Path) -> None:
    layers = read_placement(write_array(tmp_path / name), 2, E, R)
    for (slots, first), ranks in zip(layers, HELD, strict=True):
        assert slots.dtype == first.dtype == np.int64
        assert slots.tolist() == [e for experts in ranks for e in sorted(experts)]
        assert first.tolist() == np.cumsum([0, *map(len, ranks)]).tolist()


def write_map(path: Path, table: np.ndarray, **more: np.ndarray) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps({"physical_to_logical_map": table.tolist()}))
    elif path.suffix == ".pt":
        torch.save({"physical_to_logical_map": torch.from_numpy(table)}, path)
    elif path.suffix == ".npz":
        np.savez(path, physical_to_logical_map=table, **more)
    else:
        layers = {layer + 3: row.tolist() for layer, row in enumerate(table)}
        content = {"num_slots": table.shape[1], "initial_global_assignments": layers}
        path.write_text(yaml.safe_dump(content | {"layer_updates_per_iter": 0}))
    return path


@pytest.mark.parametrize("name", ["a.json", "a.pt", "a.npz", "a.yaml", "a.yml"])
def test_slot_maps(name: str, tmp_path: Path) -> None:
    layers = read_placement(write_map(tmp_path / name, EVEN), 2, E, R)
    np.testing.assert_array_equal(np.stack([slots for slots, _ in layers]), EVEN)
    assert all(first.tolist() == [0, 3, 6, 9] for _, first in layers)


def test_yaml_layers_are_ordered_by_number(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    layers = {10: EVEN[1].tolist(), 9: EVEN[0].tolist()}
    path.write_text(yaml.safe_dump({"num_slots": 9, "initial_global_assignments": layers}))
    np.testing.assert_array_equal(np.stack([s for s, _ in read_placement(path, 2, E, R)]), EVEN)


def test_dense_layers_at_the_start_are_left_out(tmp_path: Path) -> None:
    table = np.concatenate([EVEN[:1] * 0, EVEN])
    path = write_map(tmp_path / "a.json", table)
    layers = read_placement(path, 2, E, R, num_dense_layers=1)
    np.testing.assert_array_equal(np.stack([slots for slots, _ in layers]), EVEN)
    assert "has shape [3, 9], the model 2 MoE layers of 6 experts" in refusal(path)


def test_a_recorded_run_gives_its_placement(tmp_path: Path) -> None:
    """Our routing.npz: layers of 8 and 9 slots, padded with -1."""
    table, ranks = np.full((2, 9), -1), np.full((2, 9), -1)
    for layer, held in enumerate(HELD):
        flat = [(rank, e) for rank, experts in enumerate(held) for e in experts]
        ranks[layer, : len(flat)], table[layer, : len(flat)] = zip(*flat, strict=True)
    path = tmp_path / "routing.npz"
    np.savez(path, physical_to_logical_map=table, slot_rank=ranks, topk_ids=np.zeros(1))
    layers = read_placement(path, 2, E, R)
    for (slots, first), held in zip(layers, HELD, strict=True):
        assert slots.tolist() == [e for experts in held for e in experts]
        assert first.tolist() == np.cumsum([0, *map(len, held)]).tolist()
    for others in (2, R + 1):  # with more ranks, some would hold nothing
        said = f"on {R} ranks that dispatch to each other, this run has {others}; run on {R},"
        assert said in refusal(path, ranks=others)
    header = json.dumps({"ranks": 12, "ep_size": 12, "expert_tp": 12 // R})  # as a run says it
    np.savez(path, physical_to_logical_map=table, slot_rank=ranks, header=header)
    read_placement(path, 2, E, R)
    header = json.dumps({"ranks": 5, "ep_size": 5, "expert_tp": 1})  # the last ranks hold nothing
    np.savez(path, physical_to_logical_map=table, slot_rank=ranks, header=header)
    assert f"on 5 ranks that dispatch to each other, this run has {R};" in refusal(path)
    np.savez(path, physical_to_logical_map=table, slot_rank=ranks[:, ::-1])
    assert f"must ascend within 0 .. {R - 1} ({R} ranks)" in refusal(path)
    np.savez(path, physical_to_logical_map=table, slot_rank=ranks[:, :-1])
    assert "they must be equal" in refusal(path)


def refusal(path: Path, layers: int = 2, experts: int = E, ranks: int = R) -> str:
    with pytest.raises(ValueError) as caught:
        read_placement(path, layers, experts, ranks)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(94, 128, 16), (2, E, 2), (3, E, R), (2, 7, R)])
def test_an_array_of_another_shape_names_both(shape: tuple[int, int, int], tmp_path: Path) -> None:
    text = refusal(write_array(tmp_path / "a.npy"), *shape)
    assert f"{(R, 2, E)} (ranks, layers, experts)" in text
    assert str((shape[2], shape[0], shape[1])) in text


def test_values_other_than_0_and_1(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", zeros_and_ones() * 2)
    assert "the array holds 2, it must hold 0 and 1 only" in refusal(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", zeros_and_ones().astype(np.float32))
    assert "must be an array of integers" in refusal(tmp_path / "a.npy")


def test_an_expert_that_is_nowhere(tmp_path: Path) -> None:
    array = zeros_and_ones()
    array[:, 1, 4] = 0
    np.save(tmp_path / "a.npy", array)
    assert "layer 1: expert 4 is nowhere (1 of 6 missing)" in refusal(tmp_path / "a.npy")


def test_an_expert_twice_on_a_rank(tmp_path: Path) -> None:
    table = EVEN.copy()
    table[1, 3:6] = (2, 2, 0)
    table[1, 6] = 1
    text = refusal(write_map(tmp_path / "a.json", table))
    assert "layer 1: rank 1 holds expert 2 2 times" in text


@pytest.mark.parametrize("wrong", [-1, E])
def test_experts_outside(wrong: int, tmp_path: Path) -> None:
    table = EVEN.copy()
    table[0, 7] = wrong
    assert f"expert {wrong} must lie in 0 .. 5" in refusal(write_map(tmp_path / "a.pt", table))


def test_slots_that_ranks_cannot_share(tmp_path: Path) -> None:
    text = refusal(write_map(tmp_path / "a.json", EVEN), ranks=4)
    assert "9 slots cannot be shared evenly by 4 ranks; nearest: 8 or 12 slots" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "cannot be read as YAML"),
        ("num_slots: 9", "must have num_slots and initial_global_assignments"),
        ("num_slots: 9\ninitial_global_assignments: 3", "must have num_slots"),
        ("num_slots: 9\ninitial_global_assignments: {3: [0, 1]}", "layer 3 has 2 slots, num_slots"),
        ("num_slots: 2\ninitial_global_assignments: {x: [0, 1]}", "by layer number"),
        ("num_slots: 2\ninitial_global_assignments: {3: [0, x]}", "array of integers"),
        ("num_slots: 2\ninitial_global_assignments: {3: [0, 1]}", "has 1 layers of 2 slots"),
        ("!!python/object/apply:os.getcwd []", "cannot be read as YAML"),
    ],
)
def test_yaml_that_is_wrong(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(content)
    assert said in refusal(tmp_path / "a.yaml")


def test_files_that_hold_no_placement(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert "holds no placement; give a 0/1 array" in refusal(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"physical_to_logical_map": [[1, 2], [3]]}')
    assert "rows of equal length" in refusal(tmp_path / "b.json")
    assert "no such file" in refusal(tmp_path / "none.yaml").lower()
    assert "no such file" in refusal(tmp_path / "none.npy")
    data = write_array(tmp_path / "a.npy.xz").read_bytes()
    (tmp_path / "a.npy.xz").write_bytes(data[:60])
    refusal(tmp_path / "a.npy.xz")
