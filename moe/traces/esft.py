"""ESFT's records of DeepSeek-V2-Lite: expert_weights_<layer>.txt, one line a sequence.

A line: the ids of all tokens separated by tabs, an empty field, their weights; both halves are
[tokens, K] row by row. K is not written anywhere. Line i is the same sequence in every layer.
A folder of such files, or <archive>.tar.xz/<folder>. Weights are not normalised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np

from moe.traces.base import MOE_LAYERS, CountTrace, Expected, RawRouting, RouterTrace
from moe.traces.files import ESFT_PREFIX, Opened, one_line_errors
from moe.traces.finish import router_trace
from moe.traces.format import TraceFormat, ordered
from moe.traces.rules import TraceError

LARGEST_K = 32
WRONG_ROWS = 0.01  # share of rows that may name an expert twice before a K is ruled out


def read(opened: Opened, expected: Expected) -> RouterTrace | CountTrace:
    """Tokens of all sequences, one after the other."""
    source, files = str(opened.path), opened.content
    names = [name for name in ordered(files) if name.startswith(ESFT_PREFIX)]
    if not names:
        raise TraceError(f"{source}: holds no {ESFT_PREFIX}<layer>.txt")
    parsed = [_layer(source, name, files[name]) for name in names]
    lengths = parsed[0][2]
    for name, (_, _, other) in zip(names, parsed, strict=True):
        if other != lengths:
            raise TraceError(
                f"{source}: the lines of {name} and {names[0]} differ in length or number; line i"
                " must be the same sequence in every layer"
            )
    top_k = _top_k(source, [ids for ids, _, _ in parsed], lengths, expected.top_k)
    return router_trace(
        source,
        RawRouting(
            layers=[ids.reshape(-1, top_k) for ids, _, _ in parsed],
            weights=[weights.reshape(-1, top_k) for _, weights, _ in parsed],
            layer_numbers=[_number(source, name) for name in names],
            layer_axis=MOE_LAYERS,
            num_experts=_num_experts(source, files),
            notes=(f"{len(lengths)} sequences; K = {top_k} taken from the lines' lengths",),
        ),
        expected,
    )


def _layer(source: str, name: str, data: bytes) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Ids and weights of one layer, flat, and the ids of each line."""
    ids, weights, lengths = [], [], []
    with one_line_errors(source, f"text in {name}"):
        lines = data.decode("utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{source}: line {number} of {name}"
        halves = line.split("\t\t")
        if len(halves) != 2:
            raise TraceError(f"{where} must be ids, an empty field and weights, split by tabs")
        left, right = halves[0].split("\t"), halves[1].split("\t")
        if len(left) != len(right):
            raise TraceError(f"{where} has {len(left)} ids and {len(right)} weights")
        try:
            ids.append(np.array(left, dtype=object).astype(np.int64))
            weights.append(np.array(right, dtype=np.float64))
        except (ValueError, OverflowError) as error:
            raise TraceError(f"{where}: {error}") from None
        lengths.append(len(left))
    if not lengths:
        raise TraceError(f"{source}: {name} is empty")
    return np.concatenate(ids), np.concatenate(weights), lengths


def _top_k(source: str, layers: list[np.ndarray], lengths: list[int], wanted: int | None) -> int:
    """The model's K where the lines allow it, else the largest that hardly ever repeats an expert.

    A K that is too large joins parts of different tokens, which share experts soon.
    """
    common = math.gcd(*lengths)
    fits = [
        k
        for k in range(min(common, LARGEST_K), 0, -1)
        if common % k == 0 and all(_repeats(ids.reshape(-1, k)) <= WRONG_ROWS for ids in layers)
    ]
    if not fits:
        raise TraceError(f"{source}: no K divides its lines of {sorted(set(lengths))[:5]} ids")
    return wanted if wanted in fits else fits[0]


def _repeats(rows: np.ndarray) -> float:
    """Share of rows with an expert more than once."""
    ordered_rows = np.sort(rows, axis=1)
    return float((ordered_rows[:, 1:] == ordered_rows[:, :-1]).any(axis=1).mean())


def _number(source: str, name: str) -> int:
    text = name.removeprefix(ESFT_PREFIX).removesuffix(".txt")
    if not text.isdigit():
        raise TraceError(f"{source}: {name} must be {ESFT_PREFIX}<layer>.txt")
    return int(text)


def _num_experts(source: str, files: Mapping[str, bytes]) -> int | None:
    """How many experts summary.json has figures for, where it lies beside the layers."""
    if "summary.json" not in files:
        return None
    with one_line_errors(source, "JSON in summary.json"):
        summary = json.loads(files["summary.json"])
        return len(next(iter(summary["token_scores"].values())))


FORMATS = (
    TraceFormat(
        name="esft",
        kind="esft",
        describes="ESFT folder of expert_weights_<layer>.txt, or <archive>.tar.xz/<folder>",
        matches=lambda content: any(name.startswith(ESFT_PREFIX) for name in content),
        read=read,
    ),
)
