"""Recorded routing, replayed token by token or by its counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from routing_samples import chi_square_z, context
from trace_files import COUNT_FORMATS, COUNTS, IDS, STEPS, TOKEN_FORMATS, WEIGHTS, E, K, L, T

from comm.analytic.law import NoLaw, Weighted
from moe.routing import build_source
from moe.routing.replay import CountDriven, Replay, fit_weights, target_chances
from moe.routing.weighted import inclusion
from moe.traces import read_trace
from moe.traces.base import CountTrace, RouterTrace


def recorded(tmp_path: Path, name: str = "wideep", router: str = "replay", **run: Any) -> Any:
    write = {**TOKEN_FORMATS, **COUNT_FORMATS}[name][0]
    base: dict[str, Any] = {"num_experts": E, "top_k": K, "layers": L, "steps": STEPS}
    base |= {"tokens": (T,), **run}
    return build_source(router, context(path=str(write(tmp_path)), **base))


@pytest.mark.parametrize("tokens", [(T,), (10, 10), (7, 0, 13), (1,) * T, (0, T)])
def test_a_recorded_run_replays_equally_on_any_ranks(
    tokens: tuple[int, ...], tmp_path: Path
) -> None:
    source = recorded(tmp_path, tokens=tokens)
    for step, layer in itertools.product(range(STEPS), range(L)):
        parts, first = [], 0
        for count in tokens:
            parts.append(source.choose(step, layer, first, count))
            first += count
        rows = slice(step * T, (step + 1) * T)
        ids = np.concatenate([part.topk_ids for part in parts])
        weights = np.concatenate([part.topk_weights for part in parts])
        np.testing.assert_array_equal(ids, IDS[layer, rows])
        np.testing.assert_array_equal(weights, WEIGHTS[layer, rows])
        assert weights.dtype == np.float32
    assert "the first 40 of the trace's 40 tokens are replayed" in source.notes


def test_without_weights_the_router_gives_them(tmp_path: Path) -> None:
    assert recorded(tmp_path, "megatron_replay").choose(0, 0, 0, 3).topk_weights is None


def test_no_law_is_claimed(tmp_path: Path) -> None:
    assert recorded(tmp_path).law == NoLaw("replayed routing follows no law")


def test_a_short_trace_starts_over_and_says_so(tmp_path: Path) -> None:
    source = recorded(tmp_path, tokens=(30, 30))
    ids = source.choose(1, 2, 0, 60).topk_ids  # tokens 60 .. 119 of a trace of 40
    np.testing.assert_array_equal(ids, IDS[2, np.arange(60, 120) % 40])
    assert any(
        "the run needs 120: it starts over, a token serves up to 3" in n for n in source.notes
    )


@pytest.mark.parametrize("layers", [2, 3, 7])
def test_layers_are_taken_round(layers: int, tmp_path: Path) -> None:
    source = recorded(tmp_path, layers=layers)
    for layer in range(layers):
        ids = source.choose(0, layer, 0, T).topk_ids
        np.testing.assert_array_equal(ids, IDS[layer % 3, :T])
    said = {2: "layers 0, 1 of the trace's 3 are used", 3: None, 7: "layer l takes layer l % 3"}
    assert said[layers] is None or any(said[layers] in note for note in source.notes)
    assert (said[layers] is None) == (
        not any("layers" in n or "layer l" in n for n in source.notes)
    )


def test_active_tokens_are_those_with_an_expert(tmp_path: Path) -> None:
    ids = IDS[:1, :6].copy()
    ids[0, [0, 4, 5]] = -1
    torch.save([torch.from_numpy(ids[0])], tmp_path / "a.pt")
    run = context(
        path=str(tmp_path / "a.pt"), num_experts=E, top_k=K, layers=1, steps=1, tokens=(2, 0, 1, 3)
    )
    assert build_source("replay", run).active_tokens(0, 0).tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": 128}, ("num_experts=896", "num_experts=128")),
        ({"top_k": 8}, ("has 4 experts a token", "top_k=8")),
    ],
)
def test_another_model_is_refused(
    change: dict[str, int], said: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        recorded(tmp_path, **change)
    assert all(words in str(caught.value) for words in said)


def test_a_trace_given_directly_is_checked_too() -> None:
    ids = np.array([[[0, 30]]])
    given = RouterTrace(ids, None, None, (0,), "not said", True, "here")
    with pytest.raises(ValueError, match="here has id 30, the model num_experts=24"):
        Replay(context(top_k=2), given)
    with pytest.raises(ValueError, match="here has top_k=2, the model top_k=4"):
        Replay(context(top_k=4), given)
    counts = CountTrace(np.ones((1, 1, 30), dtype=np.int64), None, (0,), "not said", True, "there")
    with pytest.raises(ValueError, match="there has num_experts=30, the model num_experts=24"):
        CountDriven(context(), counts)


def test_the_path_and_its_kind(tmp_path: Path) -> None:
    for router in ("replay", "counts"):
        with pytest.raises(ValueError, match=f"router.path=None: router={router} needs a file"):
            build_source(router, context())
    with pytest.raises(ValueError, match="use router=counts"):
        recorded(tmp_path, "sglang_stat")


def test_format_and_skipped_rows_reach_the_reader(tmp_path: Path) -> None:
    source = recorded(tmp_path, format="wideep", skip_rows=5)
    np.testing.assert_array_equal(source.choose(0, 1, 0, 10).topk_ids, IDS[1, 5:15])
    assert any("5 of 40 token rows at the start skipped" in note for note in source.notes)
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="is of kind npz, format=esft"):
        recorded(tmp_path / "b", format="esft")


def skewed(experts: int, seed: int = 0) -> np.ndarray:
    """[1, 2, E] counts of two layers."""
    rng = np.random.default_rng(seed)
    return (rng.lognormal(0, 1, (1, 2, experts)) * 500).astype(np.int64) + 1


def test_counts_are_met_by_the_draws() -> None:
    given = CountTrace(skewed(24), 4, (0, 1), "not said", True, "here")
    source = CountDriven(context(layers=3, steps=1, tokens=(20_000,)), given)
    for layer in range(3):
        ids = source.choose(0, layer, 0, 20_000).topk_ids
        assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
        wanted = given.counts[layer % 2] / given.counts[layer % 2].sum() * ids.size
        # fixed seed; the K of a token exclude one another, so the spread is below the chi-square's
        assert chi_square_z(np.bincount(ids.ravel(), minlength=24).tolist(), wanted.tolist()) < 3.09
    law = source.law
    assert isinstance(law, Weighted)
    assert law.variant.tolist() == [[0, 1, 0]]
    for layer in range(2):
        chances = given.counts[layer] * (4 / given.counts[layer].sum())
        assert np.abs(inclusion(law.weights[layer], 4) - chances).max() < 1e-7


def test_the_same_draws_on_any_ranks() -> None:
    given = CountTrace(skewed(24), 4, (0, 1), "not said", True, "here")
    whole = CountDriven(context(tokens=(40,)), given).choose(1, 1, 0, 40).topk_ids
    parts = CountDriven(context(tokens=(7, 33)), given)
    np.testing.assert_array_equal(
        np.concatenate([parts.choose(1, 1, 0, 7).topk_ids, parts.choose(1, 1, 7, 33).topk_ids]),
        whole,
    )


@pytest.mark.parametrize("name", ["sglang_stat", "tensorrt_llm", "wideep"])
def test_counts_of_a_file_or_of_recorded_tokens(name: str, tmp_path: Path) -> None:
    source = recorded(tmp_path, name, router="counts")
    never = COUNTS == 0
    for layer in range(L):
        assert (source.weights(0, layer) == 0).tolist() == never[layer].tolist()
    counted = "choices of each token counted, their order is not kept" in source.notes
    assert counted == (name == "wideep")


def brute_chances(weights: np.ndarray, top_k: int) -> np.ndarray:
    """[E] by listing every set."""
    chances, total = np.zeros(len(weights)), 0.0
    for one in itertools.combinations(range(len(weights)), top_k):
        product = float(np.prod(weights[list(one)]))
        total += product
        chances[list(one)] += product
    return chances / total


@pytest.mark.parametrize("experts, top_k", [(2, 1), (4, 1), (5, 4), (8, 2), (9, 5), (12, 3)])
def test_weights_give_the_chances(experts: int, top_k: int) -> None:
    for seed in range(5):
        chances, _ = target_chances(skewed(experts, seed)[0, 0], top_k)
        weights = fit_weights(chances, top_k)
        assert weights.max() == 1
        assert np.abs(brute_chances(weights, top_k) - chances).max() < 2e-9


def test_fits_of_many_sizes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        experts = int(rng.integers(2, 60))
        top_k = int(rng.integers(1, experts))
        counts = (rng.lognormal(0, rng.choice([0.1, 1, 4]), experts) * 100).astype(np.int64)
        counts[rng.integers(experts)] += 1
        chances, _ = target_chances(counts, top_k)
        assert chances.sum() == pytest.approx(top_k, abs=1e-9)
        reached = inclusion(fit_weights(chances, top_k), top_k)
        assert np.abs(reached - chances).max() < 1e-9


@pytest.mark.parametrize(
    ("counts", "wanted", "said"),
    [
        ([5, 5, 0, 0], [1, 1, 0, 0], "only K = 2 experts have counts: all certain"),
        ([5, 0, 0, 0], [1, 1 / 3, 1 / 3, 1 / 3], "only 1 experts have counts, fewer than K = 2"),
        ([9, 5, 1, 0], [1, 5 / 6, 1 / 6, 0], "1 experts were chosen by every token or more"),
        ([10, 5, 5, 0], [1, 0.5, 0.5, 0], "1 experts were chosen by every token or more"),
        ([3, 2, 2, 1], [0.75, 0.5, 0.5, 0.25], None),
    ],
)
def test_counts_that_no_weights_give(
    counts: list[int], wanted: list[float], said: str | None
) -> None:
    chances, notes = target_chances(np.array(counts), 2)
    assert chances == pytest.approx(wanted, abs=2e-6)
    assert (said is None and not notes) or said in notes[0]
    fit_weights(chances, 2)
    given = CountTrace(np.array([[counts]]), None, (7,), "not said", True, "here")
    run = context(num_experts=4, top_k=2, layers=1, tokens=(400,))
    source = CountDriven(run, given)
    ids = source.choose(0, 0, 0, 400).topk_ids
    shares = np.bincount(ids.ravel(), minlength=4) / 400
    assert shares == pytest.approx(wanted, abs=0.1)
    assert said is None or any(note.startswith("layer 7: ") for note in source.notes)


def test_k_of_all_experts() -> None:
    chances, notes = target_chances(np.array([3, 0, 1]), 3)
    assert chances.tolist() == [1, 1, 1]
    assert notes
    assert fit_weights(chances, 3).tolist() == [1, 1, 1]


def test_chances_that_cannot_be_reached_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.routing.replay.FIT_ROUNDS", 2)
    with pytest.raises(ValueError, match="no weights found that give these counts with top_k=2"):
        fit_weights(target_chances(np.array([9, 5, 3, 1, 1]), 2)[0], 2)


def test_a_replay_keeps_what_the_reader_found(tmp_path: Path) -> None:
    write: Callable[[Path], Path] = TOKEN_FORMATS["vllm_routed_experts"][0]
    path = write(tmp_path)
    trace = read_trace(path, num_experts=E)
    source = build_source(
        "replay", context(path=str(path), num_experts=E, top_k=K, layers=L, tokens=(5,))
    )
    assert isinstance(source, Replay)
    assert source.notes[: len(trace.notes)] == trace.notes
