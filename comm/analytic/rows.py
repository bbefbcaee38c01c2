"""Bytes of one row and of one counts message, for each dispatcher.

A second derivation of what the wire carries, written from the description of the formats and not
from their code. All widths are in elements, all results in bytes.

    dispatcher              a dispatched row is               and carries            counts message
    all_to_all              one (token, slot) copy            payload                header + slots
    rank_dedup              one (token, rank) pair            payload, ids, weights  header + one
    allgather               one token for every rank          payload, ids, weights  header + one
    two_hop                 one (token, node) to a proxy,     payload, ids, weights  header + one,
                            then one (token, rank) inside                            at each hop
    hierarchical_allgather  two_hop to every node and rank    payload, ids, weights  as two_hop
    padded                  a fixed number for every slot     payload                header + slots
                                                                                     + one (tokens)
    one_sided               one (token, slot) copy            payload, one id        header + slots
      deduplicate=True      one (token, rank) pair            payload, ids, weights  header + one

A combined row is the answer to one dispatched row and carries hidden and scales only. Backward, a
row of the dispatch brings the gradients of the weights that its forward row brought.
"""

DISPATCHERS = (
    "all_to_all",
    "rank_dedup",
    "allgather",
    "two_hop",
    "hierarchical_allgather",
    "padded",
    "one_sided",
)
PHASES = ("dispatch", "combine")  # those that every run has
ROW_PHASES = (*PHASES, "tp_gather", "tp_reduce")  # those that move rows of tokens
DIRECTIONS = ("forward", "backward")
KINDS = (
    "hidden",
    "scales",
    "ids",
    "weights",
    "counts",
    "padding",
    "expert_weights",
    "gradients",
)
PAYLOAD_KINDS = ("hidden", "scales")

ID_BYTES = 4  # int32
WEIGHT_BYTES = 4  # fp32
COUNT_BYTES = 8  # int64
HEADER_BYTES = 4 * 8  # layer, phase, row bytes, wire format: four int64 before the counts

_BITS = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8_block128": 8,
    "mxfp8": 8,
    "mxfp4": 4,
    "nvfp4": 4,
}
# Elements a block, bytes a scale.
_SCALES = {"fp8_block128": (128, 4), "mxfp8": (32, 1), "mxfp4": (32, 1), "nvfp4": (16, 1)}
WIRES = tuple(_BITS)

# Dispatchers whose row is a whole token: the receiver must learn which experts, and how weighted.
_WHOLE_TOKEN = ("rank_dedup", "allgather", "two_hop", "hierarchical_allgather")


def check_dispatcher(dispatcher: str) -> None:
    """Refuse a dispatcher that has no law here."""
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"dispatcher={dispatcher!r} has no law; choose one of {DISPATCHERS}")


def whole_tokens(dispatcher: str, deduplicate: bool = False) -> bool:
    """Whether a row stands for a token, ids and weights with it, and not for one of its copies."""
    check_dispatcher(dispatcher)
    return dispatcher in _WHOLE_TOKEN or (dispatcher == "one_sided" and deduplicate)


def payload_bytes(wire: str, width: int) -> tuple[int, int]:
    """(hidden, scales) bytes of a row of `width` elements in the format `wire`."""
    if wire not in _BITS:
        raise ValueError(f"wire={wire!r} is not a wire format; choose one of {WIRES}")
    block_size, scale_bytes = _SCALES.get(wire, (1, 0))
    num_blocks = (width + block_size - 1) // block_size  # the last block may be a short one
    # Two 4-bit elements share a byte; an odd last one has its byte to itself.
    return (width * _BITS[wire] + 7) // 8, num_blocks * scale_bytes


def row_bytes(
    dispatcher: str,
    phase: str,
    wire: str,
    width: int,
    top_k: int,
    *,
    direction: str = "forward",
    deduplicate: bool = False,
) -> dict[str, int]:
    """Bytes of each kind in one row; every kind of `KINDS` is present, also with 0.

    phase: one of `ROW_PHASES`; wire: the format of that phase and direction
    deduplicate: of one_sided; the others have it in their name
    """
    whole = whole_tokens(dispatcher, deduplicate)
    for name, value, valid in (
        ("phase", phase, ROW_PHASES),
        ("direction", direction, DIRECTIONS),
    ):
        if value not in valid:
            raise ValueError(f"{name}={value!r} is not a {name}; choose one of {valid}")
    hidden, scales = payload_bytes(wire, width)
    num_ids = num_weights = 0
    if phase == "dispatch":
        forward = direction == "forward"
        num_weights = top_k if whole else 0
        if forward:
            # Per copy the sender's order names the expert, unless rows are put one by one.
            num_ids = top_k if whole else int(dispatcher == "one_sided")
    return dict.fromkeys(KINDS, 0) | {
        "hidden": hidden,
        "scales": scales,
        "ids": num_ids * ID_BYTES,
        "weights": num_weights * WEIGHT_BYTES,
    }


def counts_bytes(
    dispatcher: str, slots_on_dst: int, *, phase: str = "dispatch", deduplicate: bool = False
) -> int:
    """Bytes of the counts message of one pair of ranks, forward; backward has none.

    slots_on_dst: physical experts of the rank that is to compute (in a combine, which goes the
        other way, that is the sender)

    Sent once for each pair of the lane (at a second hop: of the node, in tp_gather: of the shard
    group), layer, step and chunk, also to a rank that gets no rows and to oneself.
    """
    whole = whole_tokens(dispatcher, deduplicate)
    if phase == "dispatch":
        num_counts = 1 if whole else slots_on_dst + (dispatcher == "padded")
        return HEADER_BYTES + num_counts * COUNT_BYTES
    if phase == "tp_gather":
        return HEADER_BYTES + slots_on_dst * COUNT_BYTES
    if phase == "combine" and dispatcher == "one_sided" and not whole:
        return slots_on_dst * COUNT_BYTES  # where each source's rows begin
    return 0
