"""Two results side by side, as text.

COMPARED     which they are, whether the routing is the same, and every setting that differs
BY PHASE     bytes by phase and place, FULL SIZE one token of the full model
BY KIND      what the bytes are
VERDICTS     of both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comm.report import compare
from comm.report.answer import labelled_facts
from comm.report.compare import Pair
from comm.report.layout import Line, table, title, wrap
from comm.report.table_rows import TIER_WORDS, phase_label
from comm.report.units import format_bytes, format_count

Record = Mapping[str, Any]
PART_WORDS = {
    **{f"{tier}_bytes": words for tier, words in TIER_WORDS.items()},
    **{f"{part}_bytes": part for part in ("payload", "metadata", "network")},
}
LONGEST = 36  # columns of a setting's value, of which the page has two


def compare_page(a: Record, b: Record, width: int) -> list[Line]:
    """The page as lines of at most `width` columns."""
    each = "of one token in one layer, the mean" if compare.per_token(a, b) else "of the whole run"
    places = [
        Pair((phase_label(*pair.name[:2]), TIER_WORDS[pair.name[2]]), pair.a, pair.b)
        for pair in compare.by_place(a, b)
    ]
    full = [Pair((PART_WORDS[one.name[0]],), one.a, one.b) for one in compare.full_size(a, b)]
    lines = [*_compared(a, b, width), *_settings(a, b, width)]
    lines += title("BY PHASE", f"bytes {each}; self stays on its rank", width)
    lines += _bytes(("phase", "place"), places)
    lines += title("BY KIND", f"the same bytes {each}", width) + _bytes(
        ("kind",), compare.by_kind(a, b)
    )
    if full:
        what = "one token of the full model, a forward pass, what leaves its rank"
        lines += title("FULL SIZE", what, width) + _bytes(("",), full)
    return lines + _verdicts(a, b, width)


def _compared(a: Record, b: Record, width: int) -> list[Line]:
    facts = {name: _name(record) for name, record in (("a", a), ("b", b))}
    same = a["manifest"]["routing_sha256"] == b["manifest"]["routing_sha256"]
    facts["routing"] = (
        "the same choices of experts for the same tokens"
        if same
        else "other choices, or other tokens and layers: not every difference is a setting's"
    )
    return title("COMPARED", "two results", width)[1:] + labelled_facts(facts, width)


def _name(record: Record) -> str:
    about = record["manifest"]
    tokens, layers = compare.shape(record)
    sizes = (
        format_count(number, noun)
        for number, noun in (
            (about["world_size"], "rank"),
            (about["num_nodes"], "node"),
            (tokens, "token"),
            (layers, "layer"),
        )
    )
    what = ", ".join((about["model"], about["dispatcher"], *sizes))
    return f"{record['result_dir']}: {what}; status {record['status']}"


def _settings(a: Record, b: Record, width: int) -> list[Line]:
    """Why they differ: settings beside each other, long values cut."""
    pairs = compare.settings(a, b)
    if not pairs:
        return title("WHY", "no setting differs", width)
    rows = [(pair.name[0], _value(pair.a), _value(pair.b)) for pair in pairs]
    return title("WHY", "settings that differ", width) + table(("setting", "a", "b"), rows, 3)


def _value(value: Any) -> str:
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
    return wrap(text, LONGEST - 3)[0] + "..." if len(text) > LONGEST else text


def _bytes(names: Sequence[str], pairs: Sequence[Pair]) -> list[Line]:
    """a, b, b - a, and b / a of each figure."""
    rows = [
        (*pair.name, _size(pair.a), _size(pair.b), _difference(pair), _ratio(pair))
        for pair in pairs
    ]
    return table((*names, "a", "b", "b - a", "b / a"), rows, len(names))


def _size(num_bytes: float | None) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _difference(pair: Pair) -> str:
    difference = (pair.b or 0) - (pair.a or 0)
    if not difference:
        return "0"
    return ("+" if difference > 0 else "-") + format_bytes(abs(difference))


def _ratio(pair: Pair) -> str:
    return f"{(pair.b or 0) / pair.a:.4f}" if pair.a else "-"


def _verdicts(a: Record, b: Record, width: int) -> list[Line]:
    pairs = compare.verdicts(a, b)
    rows = [(pair.name[0], *map(_state, (pair.a, pair.b))) for pair in pairs]
    lines = title("VERDICTS", "of each run against its own predictions", width)
    return lines + table(("check", "a", "b"), rows, 3)


def _state(state: str | None) -> str:
    return (state or "not made").replace("_", " ")
