"""Bytes of rows and counts messages."""

import pytest

from comm.analytic.rows import (
    DISPATCHERS,
    KINDS,
    PAYLOAD_KINDS,
    ROW_PHASES,
    WIRES,
    counts_bytes,
    payload_bytes,
    row_bytes,
)

PER_COPY = ("all_to_all", "padded")
WHOLE_TOKEN = ("rank_dedup", "allgather", "two_hop", "hierarchical_allgather")


def moved(row: dict[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in row.items() if size}


@pytest.mark.parametrize(
    ("wire", "width", "hidden", "scales"),
    [
        ("fp32", 3584, 14336, 0),
        ("bf16", 3584, 7168, 0),
        ("fp16", 3584, 7168, 0),
        ("mxfp8", 3584, 3584, 112),
        ("fp8_block128", 3584, 3584, 112),
        ("fp8_block128", 7168, 7168, 224),
        ("mxfp4", 3584, 1792, 112),
        ("nvfp4", 3584, 1792, 224),
        # widths that no block divides: the short last block has a scale of its own
        ("fp8_block128", 130, 130, 8),
        ("mxfp8", 130, 130, 5),
        ("fp8_block128", 1, 1, 4),
        ("mxfp8", 33, 33, 2),
        ("mxfp4", 33, 17, 2),
        ("nvfp4", 33, 17, 3),
        ("mxfp4", 1, 1, 1),
        ("nvfp4", 31, 16, 2),
    ],
)
def test_payload_of_a_row(wire: str, width: int, hidden: int, scales: int) -> None:
    assert payload_bytes(wire, width) == (hidden, scales)


def test_eight_bits_do_not_halve_the_traffic() -> None:
    full = sum(payload_bytes("bf16", 3584))
    for wire in ("mxfp8", "fp8_block128"):
        assert sum(payload_bytes(wire, 3584)) / full == 0.515625
        assert (sum(payload_bytes(wire, 3584)) + full) / (2 * full) == 0.7578125
    assert sum(payload_bytes("mxfp4", 3584)) / full == 0.265625
    assert sum(payload_bytes("nvfp4", 3584)) / full == 0.28125


@pytest.mark.parametrize("dispatcher", PER_COPY)
def test_a_copy_carries_payload_alone(dispatcher: str) -> None:
    row = row_bytes(dispatcher, "dispatch", "bf16", 128, 16)
    assert row == dict.fromkeys(KINDS, 0) | {"hidden": 256}


@pytest.mark.parametrize("dispatcher", WHOLE_TOKEN)
def test_ids_and_weights_travel_with_whole_tokens(dispatcher: str) -> None:
    row = row_bytes(dispatcher, "dispatch", "bf16", 128, 16)
    assert moved(row) == {"hidden": 256, "ids": 64, "weights": 64}
    assert sum(row.values()) == 384  # half as much again as the payload at this small width


def test_one_sided_names_the_expert_of_a_row() -> None:
    assert moved(row_bytes("one_sided", "dispatch", "bf16", 128, 16)) == {"hidden": 256, "ids": 4}
    row = row_bytes("one_sided", "dispatch", "bf16", 128, 16, deduplicate=True)
    assert row == row_bytes("rank_dedup", "dispatch", "bf16", 128, 16)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_everything_else_is_payload(dispatcher: str) -> None:
    for phase in ROW_PHASES[1:]:
        for direction in ("forward", "backward"):
            row = row_bytes(dispatcher, phase, "mxfp8", 128, 16, direction=direction)
            assert tuple(row) == KINDS
            assert moved(row) == {"hidden": 128, "scales": 4}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_backward_brings_the_gradients_of_the_weights_that_travelled(dispatcher: str) -> None:
    for deduplicate in (False, True):
        forward, backward = (
            row_bytes(
                dispatcher,
                "dispatch",
                "bf16",
                128,
                16,
                direction=direction,
                deduplicate=deduplicate,
            )
            for direction in ("forward", "backward")
        )
        assert backward == forward | {"ids": 0}
        whole = dispatcher in WHOLE_TOKEN or (dispatcher == "one_sided" and deduplicate)
        assert backward["weights"] == (64 if whole else 0)


def test_counts_message() -> None:
    assert counts_bytes("all_to_all", 112) == counts_bytes("one_sided", 112) == 32 + 112 * 8
    assert counts_bytes("all_to_all", 0) == 32  # a rank without experts is told so
    assert counts_bytes("padded", 112) == 32 + 113 * 8  # and how many tokens the source has
    assert counts_bytes("one_sided", 112, deduplicate=True) == 40
    for dispatcher in WHOLE_TOKEN:
        assert counts_bytes(dispatcher, 112) == 40


def test_counts_of_other_phases() -> None:
    for dispatcher in DISPATCHERS:
        assert counts_bytes(dispatcher, 3, phase="tp_gather") == 32 + 3 * 8
        assert counts_bytes(dispatcher, 3, phase="tp_reduce") == 0
        announces = dispatcher == "one_sided"
        assert counts_bytes(dispatcher, 3, phase="combine") == (3 * 8 if announces else 0)
        assert counts_bytes(dispatcher, 3, phase="combine", deduplicate=True) == (
            0 if announces else counts_bytes(dispatcher, 3, phase="combine")
        )


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"dispatcher='two'.*rank_dedup"):
        row_bytes("two", "dispatch", "bf16", 8, 1)
    with pytest.raises(ValueError, match=r"phase='send'.*combine"):
        row_bytes("allgather", "send", "bf16", 8, 1)
    with pytest.raises(ValueError, match=r"direction='up'.*backward"):
        row_bytes("allgather", "dispatch", "bf16", 8, 1, direction="up")
    with pytest.raises(ValueError, match=r"wire='fp4'.*mxfp8"):
        row_bytes("allgather", "dispatch", "fp4", 8, 1)
    with pytest.raises(ValueError, match="dispatcher='two'"):
        counts_bytes("two", 1)


def test_every_format_weighs_something() -> None:
    assert set(PAYLOAD_KINDS) <= set(KINDS)
    assert len(WIRES) == 7
    assert all(payload_bytes(wire, 1)[0] >= 1 for wire in WIRES)
