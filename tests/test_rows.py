"""Bytes of rows and counts messages."""

import pytest

from comm.analytic.rows import DISPATCHERS, KINDS, counts_bytes, payload_bytes, row_bytes


@pytest.mark.parametrize(
    ("wire", "width", "hidden", "scales"),
    [
        ("fp32", 3584, 14336, 0),
        ("bf16", 3584, 7168, 0),
        ("fp16", 3584, 7168, 0),
        ("mxfp8", 3584, 3584, 112),
        ("fp8_block128", 3584, 3584, 112),
        ("fp8_block128", 7168, 7168, 224),
        # widths that no block divides: the short last block has a scale of its own
        ("fp8_block128", 130, 130, 8),
        ("mxfp8", 130, 130, 5),
        ("fp8_block128", 1, 1, 4),
        ("mxfp8", 33, 33, 2),
    ],
)
def test_payload_of_a_row(wire: str, width: int, hidden: int, scales: int) -> None:
    assert payload_bytes(wire, width) == (hidden, scales)


def test_eight_bits_do_not_halve_the_traffic() -> None:
    full = sum(payload_bytes("bf16", 3584))
    for wire in ("mxfp8", "fp8_block128"):
        assert sum(payload_bytes(wire, 3584)) / full == 0.515625
        assert (sum(payload_bytes(wire, 3584)) + full) / (2 * full) == 0.7578125


def test_ids_and_weights_travel_with_whole_tokens_only() -> None:
    assert row_bytes("all_to_all", "dispatch", "bf16", 128, 16) == {
        "hidden": 256,
        "scales": 0,
        "ids": 0,
        "weights": 0,
        "counts": 0,
        "padding": 0,
    }
    for dispatcher in ("rank_dedup", "allgather"):
        row = row_bytes(dispatcher, "dispatch", "bf16", 128, 16)
        assert (row["ids"], row["weights"]) == (64, 64)
        assert sum(row.values()) == 384  # half as much again as the payload at this small width
    for dispatcher in DISPATCHERS:
        answer = row_bytes(dispatcher, "combine", "mxfp8", 128, 16)
        assert tuple(answer) == KINDS
        assert {kind: size for kind, size in answer.items() if size} == {"hidden": 128, "scales": 4}


def test_counts_message() -> None:
    assert counts_bytes("all_to_all", 112) == 32 + 112 * 8
    assert counts_bytes("all_to_all", 0) == 32  # a rank without experts is told so
    assert counts_bytes("rank_dedup", 112) == counts_bytes("allgather", 0) == 40


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="dispatcher='two'.*rank_dedup"):
        row_bytes("two", "dispatch", "bf16", 8, 1)
    with pytest.raises(ValueError, match="phase='send'.*combine"):
        row_bytes("allgather", "send", "bf16", 8, 1)
    with pytest.raises(ValueError, match="wire='fp4'.*mxfp8"):
        row_bytes("allgather", "dispatch", "fp4", 8, 1)
    with pytest.raises(ValueError, match="dispatcher='two'"):
        counts_bytes("two", 1)
