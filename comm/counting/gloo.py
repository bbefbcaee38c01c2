"""Which bytes each collective needs, and which gloo's algorithms put on its connections for it.

    needed   from the rank that has them straight to the rank that must have them
    moved    by gloo: rings pass chunks on to the neighbour, trees from parent to child

Each rank works out its own row from its own call. The laws of `moved` were read off the kernel's
counters (comm.kernel) and are held to them by tests/test_counting.py; where none is known, there is
no `moved`. Pure: numbers in, numbers out.

Legend: n members of a group; place: a member's number in it; rows are int64 [n], by place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.int64]
Matrix = NDArray[np.int64]

SEGMENT_BYTES = 1 << 20  # gloo cuts what goes round a ring into pieces of at most so much


@dataclass(frozen=True)
class Call:
    """One collective as one member makes it.

    op: its name, a key of NEEDED
    size: n; place: of the caller; root: place of the one that differs from the others, or the
        destination of a message
    parts: bytes to each member, [n], or those of the one tensor, [1]
    item: bytes of an element
    apart: each of the parts is a tensor of its own, and reduced by itself
    """

    op: str
    size: int
    place: int
    parts: tuple[int, ...]
    root: int = 0
    item: int = 1
    apart: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts)

    @property
    def steps(self) -> int:
        """By how much torch's sequence number of the group grows."""
        return len(self.parts) if self.apart else 1


def needed(call: Call) -> Row:
    """Bytes that the caller must send to each member; to itself: what it copies."""
    return NEEDED[call.op](call)


def moved(call: Call) -> tuple[Row, Row] | None:
    """Bytes and messages that gloo sends from the caller to each member; None: no law is known."""
    law = MOVED.get(call.op)
    if law is None:
        return None
    if call.size == 1 or (call.op in SKIPS_NOTHING and not call.total):
        return _nothing(call), _nothing(call)
    payload, messages = law(call)
    payload[call.place] = messages[call.place] = 0
    return payload, messages


# -- what is needed --------------------------------------------------------------------------------


def _nothing(call: Call) -> Row:
    return np.zeros(call.size, np.int64)


def _parts(call: Call) -> Row:
    return np.array(call.parts, np.int64)


def _to_all(call: Call) -> Row:
    return np.full(call.size, call.total, np.int64)


def _to_root(call: Call) -> Row:
    row = _nothing(call)
    row[call.root] = call.total
    return row


def _but_self(row: Row, call: Call) -> Row:
    row[call.place] = 0
    return row


