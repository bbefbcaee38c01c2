"""The exact count, held to a slow one that loops over everything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from comm.analytic import oracle
from comm.analytic.oracle import count_rows, exact_traffic
from comm.analytic.rows import DISPATCHERS, KINDS, PHASES

ROUTING = ("topk_ids", "token_rank", "expert_rank", "slots_per_rank")


def slow_bytes(
    dispatcher: str,
    topk_ids: NDArray[np.integer],
    token_rank: NDArray[np.integer],
    expert_rank: NDArray[np.integer],
    slots_per_rank: NDArray[np.integer],
    width: int,
) -> NDArray[np.int64]:
    """Bytes [L, phase, kind, src, dst] for bf16 dispatch and mxfp8 combine, one row at a time."""
    num_steps, num_layers, num_tokens, top_k = topk_ids.shape
    world_size = slots_per_rank.shape[1]
    cells = np.zeros((num_layers, 2, 6, world_size, world_size), np.int64)
    for step in range(num_steps):
        for layer in range(num_layers):
            for src in range(world_size):
                for dst in range(world_size):
                    counts = slots_per_rank[layer, dst] if dispatcher == "all_to_all" else 1
                    cells[layer, 0, 4, src, dst] += 32 + 8 * counts
            for token in range(num_tokens):
                chosen = [int(e) for e in topk_ids[step, layer, token] if e != -1]
                owners = [int(expert_rank[layer, e]) for e in chosen]
                if dispatcher == "rank_dedup":
                    owners = sorted(set(owners))
                elif dispatcher == "allgather":
                    owners = list(range(world_size)) if chosen else []
                src = int(token_rank[token])
                for dst in owners:
                    cells[layer, 0, 0, src, dst] += 2 * width
                    if dispatcher != "all_to_all":
                        cells[layer, 0, 2, src, dst] += 4 * top_k
                        cells[layer, 0, 3, src, dst] += 4 * top_k
                    cells[layer, 1, 0, dst, src] += width
                    cells[layer, 1, 1, dst, src] += -(-width // 32)
    return cells


def routing(seed: int, world_size: int, num_experts: int, top_k: int, num_tokens: int) -> dict:
    """Random choices, one in eight of them -1, on a random placement that differs by layer."""
    rng = np.random.default_rng(seed)
    shape = (2, 3, num_tokens)  # steps, layers, tokens
    ids = rng.random((*shape, num_experts)).argsort(axis=-1)[..., :top_k]
    ids[rng.random(ids.shape) < 0.125] = -1
    ids[:, :, :1] = -1  # and a token that chose nothing
    expert_rank = rng.integers(world_size, size=(3, num_experts))
    slots = np.stack([np.bincount(layer, minlength=world_size) for layer in expert_rank])
    token_rank = np.sort(rng.integers(world_size, size=num_tokens))
    return dict(zip(ROUTING, (ids, token_rank, expert_rank, slots), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dispatcher=st.sampled_from(DISPATCHERS),
    world_size=st.integers(1, 9),
    num_experts=st.integers(1, 12),
    num_tokens=st.integers(0, 9),
    data=st.data(),
)
def test_equals_the_slow_count(
    seed: int,
    dispatcher: str,
    world_size: int,
    num_experts: int,
    num_tokens: int,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    case = routing(seed, world_size, num_experts, top_k, num_tokens)
    exact = exact_traffic(dispatcher, **case, wire_dispatch="bf16", wire_combine="mxfp8", width=33)
    np.testing.assert_array_equal(exact.bytes, slow_bytes(dispatcher, **case, width=33))
    hidden = exact.bytes[:, :, KINDS.index("hidden")]
    np.testing.assert_array_equal(exact.rows[:, 0] * 66, hidden[:, 0])
    np.testing.assert_array_equal(exact.rows[:, 1] * 33, hidden[:, 1])
    assert (exact.phases, exact.kinds) == (PHASES, KINDS)


@pytest.mark.parametrize(
    ("dispatcher", "rows"), [("all_to_all", [1, 2]), ("rank_dedup", [1, 1]), ("allgather", [1, 1])]
)
def test_the_worked_example(dispatcher: str, rows: list[int]) -> None:
    counted = count_rows(
        dispatcher, np.array([[[[1, 2, 3]]]]), np.array([0]), np.array([[0, 0, 1, 1]]), 2
    )
    np.testing.assert_array_equal(counted, [[rows, [0, 0]]])


def test_all_choices_masked_send_nothing_but_counts() -> None:
    for dispatcher in DISPATCHERS:
        exact = exact_traffic(
            dispatcher,
            np.full((1, 1, 5, 4), -1),
            np.zeros(5, int),
            np.zeros((1, 8), int),
            np.array([[8, 0]]),
            "bf16",
            "bf16",
            16,
        )
        assert not exact.rows.any()
        assert exact.bytes.sum() == exact.bytes[:, 0, KINDS.index("counts")].sum() > 0


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_chunks_do_not_show(dispatcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = routing(7, world_size=5, num_experts=11, top_k=4, num_tokens=50)
    whole = exact_traffic(dispatcher, **case, wire_dispatch="bf16", wire_combine="bf16", width=8)
    monkeypatch.setattr(oracle, "_CHUNK_CHOICES", 12)
    parts = exact_traffic(dispatcher, **case, wire_dispatch="bf16", wire_combine="bf16", width=8)
    np.testing.assert_array_equal(whole.bytes, parts.bytes)


def test_a_million_identical_tokens_of_one_rank_do_not_overflow() -> None:
    num_tokens, top_k = 1_000_000, 8
    ids = np.broadcast_to(np.arange(top_k, dtype=np.uint8), (1, 1, num_tokens, top_k))
    exact = exact_traffic(
        "rank_dedup",
        ids,
        np.zeros(num_tokens, np.int32),
        np.zeros((1, 256), np.int32),
        np.array([[256, 0]]),
        "fp32",
        "bf16",
        7168,
    )
    assert exact.bytes[0, 0, KINDS.index("hidden")].tolist() == [[28_672_000_000, 0], [0, 0]]


def test_narrow_id_types_are_lossless() -> None:
    ids = np.array([[[[255, 256, -1, 257, 301, 895]]]], np.int16)
    owner = np.arange(896, dtype=np.uint16)[None, :]
    rows = count_rows("rank_dedup", ids, np.array([200], np.uint8), owner, 896)
    assert np.argwhere(rows[0]).tolist() == [[200, e] for e in (255, 256, 257, 301, 895)]


def test_foreign_arrays_are_refused() -> None:
    good = {
        "topk_ids": np.array([[[[0, 1]]]]),
        "token_rank": np.array([0]),
        "expert_rank": np.array([[0, 1]]),
        "world_size": 2,
    }
    for wrong, message in [
        ({"topk_ids": np.array([[[[0, 2]]]])}, r"topk_ids holds 0\.\.2, valid are 0\.\.1 and -1"),
        ({"topk_ids": np.array([[[[0, -2]]]])}, "topk_ids holds -2"),
        ({"token_rank": np.array([0, 0])}, "token_rank has shape"),
        ({"token_rank": np.array([2])}, r"token_rank holds ranks 2\.\.2, valid are 0\.\.1"),
        ({"expert_rank": np.array([[0, -1]])}, "expert_rank holds ranks -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            count_rows("all_to_all", **(good | wrong))
    with pytest.raises(ValueError, match="dispatcher='two'"):
        count_rows("two", **good)
