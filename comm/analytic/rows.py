"""Bytes of one row and of one counts message, for each dispatcher.

A second derivation of what the wire carries, written from the description of the formats and not
from their code. All widths are in elements, all results in bytes.

    dispatcher   a dispatched row is        and carries                      counts message
    all_to_all   one (token, expert) copy   hidden, scales                   header + one per slot
    rank_dedup   one (token, rank) pair     hidden, scales, ids, weights     header + one
    allgather    one token for every rank   hidden, scales, ids, weights     header + one

A combined row is the answer to one dispatched row and carries hidden and scales only.
"""

DISPATCHERS = ("all_to_all", "rank_dedup", "allgather")
PHASES = ("dispatch", "combine")
KINDS = ("hidden", "scales", "ids", "weights", "counts", "padding")
PAYLOAD_KINDS = ("hidden", "scales")

ID_BYTES = 4  # int32
WEIGHT_BYTES = 4  # fp32
COUNT_BYTES = 8  # int64
HEADER_BYTES = 4 * 8  # layer, phase, row bytes, wire format: four int64 before the counts

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_block128": 1, "mxfp8": 1}
_SCALES = {"fp8_block128": (128, 4), "mxfp8": (32, 1)}  # elements a block, bytes a scale
WIRES = tuple(_ELEMENT_BYTES)


def check_dispatcher(dispatcher: str) -> None:
    """Refuse a dispatcher that has no law here."""
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"dispatcher={dispatcher!r} has no law; choose one of {DISPATCHERS}")


def payload_bytes(wire: str, width: int) -> tuple[int, int]:
    """(hidden, scales) bytes of a row of `width` elements in the format `wire`."""
    if wire not in _ELEMENT_BYTES:
        raise ValueError(f"wire={wire!r} is not a wire format; choose one of {WIRES}")
    block_size, scale_bytes = _SCALES.get(wire, (1, 0))
    num_blocks = (width + block_size - 1) // block_size  # the last block may be a short one
    return width * _ELEMENT_BYTES[wire], num_blocks * scale_bytes


def row_bytes(dispatcher: str, phase: str, wire: str, width: int, top_k: int) -> dict[str, int]:
    """Bytes of each kind in one row; every kind of `KINDS` is present, also with 0."""
    check_dispatcher(dispatcher)
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r} is not a phase; choose one of {PHASES}")
    hidden, scales = payload_bytes(wire, width)
    # Per copy the sender's order names the expert and the weight is applied at home.
    travels = phase == "dispatch" and dispatcher != "all_to_all"
    return dict.fromkeys(KINDS, 0) | {
        "hidden": hidden,
        "scales": scales,
        "ids": top_k * ID_BYTES if travels else 0,
        "weights": top_k * WEIGHT_BYTES if travels else 0,
    }


def counts_bytes(dispatcher: str, slots_on_dst: int) -> int:
    """Bytes of the counts message that announces a dispatch to one destination.

    Sent once for each pair, layer and step, also to a rank that gets no rows and to oneself.
    """
    check_dispatcher(dispatcher)
    num_counts = slots_on_dst if dispatcher == "all_to_all" else 1
    return HEADER_BYTES + num_counts * COUNT_BYTES
