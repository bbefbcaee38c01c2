"""From bytes to the least time they can take on a machine; pure arithmetic on plain numbers.

    bytes        those of the busiest rank over a one-directional rate: sending and receiving go on
                 at once, and so do both tiers, so that the slowest of these decides
    latency      a phase of a single token takes that long; no number of bytes takes less
    a phase      the longer of the two, which is said to bind it
    a layer      its phases one after the other, nothing hidden behind computation

These are lower bounds. What a library reaches is `measured_GBps`, where somebody has measured it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TIERS = ("scale_up", "scale_out")


@dataclass(frozen=True)
class Links:
    """What one rank of a machine can send and, at the same time, receive; None: not known.

    GBps: tier -> 1e9 B/s of a rank, one direction, nominal
    measured_GBps, latency_us: way ("dispatch", "combine") -> of an all-to-all inside a node
    measured_ranks: ranks of the measurement
    """

    GBps: Mapping[str, float | None]
    measured_GBps: Mapping[str, float] = field(default_factory=dict)
    latency_us: Mapping[str, float] = field(default_factory=dict)
    measured_ranks: int | None = None


@dataclass(frozen=True)
class PhaseTime:
    """The least time of one phase of one layer, in microseconds.

    bytes: tier -> of the busiest rank; nominal_us, measured_us: tier -> time of those bytes
    latency_us: the floor; None: not known
    """

    direction: str
    phase: str
    bytes: Mapping[str, float]
    nominal_us: Mapping[str, float]
    measured_us: Mapping[str, float]
    latency_us: float | None

    @property
    def bytes_us(self) -> float:
        """The slowest tier's bytes, at its nominal rate."""
        return max(self.nominal_us.values(), default=0.0)

    @property
    def us(self) -> float:
        """The bound: bytes or latency, whichever takes longer."""
        return max(self.bytes_us, self.latency_us or 0.0)

    @property
    def tier(self) -> str | None:
        """The tier whose bytes take longest; None where no bytes leave a rank."""
        return max(self.nominal_us, key=lambda tier: self.nominal_us[tier], default=None)

    @property
    def bound(self) -> str:
        """What binds: "bandwidth", "latency" or "nothing"."""
        if (self.latency_us or 0.0) > self.bytes_us:
            return "latency"
        return "bandwidth" if self.bytes_us > 0 else "nothing"


def way(direction: str, phase: str) -> str:
    """To the experts ("dispatch") or back: a transpose goes the other way."""
    there = phase in ("dispatch", "tp_gather")
    return "dispatch" if there == (direction == "forward") else "combine"


def unknown_rates(num_bytes: Mapping[str, float], links: Links) -> list[str]:
    """Tiers that move bytes at a rate nobody has said."""
    return [tier for tier in TIERS if num_bytes.get(tier) and links.GBps[tier] is None]


def phase_time(
    direction: str, phase: str, num_bytes: Mapping[str, float], links: Links
) -> PhaseTime:
    """The least time of a phase. Raises ValueError for bytes on a tier of unknown rate.

    num_bytes: tier -> bytes that its busiest rank sends or receives, whichever are more
    """
    if unknown := unknown_rates(num_bytes, links):
        raise ValueError(f"{unknown[0]} moves bytes, its rate is not known")
    nominal, measured = {}, {}
    which = way(direction, phase)
    whole = phase in ("dispatch", "combine")  # nobody has measured the exchange between shards
    for tier in TIERS:
        if num_bytes.get(tier):
            rate = links.GBps[tier]
            assert rate is not None
            nominal[tier] = num_bytes[tier] / rate / 1e3  # B / (1e9 B/s), in 1e-6 s
            if tier == "scale_up" and whole and which in links.measured_GBps:
                measured[tier] = num_bytes[tier] / links.measured_GBps[which] / 1e3
    floor = links.latency_us.get(which) if whole and nominal else None
    return PhaseTime(direction, phase, dict(num_bytes), nominal, measured, floor)


def bound_in_words(phases: Iterable[PhaseTime]) -> str:
    """What binds a layer: "bandwidth" or "latency" where all its phases agree, else "both"."""
    found = {phase.bound for phase in phases} - {"nothing"}
    if not found:
        return "nothing"
    return found.pop() if len(found) == 1 else "both"


def tokens_at_bandwidth(phase: PhaseTime, tokens: float) -> float | None:
    """Tokens a rank from which a phase's bytes take longer than its latency; None: no floor known.

    tokens: of a rank, for which the phase was computed; bytes grow in proportion
    """
    if phase.latency_us is None or not phase.bytes_us:
        return None
    return tokens * phase.latency_us / phase.bytes_us
