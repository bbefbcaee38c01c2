"""The split guard, and that nothing stale is ever handed on."""

import numpy as np
import pytest
import rank_bodies
import torch

from comm.header import SplitMismatch, check_headers, header
from comm.meter import Position
from comm.spawn import RankFailure, run_ranks


@pytest.mark.parametrize(
    ("what", "numbers"),
    [
        ("layer", ("3", "2")),
        ("row bytes", ("640", "512")),
        ("wire format", ("4", "1")),
        ("phase", ("dispatch", "combine")),
        ("direction", ("forward", "backward")),
        ("counts", ("announces counts 1, ", "expects 3")),
    ],
)
def test_ranks_that_mean_different_messages_are_both_named(what, numbers):
    """Field case 25: gloo itself would return stale memory or abort."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(rank_bodies.disagree, 2, what, deadline_s=60)
    text = failure.value.guilty.error
    assert "SplitMismatch" in text and "dispatch" in text and what in text
    assert "rank 0" in text and "rank 1" in text
    assert all(number in text for number in numbers)


def test_a_rank_that_places_experts_otherwise_is_found_before_a_message_moves():
    said = run_ranks(rank_bodies.place_otherwise, 2, 8)
    assert said[0] == said[1] and said[0].startswith("layer 1: rank 1 places its experts otherwise")
    assert "than rank 0" in said[0]


def test_memory_that_nobody_wrote_is_no_header():
    mine = header(Position(1, "combine", "backward"), 640, 3, 5)
    check_headers(Position(1, "combine"), (4, 7), 7, np.stack([mine, mine]), mine)
    for stale in (0, -1, 0xAB):
        with pytest.raises(SplitMismatch, match="rank 7 announces protocol .*, rank 4 expects"):
            check_headers(
                Position(1, "combine"), (4, 7), 4, np.stack([mine, np.full(4, stale)]), mine
            )


def test_rows_arrive_from_their_sources_and_nothing_of_the_old_memory_does():
    rows_to = [[0, 2, 1], [3, 0, 0], [1, 1, 4]]
    for rank, (rows_from, received, sent) in enumerate(
        run_ranks(rank_bodies.exchange_poisoned, 3, rows_to)
    ):
        assert rows_from == [rows_to[source][rank] for source in range(3)]
        expected = [source for source in range(3) for _ in range(rows_to[source][rank])]
        assert received[:, 0].tolist() == expected
        assert not torch.any(received == 0xAB)
        counts = 8 * (4 + 1)  # header and one count to each rank
        by_destination = [counts + 8 * rows for rows in rows_to[rank]]
        assert sent.sum(axis=0).tolist() == by_destination


def test_types_that_gloo_does_not_know_travel_as_bytes():
    """Field case 24: each rank gets the same half from both."""
    types = ("float8_e4m3fn", "float8_e5m2", "int16", "uint16", "bfloat16")
    for rank, found in enumerate(run_ranks(rank_bodies.exchange_types, 2, types)):
        assert len(found) == len(types)
        for got, sent in found:
            mine = sent[4 * rank : 4 * rank + 4]
            assert torch.equal(got, torch.cat([mine, mine]))


GROUPS = [[0, 2, 3], [1, 4, 5]]


def test_a_group_exchanges_by_place_and_is_counted_by_rank():
    rows_to = [[0, 2, 1], [3, 0, 0], [1, 1, 4]]
    found = run_ranks(rank_bodies.exchange_poisoned, 6, rows_to, GROUPS)
    for group in GROUPS:
        for place, rank in enumerate(group):
            rows_from, received, sent = found[rank]
            assert rows_from == [rows_to[source][place] for source in range(3)]
            sources = [group[source] for source in range(3) for _ in range(rows_to[source][place])]
            assert received[:, 0].tolist() == sources
            to_mates = [8 * (4 + 1) + 8 * rows for rows in rows_to[place]]
            to_ranks = dict(zip(group, to_mates, strict=True))
            assert sent.sum(axis=0).tolist() == [to_ranks.get(other, 0) for other in range(6)]


def test_a_group_that_disagrees_names_its_ranks_in_the_world():
    with pytest.raises(RankFailure) as failure:
        run_ranks(rank_bodies.disagree, 6, "row bytes", GROUPS, deadline_s=60)
    text = failure.value.guilty.error
    assert "SplitMismatch" in text and "640" in text and "512" in text
    assert "rank 5" in text and any(f"rank {mate} " in text for mate in (1, 4))


def test_a_message_of_more_than_two_gibibytes_arrives_and_is_counted():
    """Field case 23; an offset of 32 bits would end at 2**31."""
    rows = (1 << 31) // 4096 + 1
    (_, counted), (ends, none) = run_ranks(
        rank_bodies.exchange_large, 2, 4096, rows, deadline_s=120
    )
    assert ends == [3, 7]
    assert (counted, none) == (rows * 4096, 0)
