"""The headline formula and its seven factors."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.analytic.headline import FACTORS, Headline, headline
from comm.analytic.oracle import count_rows, exact_traffic
from comm.analytic.rows import DISPATCHERS, KINDS


def of_run(
    dispatcher: str,
    ids: np.ndarray,
    token_rank: np.ndarray,
    slots: list[int],
    wire: str,
    width: int,
) -> Headline:
    """Headline of a run in which exactly the right bytes moved; hidden size is twice the width."""
    num_steps, num_layers, num_tokens, top_k = ids.shape
    expert_rank = np.repeat(np.arange(len(slots)), slots)
    owners = np.array([expert_rank] * num_layers)
    slots_per_rank = np.array([slots] * num_layers)
    exact = exact_traffic(dispatcher, ids, token_rank, owners, slots_per_rank, wire, "bf16", width)
    remote = ~np.eye(len(slots), dtype=bool)
    copies = count_rows("all_to_all", ids, token_rank, owners, len(slots))
    return headline(
        {kind: int(exact.bytes[:, 0, k][..., remote].sum()) for k, kind in enumerate(KINDS)},
        int(exact.rows[:, 0][..., remote].sum()),
        int(copies[..., remote].sum()),
        num_tokens * num_steps,
        num_layers,
        top_k,
        2 * width,
        width,
    )


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dispatcher=st.sampled_from(DISPATCHERS),
    slots=st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(any),
    num_tokens=st.integers(0, 6),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    wire=st.sampled_from(["fp32", "bf16", "fp8_block128", "mxfp8"]),
    data=st.data(),
)
def test_the_product_of_the_factors_is_the_ratio(
    seed: int,
    dispatcher: str,
    slots: list[int],
    num_tokens: int,
    masked: float,
    wire: str,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, sum(slots)))
    rng = np.random.default_rng(seed)
    ids = rng.random((2, 3, num_tokens, sum(slots))).argsort(axis=-1)[..., :top_k]
    ids[rng.random(ids.shape) < masked] = -1
    token_rank = rng.integers(len(slots), size=num_tokens)
    result = of_run(dispatcher, ids, token_rank, slots, wire, width=50)
    if num_tokens == 0:
        assert (result.ratio, result.factors) == (None, ())
        return
    assert result.headline_bytes == top_k * num_tokens * 2 * 3 * 100 * 2
    assert result.ratio == result.measured_bytes / result.headline_bytes
    assert tuple(name for name, _ in result.factors) == FACTORS
    assert prod(factor for _, factor in result.factors) == pytest.approx(result.ratio, rel=1e-12)


@pytest.mark.parametrize(
    ("dispatcher", "rows"), [("all_to_all", 3), ("rank_dedup", 2), ("allgather", 3)]
)
def test_each_factor_by_hand(dispatcher: str, rows: int) -> None:
    """4 ranks of 2 experts, one token on rank 0 with K = 4 in experts {0, 2, 3, 4}, mxfp8.

    3 of its 4 copies leave the rank; per rank they are 2 rows, to everyone 3.
    """
    ids = np.array([[[[0, 2, 3, 4]]]])
    result = of_run(dispatcher, ids, np.array([0]), [2] * 4, "mxfp8", width=128)
    payload, full_row = 128 + 4, 2 * 128
    ids_and_weights = 0 if dispatcher == "all_to_all" else 4 * 8
    counts = 12 * (32 + 8 * (2 if dispatcher == "all_to_all" else 1))
    measured = rows * (payload + ids_and_weights) + counts
    assert result.measured_bytes == measured
    assert dict(result.factors) == pytest.approx(
        {
            "remote_share": 3 / 4,
            "rows_per_copy": rows / 3,
            "hops": 1.0,
            "padding": 1.0,
            "width": 0.5,
            "format": payload / full_row,
            "metadata": measured / (rows * payload),
        }
    )


def test_half_the_headline_is_the_width_of_kimi_k3() -> None:
    """One copy to each of 16 remote ranks in BF16: 114,688 B, where the headline says 229,376."""
    result = headline({"hidden": 114_688}, 16, 16, 1, 1, 16, 7168, 3584)
    assert (result.headline_bytes, result.ratio) == (229_376, 0.5)
    assert [name for name, factor in result.factors if factor != 1] == ["width"]


def test_counts_alone_are_metadata() -> None:
    """Every choice is local: no remote copy, but the empty exchange is still announced."""
    result = headline({"hidden": 0, "counts": 80}, 0, 0, 1, 1, 2, 4, 4)
    assert dict(result.factors)["metadata"] == result.ratio == 5.0


def test_an_all_gather_sends_rows_that_no_copy_asked_for() -> None:
    result = headline({"hidden": 8, "counts": 40}, 1, 0, 1, 1, 2, 4, 4)
    factors = dict(result.factors)
    assert factors["remote_share"] == 1
    assert factors["rows_per_copy"] == 8 / 16
    assert prod(factors.values()) == pytest.approx(48 / 16)


def test_one_rank_sends_nothing() -> None:
    result = headline({"hidden": 0, "counts": 0}, 0, 0, 5, 1, 2, 4, 4)
    assert result.ratio == 0
    assert prod(factor for _, factor in result.factors) == 0