def _shares(call: Call) -> Row:
    """Bytes of each member's share of a reduction: as even as can be, the first ones larger."""
    items = call.total // call.item
    share = np.full(call.size, items // call.size, np.int64)
    share[: items % call.size] += 1
    return share * call.item


def _reduced_everywhere(call: Call) -> Row:
    """To each member its share, and to each the caller's own, summed."""
    shares = _shares(call)
    return _but_self(shares + shares[call.place], call)


NEEDED: dict[str, Callable[[Call], Row]] = {
    "all_to_all": _parts,
    "all_gather": _to_all,
    "reduce_scatter": _parts,
    "all_reduce": _reduced_everywhere,
    "broadcast": lambda call: (
        _but_self(_to_all(call), call) if call.place == call.root else _nothing(call)
    ),
    "reduce": lambda call: _but_self(_to_root(call), call),
    "gather": _to_root,
    "scatter": lambda call: _parts(call) if call.place == call.root else _nothing(call),
    "send": _to_root,
    "recv": _nothing,
    "barrier": _nothing,
}


# -- what gloo moves -------------------------------------------------------------------------------


def _direct(call: Call) -> tuple[Row, Row]:
    return _parts(call), np.ones(call.size, np.int64)


def _one(call: Call) -> tuple[Row, Row]:
    row = _to_root(call)
    return row, (np.arange(call.size) == call.root).astype(np.int64)


def _scattered(call: Call) -> tuple[Row, Row]:
    return _direct(call) if call.place == call.root else (_nothing(call), _nothing(call))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _chunks(call: Call) -> tuple[Row, Row]:
    """Of a reduction: bytes of each member's chunk, and pieces that it is sent in, [n] each."""
    wanted = max(-(-call.total // SEGMENT_BYTES), 2 * call.size)
    each = _round_up(wanted, call.size) // call.size
    piece = _round_up(-(-call.total // (each * call.size)), call.item)
    starts = np.minimum(np.arange(call.size * each + 1) * piece, call.total)
    pieces = np.diff(starts).reshape(call.size, each)
    return pieces.sum(axis=1), (pieces > 0).sum(axis=1)


def _ring(call: Call, step: int, kept: int) -> tuple[Row, Row]:
    """All chunks but the one of place `kept` go to the neighbour, `step` places on."""
    payload, messages = _nothing(call), _nothing(call)
    size, pieces = _chunks(call)
    neighbour = (call.place + step) % call.size
    payload[neighbour] = call.total - size[kept]
    messages[neighbour] = pieces.sum() - pieces[kept]
    return payload, messages


def _reduced_in_a_ring(call: Call) -> tuple[Row, Row]:
    """First towards each chunk's owner, then from there."""
    towards = _ring(call, -1, call.place)
    back = _ring(call, -1, (call.place - 1) % call.size)
    return towards[0] + back[0], towards[1] + back[1]


def _reduced_and_cut(call: Call) -> tuple[Row, Row]:
    """gloo reduces all of it everywhere, and each member keeps its part."""
    tensors = call.parts if call.apart else (call.total,)
    rows = [_reduced_in_a_ring(replace(call, parts=(one,))) for one in tensors if one]
    return sum((row[0] for row in rows), _nothing(call)), sum(
        (row[1] for row in rows), _nothing(call)
    )


def _reduced_to_root(call: Call) -> tuple[Row, Row]:
    payload, messages = _ring(call, -1, call.place)
    if call.place != call.root:
        size, pieces = _chunks(call)
        payload[call.root] += size[call.place]
        messages[call.root] += pieces[call.place] > 0
    return payload, messages


def _gathered_in_a_ring(call: Call) -> tuple[Row, Row]:
    """Every member's tensor but one goes on to the next place, in halves."""
    payload, messages = _nothing(call), _nothing(call)
    neighbour = (call.place + 1) % call.size
    payload[neighbour] = (call.size - 1) * call.total
    messages[neighbour] = 2 * (call.size - 1)
    return payload, messages


def _down_a_tree(call: Call) -> tuple[Row, Row]:
    """Binomial: whoever has it sends to the place 1, 2, 4, ... further from the root."""
    payload, messages = _nothing(call), _nothing(call)
    behind = (call.place - call.root) % call.size
    step = 1 << behind.bit_length() if behind else 1
    while behind + step < call.size:
        child = (call.root + behind + step) % call.size
        payload[child], messages[child] = call.total, 1
        step *= 2
    return payload, messages


def _met(call: Call) -> tuple[Row, Row]:
    """Empty messages to the places 1, 2, 4, ... on."""
    messages, step = _nothing(call), 1
    while step < call.size:
        messages[(call.place + step) % call.size] += 1
        step *= 2
    return _nothing(call), messages


MOVED: dict[str, Callable[[Call], tuple[Row, Row]]] = {
    "all_to_all": _direct,
    "all_gather": _gathered_in_a_ring,
    "reduce_scatter": _reduced_and_cut,
    "all_reduce": _reduced_in_a_ring,
    "broadcast": _down_a_tree,
    "reduce": _reduced_to_root,
    "gather": _one,
    "scatter": _scattered,
    "send": _one,
    "recv": lambda call: (_nothing(call), _nothing(call)),
    "barrier": _met,
}
SKIPS_NOTHING = ("all_reduce", "all_gather", "reduce_scatter")
