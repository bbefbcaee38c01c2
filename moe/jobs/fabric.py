"""job=fabric: switch ports that so many accelerators need for scale-out; no rank is started."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from comm.analytic.fabric import clos
from comm.report.answer import LABEL, labelled_facts
from comm.report.console import WIDTH, print_lines
from comm.report.fabric_page import fabric_page
from comm.report.layout import labelled
from moe.hardware import UnknownHardware
from moe.settings import Config, ConfigError
from moe.version import VERSION

GBPS_OF_GB = 8  # Gb/s of a card that carries 1 GB/s


def launch(config: Config) -> int:
    """Print the page; always 0. The fabric that was asked for must exist, the others need not."""
    try:
        nic = nic_Gbps(config)
        fabric_of(config, nic, config.fabric.tiers)
    except UnknownHardware as error:
        raise ConfigError(f"{error} or fabric.nic_Gbps=...") from error
    except ValueError as error:
        raise ConfigError(f"fabric.{error}") from error
    asked, hardware = config.fabric, config.hardware
    rates = [nic] if asked.nic_Gbps is not None else _rates(config)
    tiers = sorted({1, 2, 3, asked.tiers})
    shown = [_shown(config, rate, number) for rate in rates for number in tiers]
    cards = hardware.nics_per_rank or 1
    about = {
        "asked": f"{asked.accelerators:,} x {hardware.name}, {cards:g} cards for each;"
        f" switches of {asked.radix} ports of {asked.port_Gbps:g} Gb/s;"
        f" {'non-blocking' if _oversubscription(config) == 1 else 'oversubscribed'}"
        f" ({_oversubscription(config):g}:1)"
    }
    head = labelled(f"WideEP {VERSION}", "fabric: no ranks were started", WIDTH, LABEL, "bold")
    print_lines([*head, *labelled_facts(about, WIDTH), *fabric_page(shown, WIDTH)])
    return 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank prints, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0


def nic_Gbps(config: Config) -> float:
    """Of a card, one way: as given, else the part's."""
    if config.fabric.nic_Gbps is not None:
        return config.fabric.nic_Gbps
    return config.hardware.known("scale_out_GBps") * GBPS_OF_GB


def fabric_of(config: Config, nic: float, tiers: int) -> dict[str, Any]:
    """The fabric as plain values; ValueError if there is none."""
    asked = config.fabric
    found = clos(
        asked.accelerators,
        nic,
        asked.port_Gbps,
        tiers,
        asked.radix,
        _oversubscription(config),
        config.hardware.nics_per_rank or 1,
    )
    return asdict(found) | {"nic_Gbps": nic, "tiers": tiers, "refused": ""}


def _shown(config: Config, nic: float, tiers: int) -> dict[str, Any]:
    try:
        return fabric_of(config, nic, tiers)
    except ValueError:
        return {"nic_Gbps": nic, "tiers": tiers, "refused": "too few tiers"}


def _rates(config: Config) -> list[float]:
    """The part's card, and the faster one it is also sold with."""
    low, high = config.hardware.known("scale_out_GBps"), config.hardware.scale_out_high_GBps
    return [rate * GBPS_OF_GB for rate in (low, high) if rate is not None]


def _oversubscription(config: Config) -> float:
    return config.hardware.oversubscription or 1
