"""Two results held against each other, from their run.json dictionaries. Pure.

Where they ran other tokens, steps or layers, bytes are those of one token in one layer: ranks,
nodes and strategies can be compared, totals cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from comm.analytic.rows import KINDS
from comm.report.tally import MOE_PHASES
from comm.topology import TIER_NAMES

Record = Mapping[str, Any]
# Settings that do not decide what is sent.
INCIDENTAL = ("output_dir", "timeout_s", "traffic_csv", "record_routing", "job")
ORDER = ("forward", "backward", *MOE_PHASES, *TIER_NAMES, *KINDS)
SOFTWARE = ("version", "commit", "torch", "python", "backend", "device")


@dataclass(frozen=True)
class Pair:
    """A figure of both results; None where one has no such thing."""

    name: tuple[str, ...]
    a: Any
    b: Any


def settings(a: Record, b: Record) -> list[Pair]:
    """Every setting that differs, by its key, and what of the software differs."""
    both = [dict(_flat(record["manifest"]["config"])) for record in (a, b)]
    names = dict.fromkeys([*both[0], *both[1]])
    chosen = [name for name in names if name.partition(".")[0] not in INCIDENTAL]
    found = [Pair((name,), both[0].get(name), both[1].get(name)) for name in chosen]
    found += [Pair((name,), a["manifest"][name], b["manifest"][name]) for name in SOFTWARE]
    return [pair for pair in found if pair.a != pair.b]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        full = prefix.rstrip(".") if prefix and name == "name" else prefix + name
        if isinstance(value, Mapping):
            yield from _flat(value, full + ".")
        else:
            yield full, value


def shape(record: Record) -> tuple[int, int]:
    """Tokens of all ranks and measured steps; layers."""
    about = record["manifest"]
    return sum(about["tokens_per_rank"]) * about["steps"], about["shape"]["num_moe_layers"]


def per_token(a: Record, b: Record) -> bool:
    """Whether totals cannot be compared."""
    return shape(a) != shape(b)


def by_place(a: Record, b: Record) -> list[Pair]:
    """Bytes by direction, phase and tier."""
    return _pairs(a, b, ("direction", "phase", "tier"))


def by_kind(a: Record, b: Record) -> list[Pair]:
    """Bytes by kind, of both directions, on the network and not."""
    return _pairs(a, b, ("kind",))


def _pairs(a: Record, b: Record, names: tuple[str, ...]) -> list[Pair]:
    """Counted bytes of all cells summed to those names, of all phases that move tokens."""
    whole = not per_token(a, b)
    sums: list[dict[tuple[str, ...], float]] = []
    for record in (a, b):
        tokens, layers = shape(record)
        over = 1 if whole else max(1, tokens * layers)
        found: dict[tuple[str, ...], float] = {}
        for cell in record["totals"]["cells"]:
            if cell["phase"] in MOE_PHASES:
                place = tuple(cell[name] for name in names)
                found[place] = found.get(place, 0) + cell["measured_bytes"] / over
        sums.append(found)
    places = sorted({*sums[0], *sums[1]}, key=lambda place: tuple(map(_order, place)))
    return [Pair(place, sums[0].get(place), sums[1].get(place)) for place in places]


def _order(name: str) -> int:
    """Of what happens first, and of what is nearest."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def verdicts(a: Record, b: Record) -> list[Pair]:
    """State of each verdict; None where it was not made."""
    states = [{one["name"]: one["state"] for one in record["verdicts"]} for record in (a, b)]
    names = dict.fromkeys([*states[0], *states[1]])
    return [Pair((name,), states[0].get(name), states[1].get(name)) for name in names]


def full_size(a: Record, b: Record) -> list[Pair]:
    """Of one token on the unscaled model in a forward pass; empty where a run had no tokens."""
    if not a["full_scale"] or not b["full_scale"]:
        return []
    parts = ("scale_up_bytes", "scale_out_bytes", "payload_bytes", "metadata_bytes")
    both = [record["full_scale"]["forward_pass"] for record in (a, b)]
    return [Pair((part,), both[0][part], both[1][part]) for part in (*parts, "network_bytes")]
