"""What an accelerator and its machine can hold and move; plain values, units in the names.

    memory        beside the processor: the maker's "GB" and what the driver reports, which differ
    scale-up      links inside a domain (NVLink, Infinity Fabric, UB): one way, per accelerator
    scale-out     network cards out of the domain: one direction, per card
    host, NVMe    tiers below the memory, for weights or caches that it cannot hold

null means unknown. Whoever needs such a value asks `known` for it, and the refusal names the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

GB, MIB, GIB = 10**9, 2**20, 2**30
PHASES = ("dispatch", "combine")
LEAST, MOST = 1e-9, 1e18  # of any value: beyond them sums and quotients lose all meaning


class UnknownHardware(ValueError):
    """A value that a computation needs and the part's file does not have; one line."""


@dataclass(frozen=True)
class Reach:
    """What was measured of an all-to-all inside a scale-up domain.

    ep_size: the measured number of ranks that stands for the wanted one
    GBps: bytes of the phase / time, one direction, of large messages
    latency_us: the time of a single token, below which no message comes; None: not measured
    """

    ep_size: int
    GBps: float
    latency_us: float | None


@dataclass(frozen=True)
class HardwareConfig:
    """One part, per accelerator; rates in GB/s = 1e9 B/s and one direction.

    memory_nominal_GB: as sold; memory_reported_MiB: as the driver reports it, 2^20 B
    scale_up_domain: accelerators that reach each other at scale_up_GBps
    scale_out_GBps: of one card; scale_out_high_GBps: of the faster card it is also sold with
    nics_per_rank: cards for each accelerator, 0.5 where two share one
    oversubscription: of the scale-out fabric, 1 where it is non-blocking
    measured_*, latency_*: one value for each of measured_ep_sizes, or none
    host_memory_GB, nvme_GB: capacity for each accelerator, as sold; *_GBps: rate towards it
    """

    name: str
    source: str
    memory_nominal_GB: float | None
    memory_reported_MiB: int | None
    memory_bandwidth_GBps: float | None
    scale_up_GBps: float | None
    scale_up_domain: int | None
    scale_out_GBps: float | None
    scale_out_high_GBps: float | None
    nics_per_rank: float | None
    oversubscription: float | None
    host_memory_GB: float | None
    host_GBps: float | None
    nvme_GB: float | None
    nvme_GBps: float | None
    measured_ep_sizes: tuple[int, ...] = ()
    measured_dispatch_GBps: tuple[float, ...] = ()
    measured_combine_GBps: tuple[float, ...] = ()
    latency_dispatch_us: tuple[float, ...] = ()
    latency_combine_us: tuple[float, ...] = ()

    def known(self, field: str) -> float:
        """The value of a field, or an UnknownHardware that says which key to set."""
        value = getattr(self, field)
        if value is None:
            raise UnknownHardware(
                f"hardware={self.name}: {field} is not known; set hardware.{field}=..."
            )
        return value

    @property
    def nominal_bytes(self) -> float:
        """Memory as sold, its GB read as 1e9 B."""
        return self.known("memory_nominal_GB") * GB

    @property
    def reported_bytes(self) -> int:
        """Memory as the driver reports it."""
        return int(self.known("memory_reported_MiB")) * MIB

    @property
    def scale_out_rank_GBps(self) -> float:
        """What the cards and the fabric leave to each accelerator."""
        cards = self.known("scale_out_GBps") * self.known("nics_per_rank")
        return cards / self.known("oversubscription")

    def reach(self, phase: str, ep_size: int) -> Reach | None:
        """The measurement at the next larger number of ranks, or the largest; None without any."""
        if not self.measured_ep_sizes:
            return None
        larger = [size for size in self.measured_ep_sizes if size >= ep_size]
        chosen = min(larger) if larger else max(self.measured_ep_sizes)
        at = self.measured_ep_sizes.index(chosen)
        rates, latencies = (
            (self.measured_dispatch_GBps, self.latency_dispatch_us)
            if phase == "dispatch"
            else (self.measured_combine_GBps, self.latency_combine_us)
        )
        return Reach(chosen, rates[at], latencies[at] if latencies else None)

    def validate(self) -> HardwareConfig:
        """Return self, or raise ValueError with the field, its value and the rule."""
        for item in fields(self):
            value = getattr(self, item.name)
            for entry in value if isinstance(value, tuple) else (value,):
                if not isinstance(entry, str | None) and not 0 < entry < math.inf:  # nan, too
                    raise ValueError(
                        f"hardware.{item.name}={_shown(value)}: must be positive, or null"
                    )
                if not isinstance(entry, str | None) and not LEAST <= entry <= MOST:
                    nearest = min(max(entry, LEAST), MOST)
                    raise ValueError(
                        f"hardware.{item.name}={_shown(value)}: must be from {LEAST:g} to {MOST:g};"
                        f" nearest: {nearest:g}"
                    )
        sizes = len(self.measured_ep_sizes)
        for phase in PHASES:
            self._check_length(f"measured_{phase}_GBps", {sizes})
            self._check_length(f"latency_{phase}_us", {0, sizes})
        return self

    def _check_length(self, field: str, allowed: set[int]) -> None:
        """A list has a value for each of measured_ep_sizes."""
        value = getattr(self, field)
        if len(value) not in allowed:
            raise ValueError(
                f"hardware.{field}={_shown(value)}: one value expected for each of"
                f" hardware.measured_ep_sizes={_shown(self.measured_ep_sizes)}"
            )


def _shown(value: float | Sequence[float]) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
