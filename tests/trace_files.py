"""Writes small files of every trace format from one truth, for the tests of the readers."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

E, K, L, T, STEPS = 896, 4, 3, 20, 2
EDGES = (255, 256, 257, 301, 895)  # what a uint8 would lose


def truth(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """topk_ids int64 [L, STEPS * T, K], distinct in a row, EDGES among them; weights float32."""
    rng = np.random.default_rng(seed)
    ids = np.stack(
        [rng.choice(np.arange(1, E), K, replace=False) for _ in range(L * STEPS * T)]
    ).reshape(L, STEPS * T, K)
    for column, edge in enumerate(EDGES):
        ids[:, column + 1] = (edge, 7, 8, 9 + column)
    return ids, rng.random(ids.shape, dtype=np.float32)


IDS, WEIGHTS = truth()
COUNTS = np.stack([np.bincount(layer.ravel(), minlength=E) for layer in IDS])
# per step [STEPS, L, E]
STEP_COUNTS = np.stack(
    [
        [np.bincount(layer[s * T : (s + 1) * T].ravel(), minlength=E) for layer in IDS]
        for s in range(STEPS)
    ]
)
# another order of the slots in every layer, and two replicas: [L, E + 2]
SLOTS = np.stack(
    [np.append(np.random.default_rng(layer).permutation(E), [5, 895]) for layer in range(L)]
)


def physical(ids: np.ndarray) -> np.ndarray:
    """Each id [L, n, K] as the last slot that holds it."""
    slot_of = np.zeros((L, E), dtype=np.int64)
    for layer in range(L):
        slot_of[layer, SLOTS[layer]] = np.arange(E + 2)
    return slot_of[np.arange(L)[:, None, None], ids]


def physical_counts() -> np.ndarray:
    """[STEPS, L, slots]"""
    slots = physical(IDS)
    return np.stack(
        [
            [np.bincount(layer[s * T : (s + 1) * T].ravel(), minlength=E + 2) for layer in slots]
            for s in range(STEPS)
        ]
    )


def wideep(folder: Path) -> Path:
    by_step = np.stack([IDS[:, s * T : (s + 1) * T] for s in range(STEPS)])
    weights = np.stack([WEIGHTS[:, s * T : (s + 1) * T] for s in range(STEPS)])
    header = json.dumps({"model": "m", "num_experts": E, "top_k": K, "ranks": 2, "source": "test"})
    np.savez_compressed(
        folder / "routing.npz",
        topk_ids=by_step.astype(np.int32),
        topk_weights=weights,
        header=np.asarray(header),
    )
    return folder / "routing.npz"


def sglang_stat(folder: Path) -> Path:
    """A dense layer in front, and a third step that was never filled."""
    counts = np.zeros((STEPS + 1, L + 1, E), dtype=np.int32)
    counts[:STEPS, 1:] = STEP_COUNTS
    path = folder / "expert_distribution_recorder_17.5.pt"
    content = {"rank": 0, "logical_count": torch.from_numpy(counts)}
    torch.save(content | {"average_utilization_rate_over_window": None}, path)
    return path


def sglang_stat_json(folder: Path) -> Path:
    path = folder / "count.json"
    path.write_text(json.dumps({"logical_count": COUNTS.tolist()}))
    return path


def _records(folder: Path, with_ids: bool) -> Path:
    """Two rank files; rank 0 has the even tokens of each step, rank 1 the odd ones."""
    folder = folder / "ranks"
    folder.mkdir()
    for rank in range(2):
        records = []
        for step in range(STEPS):
            own = physical(IDS)[:, step * T : (step + 1) * T][:, rank::2]
            count = np.stack([np.bincount(o.ravel(), minlength=E + 2) for o in own])
            record = {"forward_pass_id": 10 + step, "rank": rank, "gatherer_key": "primary"}
            record["global_physical_count"] = torch.from_numpy(count.astype(np.int32))
            if with_ids:
                wide = np.pad(own, ((0, 0), (0, 0), (0, 8 - K)), constant_values=-1)
                record["topk_ids_of_layer"] = torch.from_numpy(wide.astype(np.int32))
                record["input_ids"] = [1] * own.shape[1]
            records.append(record)
        content = {"records": records, "last_physical_to_logical_map": torch.from_numpy(SLOTS)}
        torch.save(content, folder / f"expert_distribution_recorder_17.5_{rank}.pt")
    return folder


def sglang_per_token(folder: Path) -> Path:
    return _records(folder, with_ids=True)


def sglang_per_pass(folder: Path) -> Path:
    return _records(folder, with_ids=False)


def even_then_odd(array: np.ndarray) -> np.ndarray:
    """[L, STEPS * T, K] in the order of two ranks' files: each step's even tokens, then its odd."""
    order = [s * T + t for s in range(STEPS) for rank in range(2) for t in range(rank, T, 2)]
    return array[:, order]


def sglang_csv(folder: Path) -> Path:
    """Two ranks that counted half each."""
    for rank in range(2):
        lines = ["layer_id,expert_id,count"]
        for layer, expert in np.argwhere(COUNTS):
            count = COUNTS[layer, expert]
            half = count // 2 if rank else count - count // 2
            lines += [f"{layer + 1},{expert},{half}"] if half else []
        (folder / f"counts_{rank}.csv").write_text("\n".join(lines) + "\n")
    return folder


def vllm_routed_experts(folder: Path) -> Path:
    np.save(folder / "experts.npy", IDS.swapaxes(0, 1).astype(np.int16))
    return folder / "experts.npy"


def vllm_routed_experts_npz(folder: Path) -> Path:
    np.savez(folder / "experts.npz", routed_experts=IDS.swapaxes(0, 1).astype(np.uint16))
    return folder / "experts.npz"


def vllm_eplb(folder: Path) -> Path:
    path = folder / "state.npz"
    np.savez(path, expert_load_window=physical_counts(), physical_to_logical_map=SLOTS)
    return path


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def vllm_jsonl(folder: Path) -> Path:
    rows: list[dict] = [{"type": "meta", "model": "m", "top_k": K, "layers_logged": [3, 5, 9]}]
    for token in range(STEPS * T):
        for layer, number in enumerate((3, 5, 9)):
            rows.append(
                {
                    "type": "route",
                    "req_id": f"r{token // 8}",
                    "token_idx": token % 8,
                    "layer": number,
                    "topk_ids": IDS[layer, token].tolist(),
                    "topk_weights": [float(w) for w in WEIGHTS[layer, token]],
                }
            )
    return jsonl(folder / "log.jsonl", rows)


def _tensorrt(folder: Path, raw: bool) -> Path:
    folder = folder / "statistic"
    folder.mkdir()
    meta = {"num_experts": E, "num_experts_per_token": K}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    for rank in range(2):
        counts, ids = {}, {}
        for step in range(STEPS):
            for layer in range(L):
                own = IDS[layer, step * T : (step + 1) * T][rank::2].astype(np.int32)
                counts[f"{100 + step}_{layer + 3}"] = np.bincount(own.ravel(), minlength=E)
                ids[f"{100 + step}_{layer + 3}"] = np.ascontiguousarray(own)
        save_file(counts, folder / f"rank{rank}.safetensors")
        if raw:
            save_file(ids, folder / f"rank{rank}_raw.safetensors")
    return folder


def tensorrt_llm(folder: Path) -> Path:
    return _tensorrt(folder, raw=False)


def tensorrt_llm_raw(folder: Path) -> Path:
    return _tensorrt(folder, raw=True)


def megatron_replay(folder: Path) -> Path:
    torch.save([torch.from_numpy(layer) for layer in IDS], folder / "replay.pt")
    return folder / "replay.pt"


def megatron_jsonl(folder: Path) -> Path:
    for rank in range(2):
        rows = []
        for step in range(STEPS):
            for layer in range(L):
                own = IDS[layer, step * T : (step + 1) * T][rank::2].tolist()
                row = {"step": step, "layer": layer + 1, "rank": rank, "num_tokens": len(own)}
                rows.append(row | {"topk": K, "top_indices": own})
        jsonl(folder / f"trace_{rank}.jsonl", rows)
    return folder


def esft_text(ids: np.ndarray, weights: np.ndarray, lengths: list[int]) -> str:
    """Lines of `lengths` tokens each, for one layer [tokens, K]."""
    lines, first = [], 0
    for length in lengths:
        rows = slice(first, first + length)
        halves = (ids[rows].ravel(), weights[rows].ravel())
        lines.append("\t\t".join("\t".join(str(v) for v in half) for half in halves))
        first += length
    return "\n".join(lines) + "\n"


def esft(folder: Path) -> Path:
    for layer, number in enumerate((1, 2, 10)):
        text = esft_text(IDS[layer], WEIGHTS[layer], [7, 13, 20])
        (folder / f"expert_weights_{number}.txt").write_text(text)
    return folder


def esft_archive(folder: Path) -> Path:
    """An archive of two tasks, of which "law" is the truth."""
    path = folder / "scores.tar.xz"
    with tarfile.open(path, "w:xz") as bundle:
        for task in ("law", "intent"):
            for layer, number in enumerate((1, 2, 10)):
                ids = IDS[layer] if task == "law" else IDS[layer][::-1]
                data = esft_text(ids, WEIGHTS[layer], [7, 13, 20]).encode()
                entry = tarfile.TarInfo(f"esft/{task}/expert_weights_{number}.txt")
                entry.size = len(data)
                bundle.addfile(entry, io.BytesIO(data))
    return path / "law"


Writer = Callable[[Path], Path]
# format: (writer, ids expected in this order, weights kept, layer numbers)
TOKEN_FORMATS: dict[str, tuple[Writer, np.ndarray, bool, tuple[int, ...]]] = {
    "wideep": (wideep, IDS, True, (0, 1, 2)),
    "sglang_per_token": (sglang_per_token, even_then_odd(IDS), False, (0, 1, 2)),
    "vllm_routed_experts": (vllm_routed_experts, IDS, False, (0, 1, 2)),
    "vllm_routed_experts_npz": (vllm_routed_experts_npz, IDS, False, (0, 1, 2)),
    "vllm_jsonl": (vllm_jsonl, IDS, True, (3, 5, 9)),
    "tensorrt_llm_raw": (tensorrt_llm_raw, even_then_odd(IDS), False, (3, 4, 5)),
    "megatron_replay": (megatron_replay, IDS, False, (0, 1, 2)),
    "megatron_jsonl": (megatron_jsonl, even_then_odd(IDS), False, (1, 2, 3)),
    "esft": (esft, IDS, True, (1, 2, 10)),
}
# format: (writer, steps kept, layer numbers)
COUNT_FORMATS: dict[str, tuple[Writer, bool, tuple[int, ...]]] = {
    "sglang_stat": (sglang_stat, True, (1, 2, 3)),
    "sglang_stat_json": (sglang_stat_json, False, (0, 1, 2)),
    "sglang_per_pass": (sglang_per_pass, True, (0, 1, 2)),
    "sglang_csv": (sglang_csv, False, (1, 2, 3)),
    "vllm_eplb": (vllm_eplb, True, (0, 1, 2)),
    "tensorrt_llm": (tensorrt_llm, True, (3, 4, 5)),
}
